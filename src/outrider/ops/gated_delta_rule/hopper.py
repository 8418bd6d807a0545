"""The gated delta rule for heads of 128 by 128, in Gluon: the fast form of triton.py's kernel.

Layouts are fixed by hand: a row of v is spread over 8 lanes along k, and every sum over k is taken
in that one order. So neither the number of rows T nor the tile changes a bit. Measured on Hopper;
apart from the overlapped launch it asks for nothing that is younger than SM75.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.ops.gated_delta_rule.triton import RuleInputs

if TYPE_CHECKING:
    from outrider.ops.gated_delta_rule import DeltaState, PendingRecords

HEAD_DIM = 128
NUM_WARPS = 4
MAX_REGISTERS = 128
"""Per thread where tiles are prefetched: lets four programs share a multiprocessor."""


@gluon.constexpr_function
def strip_size(layout):
    """Columns that one vector load of each of the 8 lanes along k covers."""
    return layout.size_per_thread[1] * layout.threads_per_warp[1]


@gluon.jit
def load_rows(p_row, num_rows, STRIDE: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr,
              LAYOUT: gl.constexpr):  # fmt: skip
    """[ROWS, SIZE] float32 of rows STRIDE apart; zero from num_rows on."""
    i_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    o_column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))
    p_tile = p_row + i_row[:, None] * STRIDE + o_column[None, :]
    return gl.load(p_tile, mask=(i_row < num_rows)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def load_scalars(p_row, num_rows, STRIDE: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, 1] float32 of values STRIDE apart; zero from num_rows on."""
    i_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(p_row + i_row * STRIDE, mask=i_row < num_rows, other=0.0)[:, None]


