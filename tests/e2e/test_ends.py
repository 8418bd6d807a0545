"""Every kind of end at every place of a block: what is left is what plain decoding leaves.

Most texts here are known beforehand: the model `chain` is made so that each token has one
successor, whatever stands before it. Blocks of drafts that follow the chain are accepted whole, so
the round is known in which each token is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.batch import FinishReason
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from tests.checkpoints import TinyShape, write_qwen3_5
from tests.checkpoints_qwen3 import Qwen3Shape, write_qwen3
from tests.harness import ScriptedDrafter, make_engine, random_tokens, run_requests
from tests.tiny_tokenizer import byte_ids, tokenizer

VOCAB_SIZE = 272
END = 1
EVERY_K = range(1, 9)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TOKENIZER = tokenizer()

# No byte occurs twice, so that each has one successor.
TEXT = "Sé🏇ab✓cдefĸghσij" + "klmnopqrstuvwxyz0123456789"
BYTES = TEXT.encode()
CHAIN = byte_ids(BYTES)
assert len(set(BYTES)) == len(BYTES) >= 50
PLACES = range(18)
"""Places of output tokens: the prompt's pass writes place 0, the next round places 1 to k + 1, and
the one after it begins with k + 2. They cover two whole blocks of every k."""


def write_chain(path: Path) -> None:
    """A Qwen3 whose next token depends on the newest one only: CHAIN, then END."""
    write_qwen3(path, Qwen3Shape(num_layers=2, vocab_size=VOCAB_SIZE, tied=False))
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()  # the layers add nothing to the embedding
        elif name == "model.norm.weight":
            weight.fill_(1.0)
    embedding = torch.nn.functional.normalize(weights["model.embed_tokens.weight"], dim=-1)
    weights["model.embed_tokens.weight"] = embedding
    head = 0.05 * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(2))
    for token, successor in itertools.pairwise((*CHAIN, END)):
        head[successor] = 2 * embedding[token]
    weights["lm_head.weight"] = head
    save_file(weights, path / "model.safetensors")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chain")
    write_chain(path)
    return path


@dataclass(frozen=True)
class Ending:
    """A request whose text is known.

    Attributes:
        prompt: ends at a place of the chain.
        num_tokens: how many tokens of the chain are written.
        ends_with: tokens after them; the end of the text, where it is a token of its own.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    num_tokens: int
    text: str
    reason: FinishReason
    ends_with: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        begin = CHAIN.index(self.prompt[-1]) + 1
        return CHAIN[begin : begin + self.num_tokens] + self.ends_with

    @property
    def wanted(self) -> tuple[int, ...]:
        """What a draft that knows the model proposes: it does not know where the text ends."""
        begin = CHAIN.index(self.prompt[-1]) + 1
        return (*self.prompt, *(self.token_ids if self.ends_with else CHAIN[begin:]))


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "temperature": 0, "logprobs": 2} | options)


def shown(num_bytes: int, begin: int = 1) -> str:
    """Text of the chain's bytes; part of a character is U+FFFD."""
    return BYTES[begin : begin + num_bytes].decode(errors="replace")


def by_stop_id() -> list[Ending]:
    return [
        Ending(CHAIN[:1], params(stop_token_ids=[CHAIN[1 + at]]), at + 1, shown(at), STOP)
        for at in PLACES
    ]


def by_max_tokens() -> list[Ending]:
    return [
        Ending(CHAIN[:1], params(max_tokens=at + 1), at + 1, shown(at + 1), LENGTH) for at in PLACES
    ]


def by_stop_string() -> list[Ending]:
    """Stop strings of 1 to 4 characters that end at any byte of the text that ends a character."""
    found: list[Ending] = []
    whole = TEXT[1:]
    for last, length in itertools.product(range(len(whole)), range(1, 5)):
        stop, before = whole[last + 1 - length : last + 1], whole[: last + 1 - length]
        num_tokens = len((before + stop).encode())
        if len(stop) == length and num_tokens <= len(PLACES):
            # Others that come later, or not at all, make no difference.
            stops = [stop, whole[last : last + 2] + "!", "Sé"]
            found.append(Ending(CHAIN[:1], params(stop=stops), num_tokens, before, STOP))
    return found


