"""What is compiled without a GPU: one module for each operation, with a function `cases`."""
