"""The delta rule equals its recurrence, and verification leaves the bits of one-token decoding."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.ops.gated_delta_rule import DeltaState, PendingRecords, delta_replay, reference

delta_gates, l2_normalise = reference.delta_gates_reference, reference.l2_normalise_reference
delta_round, delta_prefill = reference.delta_round_reference, reference.delta_prefill_reference

MAX_ROWS = 9


@dataclass(frozen=True)
class Heads:
    """Key heads, value heads, key size, value size."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


HEADS = [Heads(1, 1, 16, 16), Heads(2, 4, 16, 16), Heads(1, 3, 8, 24), Heads(2, 6, 32, 16)]


@dataclass
class Rows:
    """Inputs of the rule for the tokens of one sequence: [L, heads, size]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def random(cls, length: int, heads: Heads, seed: int, value_dtype=torch.float32) -> Rows:
        rng = torch.Generator().manual_seed(seed)

        def unit() -> Tensor:
            x = torch.randn(length, heads.keys, heads.key_dim, generator=rng)
            return x / x.norm(dim=-1, keepdim=True)

        return cls(
            queries=unit() * heads.key_dim**-0.5,
            keys=unit(),
            values=torch.randn(length, heads.values, heads.value_dim, generator=rng).to(
                value_dtype
            ),
            # From no decay at all to nearly complete forgetting.
            g=-torch.rand(length, heads.values, generator=rng).pow(4) * 12,
            beta=torch.rand(length, heads.values, generator=rng),
        )

    def __getitem__(self, at: slice) -> Rows:
        return Rows(self.queries[at], self.keys[at], self.values[at], self.g[at], self.beta[at])


def recurrence(rows: Rows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [L, HV, V] and final S [HV, K, V] in float64, as models.md writes it."""
    num_value_heads, ratio = rows.values.shape[1], rows.values.shape[1] // rows.keys.shape[1]
    outputs = torch.zeros(rows.values.shape, dtype=torch.float64)
    state = state.double().clone()
    for t in range(len(rows.keys)):
        for head in range(num_value_heads):
            q, k = (x[t, head // ratio].double() for x in (rows.queries, rows.keys))
            s = state[head] * rows.g[t, head].double().exp()
            u = rows.beta[t, head].double() * (rows.values[t, head].double() - s.T @ k)
            state[head] = s + torch.outer(k, u)
            outputs[t, head] = state[head].T @ q
    return outputs, state


class Slots:
    """State and records of a few slots; everything that nobody wrote is NaN."""

    def __init__(self, heads: Heads, num_slots: int = 6) -> None:
        def poisoned(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"))

        records = (2, num_slots, MAX_ROWS)
        self.delta = DeltaState(
            state=poisoned(num_slots, heads.values, heads.value_dim, heads.key_dim),
            record_keys=poisoned(*records, heads.keys, heads.key_dim),
            record_updates=poisoned(*records, heads.values, heads.value_dim),
            record_decays=poisoned(*records, heads.values),
        )
        self.pending = PendingRecords(
            *(torch.zeros(num_slots, dtype=torch.int64) for _ in range(3))
        )

    def start(self, slot: int, state: Tensor) -> None:
        """Begin at S [HV, V, K] with nothing pending."""
        self.delta.state[slot] = state
        self.pending.last_num_rows[slot] = self.pending.num_accepted_rows[slot] = 0

    def round(self, parts: dict[int, Rows], width: int | None = None) -> dict[int, Tensor]:
        """Run the rows of each slot as one rectangle; outputs of the valid rows."""
        slots = list(parts)
        num_rows = [len(parts[slot].keys) for slot in slots]
        width = width or max(num_rows)

        def rectangle(name: str) -> Tensor:
            tensors = [getattr(parts[slot], name) for slot in slots]
            padded = tensors[0].new_full((len(slots), width, *tensors[0].shape[1:]), 0.7)
            for index, tensor in enumerate(tensors):
                padded[index, : len(tensor)] = tensor
            return padded

        outputs = delta_round(
            *(rectangle(name) for name in ("queries", "keys", "values", "g", "beta")),
            self.delta,
            self.pending,
            torch.tensor(slots),
            torch.tensor(num_rows),
        )
        for slot, count in zip(slots, num_rows, strict=True):
            if count > 0:
                self.pending.parity[slot] ^= 1
                self.pending.last_num_rows[slot] = count
        return {slot: outputs[i, : num_rows[i]] for i, slot in enumerate(slots)}

    def accept(self, slot: int, count: int) -> None:
        self.pending.num_accepted_rows[slot] = count

    def materialised(self, slot: int) -> Tensor:
        """S [HV, V, K] after everything that was accepted; changes nothing."""
        copy = DeltaState(*(x.clone() for x in vars(self.delta).values()))
        delta_replay(copy, self.pending, torch.tensor([slot]))
        return copy.state[slot]

    def bits(self) -> list[Tensor]:
        """A copy of everything that is stored, NaNs made comparable."""
        return [x.clone().view(torch.int32) for x in vars(self.delta).values()]


def random_state(heads: Heads, seed: int = 99) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(heads.values, heads.value_dim, heads.key_dim, generator=rng)


def decode(rows: Rows, heads: Heads) -> tuple[Tensor, list[Tensor]]:
    """Outputs of one-token decoding, and S before the first and after every token."""
    slots = Slots(heads)
    slots.start(1, random_state(heads))
    outputs, states = [], [slots.materialised(1)]
    for t in range(len(rows.keys)):
        outputs.append(slots.round({1: rows[t : t + 1]})[1][0])
        slots.accept(1, 1)
        states.append(slots.materialised(1))
    return torch.stack(outputs), states


@pytest.mark.parametrize("num_value_heads", [1, 2, 3, 6, 32])
def test_gates_follow_their_formula(num_value_heads: int) -> None:
    rng = torch.Generator().manual_seed(num_value_heads)
    a, b = (4 * torch.randn(7, num_value_heads, generator=rng) for _ in range(2))
    a_log, dt_bias = (torch.randn(num_value_heads, generator=rng) for _ in range(2))
    g, beta = delta_gates(a, b, a_log, dt_bias)
    wide = a.double() + dt_bias.double()
    exact = -a_log.double().exp() * (1 + wide.exp()).log()
    assert g.dtype == beta.dtype == torch.float32
    assert ((g.double() - exact).abs() <= 1e-6 * exact.abs() + 1e-9).all()
    assert (beta.double() - 1 / (1 + (-b.double()).exp())).abs().max() < 1e-7


def test_gates_of_extreme_inputs_are_finite_and_in_range() -> None:
    extremes = torch.tensor([[-200.0, -50.0, 0.0, 21.0, 200.0]])
    zeros = torch.zeros(5)
    g, beta = delta_gates(extremes, extremes, zeros, zeros)
    assert g.isfinite().all() and (g <= 0).all()
    assert torch.allclose(g[0, 3:], -extremes[0, 3:])
    assert ((beta >= 0) & (beta <= 1)).all()


@pytest.mark.parametrize("num_value_heads", [1, 2, 3, 6, 32])
def test_a_rows_gates_do_not_depend_on_how_many_rows_there_are(num_value_heads: int) -> None:
    rng = torch.Generator().manual_seed(num_value_heads)
    a, b = (3 * torch.randn(81, num_value_heads, generator=rng) for _ in range(2))
    a_log, dt_bias = (torch.randn(num_value_heads, generator=rng) for _ in range(2))
    rows = [delta_gates(a[i : i + 1], b[i : i + 1], a_log, dt_bias) for i in range(81)]
    g, beta = (torch.cat(column) for column in zip(*rows, strict=True))
    for count in (2, 3, 4, 5, 7, 8, 9, 16, 18, 27, 64, 81):
        result = delta_gates(a[:count], b[:count], a_log, dt_bias)
        assert torch.equal(result[0], g[:count]), f"g of {count} rows"
        assert torch.equal(result[1], beta[:count]), f"beta of {count} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 8, 33, 128])
def test_normalised_rows_have_length_one_and_the_same_bits_in_any_company(
    dtype: torch.dtype, size: int
) -> None:
    x = torch.randn(9, 3, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    result = l2_normalise(x)
    wide = x.double()
    exact = wide / (wide.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    assert result.dtype == torch.float32
    assert (result.double() - exact).abs().max() < 1e-6
    for row in range(9):
        assert torch.equal(l2_normalise(x[row : row + 1])[0], result[row])
    assert torch.equal(l2_normalise(torch.zeros(2, size)), torch.zeros(2, size))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decoding_follows_the_recurrence(heads: Heads) -> None:
    rows = Rows.random(40, heads, seed=1)
    outputs, states = decode(rows, heads)
    exact, state = recurrence(rows, random_state(heads).transpose(1, 2))
    assert (outputs.double() - exact).abs().max() < 5e-6
    assert (states[-1].double().transpose(1, 2) - state).abs().max() < 5e-6


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("pattern", ["all", "none", "alternating", "random"])
def test_any_pattern_of_acceptance_leaves_the_bits_of_one_token_decoding(
    heads: Heads, pattern: str
) -> None:
    rng = random.Random(repr(heads) + pattern)
    text = Rows.random(60, heads, seed=2)
    outputs, states = decode(text, heads)
    slots, position, turn = Slots(heads), 0, 0
    slots.start(4, random_state(heads))
    while position < 50:
        num_rows = rng.randint(1, MAX_ROWS)
        num_right = {
            "all": num_rows,
            "none": 1,
            "alternating": num_rows if turn % 2 else 1,
            "random": rng.randint(1, num_rows),
        }[pattern]
        wrong = Rows.random(num_rows, heads, seed=1000 + turn)
        block = Rows(
            *(
                torch.cat((getattr(text, n)[position : position + num_right], getattr(wrong, n)))
                for n in ("queries", "keys", "values", "g", "beta")
            )
        )[:num_rows]
        # Neighbours of every kind, and more columns than this slot needs.
        neighbours = {s: Rows.random(rng.randint(1, MAX_ROWS), heads, 7) for s in (0, 2, 5)}
        for slot in neighbours:
            slots.start(slot, random_state(heads, slot))
        parts = dict(list(neighbours.items())[: rng.randint(0, 3)]) | {4: block}
        result = slots.round(parts, width=rng.choice([None, MAX_ROWS]))[4]
        assert torch.equal(result[:num_right], outputs[position : position + num_right])
        slots.accept(4, num_right)
        position, turn = position + num_right, turn + 1
        assert torch.equal(slots.materialised(4), states[position]), position


@pytest.mark.parametrize("count", [0, -1, -(2**62)])
def test_a_count_below_one_replays_nothing(count: int) -> None:
    heads = HEADS[1]
    slots = Slots(heads)
    slots.start(2, random_state(heads))
    slots.round({2: Rows.random(3, heads, 0)})
    slots.accept(2, count)
    assert torch.equal(slots.materialised(2), random_state(heads))
    # A later round runs from the same state.
    rows = Rows.random(2, heads, 1)
    fresh = Slots(heads)
    fresh.start(2, random_state(heads))
    assert torch.equal(slots.round({2: rows})[2], fresh.round({2: rows})[2])


@pytest.mark.parametrize("count", [4, 9, 2**62])
def test_a_count_beyond_the_last_rounds_rows_replays_those_rows(count: int) -> None:
    heads, rows = HEADS[1], Rows.random(3, HEADS[1], 0)
    slots = Slots(heads)
    slots.start(2, random_state(heads))
    slots.round({2: rows})
    slots.accept(2, count)
    _, states = decode(rows, heads)
    assert torch.equal(slots.materialised(2), states[3])


@pytest.mark.parametrize("count", [-(2**62), -1, 0, 5, 2**62])
def test_garbage_counts_of_a_slot_touch_no_other_slot_and_no_inert_one(count: int) -> None:
    heads = HEADS[1]
    slots = Slots(heads)
    for slot in range(6):
        slots.start(slot, random_state(heads, slot))
    slots.round({slot: Rows.random(4, heads, slot) for slot in range(6)})
    for slot in range(6):
        slots.accept(slot, 2)
    expected = slots.materialised(3)
    for slot in (0, 1, 2):
        slots.accept(slot, count)
    before, none = slots.bits(), Rows.random(0, heads, 0)
    # Slots 0 and 1 are inert members of the batch, 2 and 5 are not in it, 4 runs with garbage.
    slots.accept(4, count)
    slots.round({0: none, 3: Rows.random(2, heads, 8), 1: none, 4: Rows.random(1, heads, 9)})
    for was, now in zip(before, slots.bits(), strict=True):
        for slot in (0, 1, 2, 5):
            at = slot if was.shape[0] == 6 else (slice(None), slot)
            assert torch.equal(was[at], now[at]), slot
    assert torch.equal(slots.delta.state[3], expected)


def test_replay_advances_the_named_slots_only() -> None:
    heads = HEADS[3]
    slots = Slots(heads)
    for slot in (1, 2, 3):
        slots.start(slot, random_state(heads, slot))
    slots.round({slot: Rows.random(5, heads, slot) for slot in (1, 2, 3)})
    for slot, count in ((1, 5), (2, 3), (3, 1)):
        slots.accept(slot, count)
    expected = {slot: slots.materialised(slot) for slot in (1, 3)}
    untouched = slots.delta.state[2].clone()
    delta_replay(slots.delta, slots.pending, torch.tensor([3, 1]))
    assert torch.equal(slots.delta.state[1], expected[1])
    assert torch.equal(slots.delta.state[3], expected[3])
    assert torch.equal(slots.delta.state[2], untouched)
    assert slots.delta.state[[0, 4, 5]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 64, 65, 150])
def test_a_chunk_equals_the_recurrence_row_by_row(
    dtype: torch.dtype, heads: Heads, length: int
) -> None:
    rows = Rows.random(length, heads, seed=length, value_dtype=dtype)
    state = random_state(heads)
    before = state.clone()
    ends = (*range(64, length, 64), length)
    outputs, after = delta_prefill(*vars(rows).values(), state, ends)
    exact, exact_after = recurrence(rows, state.transpose(1, 2))
    assert torch.equal(state, before)
    assert outputs.dtype == dtype and outputs.shape == rows.values.shape
    rounding = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    assert ((outputs.double() - exact).abs() <= rounding * exact.abs() + 1e-5).all()
    assert after.dtype == torch.float32
    assert (after.double().transpose(1, 2) - exact_after).abs().max() < 1e-5


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_pieces_on_a_grid_give_the_same_bits_in_one_chunk_or_many(piece: int) -> None:
    heads, length = HEADS[1], 100
    rows = Rows.random(length, heads, seed=3)
    ends = (*range(piece, length, piece), length)
    whole, state = delta_prefill(*vars(rows).values(), random_state(heads), ends)
    begin, carried = 0, random_state(heads)
    for end in (*range(2 * piece, length, 2 * piece), length):
        inner = tuple(e - begin for e in ends if begin < e <= end)
        part, carried = delta_prefill(*vars(rows[begin:end]).values(), carried, inner)
        assert torch.equal(part, whole[begin:end])
        begin = end
    assert torch.equal(carried, state)


def test_a_chunk_forgets_and_remembers_without_overflow() -> None:
    heads = HEADS[1]
    rows = Rows.random(64, heads, seed=4)
    rows.g = torch.zeros_like(rows.g)
    rows.g[20] = -300.0  # exp underflows to zero
    rows.g[40] = -1e-9
    outputs, state = delta_prefill(*vars(rows).values(), random_state(heads), (64,))
    exact, exact_state = recurrence(rows, random_state(heads).transpose(1, 2))
    assert (outputs.double() - exact).abs().max() < 1e-5
    assert (state.double().transpose(1, 2) - exact_state).abs().max() < 1e-5
