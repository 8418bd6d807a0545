"""Compiles kernels for a GPU that is not there.

python -m tests.ops.cross_compile 90 [--each-kernel-once] [op ...] compiles every case of
tests/ops/compile_cases for that compute capability and exits with 1 where one fails. With the
option, a kernel is compiled in each type and for one shape only.

Runs in a process of its own, because it replaces Triton's driver, and because kernels that were
decorated for the interpreter cannot be compiled any more.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TYPE = re.compile(r"float16|float32|bf16|fp16|fp32")


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration; `launch` calls its warmup."""

    name: str
    launch: Callable[[], Any]


def mock_driver(capability: int) -> None:
    """Make Triton believe in a card of this capability, 90 for (9, 0)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Absent(CudaDriver):
        def __init__(self) -> None:
            pass

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: object = None) -> int:
            return 0

    triton.runtime.driver.set_active(Absent())


def all_cases(capability: int, ops: list[str]) -> Iterator[tuple[str, Case]]:
    from tests.ops import compile_cases

    for module in pkgutil.iter_modules(compile_cases.__path__):
        if ops and module.name not in ops:
            continue
        cases = importlib.import_module(f"tests.ops.compile_cases.{module.name}").cases
        for case in cases(capability):
            yield module.name, case


def kernel_of(op: str, name: str) -> tuple[str, ...]:
    """What tells kernels apart in a case's name: first word, a kernel's own name, and types."""
    words = name.replace(",", " ").split()
    return (op, words[0], *(word for word in words[1:] if TYPE.search(word) or word[0] == "_"))


def main() -> int:
    os.environ.pop("TRITON_INTERPRET", None)
    capability, ops = int(sys.argv[1]), [word for word in sys.argv[2:] if word[0] != "-"]
    once = "--each-kernel-once" in sys.argv
    mock_driver(capability)
    failed = count = 0
    seen: set[tuple[str, ...]] = set()
    for op, case in all_cases(capability, ops):
        kernel = kernel_of(op, case.name)
        if once and kernel in seen:
            continue
        seen.add(kernel)
        begin = time.perf_counter()
        try:
            case.launch()
        except Exception as error:
            failed += 1
            what = f"sm_{capability} {op} {case.name}"
            print(f"FAILED {what}: {type(error).__name__}: {error}")
            continue
        count += 1
        seconds = time.perf_counter() - begin
        print(f"sm_{capability} {op} {case.name}: {seconds:.1f} s")
    print(f"sm_{capability}: {count} compiled, {failed} failed")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    raise SystemExit(main())
