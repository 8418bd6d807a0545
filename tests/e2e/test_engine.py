"""The engine serves what it can, refuses what it cannot by name, and gives everything back."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from outrider.batch import Batch, FinishReason
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.errors import CapacityError, CheckpointError, ConfigError, OutriderError, RequestError
from outrider.llm import LLM
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.runner.rounds import Masks, Submission
from outrider.tokenizer import Tokenizer
from tests.checkpoints import TinyShape
from tests.harness import ScriptedDrafter, make_engine, random_tokens, run_requests, tokens_of
from tests.pools import is_idle

Checkpoints = Callable[[TinyShape], Path]

SHAPE = TinyShape(num_layers=2, interval=2, hidden_size=48, vocab_size=100)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


@pytest.fixture(scope="module")
def path(random_checkpoint: Checkpoints) -> Path:
    return random_checkpoint(SHAPE)


def named_tokens() -> Tokenizer:
    """Token 7 reads "[7]": any text tells its tokens."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({text_of([i]): i for i in range(SHAPE.vocab_size)}, unk_token="[0]")
    )
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(f"[{token_id}]" for token_id in token_ids)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0, "ignore_eos": True, **options})


def watch_batches(engine: Engine) -> list[Batch]:
    """Every batch that the engine runs from now on."""
    batches: list[Batch] = []
    submit = engine.runner.submit

    def watched(batch: Batch, masks: Masks | None = None) -> Submission:
        batches.append(batch)
        return submit(batch, masks)

    engine.runner.submit = watched  # type: ignore[method-assign]
    return batches


def assert_all_given_back(engine: Engine) -> None:
    assert not engine.has_work and is_idle(engine.cache)
    for pool in (engine.cache.blocks, engine.cache.slots):
        assert pool.num_free == pool.size
    engine.cache.check_integrity()


def test_pools_are_whole_again_after_a_thousand_requests_of_every_fate(path: Path) -> None:
    rng = random.Random(0)
    engine = make_engine(
        path, 2, max_num_seqs=16, max_model_len=80, num_kv_blocks=18, max_prefill_tokens=256
    )
    finished: dict[str, RequestOutput] = {}
    live: list[str] = []
    refused = aborted = number = 0
    while number < 1000 or engine.has_work:
        while number < 1000 and len(live) < 24:
            request_id, length = str(number), rng.choice([1, 2, 5, 15, 16, 17, 40, 64, 70])
            prompt = random_tokens(length, SHAPE.vocab_size, number)
            number += 1
            fate = rng.random()
            try:
                if fate < 0.04:
                    prompt = rng.choice([[], [SHAPE.vocab_size], [-1], [2] * 80, [True]])
                params = SamplingParams(
                    max_tokens=rng.randint(1, 8),
                    temperature=rng.choice([0, 0, 1.0]),
                    stop_token_ids=random_tokens(3, SHAPE.vocab_size, number),
                    speculation=fate > 0.15,
                    max_draft_tokens=rng.choice([None, None, 0, 1]),
                )
                engine.add_request(request_id, prompt, params)
                live.append(request_id)
            except RequestError:
                refused += 1
        if live and rng.random() < 0.1:
            output = engine.abort(live.pop(rng.randrange(len(live))))
            assert output is not None and output.finish_reason is ABORT
            aborted += 1
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
                live.remove(output.request_id)
    assert_all_given_back(engine)
    assert len(finished) + refused + aborted == 1000
    # All of it really happened.
    assert min(refused, aborted, engine.scheduler.num_preemptions) >= 10
    assert {output.finish_reason for output in finished.values()} == {STOP, LENGTH}


