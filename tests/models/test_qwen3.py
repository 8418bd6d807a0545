"""Qwen3: logits are transformers' own, YaRN included, and what cannot be served is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.config import EngineConfig
from outrider.engine import Engine
from outrider.errors import CheckpointError
from outrider.layers.rotary import RotaryEmbedding
from outrider.models.config import ModelConfig
from outrider.params import SamplingParams
from tests.checkpoints_qwen3 import QWEN3_SHAPES, Qwen3Shape
from tests.harness import (
    TargetDriver,
    make_engine,
    random_tokens,
    run_requests,
    transformers_logits,
    transformers_model,
)
from tests.trained import Folders, trained_folder

TOLERANCE = 1e-4
"""Absolute, on logits of up to about 5: float32, summed in another order."""

ORIGINAL = 64
"""Trained length of the shapes with YaRN."""


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert logits.shape == expected.shape
    worst = (logits - expected).abs().max().item()
    assert worst <= TOLERANCE, f"largest difference {worst}"


@dataclass
class Begun:
    """A driver that has run the first tokens of a text; what it gave, and what it should give."""

    driver: TargetDriver
    logits: list[Tensor]
    rest: list[int]
    expected: Tensor

    def check(self) -> None:
        assert_close(torch.cat(self.logits), self.expected)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


@pytest.fixture(params=QWEN3_SHAPES, ids=lambda shape: shape.label)
def shape(request: pytest.FixtureRequest) -> Qwen3Shape:
    return request.param


def first_piece(shape: Qwen3Shape) -> int:
    """Tokens to run in one piece, so that the others cross the trained length if there is one."""
    return ORIGINAL - 9 if shape.yarn else 0


def begun(folders: Folders, shape: Qwen3Shape, seed: int, **options: Any) -> Begun:
    path, num_first = folders.target(shape), first_piece(shape)
    tokens = random_tokens(num_first + 23, shape.vocab_size, seed)
    driver = TargetDriver(path, **options)
    logits = [driver.prefill(tokens[:num_first])] if num_first else []
    return Begun(driver, logits, tokens[num_first:], transformers_logits(path, tokens))


@pytest.mark.parametrize("length", [1, 2, 37, 64, 65, 170])
def test_a_prompt_in_one_piece_gives_transformers_logits(
    folders: Folders, shape: Qwen3Shape, length: int
) -> None:
    path, tokens = folders.target(shape), random_tokens(length, shape.vocab_size, length)
    assert_close(TargetDriver(path).prefill(tokens), transformers_logits(path, tokens))


@pytest.mark.parametrize("chunk", range(1, 10))
def test_a_prompt_in_chunks_of_every_size_gives_transformers_logits(
    folders: Folders, shape: Qwen3Shape, chunk: int
) -> None:
    text = begun(folders, shape, 0, prefill_grid=chunk)
    text.logits.append(text.driver.prefill(text.rest, chunk))
    text.check()


@pytest.mark.parametrize("num_prefilled", [1, 14])
def test_tokens_decoded_one_by_one_give_transformers_logits(
    folders: Folders, shape: Qwen3Shape, num_prefilled: int
) -> None:
    text = begun(folders, shape, 1)
    text.logits.append(text.driver.prefill(text.rest[:num_prefilled]))
    text.logits.append(text.driver.decode(text.rest[num_prefilled:]))
    text.check()


def test_rounds_with_refused_drafts_give_transformers_logits(
    folders: Folders, shape: Qwen3Shape
) -> None:
    text = begun(folders, shape, 2)
    text.logits.append(text.driver.prefill(text.rest[:6]))
    at = 6
    for num_accepted, num_refused in [(1, 3), (4, 0), (2, 7), (9, 0), (1, 1)]:
        wrong = random_tokens(num_refused, shape.vocab_size, num_refused)
        rows = text.driver.round([*text.rest[at : at + num_accepted], *wrong], num_accepted)
        text.logits.append(rows[:num_accepted])
        at += num_accepted
    text.check()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(1, 10))
@pytest.mark.parametrize("length", [1, 9, 63, 64, 65, 129, 200])
def test_every_chunk_size_and_length_gives_transformers_logits(
    folders: Folders, shape: Qwen3Shape, chunk: int, length: int
) -> None:
    path, tokens = folders.target(shape), random_tokens(length, shape.vocab_size, length)
    expected = transformers_logits(path, tokens)
    assert_close(TargetDriver(path, prefill_grid=chunk).prefill(tokens, chunk), expected)


@pytest.mark.slow
@pytest.mark.parametrize("length", [9, 65, 200])
def test_long_texts_decoded_one_by_one_give_transformers_logits(
    folders: Folders, shape: Qwen3Shape, length: int
) -> None:
    path, tokens = folders.target(shape), random_tokens(length, shape.vocab_size, length)
    driver = TargetDriver(path, block_size=64)
    logits = torch.cat((driver.prefill(tokens[:1]), driver.decode(tokens[1:])))
    assert_close(logits, transformers_logits(path, tokens))


def test_greedy_text_past_the_trained_length_is_transformers_own(
    folders: Folders, shape: Qwen3Shape
) -> None:
    path, prompt = folders.target(shape), random_tokens(160, shape.vocab_size, 3)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    [output] = run_requests(make_engine(path), [prompt], params)
    generated = transformers_model(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert output.token_ids == tuple(generated[0, len(prompt) :].tolist())


@pytest.mark.parametrize("chunk", [7, 64])
def test_the_trained_model_gives_transformers_logits_prefilled_and_decoded(chunk: int) -> None:
    path = trained_folder("tiny-qwen3")
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    tokens = random_tokens(90, vocab_size, 0)
    driver = TargetDriver(path, prefill_grid=chunk)
    logits = torch.cat((driver.prefill(tokens[:60], chunk), driver.decode(tokens[60:])))
    assert_close(logits, transformers_logits(path, tokens))


@torch.inference_mode()
def residual_streams(path: Path, tokens: list[int]) -> tuple[Tensor, ...]:
    """Entry i is the residual stream that enters layer i, in transformers' own model."""
    output = transformers_model(path)(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return tuple(hidden[0] for hidden in output.hidden_states)


@pytest.mark.parametrize("layers", [(0,), (1, 2, 3), (2, 4, 5), (0, 3, 7), (7,)])
def test_taps_are_the_residual_streams_that_enter_the_layers(
    folders: Folders, layers: tuple[int, ...]
) -> None:
    shape = QWEN3_SHAPES[3]
    path, tokens = folders.target(shape), random_tokens(21, shape.vocab_size, 4)
    driver = TargetDriver(path)
    seen: list[Tensor | None] = []
    forward = driver.target.forward

    def tapped(*args: Any) -> Any:
        output = forward(*args, layers)
        seen.append(output.residuals)
        return output

    driver.target.forward = tapped  # type: ignore[method-assign]
    logits = driver.prefill(tokens, 5)
    streams = residual_streams(path, tokens)
    expected = torch.cat([streams[layer] for layer in layers], dim=-1)
    assert_close(torch.cat([part for part in seen if part is not None]), expected)
    assert_close(logits, transformers_logits(path, tokens))


def test_a_target_without_taps_keeps_no_residual_stream(folders: Folders) -> None:
    path, outputs = folders.target(QWEN3_SHAPES[0]), []
    driver = TargetDriver(path)
    driver.target.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    driver.prefill([3, 4, 5])
    assert [output.residuals for output in outputs] == [None]


BASE: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}

