"""What the engine says of its own failures, and what it remembers of them to try no step for ever.

Knows one sequence and the sizes of the cache; nothing of steps, of the device, or of recovery.
"""

from __future__ import annotations

from outrider.batch import Span
from outrider.cache.manager import CacheManager
from outrider.errors import CapacityError, EngineFaultError
from outrider.request import Sequence

MOST_TRIES = 3
"""How often in a row a report, or a step that has nothing but reports to do, is tried."""


class AloneWatch:
    """Who ran out of memory with the engine to itself, and how far its text was computed then.

    Once may have been bad luck. A second time is not, unless it got past that place in between.
    """

    def __init__(self) -> None:
        self._sequence_id: int | None = None
        self._num_computed = 0

    def ran_out_again(self, sequence_id: int, num_computed: int) -> bool:
        """Note that the sequence ran out of memory; whether it did before, and got no further."""
        is_again = sequence_id == self._sequence_id
        self._sequence_id = None if is_again else sequence_id
        self._num_computed = num_computed
        return is_again

    def committed(self, span: Span, num_computed: int) -> None:
        """A span's results were taken in: positions below num_computed stand.

        The end of a prompt says nothing. A sequence that began again has one token more to prefill
        than before, and would get further each time without ever running a round.
        """
        ends_prompt = span.is_prefill and span.effects.samples
        got_further = num_computed > self._num_computed and not ends_prompt
        if span.sequence_id == self._sequence_id and got_further:
            self._sequence_id = None


def cannot_be_admitted(sequence: Sequence, cache: CacheManager) -> CapacityError:
    """Nothing runs, and still there is no room for it."""
    num_tokens = sequence.num_committed
    return CapacityError(
        f"request {sequence.request.request_id} cannot be admitted to an idle engine",
        got=f"{num_tokens} tokens, {cache.num_blocks_for(num_tokens)} blocks",
        allowed=f"{cache.num_available} of {cache.blocks.size} blocks, "
        f"{cache.slots.num_free} of {cache.slots.size} slots",
        hint="send a shorter prompt, or raise num_kv_blocks",
    )


def ran_out_alone(sequence: Sequence, cache: CacheManager, error: BaseException) -> CapacityError:
    """It had the engine to itself, and memory ran out all the same."""
    num_tokens = sequence.num_committed
    return CapacityError(
        f"memory ran out while request {sequence.request.request_id} ran alone ({error})",
        got=f"{num_tokens} tokens, {cache.num_blocks_for(num_tokens)} blocks",
        allowed=f"{cache.blocks.size} blocks, and what is left beside the caches",
        hint="send a shorter prompt, or lower max_prefill_tokens or num_kv_blocks",
    )


def cannot_be_reported(sequence: Sequence, error: BaseException) -> CapacityError:
    """Its text stands, and there is no memory to hand it out."""
    return CapacityError(
        f"memory ran out while request {sequence.request.request_id} was reported ({error})",
        got=f"{sequence.num_committed} tokens, tried {MOST_TRIES} times",
        hint="ask for a shorter text or fewer log probabilities, or lower num_kv_blocks",
    )


def half_taken_in(sequence: Sequence, error: BaseException | None = None) -> EngineFaultError:
    """A round's tokens are in its text in part, which nobody can take back.

    Args:
        error: what happened meanwhile; None where the step was interrupted.
    """
    reason = "an interrupt" if error is None else f"a fault ({error!r})"
    return EngineFaultError(
        f"{reason} while the tokens of request {sequence.request.request_id} were taken in",
        got=f"{sequence.num_committed} tokens before",
        hint="send the request again",
    )