def test_an_aborted_request_ends_wherever_it_stands_and_frees_what_it_held(path: Path) -> None:
    engine = make_engine(path, 3, max_num_seqs=2, prefill_grid=16, max_prefill_tokens=16)
    for index in range(4):
        engine.add_request(str(index), random_tokens(40, SHAPE.vocab_size, index), GREEDY)
    engine.step()  # 0 is in the middle of its prompt, 1 to 3 wait
    for request_id in ("3", "0"):
        output = engine.abort(request_id)
        assert output is not None
        assert (output.finish_reason, output.token_ids) == (ABORT, ())
    while not (outputs := engine.step()):
        pass
    assert outputs[0].request_id == "1"  # and it decodes
    output = engine.abort("1")
    assert output is not None and output.token_ids == outputs[0].token_ids
    assert engine.abort("1") is None and engine.abort("never seen") is None
    while engine.has_work:
        outputs = engine.step()
    assert outputs[-1].request_id == "2" and len(outputs[-1].token_ids) == 8
    assert_all_given_back(engine)


def test_neighbours_of_an_aborted_request_keep_their_text(path: Path) -> None:
    prompts = [random_tokens(20 + i, SHAPE.vocab_size, i) for i in range(3)]
    expected = tokens_of(run_requests(make_engine(path, 3), prompts, GREEDY))
    engine = make_engine(path, 3)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    engine.step()
    engine.step()
    engine.abort("1")
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs["0"].token_ids == expected[0] and outputs["2"].token_ids == expected[2]


@pytest.mark.parametrize(("num_drafts", "temperature"), [(0, 0.0), (4, 0.0), (1, 1.0)])
def test_preempted_requests_write_the_text_of_an_unpressured_run(
    path: Path, num_drafts: int, temperature: float
) -> None:
    prompts = [random_tokens(10 + 3 * i, SHAPE.vocab_size, i) for i in range(6)]
    params = [
        SamplingParams(
            max_tokens=40,
            temperature=temperature,
            seed=i,
            ignore_eos=True,
            draft_sampling="coupled",
        )
        for i in range(6)
    ]
    calm = make_engine(path, num_drafts, max_model_len=80)
    pressed = make_engine(path, num_drafts, max_model_len=80, num_kv_blocks=10)
    expected = tokens_of(run_requests(calm, prompts, params))
    outputs = run_requests(pressed, prompts, params, arrivals=[0, 0, 0, 2, 4, 4])
    assert calm.scheduler.num_preemptions == 0 and pressed.scheduler.num_preemptions >= 2
    assert tokens_of(outputs) == expected
    assert_all_given_back(pressed)


def test_the_smallest_memory_that_holds_one_sequence_serves_many_one_after_the_other(
    path: Path,
) -> None:
    prompts = [random_tokens(30 + i, SHAPE.vocab_size, i) for i in range(5)]
    params = greedy(max_tokens=64 - 34)
    expected = tokens_of(run_requests(make_engine(path, 3, max_model_len=64), prompts, params))
    engine = make_engine(path, 3, max_model_len=64, num_kv_blocks=4)
    assert tokens_of(run_requests(engine, prompts, params)) == expected


@pytest.mark.parametrize(("grid", "budget"), [(7, 7), (7, 20), (16, 40), (64, 100)])
def test_prompt_chunks_keep_to_the_budget_the_grid_and_the_order_of_arrival(
    path: Path, grid: int, budget: int
) -> None:
    lengths = [50, 3, 129, 64, 1, 20, 7]
    prompts = [random_tokens(n, SHAPE.vocab_size, n) for n in lengths]
    engine = make_engine(path, 2, prefill_grid=grid, max_prefill_tokens=budget)
    batches = watch_batches(engine)
    run_requests(engine, prompts, GREEDY)
    reached = [0] * len(lengths)
    for batch in batches:
        assert sum(span.num_rows for span in batch.prefill) <= budget
        unfinished = [i for i in range(len(lengths)) if reached[i] < lengths[i]]
        served = [span.sequence_id for span in batch.prefill]
        assert served == unfinished[: len(served)]  # nobody is passed over for a younger one
        for span in batch.prefill:
            index, end = span.sequence_id, span.start + span.num_rows
            assert span.start == reached[index]
            assert end == lengths[index] or end % grid == 0
            assert list(span.token_ids) == prompts[index][span.start : end]
            reached[index] = end
    assert reached == lengths


