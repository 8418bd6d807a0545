"""Every kernel compiles for every card that it is meant for, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compile_for(capability: int, *options: str) -> str:
    """Output of the compiler run; fails with it where a kernel does not compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.cross_compile", str(capability), *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_every_kernel_compiles_in_every_type(capability: int) -> None:
    output = compile_for(capability, "--each-kernel-once")
    kernels = {line.split()[1] for line in output.splitlines() if line.endswith(" s")}
    assert kernels >= {"linear", "attention", "small", "delta_net", "sampling", "bookkeeping"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_every_shape_compiles(capability: int) -> None:
    compile_for(capability)
