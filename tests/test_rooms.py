"""Imports go down the list of rooms only, and the core pulls in nothing heavy."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import outrider

PACKAGE = Path(outrider.__file__).parent

ROOMS = [
    "cli",
    "server",
    "llm",
    "engine",
    "scheduler",
    "cache",
    "runner",
    "spec",
    "sampling",
    "models",
    "layers",
    "ops",
]
LEAVES = [
    "assets",
    "request",
    "batch",
    "metrics",
    "one_caller",
    "output",
    "tokenizer",
    "trace",
    "config",
    "params",
    "checks",
    "errors",
    "spec.names",
    "words",
]
PART_OF = {
    "admission": "engine",
    "api_fields": "cli",
    "async_llm": "llm",
    "bench": "cli",
    "bench_report": "cli",
    "bench_runs": "cli",
    "chat": "cli",
    "chat_sources": "cli",
    "check": "cli",
    "cli_flags": "cli",
    "demo": "cli",
    "draft_vocab": "cli",
    "engine_connection": "llm",
    "engine_messages": "llm",
    "engine_process": "llm",
    "grammar_queue": "llm",
    "growing": "llm",
    "http_client": "cli",
    "live": "engine",
    "render": "cli",
    "trace_charts": "cli",
    "trace_command": "cli",
    "trace_fields": "cli",
    "trace_file": "cli",
    "trace_html": "cli",
    "trace_report": "cli",
    "engine_failures": "engine",
    "engine_setup": "engine",
    "span_rules": "scheduler",
    "structured": "engine",
}
"""Files that stand beside a room's own file and belong to it."""
OUTSIDE = ["", "__main__"]
"""The package itself and its command: they gather the public names, nobody imports them."""


def module_name(file: Path) -> str:
    """Dotted name below `outrider`; "" is the package itself."""
    parts = list(file.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}
PACKAGES = {name for name, file in FILES.items() if file.name == "__init__.py"}


def room_of(name: str) -> str:
    """The leaf or room that a module belongs to."""
    if name in LEAVES or name in OUTSIDE:
        return name
    first = name.split(".")[0]
    return PART_OF.get(first, first)


def imported_names(name: str, source: str) -> Iterator[str]:
    """Absolute dotted names that the module imports, wherever the statement stands."""
    package = ["outrider", *name.split(".")] if name else ["outrider"]
    if name not in PACKAGES:
        package.pop()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                longer = f"{stem}.{alias.name}"
                inside = longer.removeprefix("outrider.")
                yield longer if inside in FILES else stem


def own_imports(name: str) -> set[str]:
    """Modules of the package that module `name` imports, as names below `outrider`."""
    names = imported_names(name, FILES[name].read_text(encoding="utf-8"))
    return {
        imported.removeprefix("outrider").removeprefix(".")
        for imported in names
        if imported == "outrider" or imported.startswith("outrider.")
    }


def may_import(importer: str, imported: str) -> bool:
    """Whether a module of room `importer` may import one of room `imported`."""
    if importer in OUTSIDE:
        return True
    if imported in LEAVES:
        return True
    if importer in LEAVES or imported in OUTSIDE:
        return False
    return ROOMS.index(importer) <= ROOMS.index(imported)


@pytest.mark.parametrize("name", FILES)
def test_every_module_belongs_to_a_room(name: str) -> None:
    assert room_of(name) in [*ROOMS, *LEAVES, *OUTSIDE]


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down_the_list_of_rooms_only(name: str) -> None:
    room = room_of(name)
    wrong = {other for other in own_imports(name) if not may_import(room, room_of(other))}
    assert not wrong, f"{name} (room {room}) imports {sorted(wrong)}"


def test_the_package_around_a_leaf_imports_leaves_only() -> None:
    for leaf in LEAVES:
        around = leaf.rpartition(".")[0]
        if around:
            assert {room_of(name) for name in own_imports(around)} <= set(LEAVES)


def test_the_scheduler_does_not_import_torch() -> None:
    for name, file in FILES.items():
        if room_of(name) == "scheduler":
            names = imported_names(name, file.read_text(encoding="utf-8"))
            assert "torch" not in {imported.split(".")[0] for imported in names}


def test_the_rule_itself_tells_up_from_down() -> None:
    assert may_import("engine", "scheduler") and not may_import("scheduler", "engine")
    assert may_import("ops", "errors") and not may_import("errors", "ops")
    assert may_import("config", "spec.names") and not may_import("config", "spec")
    assert not may_import("engine", "")
    found = set(imported_names("cache.pool", "def f():\n    from ..spec import names\n"))
    assert found == {"outrider.spec.names"}
    assert set(imported_names("cache", "from . import x\nimport torch.nn")) >= {"torch.nn"}


def test_importing_outrider_pulls_in_no_framework() -> None:
    program = (
        "import sys, outrider\n"
        "heavy = {'fastapi', 'uvicorn', 'pydantic', 'zmq', 'msgspec', 'prometheus_client'}\n"
        "heavy |= {'xgrammar', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_comment_is_a_banner() -> None:
    """A file that needs headings is two files."""
    root = PACKAGE.parents[1]
    files = [path for name in ("src", "tests", "bench") for path in (root / name).rglob("*.py")]
    assert len(files) > 200
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.match(r"\s*#\s*[-=#*]{3,}", line), f"{path.name}: {line.strip()}"
