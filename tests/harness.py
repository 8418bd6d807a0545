"""Drives the engine and its parts from tests: teacher forcing, scripted drafts, state snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor

from outrider.batch import Batch, Effects, SlotSetup, Span
from outrider.config import MAX_SPECULATIVE_TOKENS, EngineConfig, SpeculativeConfig
from outrider.engine import Engine
from outrider.layers.rows import AttentionCache, DeltaCache, LayerCache
from outrider.models.build import Checkpoint, load_target
from outrider.ops.gated_delta_rule import DeltaState, PendingRecords, delta_replay
from outrider.output import RequestOutput
from outrider.params import SamplingParams
from outrider.runner.inputs import InputBuilder, PassInputs, round_numbers
from outrider.runner.rounds import Masks, Submission
from outrider.runner.slots import SlotTable
from outrider.runner.storage import StorageSize, allocate_caches
from outrider.spec.base import Drafter, Frontier
from outrider.spec.choose import Proposal
from outrider.tokenizer import Tokenizer

CPU = torch.device("cpu")


def random_tokens(length: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids from 2 on, so that no end-of-sequence id is among them."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (length,), generator=rng).tolist()


def poison(caches: Iterable[LayerCache]) -> None:
    """Fill everything that layers keep between passes with NaN."""
    for layer in caches:
        if isinstance(layer, AttentionCache):
            layer.kv_pool.fill_(float("nan"))
        else:
            for tensor in (layer.conv_ring, *vars(layer.delta).values()):
                tensor.fill_(float("nan"))


@cache
def transformers_model(path: Path) -> Any:
    """transformers' own model of a checkpoint, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def transformers_logits(path: Path, token_ids: Sequence[int]) -> Tensor:
    """[L, V] of transformers' own model."""
    return transformers_model(path)(input_ids=torch.tensor([token_ids])).logits[0]


