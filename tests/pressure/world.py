"""Users, the engine's loop and a fake device around a real scheduler and cache.

A world is drawn from a seed: its memory, budgets, requests, aborts, failures, and how late results
come. It plays steps as Engine.step does and holds every plan against the contract; the device
checks what only it can see. Nothing here looks at how the scheduler or the cache do their work.
"""

from __future__ import annotations

import random
from collections import Counter, deque

from outrider.batch import Batch, FinishReason, Span, SpanResult
from outrider.cache.manager import CacheManager
from outrider.params import SamplingParams
from outrider.request import Request, Sequence, Status
from outrider.scheduler import Scheduler, SchedulerConfig
from tests.pools import is_idle
from tests.pressure.contract import (
    Flight,
    User,
    check_order,
    check_owners,
    check_reports,
    check_span,
    rank,
)
from tests.pressure.device import DeviceShape, FakeDevice, Violation, expect
from tests.pressure.shape import WorldShape
from tests.pressure.text import VOCAB_SIZE, Text

LONGEST_PROMPT = 70
MOST_TOKENS = 36
MOST_WAITING = 12


class World:
    """One run. Raises Violation, or whatever the code's own assertions raise."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shape = shape = WorldShape.draw(self.rng)
        longest = LONGEST_PROMPT + MOST_TOKENS
        num_blocks = -(-longest // shape.block_size) + shape.spare_blocks
        self.cache = CacheManager(
            num_blocks,
            shape.block_size,
            shape.num_slots,
            prefix_unit=shape.prefix_unit,
            num_checkpoints=shape.num_checkpoints if shape.prefix_unit else None,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                shape.max_prefill_tokens,
                shape.prefill_grid,
                shape.num_drafts,
                prefix_unit=shape.prefix_unit,
                checkpoint_interval=shape.checkpoint_interval,
            ),
            self.cache,
        )
        device = DeviceShape(
            num_blocks,
            shape.block_size,
            shape.prefill_grid,
            shape.num_drafts,
            shape.num_checkpoints is not None,
            shape.acceptance,
            shape.finds_less,
        )
        self.device = FakeDevice(device, self.rng)
        self.num_steps = 0
        self.events: Counter[str] = Counter()
        self._sequences: list[Sequence] = []  # by id, all that there ever were
        self._live: dict[int, User] = {}
        self._flights: deque[Flight] = deque()
        self._documents = [self._tokens(LONGEST_PROMPT) for _ in range(3)]
        self._steps_without_the_first = 0

    def run(self, num_steps: int) -> None:
        """Play so many steps with arrivals, then as many as it takes to serve everybody."""
        try:
            while self.num_steps < num_steps or self._live or self._flights:
                if self.num_steps < num_steps:
                    self._let_arrive()
                    self._abort_somebody()
                self._step()
                if self.num_steps % 16 == 0:
                    self.cache.check_integrity()
            self._check_end()
        except BaseException as error:
            error.add_note(f"step {self.num_steps} of {self.shape}")
            raise

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(VOCAB_SIZE) for _ in range(count))

    def _prompt(self) -> tuple[int, ...]:
        """Often the beginning of what others asked, and now and then a chat's next turn."""
        rng = self.rng
        if rng.random() < 0.2:
            return self._tokens(rng.randint(1, LONGEST_PROMPT))
        document = rng.choice(self._documents)
        begin = document[: rng.randint(1, LONGEST_PROMPT)]
        return (*begin, *self._tokens(rng.choice([0, 0, 1, 9])))[:LONGEST_PROMPT]

    def _let_arrive(self) -> None:
        while len(self._live) < MOST_WAITING and self.rng.random() < self.shape.arrival_rate:
            self._ask(self._request())

    def _request(self) -> Request:
        rng, prompt = self.rng, self._prompt()
        max_tokens = rng.choice([1, 2, rng.randint(1, MOST_TOKENS), MOST_TOKENS])
        options: dict[str, object] = {}
        if rng.random() < 0.2:
            options["speculation"] = False
        elif rng.random() < 0.3:
            options["max_draft_tokens"] = rng.choice([0, 1, 2, 9])
        if rng.random() < 0.1:
            options["prompt_logprobs"] = 0
        if self.shape.has_priorities:
            options["priority"] = rng.choice([-1, 0, 0, 5])
        if rng.random() < 0.05:
            options["structured_output"] = {"kind": "json_object"}
        return Request(
            request_id="",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, **options),  # type: ignore[arg-type]
            stop_token_ids=self._tokens(rng.choice([0, 0, 1])),
            length_limit=len(prompt) + max_tokens,
            seed=0,
        )

    def _ask(self, request: Request) -> None:
        number, limit = len(self._sequences), request.length_limit
        # Drafts may be proposed past the limit, where nobody will verify them.
        text = self.device.texts[number] = Text(
            request.prompt_token_ids, limit + self.shape.num_drafts + 1
        )
        answer = text.token_ids[len(request.prompt_token_ids) : limit]
        reason = FinishReason.LENGTH
        ends = [index for index, token in enumerate(answer) if token in request.stop_token_ids]
        if ends:
            answer, reason = answer[: ends[0] + 1], FinishReason.STOP
        if self.rng.random() < 0.2:  # a stop string, which the host alone sees
            end = self.rng.randint(1, MOST_TOKENS)
            if end < len(answer):
                answer, reason = answer[:end], FinishReason.STOP
        sequence = Sequence(number, request)
        self._sequences.append(sequence)
        self._live[number] = User(sequence, tuple(answer), reason)
        self.scheduler.add(sequence)

    def _abort_somebody(self) -> None:
        if not self._live or self.rng.random() >= self.shape.abort_rate:
            return
        user = self.rng.choice(list(self._live.values()))
        self.events["aborted"] += 1
        self._end(user)
        if self.rng.random() < 0.5:
            self._ask(user.sequence.request)

    def _end(self, user: User) -> None:
        self.scheduler.finish(user.sequence, FinishReason.ABORT)
        del self._live[user.sequence.sequence_id]

    def _step(self) -> None:
        self.num_steps += 1
        first = self._first()
        batch = self._plan()
        served = {span.sequence_id for span in batch.spans} if batch is not None else set[int]()
        if batch is not None and batch.spans:
            self._submit(batch)
            if len(self._flights) <= self.shape.look_ahead and self.rng.random() < 0.9:
                self._check_progress(first, served)
                return
        elif not self._flights:
            expect(not self.scheduler.has_work, "nothing is in flight, and nothing is planned")
        served |= self._collect_oldest()
        while self._flights and not self.scheduler.has_work:
            self._collect_oldest()
        self._check_progress(first, served)

    def _first(self) -> Sequence | None:
        """Who may not be kept waiting: the first of those that run, or else of those that wait."""
        sequences = [user.sequence for user in self._live.values()]
        running = [s for s in sequences if s.status is not Status.WAITING]
        return min(running or sequences, key=rank, default=None)

    def _plan(self) -> Batch | None:
        before = self._traces()
        sequences = [user.sequence for user in self._live.values()]
        was = {sequence.sequence_id: sequence.status for sequence in sequences}
        owed = [
            sequence
            for sequence in sequences
            if sequence.status is Status.DECODING
            and sequence.num_committed_at_least < sequence.request.length_limit
        ]
        batch = self.scheduler.plan()
        if batch is None:
            expect(bool(self._flights), "a plan is refused though everything is known")
            expect(self._traces() == before, "a refused plan leaves a trace")
            self.events["plan refused"] += 1
            return None
        ids = [span.sequence_id for span in batch.spans]
        expect(len(set(ids)) == len(ids), "a sequence runs twice in a batch")
        budget = self.shape.max_prefill_tokens
        self.events["preempted"] += check_order(batch, sequences, was, owed, budget)
        for span in batch.spans:
            table, drafts = self.cache.block_ids(span.sequence_id), self.device.drafts
            check_span(span, self._live[span.sequence_id], self.shape.num_drafts, table, drafts)
        batches = [*(flight.batch for flight in self._flights), batch]
        check_owners(batches, self._sequences, self.cache.block_size)
        return batch

    def _traces(self) -> object:
        """All that a plan may change."""
        cache, users = self.cache, self._live.values()
        return (
            cache.blocks.num_free,
            cache.slots.num_free,
            cache.checkpoints.num_free,
            self.scheduler.num_preemptions,
            [
                (
                    sequence.status,
                    sequence.slot,
                    sequence.num_submitted,
                    len(sequence.in_flight),
                    None if sequence.slot is None else cache.block_ids(sequence.sequence_id),
                )
                for sequence in (user.sequence for user in users)
            ],
        )

    def _submit(self, batch: Batch) -> None:
        for span in batch.spans:
            user = self._live[span.sequence_id]
            user.num_proposed = span.effects.num_drafts_next
            if span.effects.num_prompt_logprobs is not None:
                user.num_reported += span.num_rows
        flight = Flight(batch)
        if self._fails():  # nobody knows how far it got
            may_run = [flight] if self.rng.random() < 0.5 else []
            self._lose([*self._flights, *may_run])
            return
        if not self.shape.is_lazy:
            flight.results = self.device.run(batch)
        self._flights.append(flight)

    def _collect_oldest(self) -> set[int]:
        """Returns whose results came."""
        if not self._flights:
            return set()
        flight = self._flights.popleft()
        if self._fails():
            self._lose([flight, *self._flights])
            return {sequence.sequence_id for sequence in self._sequences}
        if flight.results is None:
            flight.results = self.device.run(flight.batch)
        for span, result in zip(flight.batch.spans, flight.results, strict=True):
            self._commit(span, result)
        return {span.sequence_id for span in flight.batch.spans}

    def _fails(self) -> bool:
        return self.rng.random() < self.shape.failure_rate

    def _lose(self, on_device: list[Flight]) -> None:
        """Everything in flight begins again, once the device is done with it."""
        self.events["batch lost"] += 1
        for flight in on_device:
            if flight.results is None:
                self.device.run(flight.batch)
        self.scheduler.restart()
        self._flights.clear()

    def _commit(self, span: Span, result: SpanResult) -> None:
        if self.scheduler.has_ended(span):
            expect(span.sequence_id not in self._live, "a sequence ended that nobody ended")
            self.events["ended in flight"] += 1
            self.scheduler.discard(span)
            return
        expect(span.sequence_id in self._live, "a sequence left before its last result")
        user = self._live[span.sequence_id]
        sequence, expected = user.sequence, user.expected
        token_ids = result.token_ids[: len(expected) - len(user.received)]
        user.received.extend(token_ids)
        num_received = len(user.received)
        right = tuple(user.received) == expected[:num_received]
        expect(right, "a text is not that of plain decoding")
        is_done = num_received == len(expected)
        reason = user.expected_reason if is_done else None
        if len(token_ids) == len(result.token_ids):  # else the host ends it before the device does
            expect(
                result.finish_reason in (None, reason), "the device ends a text at another place"
            )
        self.scheduler.commit(span, result, token_ids, reason)
        self.events["state kept in a round"] += result.checkpoint_kept
        if not sequence.in_flight:
            user.num_proposed = len(result.proposed_token_ids)
        expect(sequence.output_token_ids == user.received, "the scheduler keeps another text")
        if is_done:
            expect(sequence.finish_reason is reason, "a sequence ends for another reason")
            check_reports(user)
            del self._live[span.sequence_id]
            self.events["finished"] += 1
            self.events["tokens from the prefix cache"] += sequence.num_cached
            if self.rng.random() < 0.2:  # the chat goes on
                turn = (*sequence.committed(0, sequence.num_committed), *self._tokens(2))
                self._documents[self.rng.randrange(3)] = turn[:LONGEST_PROMPT]

    def _check_progress(self, first: Sequence | None, served: set[int]) -> None:
        """Who comes first waits for results at most: never for others."""
        if first is None or first.sequence_id in served or first.status is Status.FINISHED:
            self._steps_without_the_first = 0
            return
        self._steps_without_the_first += 1
        if self._steps_without_the_first > self.shape.look_ahead + 4:
            raise Violation("who comes first is not served")

    def _check_end(self) -> None:
        """Everything is back where it came from."""
        cache = self.cache
        expect(not self.scheduler.has_work, "the scheduler has work that nobody asked for")
        expect(not self.scheduler.is_in_flight, "the scheduler waits for results of nothing")
        expect(is_idle(cache), "somebody holds memory when all have left")
        cache.check_integrity()
        expect(cache.num_available == cache.blocks.size, "a block is lost")
        cache.clear()
        cache.check_integrity()
        for pool in (cache.blocks, cache.slots, cache.checkpoints):
            expect(pool.num_free == pool.size, f"a {pool.name} is lost")
