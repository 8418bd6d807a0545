"""Divides memory between recurrent states and blocks of KV, or says what does not fit.

The plan is arithmetic on numbers that are measured or known before anything is allocated. States
come first, one for each sequence that may run; blocks take what is left, and one sequence of
max_model_len tokens must fit into them. A CPU's memory is not measured: there only the KV is
bounded. Knows nothing of layers: how large a block and a slot are is said by runner/storage.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from outrider.config import EngineConfig
from outrider.errors import CapacityError, ConfigError
from outrider.models.config import ModelConfig
from outrider.words import counted

GIB, MIB = 2**30, 2**20

_FIXED_WORKSPACE = GIB
"""For kernels' code, the matrix library and the nodes of graphs."""
_LOGIT_COPIES = 4
"""Float32 copies of a round's logits that live at once: ruled, probabilities, sorted, scratch."""


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory in bytes once the weights are loaded.

    Attributes:
        free: what nobody holds, neither this process nor another.
    """

    total: int
    free: int


@dataclass(frozen=True)
class MemoryBudget:
    """What may be used.

    Attributes:
        device: None where memory is not measured, and only kv_limit counts.
        utilization: share of the device's total that may be in use, by whomever.
        kv_limit: most bytes of KV, or None.
    """

    device: DeviceMemory | None
    utilization: float
    kv_limit: int | None

    @property
    def available(self) -> int | None:
        """Bytes that may still be allocated; below 0 where too much is in use already."""
        if self.device is None:
            return None
        used = self.device.total - self.device.free
        return int(self.device.total * self.utilization) - used


@dataclass(frozen=True)
class MemoryNeeds:
    """What is to be held. Sizes in bytes; blocks and slots without the null ones.

    Attributes:
        weight_bytes: target and draft; allocated already, and told for the report.
        workspace_bytes: kept for activations, logits and graphs.
        slot_bytes: of one sequence's recurrent state, in all layers.
        block_bytes: of one block of KV, in all layers.
        block_size: tokens in a block.
        max_num_seqs: sequences that run at once.
        num_checkpoints: states that the prefix cache keeps.
        max_model_len: most tokens of a sequence as the user wants it; None is what fits.
        model_limit: most tokens that the checkpoint knows.
        num_kv_blocks: blocks as the user wants them; None is what fits.
    """

    weight_bytes: int
    workspace_bytes: int
    slot_bytes: int
    block_bytes: int
    block_size: int
    max_num_seqs: int
    max_model_len: int | None
    model_limit: int
    num_kv_blocks: int | None = None
    num_checkpoints: int = 0

    @property
    def state_bytes(self) -> int:
        """Recurrent state of all slots, the null slot and checkpoints included."""
        return self.slot_bytes * (self.max_num_seqs + self.num_checkpoints + 1)

    @property
    def shortest(self) -> int:
        """Tokens of a sequence that must fit."""
        return self.max_model_len or min(self.model_limit, self.block_size)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that a sequence takes."""
        return ceil(num_tokens / self.block_size)