class TargetDriver:
    """Runs given tokens of one sequence through a target; logits for every position."""

    SLOT = 1

    def __init__(
        self,
        path: Path,
        *,
        prefill_grid: int = 64,
        block_size: int = 16,
        max_len: int = 256,
        dtype: str = "float32",
    ) -> None:
        checkpoint = Checkpoint.open(path, EngineConfig(str(path), dtype=dtype, device="cpu"))  # type: ignore[arg-type]
        self.target = load_target(checkpoint)
        checkpoint.close()
        num_blocks = -(-max_len // block_size)
        size = StorageSize(num_blocks + 1, block_size, self.SLOT + 1, MAX_SPECULATIVE_TOKENS + 1)
        self.caches = allocate_caches(
            self.target.cache_specs, size, checkpoint.dtype, torch.float32, CPU
        )
        poison(self.caches)
        vocab_size = checkpoint.config.vocab_size
        self.slots = SlotTable(self.SLOT + 1, MAX_SPECULATIVE_TOKENS, 1, vocab_size, max_len, CPU)
        self.inputs = InputBuilder(self.slots, block_size, prefill_grid)
        self._block_ids = tuple(range(num_blocks, 0, -1))
        self._length = 0
        self.slots.set_up(SlotSetup(self.SLOT, 0, max_len, (), 0.0, None, 1.0, 0.0, 0))

    def _span(self, num_rows: int, token_ids: Sequence[int], effects: Effects) -> Span:
        return Span(
            sequence_id=0,
            slot=self.SLOT,
            start=self._length,
            num_rows=num_rows,
            token_ids=tuple(token_ids),
            next_token_id=None,
            block_ids=self._block_ids,
            effects=effects,
        )

    @torch.inference_mode()
    def _run(self, inputs: PassInputs) -> Tensor:
        output = self.target(inputs.token_ids, inputs.rows, self.caches)
        return self.target.logits(output.hidden)

    def prefill(self, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """[L, V] of a prompt that is run in chunks of `chunk` tokens."""
        logits: list[Tensor] = []
        chunk = chunk or len(token_ids)
        for begin in range(0, len(token_ids), chunk):
            part = token_ids[begin : begin + chunk]
            span = self._span(len(part), part, Effects(False, 0, False, 0))
            logits.append(self._run(self.inputs.prefill([span])))
            self._length += len(part)
        return torch.cat(logits)

    def round(self, token_ids: Sequence[int], num_accepted_rows: int) -> Tensor:
        """[T, V] of one round's rows; the first num_accepted_rows of them become text."""
        table, slot, num_rows = self.slots, self.SLOT, len(token_ids)
        table.num_committed[slot] = self._length + 1
        table.last_token_ids[slot] = token_ids[0]
        table.draft_token_ids[slot, : num_rows - 1] = torch.tensor(token_ids[1:])
        table.num_proposed[slot] = num_rows - 1
        span = self._span(num_rows, (), Effects(True, num_rows - 1, False, 0))
        numbers = round_numbers([span], 1, len(self._block_ids))
        logits = self._run(self.inputs.rounds(numbers, num_rows))
        table.pending.parity[slot] ^= 1
        table.pending.last_num_rows[slot] = num_rows
        table.pending.num_accepted_rows[slot] = num_accepted_rows
        self._length += num_accepted_rows
        return logits

    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """[L, V] of tokens that are run one by one."""
        return torch.cat([self.round([token_id], 1) for token_id in token_ids])


class Received(dict[str, RequestOutput]):
    """The newest output of each request. What was new in each adds up to its text."""

    def __init__(self) -> None:
        self._streamed: dict[tuple[str, int], str] = {}

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """What a step returned."""
        for output in outputs:
            self[output.request_id] = output
            for completion in output.completions:
                key = output.request_id, completion.index
                self._streamed[key] = self._streamed.get(key, "") + completion.new_text
                if output.error is None:
                    assert self._streamed[key] == completion.text, "a stream lacks characters"


def run_requests(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    arrivals: Sequence[int] | None = None,
) -> list[RequestOutput]:
    """Run prompts to their end; prompt i arrives before step arrivals[i]."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    arrivals = arrivals or [0] * len(prompts)
    outputs = Received()
    waiting, step = sorted(range(len(prompts)), key=lambda i: arrivals[i]), 0
    while waiting or engine.has_work:
        while waiting and arrivals[waiting[0]] <= step:
            index = waiting.pop(0)
            engine.add_request(str(index), list(prompts[index]), each[index])
        outputs.take(engine.step())
        step += 1
    return [outputs[str(index)] for index in range(len(prompts))]


def tokens_of(outputs: Iterable[RequestOutput]) -> list[tuple[int, ...]]:
    """The token ids of outputs."""
    return [output.token_ids for output in outputs]


ENGINES: WeakSet[Engine] = WeakSet()
"""Those that tests have made; what they own is checked after every test, see conftest.py."""

Script = Callable[[int, int, int], bool]
"""(sequence id, round of that sequence, index in the block) -> whether that draft is right."""


class ScriptedDrafter(Drafter):
    """Proposes what a script says. Knows every sequence's text, so that it can be right or wrong.

    Attributes:
        texts: prompt and continuation of each sequence, by id; ids count up from 0 by arrival.
        proposed: how many rounds each sequence was drafted for.
    """

    samples = False

    def __init__(self, script: Script, texts: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        self.script, self.texts, self.vocab_size = script, texts, vocab_size
        self.sequence_in_slot: dict[int, int] = {}
        self.proposed: dict[int, int] = {}

    def propose(self, hidden: Tensor, frontier: Frontier) -> Proposal:
        group = frontier.rows_at(2).groups[0]  # step 2 stands at the newest committed token
        drafts: list[list[int]] = []
        for slot, newest in zip(group.slots.tolist(), group.starts.tolist(), strict=True):
            sequence_id = self.sequence_in_slot[slot]
            turn = self.proposed.get(sequence_id, 0)
            self.proposed[sequence_id] = turn + 1
            drafts.append(
                [
                    self._draft(sequence_id, turn, index, newest + 1 + index)
                    for index in range(frontier.max_drafts)
                ]
            )
        return Proposal(torch.tensor(drafts), frontier.num_wanted, None)

    def _draft(self, sequence_id: int, turn: int, index: int, position: int) -> int:
        text = self.texts[sequence_id]
        right = text[position] if position < len(text) else 0
        if self.script(sequence_id, turn, index):
            return right
        return (right + 1) % self.vocab_size


def watch_slots(engine: Engine, sequence_in_slot: dict[int, int]) -> None:
    """Keep the map from slot to sequence id up to date from now on."""
    submit = engine.runner.submit

    def watched(batch: Batch, masks: Masks | None = None) -> Submission:
        for span in batch.spans:
            sequence_in_slot[span.slot] = span.sequence_id
        return submit(batch, masks)

    engine.runner.submit = watched  # type: ignore[method-assign]


def make_engine(
    path: Path,
    num_drafts: int = 0,
    *,
    method: str = "mtp",
    draft: Path | None = None,
    draft_sampling: str | None = None,
    drafter: Drafter | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Engine:
    """A small engine whose memory is poisoned and whose invariants are checked at every step.

    Args:
        num_drafts: K; 0 decodes plainly.
        method, draft, draft_sampling: how to draft, and the folder of a draft of its own.
        drafter: stands in for the checkpoint's own.
    """
    spec = None
    if num_drafts:
        model = None if draft is None else str(draft)
        spec = SpeculativeConfig(method, model, num_drafts, draft_sampling=draft_sampling)
    defaults = {
        "max_model_len": 300,
        "num_kv_blocks": 200,
        "block_size": 16,
        "debug_checks": True,
        "enable_prefix_caching": False,
    }
    config = EngineConfig(
        str(path), device="cpu", speculative_config=spec, **{**defaults, **options}
    )
    if drafter is None:
        engine = Engine(config, tokenizer)
    else:
        with mock.patch("outrider.engine.build_drafter", lambda *_: drafter):
            engine = Engine(config, tokenizer)
        if isinstance(drafter, ScriptedDrafter):
            watch_slots(engine, drafter.sequence_in_slot)
    poison(engine.runner.target_caches)
    poison(engine.runner.draft_caches)
    ENGINES.add(engine)
    return engine


@dataclass(frozen=True)
class Frozen:
    """What the device holds for a sequence, independent of where it lies.

    Attributes:
        num_computed: positions that stand.
        kv: per attention layer [2, num_computed, heads, head_dim].
        conv: per delta layer, the last raw inputs [at most 3, C], oldest first.
        state: per delta layer S [HV, V, K], with everything accepted replayed.
    """

    num_computed: int
    kv: list[Tensor] = field(repr=False)
    conv: list[Tensor] = field(repr=False)
    state: list[Tensor] = field(repr=False)

    def differences(self, other: Frozen) -> list[str]:
        """Names of the parts that are not bit for bit those of `other`."""
        found = [] if self.num_computed == other.num_computed else ["num_computed"]
        for name in ("kv", "conv", "state"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            found += [f"{name} {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        return found


def freeze(engine: Engine, sequence_id: int) -> Frozen:
    """A copy of what the device holds for a running sequence."""
    sequence = engine.scheduler.sequence(sequence_id)
    slot, num_computed = sequence.slot, sequence.num_computed
    assert slot is not None
    blocks = torch.tensor(engine.cache.block_ids(sequence_id))
    kv, conv, state = [], [], []
    for layer in engine.runner.target_caches:
        if isinstance(layer, AttentionCache):
            rows = layer.kv_pool[:, blocks].transpose(2, 3).flatten(1, 2)
            kv.append(rows[:, :num_computed].clone())
            continue
        ring_size = layer.conv_ring.shape[1]
        newest = range(max(num_computed - 3, 0), num_computed)
        conv.append(layer.conv_ring[slot, [p % ring_size for p in newest]].clone())
        state.append(_materialised(layer, engine.runner.slots.pending, slot))
    return Frozen(num_computed, kv, conv, state)


def _materialised(layer: DeltaCache, pending: PendingRecords, slot: int) -> Tensor:
    delta = layer.delta
    copy = DeltaState(
        state=delta.state[slot : slot + 1].clone(),
        record_keys=delta.record_keys[:, slot : slot + 1].clone(),
        record_updates=delta.record_updates[:, slot : slot + 1].clone(),
        record_decays=delta.record_decays[:, slot : slot + 1].clone(),
    )
    own = PendingRecords(*(tensor[slot : slot + 1] for tensor in vars(pending).values()))
    delta_replay(copy, own, torch.tensor([0]))
    return copy.state[0]
