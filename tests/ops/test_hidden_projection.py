"""EAGLE3's projection of tapped hidden states: the kernels beside the references and float64.

g = fc(taps), the taps normed before it as a checkpoint says: not at all, as one row, or each on its
own. The three taps of a row lie in windows of NaN, and every output is allocated as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor

from outrider.models.eagle3 import Eagle3
from outrider.models.eagle3_config import Eagle3Config
from outrider.ops.dispatch import capability
from outrider.ops.linear import is_invariant
from tests.ops.delta_nets import relative_error

pytest.importorskip("triton")

EPS = 1e-6
NORMS = ["none", "before_fc", "each_tap"]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Relative Frobenius error: normed taps and results are rounded, sums are float32."""

INTERPRETED = [torch.float32, torch.float16]
ON_GPU = [*INTERPRETED, torch.bfloat16]


@dataclass(frozen=True)
class Shape:
    """Tapped layers, the target's width and the draft's."""

    taps: int
    target: int
    draft: int

    def __str__(self) -> str:
        return f"{self.taps}x{self.target}-{self.draft}"


SMALL = [Shape(3, 40, 24), Shape(3, 171, 33), Shape(2, 64, 96), Shape(1, 7, 5), Shape(3, 256, 48)]
MODELS = [Shape(3, 4096, 4096), Shape(3, 2560, 2560), Shape(3, 5120, 5120), Shape(3, 1024, 1000)]


def draft_of(shape: Shape, norms: str, dtype: torch.dtype, device: str) -> Eagle3:
    """A draft whose projection is random; the rest of it is as small as may be and never runs."""
    config = Eagle3Config(
        hidden_size=shape.draft,
        target_hidden_size=shape.target,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rotary_dim=8,
        rope_theta=1e4,
        yarn=None,
        rms_norm_eps=EPS,
        vocab_size=8,
        draft_vocab_size=8,
        max_position_embeddings=16,
        tapped_layers=tuple(range(shape.taps)),
        norm_before_fc=norms == "before_fc",
        fc_norm=norms == "each_tap",
    )
    draft, rng = Eagle3(config, own_embedding=False), torch.Generator(device)
    rng.manual_seed(shape.target)
    for parameter in draft.parameters():
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        values = torch.randn(parameter.shape, generator=rng, device=device) * scale
        parameter.data = values.to(dtype)
    return draft


def random_taps(shape: Shape, num_rows: int, dtype: torch.dtype, device: str) -> Tensor:
    """[R, taps * H'], rows apart, with NaN between them; the taps' scales differ widely."""
    rng = torch.Generator().manual_seed(num_rows)
    values = torch.randn(num_rows, shape.taps, shape.target, generator=rng)
    values = values * torch.tensor([0.1, 3.0, 20.0])[: shape.taps, None]
    width = shape.taps * shape.target
    room = torch.full((num_rows + 2, -(-width // 8) * 8 + 16), float("nan"), dtype=dtype)
    window = room.to(device)[1:-1, 8 : width + 8]
    window.copy_(values.flatten(1))
    return window


def exact(draft: Eagle3, taps: Tensor, norms: str, shape: Shape) -> Tensor:
    """[R, H] float64; a norm is w x / sqrt(mean(x^2) + eps)."""
    x = taps.double()
    if norms == "before_fc":
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * draft.input_norm.weight.double()
    if norms == "each_tap":
        parts = x.unflatten(1, (shape.taps, shape.target))
        weights = torch.stack([norm.weight.double() for norm in draft.fc_norm])
        x = (parts / (parts.square().mean(-1, keepdim=True) + EPS).sqrt() * weights).flatten(1)
    return x @ draft.fc.weight.double().t()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = torch.empty

    def empty(*args: object, **options: object) -> Tensor:
        tensor = allocate(*args, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> Iterator[pytest.MonkeyPatch]:
    """The kernels that run on any card, in Triton's interpreter; undone, it is the references."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled, not interpreted")
    from outrider.ops.linear.triton import linear_triton

    norms = import_module("outrider.ops.rms_norm")
    monkeypatch.setattr(norms, "uses_kernels", lambda _tensor: True)
    monkeypatch.setattr(norms, "overlaps_launches", lambda _tensor: False)
    monkeypatch.setattr("outrider.layers.linear.linear", linear_triton)
    yield monkeypatch


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("num_rows", [1, 5, 18])
@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
def test_interpreted_kernels_agree_with_the_references(
    interpreted: pytest.MonkeyPatch, dtype: torch.dtype, shape: Shape, num_rows: int, norms: str
) -> None:
    draft = draft_of(shape, norms, dtype, "cpu")
    taps = random_taps(shape, num_rows, dtype, "cpu")
    got = draft.project(taps)
    interpreted.undo()
    expected = draft.project(taps)
    assert got.shape == expected.shape == (num_rows, shape.draft) and got.dtype == dtype
    assert relative_error(got, expected) < TOLERANCE[dtype]
    assert relative_error(got, exact(draft, taps, norms, shape)) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("num_rows", [1, 4, 64, 300])
@pytest.mark.parametrize("shape", [*SMALL, *MODELS], ids=str)
@pytest.mark.parametrize("dtype", ON_GPU, ids=str)
def test_kernels_agree_with_the_references(
    poisoned: None, dtype: torch.dtype, shape: Shape, num_rows: int, norms: str
) -> None:
    draft = draft_of(shape, norms, dtype, "cuda")
    taps = random_taps(shape, num_rows, dtype, "cuda")
    got = draft.project(taps)
    assert relative_error(got, exact(draft, taps, norms, shape)) < TOLERANCE[dtype]
    if is_invariant(dtype, capability(taps.device)):
        for count in {1, 3, num_rows // 2 + 1} & set(range(num_rows)):
            assert torch.equal(draft.project(taps[:count]), got[:count]), count
    if shape in SMALL:
        expected = draft.cpu().project(taps.cpu())
        assert relative_error(got.cpu(), expected) < TOLERANCE[dtype]
