"""How long passes take, measured so that nobody waits for it. Knows nothing of what they compute.

On a CPU an operation has ended when it returns, so the host's clock tells the parts of a pass. On a
GPU a round is one graph that runs while the host is elsewhere: two events in the device's queue
give the whole, and its parts are not known.
"""

from __future__ import annotations

import time
from enum import IntEnum

import torch

from outrider.trace import PassTimes


class Phase(IntEnum):
    """A part of a pass."""

    VERIFY = 0
    COMMIT = 1
    DRAFT = 2


class PassClock:
    """Times one pass; made before its first operation.

    Args:
        num_sequences: those that sample in the pass.
        is_round: it is not the pass of a prompt.
    """

    def __init__(self, device: torch.device, num_sequences: int, *, is_round: bool) -> None:
        self._num_sequences = num_sequences
        self._is_round = is_round
        self._seconds = [0.0, 0.0, 0.0]
        self._started = self._last = time.perf_counter()
        self._start: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()

    def lap(self, phase: Phase) -> None:
        """What was done since the last call, or the beginning, was of this phase."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def times(self, arrived: torch.cuda.Event | None) -> PassTimes:
        """What was measured.

        Args:
            arrived: the event behind the pass's results, which has happened; None on a CPU.
        """
        if self._start is not None and arrived is not None:
            seconds = self._start.elapsed_time(arrived) / 1e3
            # The host has just seen the end of it: near enough to place it, not to measure it.
            started = time.perf_counter() - seconds
            return PassTimes(started, seconds, None, self._num_sequences, self._is_round)
        seconds = self._last - self._started
        verify, commit, draft = self._seconds
        parts = (verify, commit, draft)
        return PassTimes(self._started, seconds, parts, self._num_sequences, self._is_round)


def lap(clock: PassClock | None, phase: Phase) -> None:
    """The same where there may be no clock: inside a graph nothing can be told apart."""
    if clock is not None:
        clock.lap(phase)
