"""`python -m outrider` is the `outrider` command."""

import sys

from outrider.cli import main

sys.exit(main())
