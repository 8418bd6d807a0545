"""What the engine does when somebody matters more, when it drains, and when something is stuck."""

from __future__ import annotations

from operator import attrgetter

import pytest

from outrider.engine import Engine
from outrider.errors import CapacityError, DrainingError, EngineFaultError, StuckRoundError
from outrider.output import OutputBuilder, RequestOutput
from outrider.params import SamplingParams
from outrider.runner.rounds import Submission
from outrider.tokenizer import Tokenizer
from tests.harness import Received, make_engine, random_tokens, run_requests, tokens_of
from tests.pools import is_idle
from tests.trained import trained_folder, trained_pair

PROMPTS = [random_tokens(20, 4096, seed) for seed in range(4)]


TOKENIZER = Tokenizer.from_pretrained(trained_folder("tiny-qwen3.5"))


def engine_for(num_drafts: int = 3, **options: object) -> Engine:
    model = trained_folder("tiny-qwen3.5")
    return make_engine(model, num_drafts, tokenizer=TOKENIZER, dtype="float32", **options)


def wish(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **options})  # type: ignore[arg-type]


def run_out(engine: Engine) -> dict[str, RequestOutput]:
    outputs = Received()
    for _ in range(500):
        outputs.take(engine.step())
        if not engine.has_work:
            return outputs
    raise AssertionError("does not come to an end")


def test_larger_priorities_are_admitted_first_and_equal_ones_in_their_order() -> None:
    engine = engine_for(max_num_seqs=1)
    finished: list[str] = []
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)):
        engine.add_request(name, PROMPTS[0], wish(priority=priority))
    while engine.has_work:
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == ["b", "d", "a", "c", "e"]


def test_memory_is_taken_from_the_smallest_priority_and_then_from_the_youngest() -> None:
    expected = tokens_of(run_requests(engine_for(), PROMPTS, wish(max_tokens=60)))
    engine = engine_for(num_kv_blocks=13, max_model_len=100, max_num_seqs=4)
    gave_way: list[str] = []
    preempt = engine.scheduler._preempt

    def watched(sequence: object) -> None:
        gave_way.append(sequence.request.request_id)  # type: ignore[attr-defined]
        preempt(sequence)  # type: ignore[arg-type]

    engine.scheduler._preempt = watched  # type: ignore[method-assign, assignment]
    for index, priority in enumerate((0, 3, 0, 3)):
        engine.add_request(str(index), PROMPTS[index], wish(priority=priority, max_tokens=60))
    outputs = run_out(engine)
    assert [outputs[str(index)].token_ids for index in range(4)] == expected
    assert gave_way and gave_way[0] == "2" and "1" not in gave_way


def test_draining_finishes_what_runs_and_refuses_what_is_new() -> None:
    engine = engine_for(look_ahead=1)
    for index in range(3):
        engine.add_request(str(index), PROMPTS[index], wish())
    engine.step()
    outputs = engine.drain()
    assert sorted(output.request_id for output in outputs) == ["0", "1", "2"]
    assert all(len(output.token_ids) == 12 for output in outputs)
    assert is_idle(engine.cache) and not engine.has_work
    with pytest.raises(DrainingError, match="draining"):
        engine.add_request("late", PROMPTS[3], wish())
    engine.resume()
    engine.add_request("late", PROMPTS[3], wish())
    assert run_out(engine)["late"].finished


def test_who_can_never_be_admitted_fails_with_numbers_and_the_others_go_on() -> None:
    engine = engine_for(max_num_seqs=2)
    expected = tokens_of(run_requests(engine, [PROMPTS[1]], wish()))
    admit = engine.cache.admit

    def never_the_first(sequence_id: int, *others: object) -> int | None:
        return None if sequence_id == 1 else admit(sequence_id, *others)  # type: ignore[arg-type]

    engine.cache.admit = never_the_first  # type: ignore[method-assign, assignment]
    engine.add_request("stuck", PROMPTS[0], wish())
    engine.add_request("fine", PROMPTS[1], wish())
    outputs = run_out(engine)
    error = outputs["stuck"].error
    assert isinstance(error, CapacityError)
    assert "20 tokens, 2 blocks" in str(error) and "200 of 200 blocks" in str(error)
    assert outputs["fine"].token_ids == expected[0] and outputs["fine"].error is None
    assert is_idle(engine.cache)


