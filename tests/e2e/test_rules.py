"""Every sampling parameter holds at every verified row: speculation changes no token of any text.

Drafts come from scripts. A script that repeats what plain decoding wrote is accepted whole only if
each row of the block is treated as plain decoding treats it; scripts that are wrong in places make
blocks end anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.admission import AdmissionRules
from outrider.batch import FinishReason
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.sampling.rules import BlockContext, RuleTable
from tests.checkpoints import TinyShape, write_qwen3_5
from tests.checkpoints_qwen3 import Qwen3Shape, write_qwen3
from tests.harness import Script, ScriptedDrafter, make_engine, random_tokens, run_requests
from tests.sampling.plain import ends_with
from tests.tiny_tokenizer import byte_ids, tokenizer

VOCAB_SIZE = 272
END = 1
NUM_TOKENS = 20
MOST_DRAFTS = 8
TOKENIZER = tokenizer()
EVERY_K = range(1, MOST_DRAFTS + 1)
MODELS = ("qwen3", "qwen3_5")
on_every_block_length = pytest.mark.parametrize(
    ("model", "num_drafts"),
    [
        pytest.param(name, k, marks=pytest.mark.slow if name == "qwen3" and k % 3 != 1 else ())
        for name in MODELS
        for k in EVERY_K
    ],
    indirect=["model"],
)
"""Every k on the model with more state; the other one has some of them left to the slow run."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """A request."""

    prompt: tuple[int, ...]
    params: SamplingParams


def right(_sequence_id: int, _turn: int, _index: int) -> bool:
    return True


def mixed(sequence_id: int, turn: int, index: int) -> bool:
    return random.Random(f"{sequence_id} {turn} {index}").random() < 0.7


def texts_of(asks: Sequence[Ask], outputs: Sequence[RequestOutput]) -> list[Tokens]:
    """Prompt and output of every sequence, in the order of sequence ids."""
    return [
        ask.prompt + completion.token_ids
        for ask, output in zip(asks, outputs, strict=True)
        for completion in output.completions
    ]


@dataclass
class Model:
    """A checkpoint and what plain decoding made of requests, each computed once."""

    path: Path
    has_mtp: bool
    _plain: dict[str, list[RequestOutput]] = field(default_factory=dict)

    def run(self, asks: Sequence[Ask], num_drafts: int = 0, **options: Any) -> list[RequestOutput]:
        engine = make_engine(
            self.path,
            num_drafts,
            tokenizer=TOKENIZER,
            max_num_seqs=64,
            num_kv_blocks=400,
            **options,
        )
        return run_requests(engine, [ask.prompt for ask in asks], [ask.params for ask in asks])

    def plain(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        key = repr(asks)
        if key not in self._plain:
            self._plain[key] = self.run(asks)
        return self._plain[key]

    def scripted(
        self, asks: Sequence[Ask], num_drafts: int, script: Script, texts: Sequence[Tokens]
    ) -> list[RequestOutput]:
        drafter = ScriptedDrafter(script, dict(enumerate(texts)), VOCAB_SIZE)
        return self.run(asks, num_drafts, drafter=drafter)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3":
        write_qwen3(path, Qwen3Shape(num_layers=2, vocab_size=VOCAB_SIZE), seed=1)
        return Model(path, has_mtp=False)
    shape = TinyShape(num_layers=2, interval=2, hidden_size=48, vocab_size=VOCAB_SIZE)
    write_qwen3_5(path, shape, seed=1)
    return Model(path, has_mtp=True)


def assert_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Tokens, texts and ends of every completion."""

    def seen(output: RequestOutput) -> list[tuple[Tokens, str, FinishReason | None]]:
        return [(c.token_ids, c.text, c.finish_reason) for c in output.completions]

    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        assert seen(output) == seen(other), f"request {index}"


def assert_all_accepted(outputs: Sequence[RequestOutput]) -> None:
    """Every draft that belongs to the text was kept."""
    for output in outputs:
        assert len(output.token_ids) == 1 or output.speculation.num_drafted > 0
        for one in output.rounds:
            ended_in_block = one.num_emitted <= one.num_accepted
            assert ended_in_block or one.num_accepted == len(one.draft_token_ids)