def test_decoding_goes_on_while_others_are_prefilled(path: Path) -> None:
    engine = make_engine(path, 0, prefill_grid=16, max_prefill_tokens=16)
    batches = watch_batches(engine)
    prompts = [random_tokens(n, SHAPE.vocab_size, n) for n in (5, 64, 64)]
    run_requests(engine, prompts, greedy(max_tokens=9))
    assert any(batch.prefill and batch.rounds for batch in batches)
    rounds_of_first = [sum(s.sequence_id == 0 for s in batch.rounds) for batch in batches]
    # One token comes from the prompt's pass, then one a step without a gap.
    assert rounds_of_first[: 1 + 8] == [0] + [1] * 8


def test_slots_are_given_out_in_order_of_arrival(path: Path) -> None:
    engine = make_engine(path, 2, max_num_seqs=2)
    batches = watch_batches(engine)
    prompts = [random_tokens(10, SHAPE.vocab_size, i) for i in range(6)]
    params = [greedy(max_tokens=n) for n in (12, 3, 2, 9, 1, 5)]
    run_requests(engine, prompts, params)
    first_seen = [span.sequence_id for batch in batches for span in batch.prefill]
    assert first_seen == [0, 1, 2, 3, 4, 5]
    assert all(len(batch.spans) <= 2 for batch in batches)


@dataclass(frozen=True)
class Ending:
    """One way to end a text after `num_tokens` tokens, and the text that is shown."""

    params: SamplingParams
    num_tokens: int
    text: str
    reason: FinishReason


PROMPT = random_tokens(14, SHAPE.vocab_size, 3)
MOST = 24


def endings(golden: Sequence[int]) -> list[Ending]:
    """Every kind of end at every place of the text `golden`, worked out from the text alone."""
    found: list[Ending] = []
    whole = text_of(golden)
    for place, token_id in enumerate(golden[:-1]):
        first, own = golden.index(token_id), text_of([token_id])
        before, after = text_of(golden[:first]), text_of(golden[: first + 1])
        by_id = {"stop_token_ids": [token_id]}
        by_text = {"stop": own}
        found += [
            Ending(greedy(max_tokens=MOST, **by_id), first + 1, before, STOP),
            Ending(greedy(max_tokens=MOST, **by_text), first + 1, before, STOP),
            Ending(greedy(max_tokens=place + 1), place + 1, text_of(golden[: place + 1]), LENGTH),
            # Both at the same token: ids, then strings, then the length.
            Ending(greedy(max_tokens=first + 1, **by_id), first + 1, before, STOP),
            Ending(greedy(max_tokens=first + 1, **by_text), first + 1, before, STOP),
            Ending(greedy(max_tokens=MOST, **by_id, **by_text), first + 1, before, STOP),
        ]
        # A string over two tokens ends inside the second; its beginning is taken back.
        across = whole[len(after) - 2 : len(after) + 2]
        at = whole.find(across)
        ends = next(
            n for n in range(len(golden) + 1) if len(text_of(golden[:n])) >= at + len(across)
        )
        found.append(Ending(greedy(max_tokens=MOST, stop=across), ends, whole[:at], STOP))
        # Text that is held back for a stop string that does not come is shown at the end.
        never = own + "never"
        found.append(
            Ending(greedy(max_tokens=first + 1, stop=never), first + 1, after, LENGTH),
        )
    return found


def golden_text(path: Path) -> list[int]:
    [output] = run_requests(make_engine(path), [PROMPT], greedy(max_tokens=MOST))
    return list(output.token_ids)


def run_endings(path: Path, golden: list[int], num_drafts: int) -> None:
    cases = endings(golden)
    drafter = None
    if num_drafts:
        texts = {index: [*PROMPT, *golden] for index in range(len(cases))}
        drafter = ScriptedDrafter(lambda *_: True, texts, SHAPE.vocab_size)
    engine = make_engine(
        path, num_drafts, drafter=drafter, tokenizer=named_tokens(), max_num_seqs=32
    )
    outputs = run_requests(engine, [PROMPT] * len(cases), [case.params for case in cases])
    for case, output in zip(cases, outputs, strict=True):
        assert output.token_ids == tuple(golden[: case.num_tokens]), case
        assert (output.text, output.finish_reason) == (case.text, case.reason), case
    if drafter:
        # Whole blocks were accepted, so that the ends fell on every place of a block.
        longest = max(len(r.draft_token_ids) for output in outputs for r in output.rounds)
        assert longest == num_drafts
        assert all(
            r.num_accepted == len(r.draft_token_ids) for output in outputs for r in output.rounds
        )
    assert_all_given_back(engine)


