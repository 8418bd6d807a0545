"""Fixtures shared by all tests: where the checkpoints are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.browser import Browser, find_browser
from tests.checkpoints import TinyShape, write_qwen3_5

if not torch.cuda.is_available():
    # Read when a kernel is decorated: without a GPU, Triton kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

TRAINED_MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3.5"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def owners_are_checked() -> Iterator[None]:
    """After every test: blocks, slots and checkpoints of its engines each have one owner."""
    yield
    harness = sys.modules.get("tests.harness")
    for engine in list(harness.ENGINES) if harness else []:
        engine.cache.check_integrity()


@pytest.fixture(scope="session")
def trained_model() -> Path:
    """Folder of the small trained model that ships with the repository."""
    return TRAINED_MODEL


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser without a window; the test is skipped where there is none."""
    program = find_browser()
    if program is None:
        pytest.skip("needs Chromium on the PATH (chromium, chromium-browser or google-chrome)")
    running = Browser(program, tmp_path / "profile")
    yield running
    running.close()


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyShape], Path]:
    """Folder of a random checkpoint of a shape, written once a session."""
    written: dict[TinyShape, Path] = {}

    def checkpoint(shape: TinyShape) -> Path:
        if shape not in written:
            written[shape] = tmp_path_factory.mktemp("checkpoint")
            write_qwen3_5(written[shape], shape)
            remember_longer(written[shape] / "model.safetensors")
        return written[shape]

    return checkpoint


def remember_longer(file: Path) -> None:
    """Give the delta nets' heads memories of about 3 to 50 tokens.

    transformers' own random values forget nearly everything at every token. Outputs are then single
    dot products that nearly cancel, so that one unit in the last place of an embedding moves logits
    by 1e-4, and a state that is wrong does not show.
    """
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith("A_log"):
            weights[name] = torch.linspace(0.02, 0.3, len(tensor)).log()
    save_file(weights, file)