def by_stop_string_after_min_tokens() -> list[Ending]:
    """Stop strings within the first min_tokens tokens do not count, the one after them does."""
    found: list[Ending] = []
    starts = list(itertools.accumulate((len(char.encode()) for char in TEXT[1:]), initial=0))
    for least in PLACES:
        first = next(i for i, start in enumerate(starts) if start >= least)
        # A character that the boundary cuts in two is no stop string here.
        ignored = [char for char, end in zip(TEXT[1:], starts[1:], strict=True) if end <= least]
        options = params(min_tokens=least, stop=[*ignored, TEXT[1 + first]])
        num_tokens = starts[first + 1]
        found.append(Ending(CHAIN[:1], options, num_tokens, TEXT[1 : 1 + first], STOP))
    return found


def by_end_of_sequence() -> list[Ending]:
    """Prompts that end ever nearer to the chain's end, where the model writes END."""
    found: list[Ending] = []
    for at in PLACES:
        begin = len(CHAIN) - at
        found.append(Ending(CHAIN[:begin], params(), at, shown(at, begin), STOP, (END,)))
    return found


MAX_MODEL_LEN = 64


def by_max_model_len() -> list[Ending]:
    """Prompts so long that the model's limit is the end."""
    found: list[Ending] = []
    for at in PLACES:
        filler = random_tokens(MAX_MODEL_LEN - at - 2, VOCAB_SIZE, seed=at)
        prompt = (*filler, CHAIN[0])
        found.append(Ending(prompt, params(max_tokens=60), at + 1, shown(at + 1), LENGTH))
    return found


def by_grammar() -> list[Ending]:
    """Grammars that allow so much of the chain and no more: END is the only token then."""
    begin = CHAIN.index(byte_ids(b"j")[0])
    found: list[Ending] = []
    for at in range(1, len(PLACES)):
        text = shown(at, begin + 1)
        grammar = {"kind": "regex", "text": text}
        one = params(structured_output=grammar)
        found.append(Ending(CHAIN[: begin + 1], one, at, text, STOP, (END,)))
    return found


def at_the_same_token() -> list[Ending]:
    """Two ends at one token: a stop id goes before a stop string, and both before the length."""
    found: list[Ending] = []
    for at in PLACES:
        token, most = CHAIN[1 + at], at + 1
        both = params(stop_token_ids=[token], max_tokens=most)
        found.append(Ending(CHAIN[:1], both, most, shown(at), STOP))
        whole = shown(most)
        if not whole.endswith("\ufffd"):
            string = params(stop=[whole[-1]], max_tokens=most)
            found.append(Ending(CHAIN[:1], string, most, whole[:-1], STOP))
            every = params(stop=[whole[-1]], max_tokens=most, stop_token_ids=[token])
            found.append(Ending(CHAIN[:1], every, most, shown(at), STOP))
    return found


def inside_a_character() -> list[Ending]:
    """Texts that begin anywhere, also inside a character, and run over whole blocks."""
    return [
        Ending(CHAIN[: begin + 1], params(max_tokens=19), 19, shown(19, begin + 1), LENGTH)
        for begin in range(20)
    ]


HAS_XGRAMMAR = find_spec("xgrammar") is not None
KINDS = {
    "stop id": by_stop_id,
    "stop string": by_stop_string,
    "stop string after min_tokens": by_stop_string_after_min_tokens,
    "end of sequence": by_end_of_sequence,
    "max_tokens": by_max_tokens,
    "max_model_len": by_max_model_len,
    "two ends at once": at_the_same_token,
    "inside a character": inside_a_character,
} | ({"grammar": by_grammar} if HAS_XGRAMMAR else {})


def run(
    path: Path, endings: Sequence[Ending], num_drafts: int = 0, **options: Any
) -> list[RequestOutput]:
    drafter = None
    if num_drafts:
        wanted = {index: ending.wanted for index, ending in enumerate(endings)}
        drafter = ScriptedDrafter(lambda *_: True, wanted, VOCAB_SIZE)
    options = {"max_num_seqs": 64, "max_model_len": MAX_MODEL_LEN, "num_kv_blocks": 256} | options
    engine = make_engine(path, num_drafts, drafter=drafter, tokenizer=TOKENIZER, **options)
    return run_requests(engine, [e.prompt for e in endings], [e.params for e in endings])


