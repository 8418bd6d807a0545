"""Grammars: what may follow is what comes out, and drafts that break the rules change nothing."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from outrider.batch import FinishReason
from outrider.config import SpeculativeConfig
from outrider.errors import RequestError
from outrider.llm import LLM
from outrider.output import RequestOutput
from outrider.params import SamplingParams, StructuredOutput
from outrider.sampling.rules import unpack_mask
from outrider.spec.base import Drafter, Frontier
from outrider.spec.choose import Proposal
from outrider.structured import GrammarCompiler, GrammarMatcher
from tests.checkpoints import TinyShape, write_qwen3_5
from tests.checkpoints_qwen3 import Qwen3Shape, write_qwen3
from tests.harness import Script, ScriptedDrafter, make_engine, random_tokens, run_requests
from tests.tiny_tokenizer import byte_ids, tokenizer, write_tokenizer

MODELS = ("qwen3", "qwen3_5")
on_every_block_length = pytest.mark.parametrize(
    ("model", "num_drafts"),
    [
        pytest.param(name, k, marks=pytest.mark.slow if name == "qwen3" and k % 3 != 1 else ())
        for name in MODELS
        for k in range(1, 9)
    ],
    indirect=["model"],
)
needs_xgrammar = pytest.mark.skipif(
    find_spec("xgrammar") is None, reason="the optional package xgrammar is not installed"
)

VOCAB_SIZE = 272
TURN, END = 0, 1
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TOKENIZER = tokenizer()
NONE_ALLOWED: set[int] = set()


def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE, (END,))


def regex(text: str) -> GrammarMatcher:
    return compiler().matcher(StructuredOutput("regex", text))


def ids(text: str) -> tuple[int, ...]:
    return byte_ids(text.encode())


def allowed(masks: Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in unpack_mask(masks, VOCAB_SIZE)]


A, B, C = ids("abc")


@needs_xgrammar
def test_masks_follow_the_chain_of_drafts() -> None:
    assert allowed(regex("abc").masks([])) == [{A}]
    assert allowed(regex("abc").masks([A, B, C])) == [{A}, {B}, {C}, {END}]
    assert allowed(regex("a[bc]*").masks([A, C])) == [{A}, {B, C, END}, {B, C, END}]


@needs_xgrammar
def test_a_token_of_several_bytes_is_allowed_where_all_of_it_fits() -> None:
    word = TOKENIZER.encode("def")[0]
    [first] = allowed(regex("def?").masks([]))
    assert first == {ids("d")[0], word}
    assert word not in allowed(regex("deg").masks([]))[0]


@needs_xgrammar
def test_masks_of_rows_up_to_an_illegal_draft_are_those_of_the_grammar() -> None:
    # The rows after it are never reached: the draft has probability 0.
    assert allowed(regex("abc").masks([A, A, C]))[:2] == [{A}, {B}]
    assert allowed(regex("abc").masks([C, A, B]))[:1] == [{A}]
    assert regex("abc").masks([C, A, B]).shape == (4, 9)


@needs_xgrammar
def test_drafts_past_the_end_leave_the_end_as_the_only_token() -> None:
    rows = allowed(regex("ab").masks([A, B, END, A, A]))
    assert rows[:3] == [{A}, {B}, {END}]
    rows = allowed(regex("ab").masks([A, B, B, END]))
    assert rows[:3] == [{A}, {B}, {END}]


@needs_xgrammar
def test_masks_leave_the_matcher_where_it_was() -> None:
    matcher = regex("(ab|ac)+")
    matcher.advance(ids("ab"))
    before = allowed(matcher.masks([]))
    for drafts in (ids("acab"), ids("b"), ids("aa"), (*ids("ac"), END, A), (END, END), (TURN,)):
        matcher.masks(drafts)
        assert allowed(matcher.masks([])) == before
    matcher.advance(ids("a"))
    assert allowed(matcher.masks([])) == [{B, C}]


@needs_xgrammar
def test_a_matcher_may_be_advanced_over_its_end() -> None:
    matcher = regex("a")
    matcher.advance([A, END])
    matcher.advance([END, B])
    assert len(allowed(matcher.masks([A]))) == 2


@needs_xgrammar
def test_a_special_token_does_not_stand_for_its_spelling() -> None:
    # TURN is spelled "<|turn|>" in the vocabulary, but a text does not show it.
    [first] = allowed(regex("[<|turn>]{8}").masks([]))
    assert TURN not in first and set(ids("<|turn>")) <= first
    [first] = allowed(regex(r"(<\|end\|>|a)b").masks([]))
    assert first == {A, ids("<")[0]}


DEAD_END = StructuredOutput("ebnf", 'root ::= "a" loop\nloop ::= loop')


@needs_xgrammar
def test_a_dead_end_of_the_grammar_allows_the_end_of_the_text() -> None:
    matcher = compiler().matcher(DEAD_END)
    assert allowed(matcher.masks([A, B]))[:2] == [{A}, {END}]
    matcher.advance([A, END])


BROKEN = {
    "regex": ["(", "[a", "*a", "a{3,1}"],
    "ebnf": ["root ::= ", 'foo ::= "a"', "root ::= bar", 'root ::= "a', "hello"],
    "json_schema": ["{", "[]", "3", "false", '{"type": "word"}', '{"$ref": "#/nothing"}'],
}


@needs_xgrammar
@pytest.mark.parametrize(("kind", "text"), [(k, text) for k in BROKEN for text in BROKEN[k]])
def test_a_grammar_that_does_not_compile_is_refused_by_name(kind: str, text: str) -> None:
    with pytest.raises(RequestError, match=f"structured output: the {kind} does not compile"):
        compiler().matcher(StructuredOutput(kind, text))


@needs_xgrammar
@pytest.mark.parametrize(
    ("kind", "text"), [("ebnf", "root ::= root"), ("regex", r"[^\x00-\U0010ffff]")]
)
def test_a_grammar_that_no_text_follows_is_refused(kind: str, text: str) -> None:
    with pytest.raises(RequestError, match=f"no text follows the {kind}"):
        compiler().matcher(StructuredOutput(kind, text))


def test_without_xgrammar_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"xgrammar.*pip install 'outrider\[grammar\]'"):
        regex("a")


SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "tag": {"enum": ["red", "green"]},
        "on": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["id", "tag", "on", "list"],
    "additionalProperties": False,
}
ARITHMETIC = 'root ::= term (op term){1,3}\nterm ::= [0-9]{1,2} | "(" root ")"\nop ::= [+*-]'


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["id", "tag", "on", "list"]
        and type(value["id"]) is int
        and 0 <= value["id"] <= 99
        and value["tag"] in ("red", "green")
        and type(value["on"]) is bool
        and 1 <= len(value["list"]) <= 3
        and all(type(item) is bool for item in value["list"])
    )


def fits_arithmetic(text: str) -> bool:
    """Balanced, and Python reads it as arithmetic once leading zeros are gone."""
    spelled = re.fullmatch(r"[0-9+*()-]+", text) is not None
    return spelled and isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)


@dataclass(frozen=True)
class Grammar:
    kind: str
    text: str
    fits: Callable[[str], bool]


def by_regex(text: str) -> Grammar:
    return Grammar("regex", text, lambda shown: re.fullmatch(text, shown) is not None)


GRAMMARS = {
    "json_schema": Grammar("json_schema", json.dumps(SCHEMA), fits_schema),
    "json_object": Grammar("json_object", "", lambda text: isinstance(json.loads(text), dict)),
    "regex of words": by_regex(r"(def|ret|[xyz]{1,3})( of| in)?( [a-f0-9]{2,4}){1,3}"),
    "regex of bytes": by_regex(r"[é🏇✓a]{1,6}"),
    "regex of one text": by_regex("return self"),
    "regex that may end at once": by_regex("[ab]*"),
    "ebnf": Grammar("ebnf", ARITHMETIC, fits_arithmetic),
}
MAX_TOKENS = 48
NO_SPACE = dict.fromkeys(ids(" \n\t\r"), -30.0)
"""JSON allows any white space, of which a random model would write nothing but."""


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None


def asks_of(names: Sequence[str] = tuple(GRAMMARS), number: int = 3, **options: Any) -> list[Ask]:
    """Greedy and sampled requests for each grammar, and one without any for each of them."""
    found: list[Ask] = []
    for index, name in enumerate([*names] * number):
        one = GRAMMARS[name]
        turn = index // len(names)
        bias = NO_SPACE if name.startswith("json") else {}
        if name == "json_object":  # its end has to become likely
            bias = bias | dict.fromkeys(ids('}"'), 5.0)
        defaults: dict[str, Any] = {
            "max_tokens": MAX_TOKENS,
            "temperature": (0.0, 0.9, 1.4)[turn % 3],
            "seed": index,
            "logit_bias": bias or None,
            "structured_output": {"kind": one.kind, "text": one.text},
        }
        prompt = tuple(random_tokens(3 + index % 9, VOCAB_SIZE, index))
        found.append(Ask(prompt, SamplingParams(**defaults | options), one))
    free = SamplingParams(max_tokens=20, temperature=0.8, seed=9, **options)
    found.append(Ask(tuple(random_tokens(5, VOCAB_SIZE, 99)), free, None))
    return found


@dataclass
class Model:
    path: Path
    has_mtp: bool
    _plain: dict[str, list[RequestOutput]] = field(default_factory=dict)

    def run(self, asks: Sequence[Ask], num_drafts: int = 0, **options: Any) -> list[RequestOutput]:
        options = {"max_num_seqs": 64, "num_kv_blocks": 400} | options
        engine = make_engine(self.path, num_drafts, tokenizer=TOKENIZER, **options)
        return run_requests(engine, [ask.prompt for ask in asks], [ask.params for ask in asks])

    def plain(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        key = repr([(ask.prompt, ask.params) for ask in asks])
        if key not in self._plain:
            self._plain[key] = self.run(asks)
        return self._plain[key]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3":
        write_qwen3(path, Qwen3Shape(num_layers=2, vocab_size=VOCAB_SIZE), seed=5)
    else:
        write_qwen3_5(path, TinyShape(num_layers=2, interval=2, vocab_size=VOCAB_SIZE), seed=5)
    write_tokenizer(path)
    return Model(path, has_mtp=request.param == "qwen3_5")


def assert_same(outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]) -> None:
    for index, (output, other) in enumerate(zip(outputs, plain, strict=True)):
        for one, two in zip(output.completions, other.completions, strict=True):
            assert one.token_ids == two.token_ids, f"request {index}: {one.text} {two.text}"
            assert (one.text, one.finish_reason) == (two.text, two.finish_reason)


@needs_xgrammar
def test_texts_that_end_by_themselves_follow_their_grammars(model: Model) -> None:
    asks = asks_of()
    ended: dict[str, int] = {}
    for ask, output in zip(asks, model.plain(asks), strict=True):
        if ask.grammar is None:
            assert output.finish_reason is LENGTH
        elif output.finish_reason is STOP:
            assert output.token_ids[-1] == END and END not in output.token_ids[:-1]
            assert TURN not in output.token_ids
            assert ask.grammar.fits(output.text), output.text
            kind = ask.grammar.kind
            ended[kind] = ended.get(kind, 0) + 1
    assert set(ended) == {"json_schema", "json_object", "regex", "ebnf"}
    assert sum(ended.values()) > len(asks) // 2


def mixed(sequence_id: int, turn: int, index: int) -> bool:
    return random.Random(f"{sequence_id} {turn} {index}").random() < 0.7


def right(sequence_id: int, turn: int, index: int) -> bool:
    return True


def texts_of(asks: Sequence[Ask], outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [
        ask.prompt + completion.token_ids
        for ask, output in zip(asks, outputs, strict=True)
        for completion in output.completions
    ]


def scripted(
    model: Model,
    asks: Sequence[Ask],
    num_drafts: int,
    script: Script,
    texts: Sequence[tuple[int, ...]],
    **options: Any,
) -> list[RequestOutput]:
    drafter = ScriptedDrafter(script, dict(enumerate(texts)), VOCAB_SIZE)
    return model.run(asks, num_drafts, drafter=drafter, **options)


@needs_xgrammar
@on_every_block_length
def test_drafts_right_or_partly_illegal_leave_the_text_of_plain_decoding(
    model: Model, num_drafts: int
) -> None:
    # A draft that is not right is the next id, which the grammars forbid as a rule.
    asks = asks_of()
    plain, number = model.plain(asks), len(asks)

    def script(sequence_id: int, turn: int, index: int) -> bool:
        return sequence_id < number or mixed(sequence_id, turn, index)

    outputs = scripted(model, asks * 2, num_drafts, script, texts_of(asks, plain) * 2)
    assert_same(outputs, plain * 2)
    for output in outputs[:number]:
        for one in output.rounds:
            ended_in_block = one.num_emitted <= one.num_accepted
            assert ended_in_block or one.num_accepted == len(one.draft_token_ids)
    partly = [output.speculation for output in outputs[number:]]
    assert 100 < sum(s.num_accepted for s in partly) < sum(s.num_drafted for s in partly)


@needs_xgrammar
@pytest.mark.parametrize("num_drafts", [5])
def test_drafts_that_are_all_illegal_leave_the_text_of_plain_decoding(
    model: Model, num_drafts: int
) -> None:
    asks = asks_of(number=2)[:-1]
    plain = model.plain(asks)
    nonsense = ((TURN,), (END,), ids("~"), (*ids("{"), TURN, END))
    texts = [ask.prompt + one * MAX_TOKENS for one in nonsense for ask in asks]
    outputs = scripted(model, asks * len(nonsense), num_drafts, right, texts)
    assert_same(outputs, plain * len(nonsense))


@needs_xgrammar
@on_every_block_length
def test_drafts_after_the_grammars_end_never_survive(model: Model, num_drafts: int) -> None:
    # The script goes on after END as if the text went on; it was accepted up to there.
    asks = asks_of(["regex of one text", "regex of words", "ebnf", "regex that may end at once"])
    asks = asks[:-1]
    plain = model.plain(asks)
    more = texts_of(asks, plain)
    more = [text + ids("return self")[: num_drafts + 2] for text in more]
    outputs = scripted(model, asks, num_drafts, right, more)
    assert_same(outputs, plain)
    ended_inside = [
        output.rounds[-1].num_emitted < len(output.rounds[-1].draft_token_ids) + 1
        for output in outputs
        if output.finish_reason is STOP
    ]
    assert any(ended_inside)
    assert all(END not in output.token_ids[:-1] for output in outputs)


@needs_xgrammar
@pytest.mark.parametrize("num_drafts", [4])
def test_the_methods_own_drafts_leave_the_text_of_plain_decoding(
    model: Model, num_drafts: int
) -> None:
    asks = asks_of()
    methods = [("ngram", None), *([("mtp", "argmax"), ("mtp", "coupled")] if model.has_mtp else [])]
    for method, draft_sampling in methods:
        outputs = model.run(asks, num_drafts, method=method, draft_sampling=draft_sampling)
        assert_same(outputs, model.plain(asks))
        assert sum(output.speculation.num_drafted for output in outputs) > 0


@needs_xgrammar
def test_sampled_drafts_follow_the_grammar_too(model: Model) -> None:
    class Letters(Drafter):
        """Draws every draft from one and the same law."""

        def propose(self, hidden: Tensor, frontier: Frontier) -> Proposal:
            scores = torch.zeros(hidden.shape[0], VOCAB_SIZE)
            scores[:, list(ids('{}":,0123abcdef xyz'))] = 3.0
            for _ in range(frontier.max_drafts):
                frontier.chooser.choose(scores, None)
            return frontier.chooser.proposal(frontier.num_wanted)

    asks = asks_of(number=8)[:-1]
    with mock.patch("outrider.engine.build_drafter", lambda *_: Letters()):
        outputs = model.run(asks, 4, method="mtp", draft_sampling="sampled")
    assert sum(output.speculation.num_accepted for output in outputs) > 20
    num_ended = 0
    for ask, output in zip(asks, outputs, strict=True):
        assert ask.grammar is not None
        if output.finish_reason is STOP:
            assert ask.grammar.fits(output.text), output.text
            num_ended += 1
    assert num_ended > len(asks) // 2


@needs_xgrammar
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_each_of_n_outputs_stands_at_a_place_of_its_own(model: Model, num_drafts: int) -> None:
    asks = asks_of(["json_schema", "regex of words"], number=2, n=4)[:-1]
    plain = model.plain(asks)
    for ask, output in zip(asks, plain, strict=True):
        assert ask.grammar is not None
        texts = [completion.text for completion in output.completions]
        assert len(set(texts)) > 1 or ask.params.greedy
        for completion in output.completions:
            assert completion.finish_reason is LENGTH or ask.grammar.fits(completion.text)
    if num_drafts:
        assert_same(scripted(model, asks, num_drafts, mixed, texts_of(asks, plain)), plain)


@needs_xgrammar
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_requests_that_are_preempted_inside_a_grammar_go_on_where_they_stood(
    model: Model, num_drafts: int
) -> None:
    asks = asks_of(["json_schema", "regex of words", "json_object"], number=3)[:-1]
    plain = model.plain(asks)
    pressed = {"max_model_len": 96, "num_kv_blocks": 8}
    if num_drafts:
        texts = dict(enumerate(texts_of(asks, plain)))
        pressed["drafter"] = ScriptedDrafter(mixed, texts, VOCAB_SIZE)  # type: ignore[assignment]
    engine = make_engine(model.path, num_drafts, tokenizer=TOKENIZER, **pressed)
    outputs = run_requests(engine, [ask.prompt for ask in asks], [ask.params for ask in asks])
    assert engine.scheduler.num_preemptions > 1
    assert_same(outputs, plain)


@needs_xgrammar
def test_stop_ids_stop_strings_and_penalties_hold_inside_a_grammar(model: Model) -> None:
    grammar = {"kind": "regex", "text": "[abcd]{30}"}
    kinds: list[dict[str, Any]] = [
        {"stop": ["cd"]},
        {"stop_token_ids": [ids("d")[0]]},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1.4, "logit_bias": {A: 3.0, END: 50.0}},
    ]
    asks = [
        Ask(
            tuple(random_tokens(4, VOCAB_SIZE, i)),
            SamplingParams(max_tokens=40, seed=i, structured_output=grammar, **kind),
            by_regex("[abcd]{30}"),
        )
        for i, kind in enumerate(kinds * 2)
    ]
    plain = model.plain(asks)
    for index, output in enumerate(plain):
        text = output.text
        if index % 4 == 0:
            assert "cd" not in text
        elif index % 4 == 1:
            assert "d" not in text
        else:  # a bias towards the end does not bring it nearer
            assert re.fullmatch("[abcd]{30}", text) and output.finish_reason is STOP
        if index % 4 == 2:  # letters that push themselves down leave room for each other
            assert set(text) == set("abcd")
    for num_drafts in (2, 7):
        assert_same(scripted(model, asks, num_drafts, mixed, texts_of(asks, plain)), plain)


@needs_xgrammar
def test_a_text_ends_in_a_dead_end_of_its_grammar_and_its_neighbours_go_on(model: Model) -> None:
    free = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    asks = [
        Ask((5, 6), SamplingParams(structured_output=DEAD_END), None),
        Ask((7, 8), free, None),
    ]
    plain = model.plain(asks)
    assert (plain[0].text, plain[0].finish_reason) == ("a", STOP)
    assert len(plain[1].token_ids) == 20
    texts = [(5, 6, A, END, END, END, END), *texts_of(asks, plain)[1:]]
    assert_same(scripted(model, asks, 4, right, texts), plain)


@needs_xgrammar
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_grammar_fails_its_own_request_only(model: Model, kind: str) -> None:
    llm = LLM(str(model.path), max_num_seqs=4, max_model_len=96, kv_cache_memory_gib=0.01)
    good = SamplingParams(
        max_tokens=20, temperature=0, structured_output={"kind": "regex", "text": "[ab]{3}"}
    )
    bad = SamplingParams(structured_output={"kind": kind, "text": BROKEN[kind][0]})
    outputs = llm.generate([[5, 6], [7, 8], [9]], [good, bad, good])
    assert isinstance(outputs, list)
    assert isinstance(outputs[1].error, RequestError)
    assert "does not compile" in str(outputs[1].error)
    for output in (outputs[0], outputs[2]):
        assert output.error is None and re.fullmatch("[ab]{3}", output.text)
    with pytest.raises(RequestError, match="does not compile"):
        llm.generate([5, 6], bad)
    with pytest.raises(RequestError, match="does not compile"):
        llm.stream([5, 6], bad)  # at once, not at its first step
    assert not llm.engine.has_work


def test_without_xgrammar_requests_without_a_grammar_are_served(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    llm = LLM(str(model.path), max_num_seqs=4, max_model_len=96, kv_cache_memory_gib=0.01)
    wanting = SamplingParams(structured_output={"kind": "json_object"})
    outputs = llm.generate([[5, 6], [7]], [SamplingParams(max_tokens=3), wanting])
    assert isinstance(outputs, list)
    assert outputs[0].error is None and len(outputs[0].token_ids) >= 1
    assert "pip install" in str(outputs[1].error)


@needs_xgrammar
def test_a_grammar_under_synthetic_acceptance_is_refused(model: Model) -> None:
    llm = LLM(
        str(model.path),
        max_num_seqs=4,
        max_model_len=96,
        kv_cache_memory_gib=0.01,
        speculative_config=SpeculativeConfig("ngram", synthetic_acceptance_length=2.0),
    )
    with pytest.raises(RequestError, match="synthetic acceptance"):
        llm.generate([5], SamplingParams(structured_output={"kind": "json_object"}))