@pytest.mark.parametrize("num_drafts", [0, 3, 8])
def test_a_text_ends_at_the_same_place_in_any_block(path: Path, num_drafts: int) -> None:
    run_endings(path, golden_text(path), num_drafts)


@pytest.mark.parametrize("num_drafts", [0, 8])
def test_max_model_len_ends_a_text_on_every_place_of_a_block(path: Path, num_drafts: int) -> None:
    golden = golden_text(path)
    for room in range(1, 12):
        drafter = None
        if num_drafts:
            drafter = ScriptedDrafter(lambda *_: True, {0: [*PROMPT, *golden]}, SHAPE.vocab_size)
        engine = make_engine(
            path, num_drafts, drafter=drafter, max_model_len=len(PROMPT) + room, num_kv_blocks=2
        )
        [output] = run_requests(engine, [PROMPT], greedy(max_tokens=100))
        assert output.token_ids == tuple(golden[:room])
        assert output.finish_reason is LENGTH


@pytest.mark.parametrize("num_drafts", [0, 8])
@pytest.mark.parametrize("place", [0, 1, 5, 9])
def test_the_checkpoints_end_of_sequence_ids_end_a_text_unless_they_are_ignored(
    path: Path, tmp_path: Path, num_drafts: int, place: int
) -> None:
    golden = golden_text(path)
    first = golden.index(golden[place])
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    for name in ("config.json", "generation_config.json"):
        if (copy / name).exists():
            config = json.loads((copy / name).read_text())
            eos = [0, golden[place]] if 0 not in golden else golden[place]
            (copy / name).write_text(json.dumps(config | {"eos_token_id": eos}))
    texts = {0: [*PROMPT, *golden], 1: [*PROMPT, *golden]}
    drafter = ScriptedDrafter(lambda *_: True, texts, SHAPE.vocab_size) if num_drafts else None
    engine = make_engine(copy, num_drafts, drafter=drafter, tokenizer=named_tokens())
    obeyed, ignored = run_requests(
        engine,
        [PROMPT, PROMPT],
        [greedy(max_tokens=MOST, ignore_eos=False), greedy(max_tokens=MOST)],
    )
    assert obeyed.token_ids == tuple(golden[: first + 1])
    assert (obeyed.text, obeyed.finish_reason) == (text_of(golden[:first]), STOP)
    assert ignored.token_ids == tuple(golden) and ignored.finish_reason is LENGTH


