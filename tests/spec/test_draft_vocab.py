"""A draft that scores a part of the vocabulary: the same text, and only its acceptance may drop."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.draft_vocab import choose
from outrider.engine import Engine
from outrider.errors import CheckpointError, ConfigError
from outrider.models.build import Checkpoint
from outrider.models.config import ModelConfig
from outrider.output import RequestOutput, total_speculation
from outrider.params import SamplingParams
from outrider.spec.draft_ids import TABLE_NAME, draft_ids
from outrider.spec.mtp import MTPDrafter
from outrider.tokenizer import Tokenizer
from tests.checkpoints import SHAPES, TinyShape, write_qwen3_5
from tests.conftest import TRAINED_MODEL
from tests.harness import random_tokens, run_requests, tokens_of
from tests.sampled_law import (
    CHI_SQUARE_LIMIT,
    VOCAB_SIZE,
    assert_that_drafts_decide,
    draw,
    exact_law,
    statistic,
)

Checkpoints = Callable[[TinyShape], Path]

HELD_OUT = Path(__file__).parents[2] / "training" / "heldout.jsonl"
SIZES = (64, 512, 2048)
TEXTS = ("def main():\n", "    for key, value in", "To install the package,", "class Test")


def engine_of(
    path: Path, draft_vocab: str | int | None, num_drafts: int = 3, **options: Any
) -> Engine:
    """A small engine; num_drafts 0 decodes plainly."""
    spec = None
    if num_drafts:
        spec = SpeculativeConfig("mtp", num_speculative_tokens=num_drafts, draft_vocab=draft_vocab)
    defaults: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "block_size": 16}
    options = {"dtype": "float32", "debug_checks": True, **defaults, **options}
    return Engine(EngineConfig(str(path), device="cpu", speculative_config=spec, **options))


def drafter_of(engine: Engine) -> MTPDrafter:
    drafter = engine.runner.drafter
    assert isinstance(drafter, MTPDrafter)
    return drafter


def write_ids(path: Path, ids: Sequence[object]) -> str:
    path.write_text(json.dumps(list(ids)))
    return str(path)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: shape.label)
def test_the_head_covers_exactly_the_chosen_ids_in_ascending_order(
    random_checkpoint: Checkpoints, tmp_path: Path, shape: TinyShape
) -> None:
    ids = [77, 3, 120, 4, 127, 0, 50]
    engine = engine_of(random_checkpoint(shape), write_ids(tmp_path / "ids.json", ids))
    drafter, target = drafter_of(engine), engine.runner.target
    whole = target.embed_tokens.weight if shape.tied else target.lm_head.weight
    expected = [0, 3, 4, 50, 77, 120, 127]
    assert drafter.target_ids is not None and drafter.target_ids.tolist() == expected
    rows = drafter.output_weight
    assert rows.is_contiguous() and rows.data_ptr() != whole.data_ptr()
    assert torch.equal(rows, torch.stack([whole[token_id] for token_id in expected]))
    step = drafter.step_weights(1)
    assert [weight.data_ptr() for weight in step].count(rows.data_ptr()) == 1
    assert whole.data_ptr() not in [weight.data_ptr() for weight in step]
    hidden = torch.randn(5, shape.hidden_size, generator=torch.Generator().manual_seed(0))
    wanted = (hidden.double() @ whole.double().T)[:, expected]
    assert torch.allclose(drafter.logits(hidden).double(), wanted, atol=1e-4)


def test_the_whole_vocabulary_is_the_targets_own_head(
    random_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shape = SHAPES[0]
    ids = write_ids(tmp_path / "ids.json", range(shape.vocab_size - 1, -1, -1))
    engine = engine_of(random_checkpoint(shape), ids)
    drafter = drafter_of(engine)
    assert drafter.target_ids is None
    assert drafter.output_weight.data_ptr() == engine.runner.target.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("draft_sampling", ["argmax", "coupled", "sampled"])
def test_drafts_are_chosen_ids_and_texts_are_not_confined_to_them(
    random_checkpoint: Checkpoints, tmp_path: Path, draft_sampling: str
) -> None:
    path, chosen = random_checkpoint(SHAPES[0]), [5, 17, 40, 41, 90]
    engine = engine_of(path, write_ids(tmp_path / "ids.json", chosen))
    params = SamplingParams(
        max_tokens=12, seed=4, ignore_eos=True, draft_sampling=draft_sampling, top_k=60
    )
    outputs = run_requests(engine, [random_tokens(n, 128, n) for n in (3, 20)], params)
    drafts = {d for output in outputs for r in output.rounds for d in r.draft_token_ids}
    assert drafts and drafts <= set(chosen)
    assert not {token for output in outputs for token in output.token_ids} <= set(chosen)


@cache
def table() -> tuple[int, ...]:
    """All ids of the trained model, most frequent first."""
    tokenizer = Tokenizer.from_pretrained(TRAINED_MODEL)
    counts: Counter[int] = Counter()
    for line in HELD_OUT.read_text(encoding="utf-8").splitlines():
        counts.update(tokenizer.encode(json.loads(line)["text"]))
    config = ModelConfig.from_hf(TRAINED_MODEL)
    return choose("tiny", config, tokenizer.special_ids, counts, config.vocab_size).token_ids


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_pretrained(TRAINED_MODEL)
    return [tokenizer.encode(text) for text in TEXTS]


MIXED = (
    SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=24, seed=1, ignore_eos=True, draft_sampling="coupled"),
    SamplingParams(max_tokens=24, seed=2, ignore_eos=True, draft_sampling="argmax"),
    SamplingParams(max_tokens=24, seed=3, ignore_eos=True, draft_sampling="coupled", top_p=0.9),
)
GREEDY = (MIXED[0],) * 4


@pytest.fixture(scope="module")
def plain() -> dict[tuple[SamplingParams, ...], list[tuple[int, ...]]]:
    engine = engine_of(TRAINED_MODEL, None, num_drafts=0)
    return {each: tokens_of(run_requests(engine, prompts(), each)) for each in (GREEDY, MIXED)}


@pytest.mark.parametrize("size", SIZES)
def test_the_text_is_that_of_plain_decoding_whatever_the_head_covers(
    tmp_path: Path, plain: dict[tuple[SamplingParams, ...], list[tuple[int, ...]]], size: int
) -> None:
    engine = engine_of(TRAINED_MODEL, write_ids(tmp_path / "ids.json", table()[:size]))
    for each, expected in plain.items():
        outputs = run_requests(engine, prompts(), each)
        assert tokens_of(outputs) == expected
        assert total_speculation(outputs).num_accepted > 0


def greedy_outputs(draft_vocab: str | None) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    return run_requests(engine_of(TRAINED_MODEL, draft_vocab), prompts(), params)


def test_acceptance_grows_with_the_head_up_to_that_of_the_whole(tmp_path: Path) -> None:
    whole = greedy_outputs(None)
    lengths: list[float] = []
    for size in (*SIZES, 4095):  # the last id of all is one that the text does not hold
        outputs = greedy_outputs(write_ids(tmp_path / "ids.json", table()[:size]))
        lengths.append(total_speculation(outputs).acceptance_length or 0)
    assert [output.rounds for output in outputs] == [output.rounds for output in whole]
    assert lengths[0] > 1.1 and lengths[0] + 0.1 < lengths[1] <= lengths[2] <= lengths[3]
    assert lengths[2] > 0.7 * lengths[3], lengths


def test_sampled_drafts_from_a_part_of_the_vocabulary_keep_the_law_of_the_text(
    tmp_path: Path,
) -> None:
    shape = TinyShape(hidden_size=32, num_layers=2, interval=2, vocab_size=VOCAB_SIZE)
    write_qwen3_5(tmp_path, shape)
    engine = engine_of(
        tmp_path,
        write_ids(tmp_path / "ids.json", [3, 0, 2]),
        num_drafts=2,
        max_num_seqs=250,
        num_kv_blocks=250,
        max_model_len=16,
        debug_checks=False,
    )
    prompt = (2, 3, 0)
    outputs = draw(engine, prompt, 700)
    assert_that_drafts_decide(outputs)
    assert statistic(outputs, exact_law(tmp_path, prompt)) < CHI_SQUARE_LIMIT


def opened(path: Path, **options: Any) -> Checkpoint:
    return Checkpoint.open(path, EngineConfig(str(path), device="cpu", **options))


FORMS = {
    "list": "[9, 2, 5]",
    "table": '{"model": "m", "vocab_size": 128, "token_ids": [9, 2, 5]}',
    "bare table": '{"token_ids": [9, 2, 5]}',
    "lines": "9\n2\n\n5\n",
    "windows": "\ufeff9\r\n2\r\n5",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_ids_has_one_of_three_forms(
    random_checkpoint: Checkpoints, tmp_path: Path, form: str
) -> None:
    file = tmp_path / "ids"
    file.write_text(FORMS[form], encoding="utf-8")
    ids = draft_ids(str(file), opened(random_checkpoint(SHAPES[0])))
    assert ids.tolist() == [2, 5, 9] and ids.dtype == torch.int64


WRONG = {
    "[]": "is empty",
    "": "is empty",
    "[1, 128]": "entry 1: got 128; allowed: an integer from 0 to 127",
    "[-1]": "entry 0: got -1",
    "[1, true]": "entry 1: got True",
    "[2.0]": "entry 0: got 2.0",
    '["a"]': "entry 0: got 'a'",
    "[7, 3, 7]": "entry 2 repeats entry 0: got 7; allowed: distinct",
    "1\nx\n": "entry 1: got 'x'",
    "[1": "cannot be read as JSON",
    "[" * 100_000: "cannot be read as JSON",
    '{"ids": [1]}': "got None; allowed: a JSON list of token ids",
    '{"token_ids": 4}': "got 4; allowed: a JSON list",
    '{"vocab_size": 4096, "token_ids": [1]}': "another model: vocab_size: got 4096; allowed: 128",
    "\udcff": "cannot be read",
}


@pytest.mark.parametrize("content", WRONG, ids=lambda text: ascii(text)[:40])
def test_a_file_that_will_not_do_is_an_error_that_names_it(
    random_checkpoint: Checkpoints, tmp_path: Path, content: str
) -> None:
    path, file = random_checkpoint(SHAPES[0]), tmp_path / "ids"
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        engine_of(path, str(file))
    assert WRONG[content] in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_is_none_is_an_error_that_says_how_to_make_one(
    random_checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*outrider draft-vocab MODEL"):
        engine_of(random_checkpoint(SHAPES[0]), str(tmp_path / name))


def test_a_number_takes_the_first_ids_of_the_checkpoints_table(
    random_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(random_checkpoint(SHAPES[0]), folder)
    with pytest.raises(ConfigError, match=f"has no {TABLE_NAME}: got 3.*outrider draft-vocab"):
        engine_of(folder, 3)
    write_ids(folder / TABLE_NAME, [40, 7, 90, 11, 2])
    target_ids = drafter_of(engine_of(folder, 3)).target_ids
    assert target_ids is not None and target_ids.tolist() == [7, 40, 90]
    with pytest.raises(ConfigError, match=r"got 6; allowed: an integer from 1 to 5; .*larger"):
        engine_of(folder, 6)
    write_ids(folder / TABLE_NAME, [40, 40])
    with pytest.raises(CheckpointError, match=f"{TABLE_NAME}: entry 1 repeats"):
        engine_of(folder, 1)


def test_dummy_weights_take_a_number_without_a_table(random_checkpoint: Checkpoints) -> None:
    checkpoint = opened(random_checkpoint(SHAPES[0]), load_format="dummy")
    assert draft_ids(5, checkpoint).tolist() == [0, 1, 2, 3, 4]
    assert len(draft_ids(128, checkpoint)) == 128
    with pytest.raises(ConfigError, match=r"draft_vocab: got 129; allowed: .* from 1 to 128"):
        draft_ids(129, checkpoint)
    engine = engine_of(random_checkpoint(SHAPES[0]), 16, load_format="dummy")
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    [output] = run_requests(engine, [[2, 3, 4]], params)
    drafts = {draft for r in output.rounds for draft in r.draft_token_ids}
    assert drafts and max(drafts) < 16 and drafter_of(engine).output_weight.shape == (16, 64)