TEMPERATURES = (0.0, 0.8)
FAVOURED = dict.fromkeys(byte_ids(b"abcdefghijkl"), 6.0)
"""A bias that makes texts repeat themselves, and hold words that the tokenizer can spell."""


def ask_for(index: int, temperature: float, **options: Any) -> Ask:
    prompt = tuple(random_tokens(6 + 5 * index, VOCAB_SIZE, index))
    params = SamplingParams(
        max_tokens=options.pop("max_tokens", NUM_TOKENS),
        temperature=temperature,
        seed=40 + index,
        ignore_eos=options.pop("ignore_eos", True),
        logit_bias=FAVOURED | options.pop("logit_bias", {}),
        **options,
    )
    return Ask(prompt, params)


def spelled(token_ids: Sequence[int]) -> str | None:
    """The text of tokens, where the tokenizer spells it with the same tokens again."""
    text = TOKENIZER.decode(token_ids)
    is_word = bool(text) and TOKENIZER.encode(text, add_special_tokens=False) == list(token_ids)
    return text if is_word else None


def words_of(base: Tokens, length: int) -> list[str]:
    """Runs of `length` tokens of a text, every second of them."""
    runs = [base[i : i + length] for i in range(0, len(base) - length + 1, 2)]
    return [word for run in runs if (word := spelled(run)) is not None]


def rules_against(base: Tokens) -> dict[str, dict[str, Any]]:
    """One rule each, chosen so that it gets in the way of the text `base`."""
    return {
        "repetition_penalty": {"repetition_penalty": 2.0},
        "presence_penalty": {"presence_penalty": 2.0},
        "frequency_penalty": {"frequency_penalty": 1.5},
        "logit_bias": {"logit_bias": FAVOURED | dict.fromkeys(base[::2], 0.0) | {END + 1: 7.0}},
        "min_tokens": {"stop_token_ids": sorted({*base}), "min_tokens": NUM_TOKENS - 3},
        "bad_words": {"bad_words": words_of(base, 1)},
        "bad_words of two tokens": {"bad_words": words_of(base, 2)},
    }


CONTEXT_FREE = {"logit_bias", "bad_words"}
"""Rules that a row's own text does not matter to."""

WARM: dict[str, dict[str, Any]] = {
    "negative penalties": {"presence_penalty": -2.0, "frequency_penalty": -1.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.3},
    "all narrowings": {"top_k": 9, "top_p": 0.8, "min_p": 0.02},
}
"""What makes a difference at a temperature only."""


@dataclass(frozen=True)
class Ruled:
    """Requests with one rule each.

    Attributes:
        bases: what each request would write without its rule: drafts that the rule is against.
    """

    names: list[str] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    bases: list[Tokens] = field(default_factory=list)


@pytest.fixture(scope="module")
def alone(model: Model) -> Ruled:
    plain_asks = [ask_for(0, temperature) for temperature in TEMPERATURES]
    result = Ruled()
    for ask, output in zip(plain_asks, model.plain(plain_asks), strict=True):
        base = output.token_ids
        for name, options in (
            rules_against(base) | (WARM if ask.params.temperature else {})
        ).items():
            result.names.append(name)
            result.asks.append(replace(ask, params=replace(ask.params, **options)))
            result.bases.append(base)
    return result


def test_each_rule_changes_the_text_that_it_is_tested_on(model: Model, alone: Ruled) -> None:
    for name, base, output in zip(alone.names, alone.bases, model.plain(alone.asks), strict=True):
        assert output.token_ids != base, name


def test_plain_texts_keep_to_their_rules(model: Model, alone: Ruled) -> None:
    outputs = model.plain(alone.asks)
    for name, ask, base, output in zip(alone.names, alone.asks, alone.bases, outputs, strict=True):
        tokens, params = output.token_ids, ask.params
        ends = range(len(tokens) + 1)
        if name.startswith("bad_words"):
            words = [TOKENIZER.encode(word) for word in params.bad_words]
            assert {len(word) for word in words} == {2 if "two" in name else 1}
            assert any(ends_with(base[:end], word) for word in words for end in ends)
            assert not any(ends_with(tokens[:end], word) for word in words for end in ends)
        elif name == "min_tokens":
            assert not set(tokens[: params.min_tokens]) & set(params.stop_token_ids)
            assert len(tokens) > params.min_tokens