YARNS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "as Qwen3 recommends": (128, {"factor": 4.0, "original_max_position_embeddings": 32768}),
    "short": (32, {"factor": 4.0, "original_max_position_embeddings": 64}),
    "factor below one": (64, {"factor": 0.5, "original_max_position_embeddings": 512}),
    "fractional factor": (64, {"factor": 2.5, "original_max_position_embeddings": 1000}),
    "own betas": (
        64,
        {
            "factor": 8.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
    "betas that meet": (
        16,
        {
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
    "not truncated": (
        64,
        {"factor": 8.0, "original_max_position_embeddings": 2048, "truncate": False},
    ),
    "own attention factor": (
        64,
        {"factor": 8.0, "original_max_position_embeddings": 2048, "attention_factor": 0.75},
    ),
}


def rotary_of(config: ModelConfig) -> RotaryEmbedding:
    return RotaryEmbedding(config.rotary_dim, config.rope_theta, config.yarn)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("name", list(YARNS))
def test_yarn_frequencies_and_attention_factor_are_transformers_own(
    name: str, theta: float
) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim, scaling = YARNS[name]
    rope = {"rope_type": "yarn", "rope_theta": theta} | scaling
    values = {k: v for k, v in BASE.items() if k not in ("model_type", "rope_theta", "head_dim")}
    reference = Qwen3Config(**values, head_dim=head_dim, rope_parameters=rope)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](reference, "cpu")
    ours = ModelConfig.from_dict({**BASE, "head_dim": head_dim, "rope_parameters": rope})
    rotary = rotary_of(ours)
    assert rotary.scale == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(rotary.inverse_frequencies, frequencies, rtol=2e-7, atol=0)


def test_yarn_keeps_fast_dimensions_and_divides_slow_ones() -> None:
    # theta 10^4, 32 dims, trained for 64 tokens. Dimension d turns 64 / (2 pi 10^(4 * 2d / 32))
    # times over that length: d = 0 makes 10.2 turns, which is less than 32 (kept whole would be
    # d < -1.99), and one turn is made at d = 4.03. So the ramp runs from 0 to ceil(4.03) = 5.
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = ModelConfig.from_dict({**BASE, "rope_theta": 1e4, "rope_parameters": rope})
    rotary = rotary_of(config)
    plain = torch.tensor([1e4 ** (-2 * d / 32) for d in range(16)], dtype=torch.float64)
    share = rotary.inverse_frequencies.double() / plain
    expected = [1 - 0.75 * min(d / 5, 1.0) for d in range(16)]
    assert share.tolist() == pytest.approx(expected, rel=1e-6)
    cos, sin = rotary(torch.tensor([0, 100_000]))
    assert cos[0].tolist() == pytest.approx([0.1 * math.log(4) + 1] * 32)
    assert sin[0].tolist() == [0.0] * 32
    assert torch.allclose(cos**2 + sin**2, torch.tensor((0.1 * math.log(4) + 1) ** 2))


def test_a_checkpoint_without_yarn_has_the_plain_table() -> None:
    rotary = rotary_of(ModelConfig.from_dict(BASE))
    expected = [1e6 ** (-2 * d / 32) for d in range(16)]
    assert rotary.inverse_frequencies.tolist() == pytest.approx(expected, rel=1e-6)
    assert rotary.scale == 1.0


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_the_old_spelling_of_yarn_means_the_same_as_the_new_one(kind_key: str) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 1024}
    new = ModelConfig.from_dict(
        {**BASE, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **scaling}}
    )
    old = ModelConfig.from_dict({**BASE, "rope_scaling": {kind_key: "yarn", **scaling}})
    assert old == new and old.yarn is not None


