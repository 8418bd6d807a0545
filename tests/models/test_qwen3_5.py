"""Logits equal those of transformers' own Qwen3.5, however the tokens reach the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.tokenizer import Tokenizer
from tests.checkpoints import SHAPES, TinyShape
from tests.harness import TargetDriver, random_tokens, transformers_logits

Checkpoints = Callable[[TinyShape], Path]

TOLERANCE = 1e-4
"""Absolute, on logits of up to about 5: float32, summed in another order. Measured: 4e-5."""

LENGTH = 23


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert logits.shape == expected.shape
    worst = (logits.float() - expected).abs().max().item()
    assert worst <= TOLERANCE, f"largest difference {worst}"


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.label)
def shape(request: pytest.FixtureRequest) -> TinyShape:
    return request.param


@pytest.mark.parametrize("length", [1, 2, 3, 37, 64, 65, 131])
def test_a_prompt_in_one_piece_gives_transformers_logits(
    random_checkpoint: Checkpoints, shape: TinyShape, length: int
) -> None:
    path, tokens = random_checkpoint(shape), random_tokens(length, shape.vocab_size, length)
    assert_close(TargetDriver(path).prefill(tokens), transformers_logits(path, tokens))


@pytest.mark.parametrize("chunk", range(1, 10))
def test_a_prompt_in_chunks_of_every_size_gives_transformers_logits(
    random_checkpoint: Checkpoints, shape: TinyShape, chunk: int
) -> None:
    path, tokens = random_checkpoint(shape), random_tokens(LENGTH, shape.vocab_size, 0)
    driver = TargetDriver(path, prefill_grid=chunk)
    assert_close(driver.prefill(tokens, chunk), transformers_logits(path, tokens))


@pytest.mark.parametrize("num_prefilled", [1, 14])
def test_tokens_decoded_one_by_one_give_transformers_logits(
    random_checkpoint: Checkpoints, shape: TinyShape, num_prefilled: int
) -> None:
    path, tokens = random_checkpoint(shape), random_tokens(LENGTH, shape.vocab_size, 1)
    driver = TargetDriver(path)
    parts = (driver.prefill(tokens[:num_prefilled]), driver.decode(tokens[num_prefilled:]))
    assert_close(torch.cat(parts), transformers_logits(path, tokens))


def test_rounds_with_refused_drafts_give_transformers_logits(
    random_checkpoint: Checkpoints, shape: TinyShape
) -> None:
    path, tokens = random_checkpoint(shape), random_tokens(22, shape.vocab_size, 2)
    driver, at = TargetDriver(path), 5
    parts = [driver.prefill(tokens[:at])]
    for num_accepted, num_refused in [(1, 3), (4, 0), (2, 7), (9, 0), (1, 1)]:
        wrong = random_tokens(num_refused, shape.vocab_size, num_refused)
        rows = driver.round([*tokens[at : at + num_accepted], *wrong], num_accepted)
        parts.append(rows[:num_accepted])
        at += num_accepted
    assert_close(torch.cat(parts), transformers_logits(path, tokens))


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_the_trained_model_gives_transformers_logits_prefilled_and_decoded(
    trained_model: Path, chunk: int
) -> None:
    text = "def main():\n    parser = argparse.ArgumentParser()\n    parser.add_argument("
    tokens = Tokenizer.from_pretrained(trained_model).encode(text)
    expected = transformers_logits(trained_model, tokens)
    driver = TargetDriver(trained_model, prefill_grid=chunk)
    assert_close(driver.prefill(tokens, chunk), expected)
    decoded = TargetDriver(trained_model, prefill_grid=chunk)
    half = len(tokens) // 2
    assert_close(
        torch.cat((decoded.prefill(tokens[:half], chunk), decoded.decode(tokens[half:]))), expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(1, 10))
@pytest.mark.parametrize("length", [1, 9, 63, 64, 65, 129, 200])
def test_every_chunk_size_and_length_gives_transformers_logits(
    random_checkpoint: Checkpoints, shape: TinyShape, chunk: int, length: int
) -> None:
    path, tokens = random_checkpoint(shape), random_tokens(length, shape.vocab_size, length)
    expected = transformers_logits(path, tokens)
    assert_close(TargetDriver(path, prefill_grid=chunk).prefill(tokens, chunk), expected)
    driver = TargetDriver(path, block_size=64)
    token_by_token = [driver.prefill(tokens[:1]), *(driver.decode([t]) for t in tokens[1:])]
    assert_close(torch.cat(token_by_token), expected)


def copy_with(
    path: Path, to: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Path:
    """The checkpoint with other tensors, in one file."""
    shutil.copytree(path, to)
    save_file(change(load_file(path / "model.safetensors")), to / "model.safetensors")
    return to


def as_multimodal(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: w
        for name, w in weights.items()
    }
    return renamed | {
        "model.visual.patch_embed.proj.weight": torch.ones(3, 2),
        "model.visual.blocks.0.attn.qkv.bias": torch.ones(4),
    }


def test_the_names_of_a_multimodal_checkpoint_give_the_same_bits(
    random_checkpoint: Checkpoints, shape: TinyShape, tmp_path: Path
) -> None:
    path, tokens = random_checkpoint(shape), random_tokens(20, shape.vocab_size, 3)
    wrapped = copy_with(path, tmp_path / "wrapped", as_multimodal)
    config = json.loads((path / "config.json").read_text())
    config.pop("architectures", None)
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": config,
        "vision_config": {"model_type": "qwen3_5", "depth": 1},
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    (wrapped / "config.json").write_text(json.dumps(nested))
    assert torch.equal(TargetDriver(wrapped).prefill(tokens), TargetDriver(path).prefill(tokens))


def test_a_sharded_checkpoint_gives_the_same_bits_as_a_single_file(
    random_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shape = SHAPES[3]
    path, tokens = random_checkpoint(shape), random_tokens(20, shape.vocab_size, 3)
    sharded = tmp_path / "sharded"
    shutil.copytree(path, sharded)
    (sharded / "model.safetensors").unlink()
    weights = load_file(path / "model.safetensors")
    names = sorted(weights)
    index: dict[str, str] = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        part = names[number::3]
        save_file({name: weights[name] for name in part}, sharded / file)
        index |= dict.fromkeys(part, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(TargetDriver(sharded).prefill(tokens), TargetDriver(path).prefill(tokens))


# Of the norm of all logits. The types round to 2^-9 and 2^-12; layers and norms amplify that.
# Logits of an unrelated model would be about 1.4 away.
HALF_ERROR = {"bfloat16": 0.12, "float16": 0.02}


@pytest.mark.parametrize("dtype", list(HALF_ERROR))
def test_half_precision_stays_near_float32_prefilled_and_decoded(
    random_checkpoint: Checkpoints, shape: TinyShape, dtype: str
) -> None:
    path, tokens = random_checkpoint(shape), random_tokens(30, shape.vocab_size, 4)
    expected = transformers_logits(path, tokens)
    driver = TargetDriver(path, dtype=dtype)
    logits = torch.cat((driver.prefill(tokens[:17]), driver.decode(tokens[17:])))
    assert logits.dtype == getattr(torch, dtype)
    share = (logits.float() - expected).norm() / expected.norm()
    assert share <= HALF_ERROR[dtype], f"relative error {share}"


def test_block_size_changes_no_bit_of_prefilled_and_decoded_rows(
    random_checkpoint: Checkpoints, shape: TinyShape
) -> None:
    path, tokens = random_checkpoint(shape), random_tokens(72, shape.vocab_size, 5)

    def logits(block_size: int) -> Tensor:
        driver = TargetDriver(path, block_size=block_size)
        return torch.cat((driver.prefill(tokens[:60]), driver.decode(tokens[60:])))

    assert torch.equal(logits(16), logits(64))