@on_every_block_length
def test_right_wrong_and_forbidden_drafts_change_no_token_under_each_rule(
    model: Model, alone: Ruled, num_drafts: int
) -> None:
    plain, number = model.plain(alone.asks), len(alone.asks)
    written = texts_of(alone.asks, plain)
    forbidden = [ask.prompt + base for ask, base in zip(alone.asks, alone.bases, strict=True)]

    def script(sequence_id: int, turn: int, index: int) -> bool:
        is_mixed = number <= sequence_id < 2 * number
        return mixed(sequence_id, turn, index) if is_mixed else True

    outputs = model.scripted(alone.asks * 3, num_drafts, script, [*written, *written, *forbidden])
    assert_same(outputs, plain * 3)
    assert_all_accepted(outputs[:number])
    partly = [output.speculation for output in outputs[number : 2 * number]]
    assert 0 < sum(s.num_accepted for s in partly) < sum(s.num_drafted for s in partly)


Apply = Callable[[RuleTable, Tensor, Tensor, BlockContext], Tensor]
ORIGINAL: Apply = RuleTable.apply


def at_first_row_only(
    self: RuleTable, logits: Tensor, slots: Tensor, context: BlockContext
) -> Tensor:
    ruled = logits.float().clone()
    ruled[:, :1] = ORIGINAL(self, logits, slots, context)[:, :1]
    return ruled


def at_bonus_row_only(
    self: RuleTable, logits: Tensor, slots: Tensor, context: BlockContext
) -> Tensor:
    ruled = logits.float().clone()
    ruled[:, -1:] = ORIGINAL(self, logits, slots, context)[:, -1:]
    return ruled