def test_a_rope_scaling_of_null_is_no_scaling() -> None:
    assert ModelConfig.from_dict({**BASE, "rope_scaling": None}) == ModelConfig.from_dict(BASE)


def test_the_trained_length_is_max_position_embeddings_where_yarn_names_none() -> None:
    config = ModelConfig.from_dict({**BASE, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert config.yarn is not None
    assert config.yarn.original_max_position_embeddings == 4096
    assert config.max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("listed", "factor", "original", "longest"),
    [
        (4096, 4.0, 4096, 16384),  # the trained length is listed, as Qwen3's model card says
        (16384, 4.0, 4096, 16384),  # the stretched length is listed
        (20000, 4.0, 4096, 20000),  # more than that is listed
        (4096, 2.5, 1001, 4096),
    ],
)
def test_the_longest_context_is_the_stretched_one_unless_more_is_listed(
    listed: int, factor: float, original: int, longest: int
) -> None:
    scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    config = ModelConfig.from_dict(
        {**BASE, "max_position_embeddings": listed, "rope_scaling": scaling}
    )
    assert config.max_position_embeddings == longest


def test_requests_may_use_the_stretched_length(folders: Folders, tmp_path: Path) -> None:
    shape = QWEN3_SHAPES[5]
    source = folders.target(shape)
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = ORIGINAL
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Engine(EngineConfig(str(tmp_path), device="cpu", block_size=16))
    assert engine.max_model_len == 4 * ORIGINAL
    prompt = random_tokens(4 * ORIGINAL - 3, shape.vocab_size, 5)
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    [output] = run_requests(engine, [prompt], params)
    assert len(output.token_ids) == 3
    expected = transformers_logits(source, [*prompt, *output.token_ids])
    assert list(output.token_ids) == expected[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_the_head_size_is_a_share_of_the_hidden_size_where_it_is_not_listed() -> None:
    values = {key: value for key, value in BASE.items() if key != "head_dim"}
    assert ModelConfig.from_dict(values).head_dim == 16


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "mscale": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}},
        r"rope_scaling.*: mscale .*got 1\.0",
    ),
    "mscale_all_dim": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 0.7}},
        r"rope_parameters.*: mscale_all_dim .*got 0\.7",
    ),
    "yarn without a factor": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.*factor"),
    "another scaling": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope_scaling.*rope type.*got 'llama3'.*yarn",
    ),
    "sliding window": ({"use_sliding_window": True}, "use_sliding_window.*got True"),
    "attention bias": ({"attention_bias": True}, "attention_bias.*got True"),
    "mixture of experts": ({"model_type": "qwen3_moe"}, "mixture-of-experts.*got 'qwen3_moe'"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act.*got 'gelu'.*silu"),
    "quantisation": (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config.*got 'fp8'",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_variant_that_would_compute_something_else_is_refused_by_name(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict({**BASE, **change})


def test_a_sliding_window_that_is_switched_off_is_no_obstacle() -> None:
    config = ModelConfig.from_dict(
        {**BASE, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}
    )
    assert config == ModelConfig.from_dict(BASE)