def assert_ends(output: RequestOutput, ending: Ending) -> None:
    assert output.token_ids == ending.token_ids
    assert output.text == ending.text
    assert output.finish_reason is ending.reason
    # What a user is charged for.
    assert output.prompt_token_ids == ending.prompt
    assert output.speculation.num_tokens == len(ending.token_ids)
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == list(ending.token_ids)


@dataclass
class Known:
    """All endings and what plain decoding made of them."""

    endings: list[Ending]
    outputs: list[RequestOutput]
    names: list[str]


@pytest.fixture(scope="module")
def known(chain: Path) -> Known:
    each = {name: kind() for name, kind in KINDS.items()}
    endings = [ending for kind in each.values() for ending in kind]
    names = [name for name, kind in each.items() for _ in kind]
    return Known(endings, run(chain, endings), names)


@pytest.mark.parametrize("name", KINDS)
def test_plain_decoding_ends_where_the_text_says(known: Known, name: str) -> None:
    chosen = [i for i, other in enumerate(known.names) if other == name]
    assert len(chosen) >= len(PLACES) - 1
    for index in chosen:
        assert_ends(known.outputs[index], known.endings[index])


def expected_rounds(num_tokens: int, num_drafts: int) -> list[int]:
    """Tokens of each pass where every draft is right and the length is known from the start."""
    sizes = [1]
    while (left := num_tokens - sum(sizes)) > 0:
        sizes.append(min(num_drafts + 1, left))
    return sizes


@pytest.mark.parametrize("num_drafts", EVERY_K)
def test_an_end_at_any_place_of_an_accepted_block_leaves_what_plain_decoding_leaves(
    chain: Path, known: Known, num_drafts: int
) -> None:
    outputs = run(chain, known.endings, num_drafts)
    places: set[int] = set()
    for ending, output, plain in zip(known.endings, outputs, known.outputs, strict=True):
        assert_ends(output, ending)
        assert output.logprobs == plain.logprobs
        sizes = [one.num_emitted for one in output.rounds]
        assert sizes == expected_rounds(len(ending.token_ids), num_drafts)
        if len(sizes) > 1:
            places.add(sizes[-1])
    assert places == set(range(1, num_drafts + 2))


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_slots_of_texts_that_ended_inside_a_block_serve_the_next_ones(
    chain: Path, known: Known, num_drafts: int
) -> None:
    chosen = range(0, len(known.endings), 5)
    endings = [known.endings[i] for i in chosen]
    outputs = run(chain, endings, num_drafts, max_num_seqs=3)
    for ending, output in zip(endings, outputs, strict=True):
        assert_ends(output, ending)


@pytest.mark.parametrize("num_drafts", [0, *EVERY_K])
def test_streamed_text_never_shows_part_of_a_character_or_of_a_stop_string(
    chain: Path, num_drafts: int
) -> None:
    endings = [
        Ending(CHAIN[:1], params(max_tokens=24), 24, shown(24), LENGTH),
        Ending(CHAIN[:1], params(stop=["cдefĸ"]), 19, TEXT[1 : TEXT.index("c")], STOP),
        Ending(CHAIN[:1], params(stop=["🏇ab✓д"], max_tokens=17), 17, shown(17), LENGTH),
    ]
    drafter = None
    if num_drafts:
        wanted = {index: ending.wanted for index, ending in enumerate(endings)}
        drafter = ScriptedDrafter(lambda *_: True, wanted, VOCAB_SIZE)
    engine = make_engine(chain, num_drafts, drafter=drafter, tokenizer=TOKENIZER, max_model_len=64)
    for index, ending in enumerate(endings):
        engine.add_request(str(index), ending.prompt, ending.params)
    streamed = [""] * len(endings)
    while engine.has_work:
        for output in engine.step():
            index = int(output.request_id)
            streamed[index] += output.new_text
            assert streamed[index] == output.text == endings[index].text[: len(output.text)]
    assert streamed == [ending.text for ending in endings]


