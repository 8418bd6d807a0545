"""Which type a model computes in, and which matrices a deterministic engine refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider import engine_setup
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.models import build
from outrider.models.build import Checkpoint, load_target
from tests.checkpoints import SHAPES, TinyShape

Checkpoints = Callable[[TinyShape], Path]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    for module in (build, engine_setup):
        monkeypatch.setattr(module, "capability", lambda _: (major, minor))


@pytest.mark.parametrize(
    ("wanted", "stored", "device", "expected"),
    [
        ("auto", "bfloat16", CUDA, torch.float16),
        ("auto", "float32", CUDA, torch.float32),
        ("float16", "bfloat16", CUDA, torch.float16),
        ("auto", "bfloat16", CPU, torch.bfloat16),
        ("bfloat16", "float32", CPU, torch.bfloat16),
    ],
)
def test_cards_before_sm80_compute_in_float16_for_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wanted: str,
    stored: str,
    device: torch.device,
    expected: torch.dtype,
) -> None:
    pretend(monkeypatch, 7, 5)
    assert build._resolve_dtype(wanted, stored, device) == expected
    warned = "cannot compute in bfloat16" in caplog.text
    assert warned == (wanted == "auto" and stored == "bfloat16" and device == CUDA)


def test_bfloat16_by_name_is_refused_before_sm80_and_served_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 7, 5)
    with pytest.raises(ConfigError, match=r"dtype.*bfloat16.*float16 or float32.*7\.5"):
        build._resolve_dtype("bfloat16", "float32", CUDA)
    pretend(monkeypatch, 8, 0)
    assert build._resolve_dtype("bfloat16", "float32", CUDA) == torch.bfloat16


def test_deterministic_refuses_matrices_without_a_row_invariant_kernel(
    monkeypatch: pytest.MonkeyPatch, random_checkpoint: Checkpoints
) -> None:
    path = random_checkpoint(SHAPES[0])
    checkpoint = Checkpoint.open(path, EngineConfig(str(path), dtype="float16", device="cpu"))
    target = load_target(checkpoint)
    checkpoint.close()
    refuse = engine_setup.refuse_variant_shapes
    refuse(CPU, target, None)
    pretend(monkeypatch, 8, 0)
    refuse(CUDA, target, None)
    pretend(monkeypatch, 7, 5)
    with pytest.raises(ConfigError, match=r"deterministic.*torch.float16 \d+ x \d+"):
        refuse(CUDA, target, None)
    refuse(CUDA, target.float(), None)
