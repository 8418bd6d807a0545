"""Reported log probabilities are those of a teacher-forced pass over the text that came out.

The reference is transformers' own model on prompt and output at once, with the sampling rules
restated in plain Python; the engine runs the same text in blocks of drafts, rejections and chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from outrider.batch import Batch, LogitRules, TokenLogprobs
from outrider.engine import Engine
from outrider.output import Completion, RequestOutput
from outrider.params import SamplingParams
from outrider.runner.rounds import Masks, Submission
from outrider.spec.base import Drafter, Frontier
from outrider.spec.choose import Proposal
from tests.checkpoints import TinyShape, write_qwen3_5
from tests.checkpoints_qwen3 import Qwen3Shape, write_qwen3
from tests.harness import (
    ScriptedDrafter,
    make_engine,
    random_tokens,
    run_requests,
    transformers_logits,
)
from tests.sampling.plain import ruled_row
from tests.sampling.test_sampler import Choice, plain_probs
from tests.tiny_tokenizer import byte_ids, tokenizer

VOCAB_SIZE = 272
END = 1
TOLERANCE = 1e-4
TOKENIZER = tokenizer()
LETTERS = byte_ids(b"abcdefgh")


@dataclass(frozen=True)
class Ask:
    """A request; its bad words are single letters."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def rules(self) -> LogitRules:
        params = self.params
        assert all(word in "abcdefgh" for word in params.bad_words)
        spellings = [
            tuple(TOKENIZER.encode(text, add_special_tokens=False))
            for word in params.bad_words
            for text in (word, " " + word)
        ]
        return LogitRules(
            len(self.prompt),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.min_tokens,
            tuple((params.logit_bias or {}).items()),
            tuple(spellings),
        )


