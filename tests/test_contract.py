"""ARCHITECTURE.md names tests and files that exist, and its invariants are short."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "outrider"


def invariants() -> dict[int, str]:
    """By number: the section's numbered items."""
    section = TEXT.split("## Invariants")[1].split("\n## ")[0]
    items = re.split(r"^(\d+)\. ", section, flags=re.MULTILINE)[1:]
    return {int(number): item for number, item in zip(items[::2], items[1::2], strict=True)}


def test_invariants_are_numbered_and_each_names_a_test_in_five_lines_at_most() -> None:
    found = invariants()
    assert list(found) == list(range(1, len(found) + 1)) and len(found) >= 14
    for number, item in found.items():
        assert re.search(r"`tests/[\w/]+(\.py|/)`", item), number
        assert len(item.strip().splitlines()) <= 5, number


def test_every_test_that_is_named_exists_and_tests_something() -> None:
    for name in set(re.findall(r"`(tests/[\w/.]+)`", TEXT)):
        path = ROOT / name
        files = [path] if path.is_file() else list(path.glob("test_*.py"))
        assert files, f"{name} does not exist"
        if path.name.startswith("test_"):
            assert "\ndef test_" in path.read_text(encoding="utf-8"), name


def test_every_file_of_the_source_that_is_named_exists() -> None:
    for name in set(re.findall(r"`([\w/]+\.py)`", TEXT)):
        assert (SOURCE / name).exists() or (ROOT / name).exists(), name


def test_every_name_of_the_code_that_is_named_stands_in_the_code() -> None:
    """Attributes, methods and classes; paths have a test of their own."""
    files = list(SOURCE.rglob("*.py"))
    words = {file.stem for file in files} | {file.parent.name for file in files}
    for file in files:
        words.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    named = [name for name in re.findall(r"`([^`\n]+)`", TEXT) if not re.search(r"[*/]", name)]
    assert len(named) > 50
    for name in named:
        for word in re.findall(r"[A-Za-z_]\w*", name):
            assert word in words, name


def test_the_review_asks_ten_questions_or_more() -> None:
    section = TEXT.split("## Questions for a review")[1].split("\n## ")[0]
    questions = re.findall(r"^\d+\. .*?(?=^\d+\. |\Z)", section, flags=re.MULTILINE | re.DOTALL)
    assert len(questions) >= 10
    assert all("?" in question for question in questions)