MODELS = ("qwen3", "qwen3_5")
SEEDS = range(60)


@dataclass(frozen=True)
class Harvest:
    """Requests whose plain texts end in their own ways, and those texts."""

    prompts: list[tuple[int, ...]]
    params: list[SamplingParams]
    outputs: list[RequestOutput]


def harvest(path: Path) -> Harvest:
    """Sampled texts that end by END or by a stop id that a look at an endless text suggests."""
    prompts = [tuple(random_tokens(5 + seed % 7, VOCAB_SIZE, seed)) for seed in SEEDS]
    base = [
        SamplingParams(
            max_tokens=22,
            temperature=1.0 if seed % 3 else 0.0,
            seed=seed,
            logprobs=seed % 4,
            logprobs_mode=("raw", "processed")[seed % 2],
            presence_penalty=1.0,
            top_k=50,
            logit_bias={END: 4.5 if seed % 2 else -50.0},
        )
        for seed in SEEDS
    ]
    engine = make_engine(path, tokenizer=TOKENIZER, max_num_seqs=64, num_kv_blocks=256)
    endless = run_requests(engine, prompts, base)
    ending: list[SamplingParams] = []
    for seed, one, output in zip(SEEDS, base, endless, strict=True):
        place = min(seed // 2 % 19, len(output.token_ids) - 1)
        stops = [output.token_ids[place]] if seed % 2 == 0 and seed % 5 else []
        ending.append(replace(one, stop_token_ids=stops))
    engine = make_engine(path, tokenizer=TOKENIZER, max_num_seqs=64, num_kv_blocks=256)
    return Harvest(prompts, ending, run_requests(engine, prompts, ending))


@pytest.fixture(scope="module", params=MODELS)
def random_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3":
        write_qwen3(path, Qwen3Shape(num_layers=2, vocab_size=VOCAB_SIZE))
    else:
        write_qwen3_5(path, TinyShape(num_layers=2, interval=2, vocab_size=VOCAB_SIZE))
    return path


@pytest.fixture(scope="module")
def harvested(random_model: Path) -> Harvest:
    return harvest(random_model)


def test_the_random_texts_end_at_many_places(harvested: Harvest) -> None:
    by_reason = {
        reason: {len(o.token_ids) for o in harvested.outputs if o.finish_reason is reason}
        for reason in (STOP, LENGTH)
    }
    assert len(by_reason[STOP]) >= 15 and by_reason[LENGTH] == {22}
    assert sum(output.token_ids[-1] == END for output in harvested.outputs) >= 10


@pytest.mark.parametrize(
    ("random_model", "num_drafts"),
    [
        pytest.param(name, k, marks=pytest.mark.slow if name == "qwen3" and k % 3 != 1 else ())
        for name in MODELS
        for k in EVERY_K
    ],
    indirect=["random_model"],
)
def test_random_texts_end_alike_with_and_without_speculation(
    random_model: Path, harvested: Harvest, num_drafts: int
) -> None:
    texts = {
        index: prompt + output.token_ids
        for index, (prompt, output) in enumerate(
            zip(harvested.prompts, harvested.outputs, strict=True)
        )
    }

    def script(sequence_id: int, turn: int, index: int) -> bool:
        return sequence_id % 2 == 0 or (sequence_id // 2 + turn + index) % 4 > 0

    drafter = ScriptedDrafter(script, texts, VOCAB_SIZE)
    engine = make_engine(
        random_model,
        num_drafts,
        drafter=drafter,
        tokenizer=TOKENIZER,
        max_num_seqs=64,
        num_kv_blocks=256,
    )
    outputs = run_requests(engine, harvested.prompts, harvested.params)
    for output, plain in zip(outputs, harvested.outputs, strict=True):
        assert output.token_ids == plain.token_ids
        assert output.text == plain.text
        assert output.finish_reason is plain.finish_reason
        assert output.logprobs == plain.logprobs
        assert output.speculation.num_tokens == len(plain.token_ids)
