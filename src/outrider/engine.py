"""The loop: plan, run, commit, emit. Requests in, outputs out, one step at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as SequenceABC
from threading import Lock

from outrider.batch import Batch, FinishReason
from outrider.checks import check_text
from outrider.config import EngineConfig
from outrider.engine_failures import (
    MOST_TRIES,
    AloneWatch,
    cannot_be_admitted,
    cannot_be_reported,
    half_taken_in,
    ran_out_alone,
)
from outrider.engine_setup import (
    admission_rules,
    build_cache,
    build_runner,
    compile_linears,
    plan_engine_memory,
    refuse_variant_shapes,
    set_threads,
)
from outrider.errors import DrainingError, OutriderError, RequestError, StuckRoundError
from outrider.live import LiveOutput, LiveRequest
from outrider.models.build import Checkpoint, load_target
from outrider.models.config import ModelConfig
from outrider.models.files import resolve_checkpoint
from outrider.one_caller import one_caller
from outrider.ops.dispatch import overrides
from outrider.output import OutputBuilder, RequestOutput
from outrider.params import SamplingParams
from outrider.request import Sequence, Status
from outrider.runner.memory import ran_out_of_memory
from outrider.runner.rounds import Masks, Submission
from outrider.scheduler import Scheduler, SchedulerConfig
from outrider.spec.registry import build_drafter
from outrider.structured import GrammarCompiler, GrammarMatcher
from outrider.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests together. One thread calls it: what comes in between is refused."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        """Load the model and allocate its caches.

        Raises:
            CheckpointError: the checkpoint cannot be read or does not fit its configuration.
            ConfigError: the options do not fit each other or the checkpoint.
            CapacityError: the memory budget holds less than one sequence.
        """
        self.config = config
        self.call_lock = Lock()
        checkpoint = Checkpoint.open(resolve_checkpoint(config.model, config.revision), config)
        self.model_config: ModelConfig = checkpoint.config
        target = load_target(checkpoint)
        spec = config.speculative_config
        drafter = None if spec is None else build_drafter(checkpoint, target, spec)
        checkpoint.close()
        if config.deterministic:
            refuse_variant_shapes(checkpoint.device, target, drafter)
        for override in overrides():
            logger.warning(
                "%s is set, for debugging: kernels and bits are not the usual ones", override
            )
        if checkpoint.device.type == "cpu" or config.num_threads is not None:
            set_threads(config.num_threads, sum(p.numel() for p in target.parameters()))

        compile_linears(config, target, drafter)
        plan = plan_engine_memory(config, checkpoint, target, drafter)
        for line in plan.lines():
            logger.info("%s", line)
        self.max_model_len = plan.max_model_len
        self.runner = build_runner(config, checkpoint, target, drafter, plan)
        self.cache = build_cache(config, plan)
        unit = config.prefix_unit or 1
        self.scheduler = Scheduler(
            SchedulerConfig(
                config.max_prefill_tokens,
                config.prefill_grid,
                config.num_speculative_tokens,
                config.prefix_unit,
                -(-config.checkpoint_interval // unit) * unit,
            ),
            self.cache,
        )
        self._admission = admission_rules(config, checkpoint, drafter, tokenizer, plan)
        self._grammars = None
        if tokenizer is not None:
            eos = self.model_config.eos_token_ids
            self._grammars = GrammarCompiler(tokenizer, self.model_config.vocab_size, eos)
        self._live: dict[str, LiveRequest] = {}
        self._by_sequence: dict[int, LiveOutput] = {}
        self._num_sequences = 0
        self._in_flight: deque[Submission] = deque()
        self._draining = False
        self._unreported: dict[str, LiveRequest] = {}
        self._alone = AloneWatch()
        self._num_failed_steps = 0  # in a row
        self._look_ahead = 0 if checkpoint.device.type == "cpu" else 1
        if config.look_ahead is not None:
            self._look_ahead = config.look_ahead

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight or self._unreported)

    @one_caller
    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that gained tokens or ended.

        With look-ahead a step submits one batch and takes in the results of an earlier one, so that
        the device always has something to do while the host works. A step that fails or is
        interrupted loses nothing but time: what it left unfinished is computed again, and what it
        did not report is reported by a later step. Only a text whose tokens were half taken in
        fails, alone. A step that runs out of memory is tried again with fewer requests, down to a
        single one, which fails.

        Raises:
            ConcurrentCallError: another call is inside, as with `add_request` and `abort`.
        """
        try:
            outputs = self._step()
        except BaseException as error:
            is_memory = ran_out_of_memory(error)
            alone = self.scheduler.run_fewer() if is_memory else None
            num_computed = 0 if alone is None else alone.num_computed
            self._recover()
            self._num_failed_steps += 1
            is_stuck = not self.scheduler.has_work and self._num_failed_steps >= MOST_TRIES
            if not is_memory or is_stuck:
                raise
            logger.warning("a step ran out of memory and is tried again (%s)", error)
            if alone is not None and alone.status is not Status.FINISHED:
                self._memory_ran_out_for(alone, num_computed, error)
            return []
        self._num_failed_steps = 0
        return outputs

    def _step(self) -> list[RequestOutput]:
        batch = self.scheduler.plan()
        changed = self._unreported
        if batch is not None and batch.spans:
            self._submit(batch)
            if len(self._in_flight) <= self._look_ahead:
                return self._emit(changed)
        elif not self._in_flight:
            self._fail_head(changed)
        self._commit_oldest(changed)
        while self._in_flight and not self.scheduler.has_work:  # nobody is left to plan for
            self._commit_oldest(changed)
        return self._emit(changed)

    def _fail_head(self, changed: dict[str, LiveRequest]) -> None:
        """Nothing runs and nothing can be admitted: whoever is next would wait for ever."""
        head = self.scheduler.head
        if head is not None:
            live = self._by_sequence[head.sequence_id].request
            self._fail(live, cannot_be_admitted(head, self.cache), changed)

    def _memory_ran_out_for(
        self, sequence: Sequence, num_computed: int, error: BaseException
    ) -> None:
        """It had the engine to itself, and had got as far as num_computed."""
        if self._alone.ran_out_again(sequence.sequence_id, num_computed):
            live = self._by_sequence[sequence.sequence_id].request
            self._fail(live, ran_out_alone(sequence, self.cache, error), self._unreported)

    def _fail(
        self, live: LiveRequest, error: OutriderError, changed: dict[str, LiveRequest]
    ) -> None:
        """End a request with an error; it is reported by the next `_emit`."""
        live.error = error
        for output in live.outputs:
            if output.sequence.status is not Status.FINISHED:
                self.scheduler.finish(output.sequence, FinishReason.ERROR)
            output.builder.finish_reason = output.builder.finish_reason or FinishReason.ERROR
        changed[live.request_id] = live

    def drain(self) -> list[RequestOutput]:
        """Finish everything that was asked for and take nothing new, until `resume`.

        Returns:
            The last output of every request.
        """
        self._draining = True
        outputs: list[RequestOutput] = []
        while self.has_work:
            outputs += [output for output in self.step() if output.finished]
        return outputs

    def resume(self) -> None:
        """Take requests again after `drain`."""
        self._draining = False

    def _submit(self, batch: Batch) -> None:
        submission = self.runner.submit(batch, self._masks(batch))
        self._in_flight.append(submission)

    def _commit_oldest(self, changed: dict[str, LiveRequest]) -> None:
        """Take in the results of the oldest batch in flight."""
        if not self._in_flight:
            return
        submission = self._in_flight[0]
        try:
            results = self.runner.collect(submission)
        except StuckRoundError as error:
            self._give_up(error, changed)
            return
        self._in_flight.popleft()
        for span, result in zip(submission.batch.spans, results, strict=True):
            if self.scheduler.has_ended(span):
                self.scheduler.discard(span)
                continue
            output = self._by_sequence[span.sequence_id]
            try:
                token_ids = output.builder.add(result, span.start)
                if output.matcher is not None:
                    output.matcher.advance(token_ids)
            except Exception as error:  # one text that cannot be handled is not the others' fault
                logger.exception("request %s failed", output.request.request_id)
                self._fail(output.request, half_taken_in(output.sequence, error), changed)
                self.scheduler.discard(span)
                continue
            self.scheduler.commit(span, result, token_ids, output.builder.finish_reason)
            self._alone.committed(span, output.sequence.num_computed)
            if token_ids:
                changed[output.request.request_id] = output.request

    def _recover(self) -> None:
        """After a failure: wait for the device, and begin again from the texts on the host."""
        for submission in self._in_flight:
            try:
                self.runner.wait(submission)
            except StuckRoundError as error:
                logger.error("%s", error)
        self._in_flight.clear()
        self.scheduler.restart()
        for live in list(self._live.values()):
            for output in live.outputs:
                sequence, reason = output.sequence, output.builder.finish_reason
                if live.error is None and output.is_half_taken_in:
                    self._fail(live, half_taken_in(sequence), self._unreported)
                    break
                if reason is not None and sequence.status is not Status.FINISHED:
                    self.scheduler.finish(sequence, reason)
            if all(output.builder.finish_reason is not None for output in live.outputs):
                self._unreported[live.request_id] = live

    def _give_up(self, error: StuckRoundError, changed: dict[str, LiveRequest]) -> None:
        """Results did not come: fail everybody instead of waiting, and say how things stood."""
        report = StuckRoundError(
            f"{error}; sequences: {'; '.join(self.scheduler.describe())}",
            hint="the device does not answer; start the engine anew",
        )
        logger.error("%s", report)
        self._in_flight.clear()
        self.scheduler.restart()
        for live in list(self._live.values()):
            self._fail(live, report, changed)

    def check_request(self, prompt_token_ids: SequenceABC[int], params: SamplingParams) -> None:
        """Raise what add_request would raise of the prompt and the parameters; queue nothing.

        Compiles the grammar, which add_request finds then. Changes nothing that a step reads, so
        another thread may call it meanwhile.
        """
        self._admission.requests("", prompt_token_ids, params, 0)
        self._matchers(params, 1)

    @one_caller
    def add_request(
        self, request_id: str, prompt_token_ids: SequenceABC[int], params: SamplingParams
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: the prompt or a parameter cannot be served; nothing is queued then.
            DrainingError: the engine takes nothing new.
        """
        if self._draining:
            raise DrainingError("the engine is draining", hint="send the request to another one")
        check_text(RequestError, "request id", request_id)
        if request_id in self._live:
            raise RequestError("request id is in use", got=request_id, hint="choose another id")
        requests = self._admission.requests(
            request_id, prompt_token_ids, params, self._num_sequences
        )
        matchers = self._matchers(params, len(requests))
        live = LiveRequest(request_id, [])
        for index, (request, matcher) in enumerate(zip(requests, matchers, strict=True)):
            builder = OutputBuilder(request, self._admission.tokenizer, index)
            sequence = Sequence(self._num_sequences, request)
            self._num_sequences += 1
            live.outputs.append(LiveOutput(live, sequence, builder, matcher))
        self._live[request_id] = live
        try:
            for output in live.outputs:
                self._by_sequence[output.sequence.sequence_id] = output
                self.scheduler.add(output.sequence)
        except BaseException:
            self.scheduler.forget(output.sequence for output in live.outputs)
            self._forget(live)
            raise

    @one_caller
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, and report on it.

        None where no such request is running, or where there is no memory for the report now: a
        later step makes it then.
        """
        live = self._live.get(request_id)
        if live is None:
            return None
        self._unreported.pop(request_id, None)
        for output in live.outputs:
            if output.builder.finish_reason is None:
                output.builder.abort()
            # An interrupt may have come between the text's end and the sequence's.
            if output.sequence.status is not Status.FINISHED:
                self.scheduler.finish(output.sequence, FinishReason.ABORT)
        changed = {request_id: live}
        outputs = self._emit(changed)
        self._unreported |= changed
        return outputs[0] if outputs else None

    def _matchers(self, params: SamplingParams, number: int) -> list[GrammarMatcher | None]:
        """One for each output, at the beginning of the grammar; None without one."""
        if params.grammar is None:
            return [None] * number
        assert self._grammars is not None, "admission refuses grammars without a tokenizer"
        return [self._grammars.matcher(params.grammar) for _ in range(number)]

    def _masks(self, batch: Batch) -> Masks:
        """What each grammar allows at every row that will be verified."""
        masks: Masks = {}
        for span in batch.spans:
            output = self._by_sequence[span.sequence_id]
            if output.matcher is not None and span.effects.samples:
                drafts = output.sequence.proposed_token_ids[: span.effects.num_drafts]
                masks[span.sequence_id] = output.matcher.masks(drafts)
        return masks

    def _emit(self, changed: dict[str, LiveRequest]) -> list[RequestOutput]:
        """Report on requests, and forget those that have ended.

        Nothing is taken for reported before all reports are made.
        """
        if self.config.debug_checks:
            self.cache.check_integrity()
        made = [(live, self._report(live, changed)) for live in list(changed.values())]
        reports = [(live, report) for live, report in made if report is not None]
        outputs = [report for _, report in reports]
        for live, report in reports:
            live.reported()
            if report.finished:
                self._forget(live)
            changed.pop(live.request_id)
        return outputs

    def _report(self, live: LiveRequest, changed: dict[str, LiveRequest]) -> RequestOutput | None:
        """None where there is no memory for it now; after a few times the request fails."""
        try:
            return live.report()
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            live.num_failed_reports += 1
            logger.warning("no memory to report on request %s (%s)", live.request_id, error)
            if live.num_failed_reports < MOST_TRIES:
                return None
            failure = cannot_be_reported(live.outputs[0].sequence, error)
            self._fail(live, failure, changed)
            return RequestOutput.failed(live.request_id, failure)

    def _forget(self, live: LiveRequest) -> None:
        self._live.pop(live.request_id, None)
        for output in live.outputs:
            self._by_sequence.pop(output.sequence.sequence_id, None)
