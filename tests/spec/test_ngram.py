"""Prompt lookup proposes what followed the longest suffix last time, and changes no text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.output import RequestOutput, total_speculation
from outrider.params import SamplingParams
from outrider.spec.ngram import LONGEST_SUFFIX, SHORTEST_SUFFIX, lookup
from outrider.tokenizer import Tokenizer
from tests.checkpoints import SHAPES, TinyShape
from tests.checkpoints_qwen3 import QWEN3_SHAPES
from tests.harness import make_engine, random_tokens, run_requests, tokens_of
from tests.trained import Folders, trained_folder

GARBAGE = 9
"""Token id that fills what no text holds; texts do not use it unless a test says so."""


def plain_lookup(text: Sequence[int], num_wanted: int) -> list[int]:
    """The rule in words: the longest suffix, of 4 to 2 tokens, that also stands earlier in the
    text (overlapping the suffix is allowed, being it is not); its latest such place; what follows
    there, up to the end of the text.
    """
    for size in range(LONGEST_SUFFIX, SHORTEST_SUFFIX - 1, -1):
        if size > len(text):
            continue
        suffix = list(text[len(text) - size :])
        for begin in range(len(text) - size - 1, -1, -1):
            if list(text[begin : begin + size]) == suffix:
                return list(text[begin + size :][:num_wanted])
    return []


def looked_up(
    texts: Sequence[Sequence[int]], wanted: Sequence[int], *, spare: int = 0, garbage: int = GARBAGE
) -> list[list[int]]:
    """Drafts of each text, as a batch; `spare` garbage columns lie past the longest."""
    width = max(len(text) for text in texts) + spare
    history = torch.tensor([[*text, *[garbage] * (width - len(text))] for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    most = max(*wanted, 1)
    proposal = lookup(history, lengths, torch.tensor(wanted), most)
    assert proposal.q is None
    assert proposal.token_ids.shape == (len(texts), most)
    counts = proposal.num_drafts.tolist()
    return [ids[:count] for ids, count in zip(proposal.token_ids.tolist(), counts, strict=True)]


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
REQUESTS = st.lists(st.tuples(TEXTS, st.integers(0, 8)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(0, 3), st.integers(0, 2))
def test_batches_of_any_texts_are_looked_up_as_the_rule_says(
    requests: list[tuple[list[int], int]], spare: int, garbage: int
) -> None:
    texts, wanted = [text for text, _ in requests], [count for _, count in requests]
    expected = [plain_lookup(text, count) for text, count in requests]
    assert looked_up(texts, wanted, spare=spare, garbage=garbage) == expected


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(REQUESTS, st.integers(0, 3), st.integers(0, 2))
def test_many_more_batches_are_looked_up_as_the_rule_says(
    requests: list[tuple[list[int], int]], spare: int, garbage: int
) -> None:
    texts, wanted = [text for text, _ in requests], [count for _, count in requests]
    expected = [plain_lookup(text, count) for text, count in requests]
    assert looked_up(texts, wanted, spare=spare, garbage=garbage) == expected


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    text = [1, 2, 3, 4, 50, 60, 3, 4, 70, 80, 2, 3, 4]
    #             ^ 2 3 4 is followed by 50;  3 4 alone, later, by 70
    assert looked_up([text], [2]) == [[50, 60]]


def test_five_equal_tokens_are_no_better_than_four() -> None:
    # The first place agrees with five tokens of the suffix, the second with four: the later wins.
    text = [1, 2, 3, 4, 5, 60, 8, 2, 3, 4, 5, 70, 1, 2, 3, 4, 5]
    assert LONGEST_SUFFIX == 4
    assert looked_up([text], [1]) == [[70]]


def test_of_equally_long_matches_the_latest_is_continued() -> None:
    text = [1, 2, 30, 1, 2, 40, 1, 2, 50, 7, 1, 2]
    assert looked_up([text], [3]) == [[50, 7, 1]]


@pytest.mark.parametrize(
    "text", [[1], [1, 2], [1, 2, 3, 4, 5, 6], [5, 1, 2, 3, 5], [1, 2, 3, 2, 1]]
)
def test_nothing_is_drafted_where_no_two_tokens_stand_twice(text: list[int]) -> None:
    assert looked_up([text], [4]) == [[]]


def test_drafts_stop_at_the_end_of_the_text() -> None:
    text = [9, 1, 2, 3, 1, 2]
    assert looked_up([text], [8], garbage=1) == [[3, 1, 2]]
    assert looked_up([text], [8], spare=20, garbage=1) == [[3, 1, 2]]


def test_a_match_may_overlap_the_suffix() -> None:
    assert looked_up([[4, 4, 4]], [5]) == [[4]]
    assert looked_up([[1, 2, 1, 2, 1, 2]], [8]) == [[1, 2]]


@pytest.mark.parametrize("wanted", range(9))
def test_no_more_is_drafted_than_a_request_wants(wanted: int) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 1, 2]
    both = looked_up([text, text], [wanted, 8])
    assert both == [[3, 4, 5, 6, 7, 8, 11, 12][:wanted], [3, 4, 5, 6, 7, 8, 11, 12]]


def test_tokens_past_the_text_are_not_looked_at() -> None:
    # The suffix 1 2 stands again in the garbage, at its begin and across the end of the text.
    history = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2, 5, 5], [2, 1, 2, 1, 2, 1, 2, 1, 2, 1]])
    proposal = lookup(history, torch.tensor([5, 3]), torch.tensor([4, 4]), 4)
    assert proposal.num_drafts.tolist() == [3, 0]
    assert proposal.token_ids[0, :3].tolist() == [3, 1, 2]


def test_a_text_is_looked_up_alike_in_any_company() -> None:
    rng = random.Random(0)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))] for _ in range(30)]
    alone = [looked_up([text], [5])[0] for text in texts]
    assert looked_up(texts, [5] * len(texts)) == alone
    assert any(alone) and not all(alone)


Checkpoints = Callable[[TinyShape], Path]


@pytest.fixture(scope="module")
def paths(
    random_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folders = Folders(tmp_path_factory)
    return {"qwen3": folders.target(QWEN3_SHAPES[0]), "qwen3.5": random_checkpoint(SHAPES[0])}


def repetitive(length: int, seed: int) -> list[int]:
    """A prompt in which three-token words come back."""
    rng = random.Random(seed)
    words = [random_tokens(3, 128, seed + word) for word in range(4)]
    return [token for _ in range(length) for token in words[rng.randrange(4)]]


PROMPT_LIST = (repetitive(8, 1), [5], repetitive(25, 2), random_tokens(40, 128, 3))


def generated(path: Path, num_drafts: int, params: Sequence[SamplingParams]) -> list[RequestOutput]:
    engine = make_engine(path, num_drafts, method="ngram")
    return run_requests(engine, PROMPT_LIST, params)


@pytest.mark.parametrize(("model", "temperature"), [("qwen3", 0.0), ("qwen3.5", 0.7)])
def test_text_is_that_of_plain_decoding_and_drafts_vary_in_number(
    paths: dict[str, Path], model: str, temperature: float
) -> None:
    # Texts over three tokens: pairs of them come back soon, and not always with the same sequel.
    letters = dict.fromkeys((7, 8, 9), 60.0)
    params = [
        SamplingParams(
            max_tokens=18, temperature=temperature, seed=seed, logit_bias=letters, ignore_eos=True
        )
        for seed in range(len(PROMPT_LIST))
    ]
    plain = tokens_of(generated(paths[model], 0, params))
    lengths: set[int] = set()
    for num_drafts in (3, 8):
        outputs = generated(paths[model], num_drafts, params)
        assert tokens_of(outputs) == plain
        lengths |= {len(r.draft_token_ids) for o in outputs for r in o.rounds}
        assert total_speculation(outputs).num_accepted > 0
    assert {0, 1, 2, 3} <= lengths


@pytest.mark.parametrize("model", ["qwen3", "qwen3.5"])
def test_every_proposal_is_the_lookup_of_the_text_so_far(
    paths: dict[str, Path], model: str
) -> None:
    params = [SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)] * len(PROMPT_LIST)
    for prompt, output in zip(PROMPT_LIST, generated(paths[model], 5, params), strict=True):
        text, num_left = list(prompt), 24
        for index, round_ in enumerate(output.rounds):
            # A round emits one token more than it accepts, so that the last needs no draft.
            wanted = min(5, num_left - 1) if index else 0
            assert list(round_.draft_token_ids) == plain_lookup(text, 5)[:wanted]
            emitted = output.token_ids[24 - num_left :][: round_.num_emitted]
            text += emitted
            num_left -= len(emitted)


@pytest.mark.parametrize("model", ["qwen3", "qwen3.5"])
def test_requests_may_cap_or_refuse_lookups(paths: dict[str, Path], model: str) -> None:
    base = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    plain = tokens_of(generated(paths[model], 0, [base] * 4))
    wishes: list[dict[str, object]] = [{"max_draft_tokens": 2}, {}, {"speculation": False}, {}]
    params = [SamplingParams(**{**vars(base), **wish}) for wish in wishes]  # type: ignore[arg-type]
    outputs = generated(paths[model], 6, params)
    assert tokens_of(outputs) == plain
    longest = [max(len(r.draft_token_ids) for r in output.rounds) for output in outputs]
    assert longest[0] <= 2 and longest[2] == 0


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_lookups_are_accepted_on_trained_models_that_repeat_themselves(name: str) -> None:
    path = trained_folder(name)
    tokenizer = Tokenizer.from_pretrained(path)
    lines = "    parser.add_argument('--input')\n    parser.add_argument('--output')\n"
    prompt = tokenizer.encode("def main():\n" + lines * 3)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    plain = tokens_of(run_requests(make_engine(path), [prompt], params))
    outputs = run_requests(make_engine(path, 4, method="ngram"), [prompt], params)
    assert tokens_of(outputs) == plain
    stats = total_speculation(outputs)
    assert stats.acceptance_length is not None and stats.acceptance_length > 2


def test_a_preempted_text_is_looked_up_again_from_its_begin(paths: dict[str, Path]) -> None:
    params = [SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)] * len(PROMPT_LIST)
    plain = tokens_of(generated(paths["qwen3"], 0, params))
    engine = make_engine(
        paths["qwen3"], 4, method="ngram", num_kv_blocks=12, max_model_len=120, prefill_grid=16
    )
    assert tokens_of(run_requests(engine, PROMPT_LIST, params)) == plain
    assert engine.scheduler.num_preemptions > 0