@dataclass(frozen=True)
class MemoryPlan:
    """What is given to what.

    Attributes:
        max_model_len: most tokens of a sequence.
        num_blocks: blocks of KV, the null block not counted.
    """

    budget: MemoryBudget
    needs: MemoryNeeds
    max_model_len: int
    num_blocks: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all blocks, the null block included."""
        return self.needs.block_bytes * (self.num_blocks + 1)

    def lines(self) -> list[str]:
        """The plan for a reader, one line for each thing that takes memory."""
        needs, device = self.needs, self.budget.device
        state = f"{counted(needs.max_num_seqs, 'sequence')}, {needs.slot_bytes / MIB:.2f} MiB each"
        if needs.num_checkpoints and needs.slot_bytes:
            state = f"{counted(needs.num_checkpoints, 'checkpoint')} and {state}"
        kv = (
            f"{counted(self.num_blocks, 'block')} of {needs.block_size} tokens, "
            f"{needs.block_bytes / MIB:.2f} MiB each"
        )
        lines = [f"max_model_len: {self.max_model_len} of the checkpoint's {needs.model_limit}"]
        if device is not None:
            allowed = gib(device.total * self.budget.utilization)
            lines.append(
                f"GPU memory: {gib(device.total)}, of which gpu_memory_utilization "
                f"{self.budget.utilization:g} allows {allowed}"
            )
        lines += [
            _line("weights", needs.weight_bytes),
            _line("recurrent state", needs.state_bytes, state),
            _line("KV cache", self.kv_bytes, kv),
        ]
        available = self.budget.available
        if device is not None and available is not None:
            other = max(device.total - device.free - needs.weight_bytes, 0)
            left = available - needs.workspace_bytes - needs.state_bytes - self.kv_bytes
            lines += [
                _line("workspace", needs.workspace_bytes, "kept for activations and graphs"),
                _line("other use", other, "this process's own and other processes"),
                _line("left", left),
            ]
        return lines


def measure_budget(config: EngineConfig, device: torch.device) -> MemoryBudget:
    """The budget of a device as it stands. Call it once the weights are loaded."""
    if device.type != "cuda":
        return MemoryBudget(None, config.gpu_memory_utilization, config.kv_cache_bytes)
    torch.cuda.empty_cache()  # what the allocator merely keeps counts as free
    free, total = torch.cuda.mem_get_info(device)
    limit = None if config.kv_cache_memory_gib is None else config.kv_cache_bytes
    return MemoryBudget(DeviceMemory(total, free), config.gpu_memory_utilization, limit)


def workspace_bytes(config: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """An estimate, on the high side, of what passes allocate besides weights and caches.

    Args:
        itemsize: bytes of an activation.
    """
    round_rows = config.max_num_seqs * (config.num_speculative_tokens + 1)
    rows = max(round_rows, config.max_prefill_tokens)
    # The widest moment of a layer holds the stream, a norm, the packed projection and its parts.
    activations = rows * itemsize * (8 * model.hidden_size + 4 * model.intermediate_size)
    logits = round_rows * model.vocab_size * (itemsize + 4 * _LOGIT_COPIES)
    max_model_len = config.max_model_len or model.max_position_embeddings
    texts = 4 * max_model_len * (config.max_num_seqs + 1)  # an int32 for each token
    return _FIXED_WORKSPACE + activations + logits + texts


def plan_memory(budget: MemoryBudget, needs: MemoryNeeds) -> MemoryPlan:
    """Divide a budget.

    Raises:
        ConfigError: max_model_len is more than the checkpoint knows.
        CapacityError: something does not fit; the message has the numbers and what would help.
    """
    limit, wanted = needs.model_limit, needs.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError(
            "max_model_len",
            got=wanted,
            allowed=f"at most {limit}, the checkpoint's max_position_embeddings",
        )
    in_memory = _blocks_in_memory(budget, needs)
    affordable = _affordable_blocks(budget, needs, in_memory)
    max_model_len = wanted or min(limit, affordable * needs.block_size)
    if affordable < needs.num_blocks_of(needs.shortest):
        raise _less_than_one_sequence(budget, needs, affordable, affordable == in_memory)
    if needs.num_kv_blocks is None:
        most = needs.num_blocks_of(max_model_len) * needs.max_num_seqs
        affordable = min(affordable, most)
    return MemoryPlan(budget, needs, max_model_len, affordable)


def _blocks_in_memory(budget: MemoryBudget, needs: MemoryNeeds) -> int | None:
    """Blocks beside weights, workspace and states; None where memory is not measured."""
    available = budget.available
    if available is None:
        return None
    left = available - needs.workspace_bytes - needs.state_bytes
    if left < 0:
        raise CapacityError(
            f"recurrent states do not fit: {_needs_phrase(needs)}",
            got=_has_phrase(budget, available),
            hint=_remedies(budget, needs, None),
        )
    return max(left // needs.block_bytes - 1, 0)  # the null block takes one


def _affordable_blocks(budget: MemoryBudget, needs: MemoryNeeds, in_memory: int | None) -> int:
    """Blocks that may be allocated, by the user's wish, the limit of KV, and memory."""
    if needs.num_kv_blocks is not None:
        if in_memory is not None and needs.num_kv_blocks > in_memory:
            raise CapacityError(
                f"num_kv_blocks does not fit: {_needs_phrase(needs)}, "
                f"{gib(needs.block_bytes * needs.num_kv_blocks)} for the blocks",
                got=needs.num_kv_blocks,
                allowed=f"at most {in_memory}",
                hint="lower num_kv_blocks, or leave it out",
            )
        return needs.num_kv_blocks
    limits = [] if in_memory is None else [in_memory]
    if budget.kv_limit is not None:
        limits.append(budget.kv_limit // needs.block_bytes)
    assert limits, "a budget is measured or has a limit"
    return min(limits)


def _less_than_one_sequence(
    budget: MemoryBudget, needs: MemoryNeeds, affordable: int, memory_is_short: bool
) -> CapacityError:
    """
    Args:
        memory_is_short: whether memory, and not a setting, allows no more blocks.
    """
    num_blocks, num_tokens = needs.num_blocks_of(needs.shortest), needs.shortest
    available = budget.available
    if needs.num_kv_blocks is not None:
        hint = f"raise num_kv_blocks to {num_blocks}"
    elif memory_is_short:
        hint = _remedies(budget, needs, affordable)
    else:
        size = _round_up(num_blocks * needs.block_bytes / GIB)
        hint = f"raise kv_cache_memory_gib to {size}"
    if affordable and not memory_is_short:
        hint += f", or lower max_model_len to {affordable * needs.block_size}"
    has = "" if available is None else f"; has {_has_phrase(budget, available)}"
    return CapacityError(
        f"KV cache holds less than one sequence of {num_tokens} tokens: {_needs_phrase(needs)}, "
        f"{gib(num_blocks * needs.block_bytes)} for a sequence{has}",
        got=f"{affordable} blocks of {needs.block_size} tokens, {needs.block_bytes} bytes each",
        allowed=f"at least {num_blocks} blocks",
        hint=hint,
    )


def _remedies(budget: MemoryBudget, needs: MemoryNeeds, affordable: int | None) -> str:
    """What would make room on the device for one sequence.

    Args:
        affordable: blocks there are with the states as they are; None where those do not fit.
    """
    assert budget.device is not None and budget.available is not None
    kv_bytes = (needs.num_blocks_of(needs.shortest) + 1) * needs.block_bytes
    beside_states = budget.available - needs.workspace_bytes - kv_bytes
    ways: list[str] = []
    if affordable:
        ways.append(f"lower max_model_len to {affordable * needs.block_size}")
    if needs.slot_bytes:
        num_seqs = beside_states // needs.slot_bytes - 1
        if 1 <= num_seqs < needs.max_num_seqs:
            ways.append(f"lower max_num_seqs to {num_seqs}")
    missing = needs.state_bytes - beside_states
    share = _round_up(budget.utilization + missing / budget.device.total)
    if share <= 1:
        ways.append(f"raise gpu_memory_utilization to {share}")
    return ", or ".join(ways) or "free memory that others hold, or take a smaller model"


def _round_up(number: float) -> float:
    """To three digits after the point, so that what a message names is enough."""
    return ceil(number * 1000) / 1000


def _needs_phrase(needs: MemoryNeeds) -> str:
    parts = [f"{gib(needs.weight_bytes)} for the weights"]
    if needs.workspace_bytes:
        parts.append(f"{gib(needs.workspace_bytes)} for workspace")
    if needs.state_bytes:
        states = (
            f"{gib(needs.state_bytes)} for the states of {counted(needs.max_num_seqs, 'sequence')}"
        )
        parts.append(states)
    return f"needs {', '.join(parts)}"


def _has_phrase(budget: MemoryBudget, available: int) -> str:
    assert budget.device is not None
    return (
        f"{gib(max(available, 0))} beside the weights, with gpu_memory_utilization "
        f"{budget.utilization:g} of {gib(budget.device.total)} and {gib(budget.device.free)} free"
    )


def _line(name: str, size: int, detail: str = "") -> str:
    return f"  {name:16}{gib(size):>12}{f'  {detail}' if detail else ''}"


def gib(size: float) -> str:
    """Bytes as a number of GiB, to two digits after the point or three that count."""
    amount = size / GIB
    return f"{amount:.2f} GiB" if amount >= 1 or not size else f"{amount:.3g} GiB"


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether somebody asked for memory, on the host or on the device, and there was none."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = ("can't allocate memory", "not enough memory")  # by torch, of a CPU's
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)