def test_a_round_that_never_returns_fails_everybody_with_a_report() -> None:
    engine = engine_for(look_ahead=1)
    for index in range(3):
        engine.add_request(str(index), PROMPTS[index], wish())
    for _ in range(3):
        engine.step()
    collect = engine.runner.collect

    def stuck(submission: Submission) -> object:
        raise StuckRoundError("the results of a round did not come")

    engine.runner.collect = stuck  # type: ignore[method-assign, assignment]
    outputs = {output.request_id: output for output in engine.step()}
    assert sorted(outputs) == ["0", "1", "2"]
    for output in outputs.values():
        assert isinstance(output.error, StuckRoundError) and output.finished
        assert "1: decoding, slot" in str(output.error)
    assert is_idle(engine.cache) and not engine.has_work
    engine.cache.check_integrity()
    engine.runner.collect = collect  # type: ignore[method-assign]
    engine.add_request("after", PROMPTS[0], wish())
    assert run_out(engine)["after"].error is None


def test_a_refused_plan_leaves_no_trace_in_the_pools() -> None:
    engine = engine_for(num_kv_blocks=9, max_model_len=100, max_num_seqs=4, look_ahead=1)
    for index in range(4):
        engine.add_request(str(index), PROMPTS[index], wish(max_tokens=50))
    refused = 0
    for _ in range(400):
        held = {i: engine.cache.block_ids(i) for i in engine.cache._holdings}
        free = engine.cache.blocks.num_free
        plan = engine.scheduler.plan
        batch = plan()
        if batch is None:
            refused += 1
            assert engine.cache.blocks.num_free == free
            assert held == {i: engine.cache.block_ids(i) for i in engine.cache._holdings}
        engine.scheduler.plan = lambda batch=batch: batch  # type: ignore[method-assign, misc]
        engine.step()
        engine.scheduler.plan = plan  # type: ignore[method-assign]
        if not engine.has_work:
            break
    assert refused > 0 and is_idle(engine.cache)


def test_a_long_prompt_does_not_hold_up_the_rounds_of_others() -> None:
    engine = engine_for(max_model_len=3000, num_kv_blocks=400, max_prefill_tokens=128)
    engine.add_request("short", PROMPTS[0], wish(max_tokens=60))
    while not engine.step():
        pass
    engine.add_request("long", random_tokens(2500, 4096, 9), wish(max_tokens=2))
    for _ in range(15):  # a chunk of the long prompt and a round of the short one in every step
        [output] = engine.step()
        assert output.request_id == "short"
        if output.finished:
            break
    assert len(output.token_ids) > 15