@dataclass
class Model:
    path: Path
    _plain: dict[str, list[RequestOutput]] = field(default_factory=dict)

    def run(self, asks: Sequence[Ask], num_drafts: int = 0, **options: Any) -> list[RequestOutput]:
        options = {"max_num_seqs": 64, "num_kv_blocks": 400, "tokenizer": TOKENIZER} | options
        engine = make_engine(self.path, num_drafts, **options)
        return run_requests(engine, [ask.prompt for ask in asks], [ask.params for ask in asks])

    def plain(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        key = repr(asks)
        if key not in self._plain:
            self._plain[key] = self.run(asks)
        return self._plain[key]

    def scripted(self, asks: Sequence[Ask], num_drafts: int) -> list[RequestOutput]:
        """Every second request has right drafts only, the others partly wrong ones."""
        plain = self.plain(asks)
        texts = {
            i: ask.prompt + output.token_ids
            for i, (ask, output) in enumerate(zip(asks, plain, strict=True))
        }

        def script(sequence_id: int, turn: int, index: int) -> bool:
            return sequence_id % 2 == 0 or (sequence_id // 2 + turn + index) % 4 > 0

        drafter = ScriptedDrafter(script, texts, VOCAB_SIZE)
        return self.run(asks, num_drafts, drafter=drafter)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3":
        write_qwen3(path, Qwen3Shape(num_layers=2, vocab_size=VOCAB_SIZE), seed=3)
    else:
        shape = TinyShape(num_layers=2, interval=2, vocab_size=VOCAB_SIZE)
        write_qwen3_5(path, shape, seed=3)
    return Model(path)


def log_softmax(row: Sequence[float]) -> list[float]:
    highest = max(row)
    total = highest + math.log(math.fsum(math.exp(value - highest) for value in row))
    return [value - total for value in row]


def log_of_law(row: Sequence[float], params: SamplingParams) -> list[float]:
    """Of the narrowed distribution; minus infinity where it is zero."""
    choice = Choice(params.temperature, params.top_k, params.top_p, params.min_p)
    return [math.log(p) if p > 0 else -math.inf for p in plain_probs(row, choice)]


def output_laws(path: Path, ask: Ask, token_ids: Sequence[int]) -> list[list[float]]:
    """Log probabilities of every token at each place of an output."""
    text = [*ask.prompt, *token_ids]
    logits = transformers_logits(path, text).tolist()
    laws: list[list[float]] = []
    for place in range(len(ask.prompt), len(text)):
        row = logits[place - 1]
        if ask.params.logprobs_mode == "processed":
            stops = {*ask.params.stop_token_ids, *(() if ask.params.ignore_eos else (END,))}
            row = ruled_row(row, ask.rules, text[:place], stops)
            laws.append(log_of_law(row, ask.params))
        else:
            laws.append(log_softmax(row))
    return laws


def prompt_laws(path: Path, ask: Ask) -> list[list[float]]:
    """The same at each place of the prompt but the first; rules are for outputs only."""
    logits = transformers_logits(path, ask.prompt).tolist()[:-1]
    if ask.params.logprobs_mode == "processed":
        return [log_of_law(row, ask.params) for row in logits]
    return [log_softmax(row) for row in logits]


def assert_reports(
    entries: Sequence[TokenLogprobs] | None,
    token_ids: Sequence[int],
    laws: Sequence[Sequence[float]],
    num_top: int,
) -> None:
    assert entries is not None
    assert [entry.token_id for entry in entries] == list(token_ids)
    for entry, law in zip(entries, laws, strict=True):
        assert law[entry.token_id] > -math.inf  # a token that the law forbids is never written
        assert entry.logprob == pytest.approx(law[entry.token_id], abs=TOLERANCE, rel=0)
        # Tokens within the tolerance of each other may change places.
        above = sum(value > entry.logprob + TOLERANCE for value in law)
        near = sum(abs(value - entry.logprob) <= TOLERANCE for value in law)
        assert above + 1 <= entry.rank <= above + near
        possible = sum(value > -math.inf for value in law)
        assert len(entry.top) == min(num_top, possible)
        assert len({token for token, _ in entry.top}) == len(entry.top)
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        best = sorted(law, reverse=True)[: len(values)]
        assert values == pytest.approx(best, abs=TOLERANCE, rel=0)
        assert values == pytest.approx([law[t] for t, _ in entry.top], abs=TOLERANCE, rel=0)


def completion_of(output: RequestOutput) -> Completion:
    [completion] = output.completions
    return completion


def ask_for(index: int, **options: Any) -> Ask:
    prompt = tuple(random_tokens(4 + 3 * index % 17, VOCAB_SIZE, index))
    defaults = {"max_tokens": 14, "temperature": 0.0, "seed": index, "ignore_eos": True}
    return Ask(prompt, SamplingParams(**defaults | options))


FAVOURED = dict.fromkeys(LETTERS, 5.0)
RULES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    {"bad_words": ["a", "c"]},
    {"min_tokens": 9, "stop_token_ids": LETTERS[2:4]},
    {
        "repetition_penalty": 0.8,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "bad_words": ["h"],
        "min_tokens": 3,
        "stop_token_ids": LETTERS[5:6],
    },
]
LAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 12},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.9, "min_p": 0.1, "top_k": 30, "top_p": 0.95},
]
NUM_TOP = (0, 1, 5, 64)


def every_kind(**extra: Any) -> list[Ask]:
    """Raw and processed, for each rule and each law, with numbers of alternatives in turn."""
    kinds = [(mode, rule, law) for mode in ("raw", "processed") for rule in RULES for law in LAWS]
    return [
        ask_for(
            index,
            logprobs=NUM_TOP[index % len(NUM_TOP)],
            logprobs_mode=mode,
            logit_bias=FAVOURED,
            **rule,
            **law,
            **extra,
        )
        for index, (mode, rule, law) in enumerate(kinds)
    ]


def assert_teacher_forced(
    path: Path, asks: Sequence[Ask], outputs: Sequence[RequestOutput]
) -> None:
    for ask, output in zip(asks, outputs, strict=True):
        num_top = ask.params.logprobs
        assert num_top is not None
        laws = output_laws(path, ask, output.token_ids)
        assert_reports(output.logprobs, output.token_ids, laws, num_top)


def test_plain_decoding_reports_what_a_teacher_forced_pass_gives(model: Model) -> None:
    asks = every_kind()
    assert_teacher_forced(model.path, asks, model.plain(asks))


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 8])
def test_speculation_reports_what_plain_decoding_reports(model: Model, num_drafts: int) -> None:
    asks = every_kind()
    outputs = model.scripted(asks, num_drafts)
    for output, plain in zip(outputs, model.plain(asks), strict=True):
        assert output.token_ids == plain.token_ids
        assert output.logprobs == plain.logprobs
    stats = [output.speculation for output in outputs]
    assert 100 < sum(s.num_accepted for s in stats) < sum(s.num_drafted for s in stats)