def without_the_drafts_before_the_row(
    self: RuleTable, logits: Tensor, slots: Tensor, context: BlockContext
) -> Tensor:
    """Every row as if it were the first; a mask, which says its rows itself, is left alone."""
    none = context.draft_token_ids[:, :0]
    rows = [
        ORIGINAL(self, logits[:, i : i + 1], slots, replace(context, draft_token_ids=none))
        for i in range(logits.shape[1])
    ]
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize(
    "broken", [at_first_row_only, at_bonus_row_only, without_the_drafts_before_the_row]
)
def test_these_requests_find_a_rule_that_does_not_hold_at_every_row(
    model: Model, alone: Ruled, broken: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model.plain(alone.asks)
    monkeypatch.setattr(RuleTable, "apply", broken)
    outputs = model.scripted(alone.asks, 4, right, texts_of(alone.asks, plain))
    caught = {
        name
        for name, output, other in zip(alone.names, outputs, plain, strict=True)
        if output.token_ids != other.token_ids
    }
    rules = set(rules_against(plain[0].token_ids))
    if broken is without_the_drafts_before_the_row:
        rules -= CONTEXT_FREE
    assert caught >= rules


NUM_COMBINATIONS = 24


def combination(rng: random.Random, index: int, base: Tokens) -> Ask:
    """Any subset of the rules and narrowings, with values of their own."""

    def some(tokens: Sequence[int], most: int) -> list[int]:
        return rng.sample(sorted(set(tokens)), min(most, len(set(tokens))))

    temperature = rng.choice([0.0, 0.3, 0.8, 1.3])
    choices: dict[str, Any] = {
        "repetition_penalty": rng.choice([0.7, 1.2, 2.0]),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "logit_bias": {token: rng.uniform(0, 8) for token in some(base, 6)},
        "min_tokens": rng.randint(0, NUM_TOKENS),
        "stop_token_ids": some(base, 5),
        "bad_words": (words_of(base, 2) + words_of(base, 1))[: rng.randint(1, 6)],
        "stop": [word for token in some(base, 3) if (word := spelled([token])) is not None],
        "ignore_eos": False,
    }
    if temperature:
        choices |= {
            "top_k": rng.randint(1, 20),
            "top_p": rng.uniform(0.1, 1),
            "min_p": rng.uniform(0, 0.3),
        }
    options = {name: value for name, value in choices.items() if rng.random() < 0.5}
    if options.get("ignore_eos") is False:  # the end of the text is likely now
        options["logit_bias"] = {END: rng.uniform(4, 8)} | options.get("logit_bias", {})
    return ask_for(index, temperature, max_tokens=rng.randint(NUM_TOKENS // 2, 24), **(
        options | {"min_tokens": min(options.get("min_tokens", 0), NUM_TOKENS // 2)}
    ))  # fmt: skip


def combinations(model: Model, number: int, seed: int) -> list[Ask]:
    rng = random.Random(seed)
    [base, *_] = (output.token_ids for output in model.plain([ask_for(0, 0.0)]))
    more = [output.token_ids for output in model.plain([ask_for(i, 0.8) for i in range(8)])]
    return [combination(rng, i % 8, rng.choice([base, more[i % 8]])) for i in range(number)]


def check_combinations(model: Model, asks: list[Ask], num_drafts: int) -> None:
    """Right drafts for each request, and partly wrong ones for another of its kind."""
    plain, number = model.plain(asks), len(asks)

    def script(sequence_id: int, turn: int, index: int) -> bool:
        return sequence_id < number or mixed(sequence_id, turn, index)

    outputs = model.scripted(asks * 2, num_drafts, script, texts_of(asks, plain) * 2)
    assert_same(outputs, plain * 2)
    assert_all_accepted(outputs[:number])


@on_every_block_length
def test_random_combinations_of_rules_change_no_token(model: Model, num_drafts: int) -> None:
    check_combinations(model, combinations(model, NUM_COMBINATIONS, seed=0), num_drafts)


def test_random_combinations_end_in_every_way(model: Model) -> None:
    plain = model.plain(combinations(model, NUM_COMBINATIONS, seed=0))
    assert {output.finish_reason for output in plain} == {FinishReason.STOP, FinishReason.LENGTH}
    lengths = {len(output.token_ids) for output in plain}
    assert min(lengths) < 5 and max(lengths) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_many_more_combinations_of_rules_change_no_token(model: Model, seed: int) -> None:
    asks = combinations(model, 64, seed)
    for num_drafts in EVERY_K:
        check_combinations(model, asks, num_drafts)


@pytest.mark.parametrize("num_drafts", [5])
def test_the_methods_own_drafts_change_no_token_under_rules(model: Model, num_drafts: int) -> None:
    asks = combinations(model, NUM_COMBINATIONS, seed=0)
    methods = [("ngram", None)]
    if model.has_mtp:
        methods += [("mtp", "argmax"), ("mtp", "coupled")]
    for method, draft_sampling in methods:
        outputs = model.run(asks, num_drafts, method=method, draft_sampling=draft_sampling)
        assert_same(outputs, model.plain(asks))
        assert sum(output.speculation.num_drafted for output in outputs) > 0


@on_every_block_length
def test_min_tokens_from_0_to_two_past_the_block_end_where_plain_decoding_ends(
    model: Model, num_drafts: int
) -> None:
    # Biased towards the end of the text, so that it ends as soon as it may.
    asks = [
        ask_for(
            0, temperature, ignore_eos=False, min_tokens=least, logit_bias={END: 40.0}
        )
        for least in range(num_drafts + 3)
        for temperature in TEMPERATURES
    ]  # fmt: skip
    plain = model.plain(asks)
    for ask, output in zip(asks, plain, strict=True):
        assert len(output.token_ids) == ask.params.min_tokens + 1
        assert output.token_ids[-1] == END and output.finish_reason is FinishReason.STOP
    texts = texts_of(asks, plain)
    eager = [(*ask.prompt, *[END] * NUM_TOKENS) for ask in asks]  # drafts that want to end at once
    assert_same(model.scripted(asks * 2, num_drafts, right, texts + eager), plain * 2)


def test_ignore_eos_goes_on_past_ends_inside_a_block(model: Model) -> None:
    options = {"logit_bias": {END: 7.0}, "max_tokens": 24}
    asks = [ask_for(i, 1.0, ignore_eos=True, **options) for i in range(6)]
    ending = [ask_for(i, 1.0, ignore_eos=False, **options) for i in range(6)]
    plain, ended = model.plain(asks), model.plain(ending)
    for num_drafts in (1, 4, 8):
        # The drafts are the same where the end counts: one text is the beginning of the other.
        texts = texts_of(asks, plain) * 2
        outputs = model.scripted(asks + ending, num_drafts, right, texts)
        assert_same(outputs, plain + ended)
        assert_all_accepted(outputs)
    for output, whole in zip(ended, plain, strict=True):
        assert whole.finish_reason is FinishReason.LENGTH and len(whole.token_ids) == 24
        first = whole.token_ids.index(END)
        assert output.token_ids == whole.token_ids[: first + 1]
        assert output.finish_reason is FinishReason.STOP
    assert any(output.token_ids.count(END) > 1 for output in plain)


def own_seeds(ask: Ask) -> list[int]:
    """Seeds of a request's outputs, from the documented function that gives them."""
    admission = AdmissionRules(VOCAB_SIZE, 300, (END,), 0, None, False, TOKENIZER)
    return [request.seed for request in admission.requests("r", ask.prompt, ask.params, 0)]


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8])
def test_each_of_n_outputs_is_what_a_request_of_its_seed_would_write(
    model: Model, num_drafts: int
) -> None:
    options = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "top_k": 40}
    many = [ask_for(i, 0.8, n=n, **options) for i, n in enumerate([4, 1, 3])]
    seeds = [own_seeds(ask) for ask in many]
    assert [one[0] for one in seeds] == [ask.params.seed for ask in many]
    assert len({seed for one in seeds for seed in one}) == 8
    singles = [
        Ask(ask.prompt, replace(ask.params, n=1, seed=seed))
        for ask, one in zip(many, seeds, strict=True)
        for seed in one
    ]
    expected = model.plain(singles)
    texts = texts_of(singles, expected)
    outputs = model.scripted(many, num_drafts, mixed, texts) if num_drafts else model.plain(many)
    completions = [completion for output in outputs for completion in output.completions]
    assert [c.token_ids for c in completions] == [output.token_ids for output in expected]
    assert [c.text for c in completions] == [output.text for output in expected]
    assert [c.index for c in completions] == [0, 1, 2, 3, 0, 0, 1, 2]
    for output in outputs:
        assert len({c.token_ids for c in output.completions}) == len(output.completions)
        assert output.speculation.num_tokens == sum(len(c.token_ids) for c in output.completions)


