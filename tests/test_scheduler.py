"""What the scheduler plans, on plain values: no model, no tensors."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from outrider.batch import Batch, FinishReason, Span, SpanResult
from outrider.cache.manager import CacheManager
from outrider.params import SamplingParams
from outrider.request import Request, Sequence, Status
from outrider.scheduler import Scheduler, SchedulerConfig
from outrider.spec.policy import num_drafts_to_propose, num_drafts_to_verify
from tests.pools import is_idle

TOKEN = 7


class Bench:
    """A scheduler, and a stand-in for the runner that emits TOKEN and accepts what it is told."""

    def __init__(
        self,
        num_drafts: int = 0,
        *,
        num_blocks: int = 100,
        block_size: int = 16,
        num_slots: int = 8,
        budget: int = 64,
        grid: int = 16,
    ) -> None:
        self.cache = CacheManager(num_blocks, block_size, num_slots)
        self.scheduler = Scheduler(SchedulerConfig(budget, grid, num_drafts), self.cache)
        self.sequences: list[Sequence] = []

    def add(self, num_prompt: int, max_tokens: int = 20, **params: Any) -> Sequence:
        number = len(self.sequences)
        request = Request(
            request_id=str(number),
            prompt_token_ids=tuple(range(num_prompt)),
            params=SamplingParams(max_tokens=max_tokens, **params),
            stop_token_ids=(),
            length_limit=num_prompt + max_tokens,
            seed=0,
        )
        self.sequences.append(Sequence(number, request))
        self.scheduler.add(self.sequences[-1])
        return self.sequences[-1]

    def result(self, span: Span, num_accepted: int) -> SpanResult:
        """As the runner would answer: accepted drafts and one more, cut at the length limit."""
        if not span.effects.samples:
            return SpanResult(span.sequence_id)
        sequence = self.sequences[span.sequence_id]
        room = sequence.request.length_limit - sequence.num_committed
        tokens = (TOKEN,) * min(min(num_accepted, span.effects.num_drafts) + 1, room)
        reason = FinishReason.LENGTH if len(tokens) == room else None
        drafts = (TOKEN,) * span.effects.num_drafts
        proposed = (TOKEN,) * span.effects.num_drafts_next
        return SpanResult(span.sequence_id, tokens, reason, drafts, num_accepted, proposed)

    def step(self, num_accepted: int = 0) -> Batch:
        """Plan, check what must hold of any plan, answer and commit."""
        batch = self.scheduler.plan()
        self.check(batch)
        for span in batch.spans:
            result = self.result(span, num_accepted)
            self.scheduler.commit(span, result, result.token_ids, result.finish_reason)
        self.cache.check_integrity()
        return batch

    def check(self, batch: Batch) -> None:
        slots = [span.slot for span in batch.spans]
        assert len(set(slots)) == len(slots)
        owners: dict[int, int] = {}
        for span in batch.spans:
            sequence = self.sequences[span.sequence_id]
            # Section 2 of the design: target rows, then the draft chain beyond them.
            start = span.start if span.is_prefill else sequence.num_committed - 1
            ahead = max(span.effects.num_drafts_next - 1, 0)
            written = min(start + span.num_rows + ahead, sequence.request.length_limit)
            assert len(span.block_ids) * self.cache.block_size >= written
            assert span.block_ids == self.cache.block_ids(span.sequence_id)
            assert span.start <= start
            for block_id in span.block_ids:
                assert owners.setdefault(block_id, span.sequence_id) == span.sequence_id
            assert start + span.num_rows <= sequence.request.length_limit

    def run(self, num_accepted: int = 0, most: int = 10_000) -> list[Batch]:
        batches: list[Batch] = []
        while self.scheduler.has_work:
            batches.append(self.step(num_accepted))
            assert len(batches) < most, "does not come to an end"
        return batches


def ids(spans: tuple[Span, ...]) -> list[int]:
    return [span.sequence_id for span in spans]


def test_a_prompt_that_fits_the_budget_runs_in_one_span_that_samples() -> None:
    bench = Bench()
    sequence = bench.add(50)
    batch = bench.step()
    [span] = batch.prefill
    assert (span.start, span.num_rows, span.token_ids) == (0, 50, tuple(range(50)))
    assert span.effects.samples and span.next_token_id is None
    assert [setup.slot for setup in batch.setups] == [span.slot]
    assert batch.setups[0].num_committed == 50 and batch.setups[0].length_limit == 70
    assert sequence.status is Status.DECODING
    assert (sequence.num_committed, sequence.num_computed) == (51, 50)


def test_chunks_end_on_the_grid_until_the_prompt_ends() -> None:
    bench = Bench(budget=40, grid=16)
    bench.add(100)
    spans = [bench.step().prefill[0] for _ in range(3)]
    assert [(span.start, span.num_rows) for span in spans] == [(0, 32), (32, 32), (64, 36)]
    assert [span.effects.samples for span in spans] == [False, False, True]
    assert [span.next_token_id for span in spans] == [32, 64, None]


def test_only_the_first_chunk_sets_a_slot_up() -> None:
    bench = Bench(budget=16)
    bench.add(40)
    assert [len(bench.step().setups) for _ in range(3)] == [1, 0, 0]


def test_what_the_oldest_prompt_leaves_of_the_budget_goes_to_the_next() -> None:
    bench = Bench(budget=64, grid=16)
    for length in (20, 30, 40):
        bench.add(length)
    batch = bench.step()
    # 14 tokens are left for the third, less than a grid cell.
    assert [(s.sequence_id, s.num_rows) for s in batch.prefill] == [(0, 20), (1, 30)]
    assert ids(bench.step().prefill) == [2]


def test_the_first_prompt_that_cannot_be_had_holds_up_those_behind_it() -> None:
    bench = Bench(num_blocks=4, budget=200)
    bench.add(30)
    bench.add(60)  # needs 4 blocks, 2 are free
    bench.add(5)
    assert ids(bench.step().prefill) == [0]
    assert bench.cache.slots.num_free == 7


def test_no_more_sequences_run_than_there_are_slots() -> None:
    bench = Bench(num_slots=2)
    for _ in range(5):
        bench.add(3, max_tokens=4)
    batches = bench.run()
    assert max(len(batch.spans) for batch in batches) == 2
    assert [i for batch in batches for i in ids(batch.prefill)] == [0, 1, 2, 3, 4]


def test_the_prompt_budget_does_not_depend_on_how_many_decode() -> None:
    idle, busy = Bench(), Bench()
    for _ in range(5):
        busy.add(4)
    busy.step()
    for bench in (idle, busy):
        bench.add(100)
    assert idle.step().prefill[0].num_rows == busy.step().prefill[0].num_rows == 64


def test_a_prompt_of_30000_tokens_takes_its_budget_of_a_step_and_no_round_from_others() -> None:
    bench = Bench(num_drafts=3, num_blocks=3000, budget=512)
    short = bench.add(10, max_tokens=200)
    bench.step()
    bench.add(30_000, max_tokens=2)
    later = bench.add(20, max_tokens=2)
    num_steps = -(-30_000 // 512)
    for number in range(num_steps):
        batch = bench.step()
        assert ids(batch.rounds) == [0]
        assert sum(span.num_rows for span in batch.prefill) <= 512
        assert ids(batch.prefill)[0] == 1 and (number == num_steps - 1 or later.slot is None)
    assert short.num_committed == 11 + num_steps
    assert later.slot is not None  # it shared the last chunk's budget


def test_every_decoding_sequence_runs_in_every_step_oldest_first() -> None:
    bench = Bench()
    for _ in range(4):
        bench.add(3, max_tokens=6)
    bench.step()
    for _ in range(5):
        assert ids(bench.step().rounds) == [0, 1, 2, 3]
    assert not bench.scheduler.has_work


def test_a_round_has_a_row_for_the_newest_token_and_for_each_draft() -> None:
    bench = Bench(num_drafts=3)
    bench.add(10, max_tokens=50)
    [first] = bench.step().prefill
    assert (first.effects.num_drafts, first.effects.num_drafts_next) == (0, 3)
    [second] = bench.step(num_accepted=2).rounds
    assert (second.start, second.num_rows, second.effects.num_drafts) == (10, 4, 3)


def test_a_round_is_submitted_again_as_it_is_until_its_blocks_are_full() -> None:
    bench = Bench(num_drafts=3, block_size=16)
    bench.add(10, max_tokens=50)
    bench.step()
    # A text of n tokens writes 4 rows from n - 1 on, and the chain 2 positions behind them: n + 5
    # in all. That is 16 with the first 11 tokens, and 32 with 27.
    rounds = [bench.step().rounds[0] for _ in range(19)]  # a token each
    assert [len(span.block_ids) for span in rounds] == [1] + [2] * 16 + [3] * 2
    made = [index for index in range(1, 19) if rounds[index] is not rounds[index - 1]]
    assert made == [1, 17]


def test_a_round_is_made_anew_near_the_end_and_where_fewer_drafts_were_found() -> None:
    bench = Bench(num_drafts=3, block_size=64)
    sequence = bench.add(10, max_tokens=9)  # 19 tokens
    bench.step()
    rounds = [bench.step().rounds[0] for _ in range(8)]
    # From n tokens a round verifies at most 19 - n - 1 drafts, and wants at most 19 - n - 2.
    drafts = [(span.effects.num_drafts, span.effects.num_drafts_next) for span in rounds]
    assert drafts == [(3, 3)] * 4 + [(3, 2), (2, 1), (1, 0), (0, 0)]
    assert sequence.finish_reason is FinishReason.LENGTH

    bench.add(10, max_tokens=30)
    bench.step()
    [span] = bench.scheduler.plan().rounds
    result = replace(bench.result(span, 0), proposed_token_ids=(TOKEN,))
    bench.scheduler.commit(span, result, result.token_ids, None)
    [after] = bench.step().rounds
    assert (span.effects.num_drafts, after.effects.num_drafts) == (3, 1)


def test_wishes_for_drafts_are_obeyed_in_one_batch() -> None:
    bench = Bench(num_drafts=4)
    bench.add(5)
    bench.add(5, max_draft_tokens=2)
    bench.add(5, max_draft_tokens=0)
    bench.add(5, speculation=False)
    bench.add(5, max_draft_tokens=9)
    bench.step()
    rounds = bench.step().rounds
    assert [span.effects.num_drafts for span in rounds] == [4, 2, 0, 0, 4]
    assert [span.effects.num_drafts_next for span in rounds] == [4, 2, 0, 0, 4]
    assert [span.effects.feeds_draft for span in rounds] == [True, True, True, False, True]


def test_chunks_feed_the_draft_too_though_they_propose_nothing() -> None:
    bench = Bench(num_drafts=4, budget=16)
    bench.add(40)
    effects = [bench.step().prefill[0].effects for _ in range(3)]
    assert [effect.feeds_draft for effect in effects] == [True] * 3
    assert [effect.num_drafts_next for effect in effects] == [0, 0, 4]


@pytest.mark.parametrize("num_drafts", range(9))
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_draft_is_verified_past_the_end_and_the_text_ends_exactly_there(
    num_drafts: int, max_tokens: int
) -> None:
    for num_accepted in (0, 1, 8):
        bench = Bench(num_drafts=num_drafts)
        sequence = bench.add(5, max_tokens=max_tokens)
        while bench.scheduler.has_work:
            num_committed = sequence.num_committed
            for span in bench.step(num_accepted).rounds:
                # All drafts and the round's own token fit: none of them is wasted by the limit.
                assert num_committed + span.effects.num_drafts + 1 <= 5 + max_tokens
        assert sequence.num_committed == 5 + max_tokens
        assert sequence.finish_reason is FinishReason.LENGTH
        assert is_idle(bench.cache)


@pytest.mark.parametrize(
    ("num_proposed", "num_committed", "limit", "expected"),
    [(3, 10, 100, 3), (3, 10, 14, 3), (3, 10, 13, 2), (3, 10, 11, 0), (0, 10, 100, 0)],
)
def test_drafts_to_verify_leave_room_for_the_rounds_own_token(
    num_proposed: int, num_committed: int, limit: int, expected: int
) -> None:
    assert num_drafts_to_verify(num_proposed, num_committed, limit) == expected


@pytest.mark.parametrize(
    ("wanted", "num_committed", "limit", "expected"),
    [(3, 10, 100, 3), (3, 10, 15, 3), (3, 10, 14, 2), (3, 10, 12, 0), (3, 10, 11, 0)],
)
def test_drafts_to_propose_leave_room_for_two_more_tokens(
    wanted: int, num_committed: int, limit: int, expected: int
) -> None:
    assert num_drafts_to_propose(wanted, num_committed, limit) == expected


def test_a_stop_string_commits_fewer_tokens_than_the_device_did() -> None:
    bench = Bench(num_drafts=3)
    sequence = bench.add(10)
    bench.step()
    [span] = bench.scheduler.plan().rounds
    result = bench.result(span, 3)
    assert len(result.token_ids) == 4
    bench.scheduler.commit(span, result, result.token_ids[:2], FinishReason.STOP)
    assert sequence.output_token_ids == [TOKEN] * 3
    assert sequence.status is Status.FINISHED and sequence.finish_reason is FinishReason.STOP
    assert is_idle(bench.cache) and not bench.scheduler.has_work


def test_computed_positions_follow_the_chunks_and_then_stay_one_behind() -> None:
    bench = Bench(num_drafts=2, budget=16)
    sequence = bench.add(40)
    seen: list[tuple[int, int]] = []
    for _ in range(5):
        bench.step(num_accepted=1)
        seen.append((sequence.num_computed, sequence.num_committed))
    assert seen == [(16, 40), (32, 40), (40, 41), (42, 43), (44, 45)]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_sequence_may_be_ended_while_it_waits_prefills_or_decodes(num_steps: int) -> None:
    bench = Bench(budget=16, num_slots=1)
    first, second = bench.add(40), bench.add(3)
    for _ in range(num_steps):
        bench.step()
    bench.scheduler.finish(first, FinishReason.ABORT)
    assert first.finish_reason is FinishReason.ABORT and first.slot is None
    assert is_idle(bench.cache)
    assert ids(bench.step().prefill) == [second.sequence_id]


def test_the_youngest_running_sequence_gives_way() -> None:
    bench = Bench(num_blocks=3, budget=100)
    old, young = bench.add(16), bench.add(16)
    bench.step()  # each holds one full block, and its next token needs a second
    assert bench.cache.blocks.num_free == 1
    batch = bench.step()
    assert ids(batch.rounds) == [0] and not batch.prefill
    assert young.status is Status.WAITING and young.slot is None
    assert (young.num_computed, young.proposed_token_ids) == (0, ())
    assert old.status is Status.DECODING
    assert bench.scheduler.num_preemptions == 1


def test_a_preempted_sequence_comes_back_at_its_place_with_all_its_tokens_as_its_prompt() -> None:
    bench = Bench(num_blocks=3, budget=100)
    bench.add(16, max_tokens=4)
    young = bench.add(16)
    batches = [bench.step(), bench.step()]
    assert bench.scheduler.num_preemptions == 1
    bench.add(2, max_tokens=2)  # would fit, but waits behind the one that lost its place
    batches += bench.run()
    again = [s for batch in batches for s in batch.prefill if s.sequence_id == 1]
    assert [span.num_rows for span in again] == [16, 17]
    assert again[1].token_ids == (*range(16), TOKEN) and again[1].start == 0
    order = [i for batch in batches for i in ids(batch.prefill)]
    assert order == [0, 1, 1, 2]
    assert young.num_committed == 36


def test_nobody_is_let_in_during_the_step_that_preempts() -> None:
    bench = Bench(num_blocks=3, budget=100)
    bench.add(16)
    bench.add(16)
    bench.step()
    bench.add(1)
    batch = bench.step()
    assert bench.scheduler.num_preemptions == 1 and not batch.prefill


def test_an_older_sequence_is_never_preempted_for_a_younger_one() -> None:
    rng = random.Random(1)
    bench = Bench(num_drafts=3, num_blocks=9, num_slots=4, budget=64)
    for _ in range(12):
        bench.add(rng.randint(1, 60), max_tokens=rng.randint(1, 60))
    while bench.scheduler.has_work:
        was_running = [s for s in bench.sequences if s.status is Status.DECODING]
        batch = bench.step(rng.randint(0, 3))
        lost = [s.sequence_id for s in was_running if s.status is Status.WAITING]
        if lost:
            assert max(ids(batch.rounds), default=-1) < min(lost)
    assert bench.scheduler.num_preemptions > 3


@pytest.mark.parametrize("seed", range(12))
def test_every_sequence_comes_to_its_end_in_any_memory_that_holds_the_longest(seed: int) -> None:
    rng = random.Random(seed)
    wishes = [(rng.randint(1, 90), rng.randint(1, 40)) for _ in range(25)]
    needed = max(-(-(prompt + most) // 16) for prompt, most in wishes)
    bench = Bench(
        num_drafts=rng.choice([0, 1, 8]),
        num_blocks=needed + rng.choice([0, 0, 1, 5]),
        num_slots=rng.randint(1, 6),
        budget=rng.choice([16, 40, 200]),
    )
    for prompt, most in wishes:
        bench.add(prompt, most, max_draft_tokens=rng.choice([None, 0, 2]))
        if rng.random() < 0.5:
            bench.step(rng.randint(0, 8))
    bench.run(num_accepted=rng.randint(0, 8))
    for sequence, (prompt, most) in zip(bench.sequences, wishes, strict=True):
        assert sequence.num_committed == prompt + most
        assert sequence.finish_reason is FinishReason.LENGTH
    assert is_idle(bench.cache)
    bench.cache.check_integrity()


def test_a_greedy_request_is_set_up_with_temperature_zero() -> None:
    bench = Bench()
    bench.add(3, temperature=1e-6)
    bench.add(3, temperature=0.5, top_k=5, top_p=0.5, min_p=0.1)
    first, second = bench.step().setups
    assert first.temperature == 0.0
    assert (second.temperature, second.top_k, second.top_p, second.min_p) == (0.5, 5, 0.5, 0.1)


def test_a_batch_is_a_plain_value() -> None:
    import pickle

    bench = Bench(num_drafts=2)
    bench.add(20)
    batch = bench.step()
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert replace(batch.prefill[0], start=1) != batch.prefill[0]
