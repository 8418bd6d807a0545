"""Sampling kernels: what runs in which order, and the memory between them.

    _chunk_stats       of each chunk of a row: largest logit, sum of weights, maxima of groups
    _collect, _select  the threshold of top-k and top-p, in triton_threshold.py
    _race, _probs      one more pass over the row, with the threshold
    _finish            the best of the chunks

Every call launches the same kernels whatever the rows ask for, so that it can be captured; rows
that a kernel has nothing to do for leave it at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.ops.sampling.triton_rows import (
    RACE_BLOCK,
    _block_terms,
    _chunk_stats,
    _draw_listed,
    _emit_top,
    _finish,
    _probs,
    _race,
)
from outrider.ops.sampling.triton_threshold import (
    CAPACITY,
    CHUNK,
    GROUP,
    TILE,
    _collect,
    _select,
)

NUM_WARPS = 4
WIDE_WARPS = 8
"""Of _collect and of what takes a whole row, where one thread would hold too much."""
SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 key that are alike in all logits of a dtype and a sign."""


@dataclass(frozen=True)
class _Rows:
    """Rows of logits with what _chunk_stats found.

    Attributes:
        sums, groups: None where they were not asked for.
        tile: number of chunks, rounded up to a power of 2.
    """

    logits: Tensor
    leaders: Tensor
    sums: Tensor | None
    groups: Tensor | None
    num_chunks: int
    tile: int
    pdl: bool

    @classmethod
    def of(cls, logits: Tensor, temperature: Tensor | None, *, groups: bool, pdl: bool) -> _Rows:
        """Runs _chunk_stats, with sums where there is a temperature."""
        assert logits.stride(1) == 1 or logits.shape[1] == 1, logits.stride()
        num_rows, num_tokens = logits.shape
        num_chunks = triton.cdiv(num_tokens, CHUNK.value)
        tile = triton.next_power_of_2(num_chunks)
        assert tile <= TILE.value, num_tokens
        num_groups = num_chunks * (CHUNK.value // GROUP.value)
        leaders = logits.new_empty((num_rows, num_chunks), dtype=torch.int64)
        sums = group_keys = None
        if temperature is not None:
            sums = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
        if groups:
            group_keys = logits.new_empty((num_rows, num_groups), dtype=torch.int32)
        rows = cls(logits, leaders, sums, group_keys, num_chunks, tile, pdl)
        _chunk_stats[(num_chunks, num_rows)](
            *rows.where(),
            temperature,
            leaders,
            sums,
            group_keys,
            sums is not None,
            groups,
            pdl,
            **rows.options(),
        )
        return rows

    def where(self) -> tuple[Tensor, int, int]:
        """The first three arguments of kernels that read logits."""
        return self.logits, self.logits.stride(0), self.logits.shape[1]

    def options(self, num_warps: int = NUM_WARPS) -> dict[str, Any]:
        return {"num_warps": num_warps, "enable_fp_fusion": False, "launch_pdl": self.pdl}

    def collect(
        self, parameters: tuple[Tensor, ...] | None, most: int, *, with_min_p: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """counts, found, offsets: see _collect."""
        entries = self.leaders.shape
        counts = self.logits.new_empty(entries, dtype=torch.int32)
        found = self.logits.new_empty((*entries, CAPACITY.value))
        offsets = self.logits.new_empty((*entries, CAPACITY.value), dtype=torch.int16)
        # Every program searches the row's bound for itself: share it where there are many rows.
        num_rows, num_chunks = entries
        per_program = min(max(num_rows * num_chunks // 2048, 1), 8)
        _collect[(triton.cdiv(num_chunks, per_program), num_rows)](
            *self.where(),
            most,
            parameters,
            self.leaders,
            self.sums,
            self.groups,
            counts,
            found,
            offsets,
            num_chunks,
            per_program,
            parameters is not None,
            with_min_p,
            self.tile,
            self.pdl,
            **self.options(WIDE_WARPS),
        )
        return counts, found, offsets

    def threshold(
        self, parameters: tuple[Tensor, ...], *, with_min_p: bool
    ) -> tuple[Tensor, Tensor]:
        """cuts [R, 3] int32, and where with_min_p the sum of what is kept, [R] float32."""
        cuts = self.logits.new_empty((self.logits.shape[0], 3), dtype=torch.int32)
        totals = self.logits.new_empty(self.logits.shape[0], dtype=torch.float32)
        _select[(self.logits.shape[0],)](
            *self.where(),
            parameters,
            self.leaders,
            self.sums,
            *self.collect(parameters, 0, with_min_p=with_min_p),
            cuts,
            totals,
            self.num_chunks,
            with_min_p,
            SHIFTS[self.logits.dtype],
            self.tile,
            self.pdl,
            **self.options(WIDE_WARPS),
        )
        return cuts, totals

    def finish(
        self, winners: Tensor | None, temperature: Tensor | None, token_ids: Tensor | None
    ) -> Tensor:
        """[R]: winners [R, blocks] decide, in greedy rows the leaders; without winners always."""
        return _finished(winners, self.leaders, temperature, token_ids, self.options(num_warps=1))


def _finished(
    winners: Tensor | None,
    leaders: Tensor | None,
    temperature: Tensor | None,
    token_ids: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Launches _finish, with winners, leaders or both."""
    any_of = leaders if winners is None else winners
    assert any_of is not None
    output = any_of.new_empty(any_of.shape[0])
    num_winners = 0 if winners is None else winners.shape[1]
    num_leaders = 0 if leaders is None else leaders.shape[1]
    _finish[(any_of.shape[0],)](
        winners,
        num_winners,
        leaders,
        num_leaders,
        temperature,
        token_ids,
        output,
        winners is not None,
        leaders is not None,
        token_ids is not None,
        triton.next_power_of_2(num_winners),
        triton.next_power_of_2(num_leaders),
        options["launch_pdl"],
        **options,
    )
    return output


def argmax_kernel(logits: Tensor, token_ids: Tensor | None, *, pdl: bool) -> Tensor:
    """[R, V] -> [R]; see the public function."""
    return _Rows.of(logits, None, groups=False, pdl=pdl).finish(None, None, token_ids)


def sample_kernel(
    logits: Tensor,
    parameters: tuple[Tensor, ...],
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor | None,
    purpose: int,
    *,
    pdl: bool,
) -> Tensor:
    """[R, V] -> [R]; parameters are temperature, top_k, top_p and min_p, [R] each."""
    rows = _Rows.of(logits, parameters[0], groups=True, pdl=pdl)
    cuts, _ = rows.threshold(parameters, with_min_p=False)
    num_blocks = triton.cdiv(logits.shape[1], RACE_BLOCK.value)
    winners = rows.leaders.new_empty((logits.shape[0], num_blocks))
    _race[(num_blocks, logits.shape[0])](
        *rows.where(),
        seeds,
        positions,
        None,
        0,
        purpose,
        token_ids,
        parameters,
        rows.leaders,
        cuts,
        winners,
        rows.num_chunks,
        True,
        token_ids is not None,
        False,
        RACE_BLOCK.value,
        pdl,
        **rows.options(),
    )
    return rows.finish(winners, parameters[0], token_ids)


def processed_probs_kernel(logits: Tensor, parameters: tuple[Tensor, ...], *, pdl: bool) -> Tensor:
    """[R, V] -> [R, V] float32."""
    rows = _Rows.of(logits, parameters[0], groups=True, pdl=pdl)
    cuts, totals = rows.threshold(parameters, with_min_p=True)
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    _probs[(rows.num_chunks, logits.shape[0])](
        *rows.where(), parameters, cuts, totals, probs, pdl, **rows.options()
    )
    return probs


def race_kernel(
    weights: Tensor,
    seeds: Tensor,
    keys: Tensor,
    purpose: int,
    index: Tensor | int,
    *,
    pdl: bool,
) -> Tensor:
    """[R, V] -> [R]."""
    num_rows, num_tokens = weights.shape
    assert weights.stride(1) == 1 or num_tokens == 1, weights.stride()
    num_blocks = triton.cdiv(num_tokens, RACE_BLOCK.value)
    winners = weights.new_empty((num_rows, num_blocks), dtype=torch.int64)
    per_row = isinstance(index, Tensor)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False, "launch_pdl": pdl}
    _race[(num_blocks, num_rows)](
        weights,
        weights.stride(0),
        num_tokens,
        seeds,
        keys,
        index if per_row else None,
        0 if per_row else index,
        purpose,
        None,
        None,
        None,
        None,
        winners,
        0,
        False,
        False,
        per_row,
        RACE_BLOCK.value,
        pdl,
        **options,
    )
    return _finished(winners, None, None, None, options | {"num_warps": 1})


def top_m_kernel(logits: Tensor, m: int, *, pdl: bool) -> tuple[Tensor, Tensor]:
    """[R, V] -> scores and ids [R, m]."""
    rows = _Rows.of(logits, None, groups=True, pdl=pdl)
    num_rows, most = logits.shape[0], max(triton.next_power_of_2(m), 16)
    kept = rows.leaders.new_empty((num_rows, most))
    scores = logits.new_empty((num_rows, m))
    ids = rows.leaders.new_empty((num_rows, m))
    _emit_top[(num_rows,)](
        *rows.where(),
        m,
        rows.leaders,
        *rows.collect(None, m, with_min_p=False),
        kept,
        scores,
        ids,
        rows.num_chunks,
        SHIFTS[logits.dtype],
        rows.tile,
        most,
        min(most, 8192 // most),
        pdl,
        **rows.options(WIDE_WARPS),
    )
    return scores, ids


def draw_listed_kernel(
    scores: Tensor,
    token_ids: Tensor,
    parameters: tuple[Tensor, ...],
    seeds: Tensor,
    keys: Tensor,
    purpose: int,
    index: int,
    *,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """scores and token_ids [R, m] -> tokens [R], probabilities [R, m] float32."""
    num_rows, num_listed = scores.shape
    tokens = token_ids.new_empty(num_rows)
    probs = scores.new_empty(scores.shape, dtype=torch.float32)
    tile = max(triton.next_power_of_2(num_listed), 16)
    _draw_listed[(num_rows,)](
        scores,
        token_ids,
        num_listed,
        parameters,
        seeds,
        keys,
        index,
        purpose,
        tokens,
        probs,
        tile,
        pdl,
        num_warps=max(tile // 256, 1),
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return tokens, probs


def block_terms_sparse_kernel(
    probs: Tensor,
    draft_token_ids: Tensor,
    num_drafts: Tensor,
    token_ids: Tensor,
    q: Tensor,
    *,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """probs [B, K + 1, V], the rest of K rows a block -> reach and accept [B, K + 1]."""
    batch, num_rows, num_tokens = probs.shape
    num_listed = token_ids.shape[2]
    reach = probs.new_empty((batch, num_rows))
    accept = probs.new_empty((batch, num_rows))
    rows, listed = triton.next_power_of_2(max(num_rows - 1, 1)), triton.next_power_of_2(num_listed)
    _block_terms[(batch,)](
        probs,
        num_tokens,
        draft_token_ids.contiguous(),
        num_drafts,
        token_ids,
        q,
        token_ids.stride(0),
        q.stride(0),
        num_listed,
        reach,
        accept,
        num_rows - 1,
        rows,
        listed,
        pdl,
        num_warps=min(max(rows * listed // 256, 1), 8),
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return reach, accept