def test_outputs_of_one_prompt_end_each_on_its_own(model: Model) -> None:
    ask = ask_for(0, 1.0, n=8, ignore_eos=False, logit_bias={END: 7.0}, max_tokens=24)
    plain = model.plain([ask])
    lengths = {len(completion.token_ids) for completion in plain[0].completions}
    assert len(lengths) > 2
    for num_drafts in (2, 7):
        assert_same(model.scripted([ask], num_drafts, mixed, texts_of([ask], plain)), plain)


@pytest.mark.parametrize(("num_drafts", "script"), [(2, right), (5, mixed), (8, right)])
def test_blocks_of_every_length_share_a_batch_under_different_rules(
    model: Model, num_drafts: int, script: Script
) -> None:
    wishes: list[tuple[int, dict[str, Any]]] = [
        (0, {"speculation": False}),
        (0, {"max_draft_tokens": 0}),
        (0, {"speculation": False, "max_draft_tokens": 3}),
        (min(1, num_drafts), {"max_draft_tokens": 1}),
        (min(3, num_drafts), {"max_draft_tokens": 3}),
        (num_drafts, {"max_draft_tokens": 100}),
        (num_drafts, {}),
    ]
    rules = list(rules_against(model.plain([ask_for(0, 0.0)])[0].token_ids).values())
    free = [
        ask_for(i % 5, TEMPERATURES[i % 2], **rules[(i + i // 7) % len(rules)]) for i in range(21)
    ]
    asks = [
        Ask(ask.prompt, replace(ask.params, **wishes[i % len(wishes)][1]))
        for i, ask in enumerate(free)
    ]
    plain = model.plain(free)
    assert_same(model.plain(asks), plain)  # without a draft model the wishes are moot
    outputs = model.scripted(asks, num_drafts, script, texts_of(free, plain))
    assert_same(outputs, plain)
    for index, output in enumerate(outputs):
        longest = max(len(one.draft_token_ids) for one in output.rounds)
        assert longest == wishes[index % len(wishes)][0]