def engine_of(method: str, **options: object) -> Engine:
    if method == "eagle3":
        target, draft = trained_pair()
        return make_engine(target, 3, method=method, draft=draft, dtype="float32", **options)
    num_drafts = 0 if method == "plain" else 3
    model = trained_folder("tiny-qwen3.5")
    return make_engine(model, num_drafts, method=method, dtype="float32", **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("method", ["plain", "mtp", "eagle3", "ngram"])
def test_giving_way_after_any_round_changes_no_text(
    method: str, prefix_cache: bool, temperature: float
) -> None:
    params = wish(temperature=temperature, seed=3, draft_sampling="coupled", max_tokens=14)
    options: dict[str, object] = {"enable_prefix_caching": prefix_cache, "prefill_grid": 16}
    if prefix_cache and method != "eagle3":  # whose target keeps no recurrent state
        options["checkpoint_interval"] = 16
    [expected] = tokens_of(run_requests(engine_of(method, **options), PROMPTS[:1], params))
    for gives_way_after in range(1, 16):
        engine = engine_of(method, **options)
        engine.add_request("0", PROMPTS[0], params)
        outputs = Received()
        for step in range(60):
            outputs.take(engine.step())
            if not engine.has_work:
                break
            if step + 1 == gives_way_after:
                engine.scheduler._preempt(engine.scheduler.sequence(0))
        assert outputs["0"].token_ids == expected, gives_way_after
        if engine.scheduler.num_preemptions == 0:
            break
    assert gives_way_after > 3 and is_idle(engine.cache)


@pytest.mark.parametrize("where", ["submit", "collect"])
@pytest.mark.parametrize("look_ahead", [0, 1, 2])
@pytest.mark.parametrize("after", [1, 2, 4, 9])
def test_a_step_that_fails_once_changes_no_text(where: str, look_ahead: int, after: int) -> None:
    """Prompt chunks, the ends of prompts, rounds: whatever was lost is computed again."""
    prompts = [random_tokens(43, 4096, 7), *PROMPTS[:2]]
    options = {"max_prefill_tokens": 64, "look_ahead": look_ahead}
    expected = tokens_of(run_requests(engine_for(**options), prompts, wish(max_tokens=40)))
    engine = engine_for(**options)
    original, calls = getattr(engine.runner, where), 0

    def failing(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == after:
            raise RuntimeError("once")
        return original(*args)

    setattr(engine.runner, where, failing)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, wish(max_tokens=40))
    outputs = Received()
    failures = 0
    for _ in range(200):
        try:
            outputs.take(engine.step())
        except RuntimeError:
            failures += 1
        if not engine.has_work:
            break
    assert failures == 1
    assert [outputs[str(index)].token_ids for index in range(3)] == expected
    assert is_idle(engine.cache)
    engine.cache.check_integrity()


@pytest.mark.parametrize("look_ahead", [0, 1])
@pytest.mark.parametrize(
    "site",
    [
        ("scheduler", "_admit"),
        ("scheduler.rules", "chunk"),
        ("scheduler", "commit"),
        ("scheduler", "_fill"),
        ("cache", "publish"),
        ("cache", "take_checkpoint"),
        ("cache", "keep_checkpoint"),
        ("cache", "reserve"),
        ("runner", "submit"),
        ("runner", "collect"),
        ("builder", "_take"),
        ("builder", "_show"),
    ],
    ids=".".join,
)
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_anywhere_in_a_step_changes_no_text_and_leaks_nothing(
    site: tuple[str, str], late: bool, look_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_tokens(43, 4096, 7), *PROMPTS[:2]]
    options = {
        "max_prefill_tokens": 32,
        "look_ahead": look_ahead,
        "enable_prefix_caching": True,
        "prefill_grid": 16,
        "checkpoint_interval": 16,
    }
    expected = tokens_of(run_requests(engine_for(**options), prompts, wish(max_tokens=30)))
    engine = engine_for(**options)
    part = OutputBuilder if site[0] == "builder" else attrgetter(site[0])(engine)
    original, calls = getattr(part, site[1]), 0

    def interrupted(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3 and not late:
            raise KeyboardInterrupt
        result = original(*args)
        if calls == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(part, site[1], interrupted)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, wish(max_tokens=30))
    outputs = Received()
    interrupts = 0
    for _ in range(300):
        try:
            outputs.take(engine.step())
        except KeyboardInterrupt:
            interrupts += 1
        if not engine.has_work:
            break
    assert interrupts == 1 and sorted(outputs) == ["0", "1", "2"]
    for index, text in enumerate(expected):
        output = outputs[str(index)]
        # Tokens that were half taken in end their request, and no other, with an error.
        assert output.token_ids == text or isinstance(output.error, EngineFaultError)
        assert output.error is not None or output.text == TOKENIZER.decode(text)
    num_failed = sum(output.error is not None for output in outputs.values())
    assert num_failed == 1 if site[0] == "builder" else num_failed <= 1
    engine.cache.check_integrity()
    engine.cache.clear()
    for pool in (engine.cache.blocks, engine.cache.slots, engine.cache.checkpoints):
        assert pool.num_free == pool.size


def test_a_text_that_cannot_be_handled_fails_alone() -> None:
    expected = tokens_of(run_requests(engine_for(), PROMPTS[:3], wish()))
    engine = engine_for(look_ahead=1)
    for index in range(3):
        engine.add_request(str(index), PROMPTS[index], wish())
    builder = engine._live["1"].outputs[0].builder
    add, calls = builder.add, 0

    def broken(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise UnicodeError("no such character")
        return add(*args)  # type: ignore[arg-type]

    builder.add = broken  # type: ignore[method-assign, assignment]
    outputs = run_out(engine)
    assert isinstance(outputs["1"].error, EngineFaultError)
    assert "no such character" in str(outputs["1"].error)
    assert [outputs[i].token_ids for i in ("0", "2")] == [expected[0], expected[2]]
    assert is_idle(engine.cache)


def test_a_shared_beginning_is_found_by_the_third_who_has_it() -> None:
    """The first computes it, the second parts from it and keeps the state, the third goes on."""
    beginning = random_tokens(100, 4096, 1)
    prompts = [[*beginning, *random_tokens(40, 4096, seed)] for seed in range(2, 6)]
    engine = engine_for(enable_prefix_caching=True, prefill_grid=16, max_model_len=300)
    cached = [run_requests(engine, [prompt], wish())[0].num_cached_tokens for prompt in prompts]
    assert cached == [0, 0, 96, 96]