class Letters(Drafter):
    """Draws every draft from one and the same law, which is mostly over LETTERS."""

    def propose(self, hidden: Tensor, frontier: Frontier) -> Proposal:
        scores = torch.linspace(0, 1, VOCAB_SIZE)
        scores[list(LETTERS)] += 4.0
        for _ in range(frontier.max_drafts):
            frontier.chooser.choose(scores.expand(hidden.shape[0], -1), None)
        return frontier.chooser.proposal(frontier.num_wanted)


@pytest.mark.parametrize("draft_sampling", ["argmax", "coupled", "sampled"])
def test_texts_of_every_verification_rule_are_reported_as_a_teacher_forced_pass_gives_them(
    model: Model, draft_sampling: str
) -> None:
    # A drafted token that the rules forbid at its row would have probability 0 here.
    asks = every_kind(draft_sampling=draft_sampling)[2::3]
    with mock.patch("outrider.engine.build_drafter", lambda *_: Letters()):
        outputs = model.run(asks, 4, method="mtp")
    assert_teacher_forced(model.path, asks, outputs)
    stats = [output.speculation for output in outputs]
    assert 10 < sum(s.num_accepted for s in stats) < sum(s.num_drafted for s in stats)


def test_logprobs_come_where_they_are_asked_for_and_only_there(model: Model) -> None:
    asks = [ask_for(0, logprobs=2), ask_for(1), ask_for(2, logprobs=0), ask_for(3)]
    outputs = model.scripted(asks, 4)
    assert [output.logprobs is None for output in outputs] == [False, True, False, True]
    assert [entry.top for entry in outputs[2].logprobs or ()] == [()] * 14
    assert all(output.prompt_logprobs is None for output in outputs)


def test_each_of_n_outputs_has_logprobs_of_its_own(model: Model) -> None:
    ask = ask_for(5, n=3, logprobs=3, temperature=1.0)
    for output in (model.plain([ask])[0], model.run([ask], 3, method="ngram")[0]):
        assert len({completion.token_ids for completion in output.completions}) == 3
        for completion in output.completions:
            laws = output_laws(model.path, ask, completion.token_ids)
            assert_reports(completion.logprobs, completion.token_ids, laws, 3)


def test_a_text_that_is_streamed_has_as_many_entries_as_tokens_at_every_step(model: Model) -> None:
    ask = ask_for(1, logprobs=1, stop=["\x00"])
    [plain] = model.plain([ask])
    texts = {0: ask.prompt + plain.token_ids}
    drafter = ScriptedDrafter(lambda *_: True, texts, VOCAB_SIZE)
    engine = make_engine(model.path, 4, drafter=drafter, tokenizer=TOKENIZER)
    engine.add_request("0", ask.prompt, ask.params)
    while engine.has_work:
        for output in engine.step():
            assert output.logprobs is not None and plain.logprobs is not None
            assert output.logprobs == plain.logprobs[: len(output.token_ids)]


def prompt_asks() -> list[Ask]:
    lengths = (1, 2, 7, 8, 33, 64, 65, 100)
    return [
        Ask(
            tuple(random_tokens(length, VOCAB_SIZE, length)),
            SamplingParams(
                max_tokens=6,
                prompt_logprobs=NUM_TOP[i % len(NUM_TOP)],
                logprobs=1 if i % 3 else None,
                logprobs_mode="processed" if i % 2 else "raw",
                ignore_eos=True,
                repetition_penalty=1.2 if i % 4 > 1 else 1.0,
                seed=i,
                **LAWS[i % len(LAWS)],
            ),
        )
        for i, length in enumerate(lengths)
    ]


def assert_prompts(path: Path, asks: Sequence[Ask], outputs: Sequence[RequestOutput]) -> None:
    for ask, output in zip(asks, outputs, strict=True):
        num_top = ask.params.prompt_logprobs
        assert num_top is not None and output.prompt_logprobs is not None
        entries, laws = output.prompt_logprobs, prompt_laws(path, ask)
        assert len(entries) == len(laws) == len(ask.prompt) - 1
        for entry, token, law in zip(entries, ask.prompt[1:], laws, strict=True):
            if law[token] > -math.inf:
                assert_reports([entry], [token], [law], num_top)
            else:  # a prompt may well hold what would not have been written
                assert (entry.token_id, entry.logprob) == (token, -math.inf)


