"""An engine that is short of everything, and places of it that are made to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

from outrider.engine import Engine
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from tests import tiny_tokenizer
from tests.checkpoints import TinyShape
from tests.harness import make_engine, random_tokens, run_requests, tokens_of
from tests.pools import is_idle

SHAPE = TinyShape(
    num_layers=2, interval=2, hidden_size=48, vocab_size=tiny_tokenizer.SHAPE.vocab_size
)
SHARED = random_tokens(46, 100, 1)
PROMPTS = [[*SHARED, *random_tokens(length, 100, length)] for length in (3, 5, 1, 4)]
ARRIVALS = [0, 0, 1, 4]
MOST_TOKENS = 16
NUM_BLOCKS = 7


@dataclass(frozen=True)
class Place:
    """Attributes:
    owner: path from the engine, or a module.
    """

    owner: str | Any
    name: str

    def of(self, engine: Engine) -> Any:
        return attrgetter(self.owner)(engine) if isinstance(self.owner, str) else self.owner

    @property
    def label(self) -> str:
        owner = self.owner if isinstance(self.owner, str) else self.owner.__name__
        return f"{owner.removeprefix('outrider.')}.{self.name}"


def short_engine(path: Path) -> Engine:
    """Few blocks, few states, and a round in flight."""
    return make_engine(
        path,
        3,
        tokenizer=tiny_tokenizer.tokenizer(),
        dtype="float32",
        enable_prefix_caching=True,
        block_size=16,
        prefill_grid=16,
        max_prefill_tokens=48,
        max_model_len=80,
        num_kv_blocks=NUM_BLOCKS,
        max_num_seqs=3,
        num_state_checkpoints=2,
        checkpoint_interval=16,
        look_ahead=1,
    )


def texts_alone(path: Path) -> list[tuple[int, ...]]:
    """Of PROMPTS, by an engine that does one thing at a time."""
    alone = make_engine(path, dtype="float32", max_num_seqs=1)
    return [tokens_of(run_requests(alone, [prompt], wish()))[0] for prompt in PROMPTS]


def wish() -> SamplingParams:
    return SamplingParams(max_tokens=MOST_TOKENS, temperature=0, ignore_eos=True)


def serve(engine: Engine) -> list[RequestOutput]:
    return run_requests(engine, PROMPTS, wish(), arrivals=ARRIVALS)


def assert_all_is_back(engine: Engine) -> None:
    cache = engine.cache
    assert not engine.has_work and is_idle(cache) and not engine._live and not engine._by_sequence
    cache.check_integrity()
    assert cache.num_available == cache.blocks.size
    cache.clear()
    cache.check_integrity()
    for pool in (cache.blocks, cache.slots, cache.checkpoints):
        assert pool.num_free == pool.size


@contextmanager
def failing(engine: Engine, place: Place, fails: Callable[[int, Any], bool]) -> Iterator[list[int]]:
    """Make a place fail at the calls that `fails` picks, by their number from 1 and arguments."""
    calls = [0]
    owner = place.of(engine)
    original = getattr(owner, place.name)

    def called(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if not fails(calls[0], args):
            return original(*args, **options)
        raise MemoryError(f"no memory at call {calls[0]}")

    with mock.patch.object(owner, place.name, called):
        yield calls