def test_statistics_count_passes_drafts_and_what_was_accepted(path: Path) -> None:
    golden = golden_text(path)
    drafter = ScriptedDrafter(
        lambda _sequence, turn, index: index < turn % 3, {0: [*PROMPT, *golden]}, SHAPE.vocab_size
    )
    engine = make_engine(path, 3, drafter=drafter)
    [output] = run_requests(engine, [PROMPT], greedy(max_tokens=13))
    stats = output.speculation
    # The prompt's pass, then rounds that accept 0, 1, 2, 0, 1, 2 of 3: 1 + 1+2+3 + 1+2+3 = 13.
    assert (stats.num_passes, stats.num_rounds, stats.num_tokens) == (7, 6, 13)
    assert stats.num_accepted == 6 and stats.accepted_per_position[:2] == (4, 2)
    assert stats.acceptance_length == 2.0


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], "prompt is empty"),
        ([2] * 64, "64 tokens"),
        ([2] * 500, "at most 63"),
        ([2, SHAPE.vocab_size], "prompt token 1"),
        ([-1], "prompt token 0"),
        ([2, 3, 2.0], "prompt token 2"),
        ([2, True], "prompt token 1"),
        (["a"], "prompt token 0"),
    ],
    ids=[
        "empty",
        "one too long",
        "far too long",
        "id too large",
        "negative",
        "float",
        "bool",
        "str",
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_and_leaves_no_trace(
    path: Path, prompt: list[Any], named: str
) -> None:
    engine = make_engine(path, 2, max_model_len=64)
    with pytest.raises(RequestError, match=named):
        engine.add_request("bad", prompt, GREEDY)
    assert_all_given_back(engine)
    [output] = run_requests(engine, [[2] * 63], GREEDY)
    assert len(output.token_ids) == 1 and output.finish_reason is LENGTH


def test_an_id_in_use_is_refused_until_its_request_has_ended(path: Path) -> None:
    engine = make_engine(path)
    engine.add_request("a", [2, 3], GREEDY)
    with pytest.raises(RequestError, match="request id is in use: got 'a'"):
        engine.add_request("a", [2], GREEDY)
    while engine.has_work:
        engine.step()
    engine.add_request("a", [2], GREEDY)


def test_stop_ids_outside_the_vocabulary_and_strings_without_a_tokenizer_are_refused(
    path: Path,
) -> None:
    engine = make_engine(path)
    with pytest.raises(RequestError, match=f"stop token id: got {SHAPE.vocab_size}"):
        engine.add_request("a", [2], SamplingParams(stop_token_ids=[SHAPE.vocab_size]))
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        engine.add_request("a", [2], SamplingParams(stop="end"))
    assert_all_given_back(engine)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"num_kv_blocks": 3, "max_model_len": 49}, "num_kv_blocks"),
        ({"num_kv_blocks": None, "kv_cache_memory_gib": 1e-9}, "kv_cache_memory_gib"),
        (
            {"num_kv_blocks": None, "kv_cache_memory_gib": 1e-5, "max_model_len": 1000},
            "kv_cache_memory_gib",
        ),
    ],
    ids=["blocks", "no block at all", "memory"],
)
def test_memory_for_less_than_one_sequence_is_an_error_that_says_what_to_raise(
    path: Path, options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(CapacityError, match=f"less than one sequence.*raise {remedy}"):
        make_engine(path, **options)


def test_a_longer_max_model_len_than_the_checkpoints_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len: got 1025; allowed: at most 1024"):
        make_engine(path, max_model_len=1025)


def test_a_target_without_a_head_cannot_host_mtp(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(ConfigError, match="qwen3_5 cannot host speculative method mtp"):
        make_engine(copy, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="device: got 'cuda'"):
        Engine(EngineConfig(str(path), device="cuda"))


def test_dummy_weights_run_with_speculation(path: Path) -> None:
    config = EngineConfig(
        str(path),
        load_format="dummy",
        device="cpu",
        max_model_len=64,
        speculative_config=SpeculativeConfig("mtp"),
    )
    [output] = run_requests(Engine(config), [[2, 3, 4]], GREEDY)
    assert len(output.token_ids) == 8


@pytest.fixture(scope="module")
def folder(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a tokenizer beside it."""
    copy = tmp_path_factory.mktemp("llm") / "model"
    shutil.copytree(path, copy)
    words = {text_of([i]): i for i in range(SHAPE.vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[0]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(r"]", "merged_with_previous")
    backend.decoder = decoders.Fuse()
    backend.save(str(copy / "tokenizer.json"))
    return copy


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(
        str(folder), speculative_config=SpeculativeConfig("mtp"), max_model_len=64, device="cpu"
    )


def test_one_bad_request_in_a_batch_fails_alone(llm: LLM) -> None:
    good = text_of([5, 6, 7])
    prompts: list[Any] = [good, [], [2, 3], [SHAPE.vocab_size], 5, text_of([2] * 70), None]
    outputs = llm.generate(prompts, greedy())
    assert isinstance(outputs, list)
    errors = [output.error for output in outputs]
    assert [error is not None for error in errors] == [False, True, False, True, True, True, True]
    assert all(isinstance(error, RequestError) for error in errors if error)
    for output in outputs:
        if output.error:
            assert (output.finish_reason, output.text) == (FinishReason.ERROR, "")
    alone = llm.generate(good, greedy())
    assert isinstance(alone, RequestOutput)
    assert outputs[0].text == alone.text and outputs[0].token_ids == alone.token_ids
    assert outputs[2].finish_reason is LENGTH
    assert_all_given_back(llm.engine)


def test_a_single_bad_prompt_raises(llm: LLM) -> None:
    for prompt in ([SHAPE.vocab_size], text_of([2] * 64)):
        with pytest.raises(RequestError):
            llm.generate(prompt, greedy())
    with pytest.raises(RequestError):
        llm.stream([], greedy())
    assert_all_given_back(llm.engine)


def test_calls_that_make_no_sense_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 for 2 prompts"):
        llm.generate(["[5]", "[6]"], [greedy()])
    with pytest.raises(RequestError, match="params: got"):
        llm.generate("[5]", [greedy()])
    with pytest.raises(RequestError, match="prompts"):
        llm.generate(7, greedy())  # type: ignore[call-overload]
    assert llm.generate([], greedy()) == []
    assert_all_given_back(llm.engine)


def test_prompts_may_be_text_or_ids_and_give_the_same(llm: LLM) -> None:
    by_text, by_ids = llm.generate(["[5][6]", [5, 6]], greedy())
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == text_of(by_text.token_ids)
    single = llm.generate([5, 6], greedy())
    assert isinstance(single, RequestOutput) and single.token_ids == by_ids.token_ids


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate(["[5]"] * 3, [greedy(max_tokens=n) for n in (1, 7, 3)])
    assert [len(output.token_ids) for output in outputs] == [1, 7, 3]


def test_a_stream_adds_up_to_the_text_and_closing_it_ends_the_request(llm: LLM) -> None:
    whole = llm.generate("[5][6]", greedy(max_tokens=12))
    parts = list(llm.stream("[5][6]", greedy(max_tokens=12)))
    assert "".join(part.new_text for part in parts) == whole.text
    assert parts[-1].finish_reason is LENGTH and all(not part.finished for part in parts[:-1])
    stream = llm.stream("[5][6]", greedy(max_tokens=12))
    next(stream)
    stream.close()
    assert_all_given_back(llm.engine)


def test_a_stream_that_is_closed_before_its_first_step_leaves_nothing_running(llm: LLM) -> None:
    stream = llm.stream("[5][6]", greedy())
    stream.close()  # type: ignore[attr-defined]
    assert_all_given_back(llm.engine)


def test_an_interrupt_leaves_nothing_running(llm: LLM) -> None:
    def interrupt(finished: int, total: int, num_tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["[5]", "[6]"], greedy(), progress=interrupt)
    assert_all_given_back(llm.engine)


def test_progress_counts_requests_and_tokens(llm: LLM) -> None:
    seen: list[tuple[int, int, int]] = []
    outputs = llm.generate(
        ["[5]", [], "[6]"], greedy(), progress=lambda *counts: seen.append(counts)
    )
    assert seen == sorted(seen)
    assert seen[-1] == (3, 3, sum(len(output.token_ids) for output in outputs))


def test_an_engine_that_cannot_be_built_says_which_part_is_wrong(
    folder: Path, tmp_path: Path
) -> None:
    def broken(name: str, change: Callable[[Path], object]) -> str:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        change(copy)
        return str(copy)

    def foreign(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"model_type": "gpt17"}))

    def truncate(copy: Path) -> None:
        data = (copy / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(data[: len(data) // 2])

    cases: list[tuple[str, type[OutriderError], str]] = [
        (str(tmp_path / "nowhere"), CheckpointError, "nowhere"),
        (broken("foreign", foreign), CheckpointError, "gpt17"),
        (broken("truncated", truncate), CheckpointError, "model.safetensors"),
        (
            broken("wordless", lambda copy: (copy / "tokenizer.json").unlink()),
            CheckpointError,
            "tokenizer.json is missing",
        ),
    ]
    for model, kind, named in cases:
        with pytest.raises(kind, match=named):
            LLM(model, device="cpu")
