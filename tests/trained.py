"""Folders of checkpoints: the trained ones of the repository, and random Qwen3 pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints_qwen3 import Qwen3Shape, write_eagle3, write_qwen3

MODELS = Path(__file__).parents[1] / "models"


def trained_folder(name: str) -> Path:
    """A trained checkpoint of the repository."""
    return MODELS / name


def trained_pair() -> tuple[Path, Path]:
    """The trained Qwen3 target and the EAGLE3 draft for it."""
    return trained_folder("tiny-qwen3"), trained_folder("tiny-qwen3-eagle3")


class Folders:
    """Random Qwen3 targets and EAGLE3 drafts, each written once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._written: dict[str, Path] = {}

    def target(self, shape: Qwen3Shape) -> Path:
        key = repr(shape)
        if key not in self._written:
            self._written[key] = self._factory.mktemp("qwen3")
            write_qwen3(self._written[key], shape)
        return self._written[key]

    def draft(self, shape: Qwen3Shape, draft_vocab_size: int = 40, **options: Any) -> Path:
        """`options` are those of write_eagle3."""
        key = repr((shape, draft_vocab_size, sorted(options.items())))
        if key not in self._written:
            self._written[key] = self._factory.mktemp("eagle3")
            write_eagle3(self._written[key], shape, draft_vocab_size, **options)
        return self._written[key]