@pytest.mark.parametrize(
    ("grid", "budget", "num_drafts"), [(64, 512, 0), (64, 512, 3), (7, 7, 3), (16, 40, 0)]
)
def test_prompts_are_reported_whatever_the_chunks_they_are_run_in(
    model: Model, grid: int, budget: int, num_drafts: int
) -> None:
    asks = prompt_asks()
    outputs = model.run(
        asks, num_drafts, method="ngram", prefill_grid=grid, max_prefill_tokens=budget
    )
    assert_prompts(model.path, asks, outputs)
    for ask, output in zip(asks, outputs, strict=True):
        assert (output.logprobs is None) == (ask.params.logprobs is None)


def test_a_prompt_of_several_outputs_is_reported_once(model: Model) -> None:
    one = Ask(tuple(random_tokens(30, VOCAB_SIZE, 1)), SamplingParams(prompt_logprobs=2, seed=1))
    many = Ask(one.prompt, SamplingParams(prompt_logprobs=2, seed=1, n=3, max_tokens=4))
    outputs = model.run([one, many], prefill_grid=8, max_prefill_tokens=16)
    assert_prompts(model.path, [one, many], outputs)


def watch(engine: Engine) -> list[Batch]:
    """Every batch from now on."""
    batches: list[Batch] = []
    submit = engine.runner.submit

    def watched(batch: Batch, masks: Masks | None = None) -> Submission:
        batches.append(batch)
        return submit(batch, masks)

    engine.runner.submit = watched  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_prompt_whose_prefill_was_broken_off_is_reported_once_and_whole(
    model: Model, num_drafts: int
) -> None:
    # The older request grows into the memory that the younger one's prompt holds.
    older = Ask(
        tuple(random_tokens(30, VOCAB_SIZE, 1)),
        SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=1),
    )
    younger = Ask(
        tuple(random_tokens(90, VOCAB_SIZE, 2)),
        SamplingParams(max_tokens=5, prompt_logprobs=3, logprobs=2, seed=3, ignore_eos=True),
    )
    engine = make_engine(
        model.path,
        num_drafts,
        method="ngram",
        tokenizer=TOKENIZER,
        max_model_len=112,
        num_kv_blocks=9,
        prefill_grid=4,
        max_prefill_tokens=4,
    )
    batches = watch(engine)
    asks = [older, younger]
    outputs = run_requests(engine, [a.prompt for a in asks], [a.params for a in asks])
    begun = [span for batch in batches for span in batch.prefill if span.sequence_id == 1]
    assert [span.start for span in begun].count(0) > 1  # it really began again
    first_pass = next(i for i, span in enumerate(begun) if i and span.start == 0)
    assert not any(span.effects.samples for span in begun[:first_pass])
    assert_prompts(model.path, [younger], outputs[1:])
    for ask, output in zip(asks, outputs, strict=True):
        laws = output_laws(model.path, ask, output.token_ids)
        assert_reports(output.logprobs, output.token_ids, laws, ask.params.logprobs or 0)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_requests_that_are_broken_off_while_they_write_keep_their_reports(
    model: Model, num_drafts: int
) -> None:
    asks = [
        Ask(
            tuple(random_tokens(12 + 3 * i, VOCAB_SIZE, i)),
            SamplingParams(
                max_tokens=36,
                temperature=0.9,
                seed=i,
                ignore_eos=True,
                logprobs=2,
                prompt_logprobs=1,
                logprobs_mode=("raw", "processed")[i % 2],
                presence_penalty=0.5,
            ),
        )
        for i in range(5)
    ]
    engine = make_engine(
        model.path,
        num_drafts,
        method="ngram",
        tokenizer=TOKENIZER,
        max_model_len=80,
        num_kv_blocks=9,
    )
    outputs = run_requests(engine, [a.prompt for a in asks], [a.params for a in asks])
    assert engine.scheduler.num_preemptions > 1
    assert [o.token_ids for o in outputs] == [o.token_ids for o in model.plain(asks)]
    assert_teacher_forced(model.path, asks, outputs)
    assert_prompts(model.path, asks, outputs)