@gluon.jit
def load_state(p_tile, wanted, BLOCK_V: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile of S, [BLOCK_V, 128], as a tuple of strips of columns, float32; zero if not wanted."""
    STRIP: gl.constexpr = strip_size(LAYOUT)
    i_v = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, STRIP, layout=gl.SliceLayout(0, LAYOUT))
    offsets = i_v[:, None] * 128 + o_k[None, :]
    strips = ()
    for i in gl.static_range(128 // STRIP):
        b_s = gl.load(p_tile + i * STRIP + offsets, mask=(offsets >= 0) & wanted, other=0.0)
        strips = strips + (b_s.to(gl.float32),)  # noqa: RUF005
    return strips


@gluon.jit
def store_state(p_tile, strips, BLOCK_V: gl.constexpr, LAYOUT: gl.constexpr):
    STRIP: gl.constexpr = strip_size(LAYOUT)
    i_v = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, STRIP, layout=gl.SliceLayout(0, LAYOUT))
    offsets = i_v[:, None] * 128 + o_k[None, :]
    for i in gl.static_range(128 // STRIP):
        gl.store(p_tile + i * STRIP + offsets, strips[i].to(p_tile.dtype.element_ty))


@gluon.jit
def load_strips(s_row, LAYOUT: gl.constexpr):
    """A row [1, 128] of shared memory, cut as S is."""
    STRIP: gl.constexpr = strip_size(LAYOUT)
    strips = ()
    for i in gl.static_range(128 // STRIP):
        strips = strips + (s_row.slice(i * STRIP, STRIP, 1).load(LAYOUT),)  # noqa: RUF005
    return strips


@gluon.jit
def advanced_state(strips, b_update, keys, b_decay, STORAGE: gl.constexpr):
    """S <- e S + u k^T, rounded to what S is stored in; u [BLOCK_V, 1], e [1, 1]."""
    advanced = ()
    for i in gl.static_range(len(strips)):
        b_s = gl.fma(b_update, keys[i], strips[i] * b_decay).to(STORAGE).to(gl.float32)
        advanced = advanced + (b_s,)  # noqa: RUF005
    return advanced


@gluon.jit
def product(strips, row):
    """S x [BLOCK_V]: strips first, one fused multiply-add each, then across a strip's columns."""
    b_sum = strips[0] * row[0]
    for i in gl.static_range(1, len(strips)):
        b_sum = gl.fma(strips[i], row[i], b_sum)
    return gl.sum(b_sum, 1)


@gluon.jit
def replayed_state(strips, s_keys, s_updates, s_decays, num_pending, MAX_ROWS: gl.constexpr,
                   STORAGE: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """S advanced over its first num_pending records, staged in shared memory."""
    for i in gl.static_range(MAX_ROWS):
        if i < num_pending:
            keys = load_strips(s_keys.slice(i, 1), LAYOUT)
            b_update = s_updates.slice(i, 1).permute((1, 0)).load(LAYOUT)
            b_decay = s_decays.slice(i, 1).load(LAYOUT)
            strips = advanced_state(strips, b_update, keys, b_decay, STORAGE)
    return strips


@gluon.jit
def run_rows(strips, p_update, p_output, s_queries, s_keys, s_values, s_decays, s_beta,
             s_key_query, num_rows, ROW_STRIDE: gl.constexpr, T: gl.constexpr,
             STORAGE: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """T rows on a copy of S; their updates and outputs, [BLOCK_V] each, are stored."""
    for t in gl.static_range(T):
        keys = load_strips(s_keys.slice(t, 1), LAYOUT)
        queries = load_strips(s_queries.slice(t, 1), LAYOUT)
        b_e = s_decays.slice(t, 1).load(LAYOUT)
        # The maximum over a dimension of size 1 only changes the layout.
        b_v = gl.max(s_values.slice(t, 1).permute((1, 0)).load(LAYOUT), 1)
        b_beta = gl.max(s_beta.slice(t, 1).load(LAYOUT), 1)
        b_key_query = gl.max(s_key_query.slice(t, 1).load(LAYOUT), 1)
        b_decay = gl.max(b_e, 1)
        b_u = b_beta * gl.fma(-b_decay, product(strips, keys), b_v)
        b_o = gl.fma(b_u, b_key_query, b_decay * product(strips, queries))
        if t + 1 < T:
            strips = advanced_state(strips, b_u[:, None], keys, b_e, STORAGE)
        i_v = gl.arange(0, b_u.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        gl.store(p_output + t * ROW_STRIDE + i_v, b_o.to(p_output.dtype.element_ty))
        gl.store(p_update + t * ROW_STRIDE + i_v, b_u, mask=i_v * 0 + t < num_rows)


@gluon.jit
def run_sequence(p_state, p_record_keys, p_record_updates, p_record_decays, p_parity,
                 p_last_num_rows, p_num_accepted_rows, p_queries, p_values, p_beta, p_key_query,
                 p_output, i_b, i_h, i_v, slot, num_rows, num_slots, HK: gl.constexpr,
                 HV: gl.constexpr, T: gl.constexpr, MAX_ROWS: gl.constexpr, T_PAD: gl.constexpr,
                 MAX_PAD: gl.constexpr, BLOCK_V: gl.constexpr, TILES: gl.constexpr,
                 VECTOR: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """A live sequence's part of delta_rows_kernel."""
    D: gl.constexpr = 128
    STORAGE: gl.constexpr = p_state.dtype.element_ty
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [4, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    LANES: gl.constexpr = BLOCK_V if BLOCK_V < 32 else 32
    NARROW: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Whether the only tile can be replayed and stored while the kernel in front still runs.
    EARLY: gl.constexpr = PDL and TILES == 1

    p_s = p_state + (slot * HV + i_h) * (D * D) + i_v * (TILES * BLOCK_V * D)
    next_strips = load_state(p_s, True, BLOCK_V, LAYOUT)

    parity = gl.load(p_parity + slot) & 1
    last = gl.minimum(gl.load(p_last_num_rows + slot), MAX_ROWS)
    accepted = gl.maximum(gl.load(p_num_accepted_rows + slot), 0)
    num_pending = gl.minimum(accepted, last).to(gl.int32)
    i_hk = i_h // (HV // HK)
    o_value = i_h * D + i_v * (TILES * BLOCK_V)
    old = (parity * num_slots + slot) * MAX_ROWS
    s_old_keys = gl.allocate_shared_memory(gl.float32, [MAX_PAD, D], SHARED)
    s_old_updates = gl.allocate_shared_memory(gl.float32, [TILES, MAX_PAD, BLOCK_V], SHARED)
    s_old_decays = gl.allocate_shared_memory(gl.float32, [MAX_PAD, 1], SHARED)
    p_old_keys = p_record_keys + old * (HK * D) + i_hk * D
    s_old_keys.store(load_rows(p_old_keys, num_pending, HK * D, MAX_PAD, D, WIDE))
    s_old_decays.store(
        load_scalars(p_record_decays + old * HV + i_h, num_pending, HV, MAX_PAD, WIDE)
    )
    p_old_updates = p_record_updates + old * (HV * D) + o_value
    for j in gl.static_range(TILES):
        b_updates = load_rows(
            p_old_updates + j * BLOCK_V, num_pending, HV * D, MAX_PAD, BLOCK_V, NARROW
        )
        s_old_updates.index(j).store(b_updates)
    if EARLY:
        next_strips = replayed_state(
            next_strips, s_old_keys, s_old_updates.index(0), s_old_decays, num_pending, MAX_ROWS,
            STORAGE, LAYOUT,
        )  # fmt: skip
        if num_pending > 0:
            store_state(p_s, next_strips, BLOCK_V, LAYOUT)
    if PDL:
        gdc_wait()

    new = ((1 - parity) * num_slots + slot) * MAX_ROWS
    row = i_b.to(gl.int64) * T
    s_keys = gl.allocate_shared_memory(gl.float32, [T_PAD, D], SHARED)
    s_queries = gl.allocate_shared_memory(gl.float32, [T_PAD, D], SHARED)
    s_values = gl.allocate_shared_memory(gl.float32, [TILES, T_PAD, BLOCK_V], SHARED)
    s_decays = gl.allocate_shared_memory(gl.float32, [T_PAD, 1], SHARED)
    s_beta = gl.allocate_shared_memory(gl.float32, [T_PAD, 1], SHARED)
    s_key_query = gl.allocate_shared_memory(gl.float32, [T_PAD, 1], SHARED)
    p_new_keys = p_record_keys + new * (HK * D) + i_hk * D
    b_keys = load_rows(p_new_keys, num_rows, HK * D, T_PAD, D, WIDE)
    b_queries = load_rows(p_queries + (row * HK + i_hk) * D, num_rows, HK * D, T_PAD, D, WIDE)
    b_decays = load_scalars(p_record_decays + new * HV + i_h, num_rows, HV, T_PAD, WIDE)
    b_beta = load_scalars(p_beta + row * HV + i_h, num_rows, HV, T_PAD, WIDE)
    b_key_query = load_scalars(p_key_query + row * HK + i_hk, num_rows, HK, T_PAD, WIDE)
    p_row_values = p_values + row * (HV * D) + o_value
    for j in gl.static_range(TILES):
        b_values = load_rows(p_row_values + j * BLOCK_V, num_rows, HV * D, T_PAD, BLOCK_V, NARROW)
        s_values.index(j).store(b_values)
    s_keys.store(b_keys)
    s_queries.store(b_queries)
    s_decays.store(b_decays)
    s_beta.store(b_beta)
    s_key_query.store(b_key_query)

    for j in range(TILES):
        strips = next_strips
        p_tile = p_s + j * (BLOCK_V * D)
        if TILES > 1:  # the next tile is on its way while this one is computed
            next_strips = load_state(p_tile + BLOCK_V * D, j + 1 < TILES, BLOCK_V, LAYOUT)
        if not EARLY:
            strips = replayed_state(
                strips, s_old_keys, s_old_updates.index(j), s_old_decays, num_pending, MAX_ROWS,
                STORAGE, LAYOUT,
            )  # fmt: skip
            if num_pending > 0:
                store_state(p_tile, strips, BLOCK_V, LAYOUT)
        p_update = p_record_updates + new * (HV * D) + o_value + j * BLOCK_V
        p_out = p_output + row * (HV * D) + o_value + j * BLOCK_V
        run_rows(
            strips, p_update, p_out, s_queries, s_keys, s_values.index(j), s_decays, s_beta,
            s_key_query, num_rows, HV * D, T, STORAGE, LAYOUT,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["p_slots", "p_num_rows"]
)
def delta_rows_kernel(
    p_state,  # [slots, HV, 128, 128]
    p_record_keys,  # [2, slots, MAX_ROWS, HK, 128] float32
    p_record_updates,  # [2, slots, MAX_ROWS, HV, 128] float32
    p_record_decays,  # [2, slots, MAX_ROWS, HV] float32
    p_parity,  # [slots] int64
    p_last_num_rows,  # [slots] int64
    p_num_accepted_rows,  # [slots] int64
    p_slots,  # [B] int64
    p_num_rows,  # [B] int64
    p_queries,  # [B * T, HK, 128] float32
    p_values,  # [B * T, HV, 128]
    p_beta,  # [B * T, HV] float32
    p_key_query,  # [B * T, HK] float32
    p_output,  # [B * T, HV, 128]
    num_slots,
    HK: gl.constexpr,
    HV: gl.constexpr,
    T: gl.constexpr,
    MAX_ROWS: gl.constexpr,
    T_PAD: gl.constexpr,
    MAX_PAD: gl.constexpr,
    BLOCK_V: gl.constexpr,
    TILES: gl.constexpr,
    VECTOR: gl.constexpr,
    PDL: gl.constexpr,
):
    """One (sequence, value head, TILES tiles of BLOCK_V rows of v).

    Pending records: S <- e S + u k^T, stored. Then T rows on a copy, both products from the old S:

        u = beta (v - e S k);   o = e S q + u (k . q);   S <- e S + u k^T

    With PDL it reads slots, num_rows, the pending counters, S and the records to be replayed, and
    where TILES is 1 stores S, before it waits: none of these may be written by kernels that could
    still run when it starts.
    """
    if PDL:
        gdc_launch_dependents()
    program = gl.program_id(0)
    BLOCKS: gl.constexpr = 128 // (BLOCK_V * TILES)
    i_b = program // (BLOCKS * HV)
    num_rows = gl.load(p_num_rows + i_b).to(gl.int32)
    slot = gl.load(p_slots + i_b)
    if num_rows > 0:
        run_sequence(
            p_state, p_record_keys, p_record_updates, p_record_decays, p_parity,
            p_last_num_rows, p_num_accepted_rows, p_queries, p_values, p_beta, p_key_query,
            p_output, i_b, program // BLOCKS % HV, program % BLOCKS, slot, num_rows, num_slots,
            HK, HV, T, MAX_ROWS, T_PAD, MAX_PAD, BLOCK_V, TILES, VECTOR, PDL,
        )  # fmt: skip
    else:
        if PDL:  # who waits for this kernel relies on its having waited for those in front
            gdc_wait()


def tile(num_heads: int, num_rows: int) -> tuple[int, int]:
    """(BLOCK_V, TILES) for B * HV heads and T rows, as measured; no choice changes a bit."""
    if num_heads <= 128:
        return 16, 1
    if num_heads < 1024:
        return 32, 2
    if num_rows <= 2:
        return 32, 1
    return (32, 2) if num_rows <= 4 else (32, 4)


def launch_rows(
    inputs: RuleInputs,
    output: Tensor,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    num_rows: Tensor,
    *,
    overlap: bool,
    shape: tuple[int, int] | None = None,
    warmup: bool = False,
) -> Any:
    """Launch delta_rows_kernel; `shape` overrides the tile."""
    num_slots, num_value_heads = delta.state.shape[:2]
    max_rows, num_key_heads = delta.record_keys.shape[2:4]
    rows_per_sequence = inputs.queries.shape[0] // slots.shape[0]
    num_heads = slots.shape[0] * num_value_heads
    block_values, tiles = shape or tile(num_heads, rows_per_sequence)
    arguments = (
        delta.state,
        delta.record_keys,
        delta.record_updates,
        delta.record_decays,
        pending.parity,
        pending.last_num_rows,
        pending.num_accepted_rows,
        slots,
        num_rows,
        inputs.queries,
        inputs.values,
        inputs.beta,
        inputs.key_query,
        output,
        num_slots,
    )
    options: dict[str, Any] = {
        "HK": num_key_heads,
        "HV": num_value_heads,
        "T": rows_per_sequence,
        "MAX_ROWS": max_rows,
        "T_PAD": triton.next_power_of_2(rows_per_sequence),
        "MAX_PAD": triton.next_power_of_2(max_rows),
        "BLOCK_V": block_values,
        "TILES": tiles,
        "VECTOR": 16 // delta.state.element_size(),
        "PDL": overlap,
        "num_warps": NUM_WARPS,
        "maxnreg": MAX_REGISTERS if tiles > 1 else None,
        "enable_fp_fusion": False,
        "launch_pdl": overlap,
    }
    grid = (num_heads * (HEAD_DIM // (block_values * tiles)),)
    if warmup:
        return delta_rows_kernel.warmup(*arguments, grid=grid, **options)
    return delta_rows_kernel[grid](*arguments, **options)


def delta_rows(
    inputs: RuleInputs,
    delta: DeltaState,
    pending: PendingRecords,
    slots: Tensor,
    num_rows: Tensor,
    *,
    overlap: bool,
) -> Tensor:
    """[R, HV, 128] outputs of rows whose keys and decays were recorded already."""
    output = torch.empty_like(inputs.values)
    launch_rows(inputs, output, delta, pending, slots, num_rows, overlap=overlap)
    return output
