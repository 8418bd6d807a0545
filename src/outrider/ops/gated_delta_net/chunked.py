"""fla-core's kernels of the chunked gated delta rule, launched without what fla-core wraps them in.

fla-core (flash-linear-attention) cuts the rows it is given into 64s from the first one on. Its
public function checks and copies arguments, keeps tensors for a backward pass and tunes every
kernel by timing at the first call; one layer's five launches then cost the host more than they
cost the GPU. And the number of warps decides the order of some sums: with the one configuration
given here, a prompt's bits are the same in every process.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

CHUNK = 64
"""Rows that fla-core takes at a time."""

_SUB_CHUNK = 16
_BLOCK = 64

_KERNELS = {
    "sum_decays": ("fla.ops.utils.cumsum", "chunk_local_cumsum_scalar_kernel"),
    "solve": (
        "fla.ops.gated_delta_rule.chunk_fwd",
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
    ),
    "weigh": ("fla.ops.gated_delta_rule.wy_fast", "recompute_w_u_fwd_kernel"),
    "states": ("fla.ops.common.chunk_delta_h", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"),
    "outputs": ("fla.ops.common.chunk_o", "chunk_fwd_kernel_o"),
}

OPTIONS: Mapping[str, Mapping[str, int]] = {
    "sum_decays": {"num_warps": 1},
    "solve": {"BK": 64, "num_warps": 2},
    "weigh": {"BK": _BLOCK, "BV": _BLOCK, "num_warps": 4, "num_stages": 3},
    "states": {"BV": 32, "num_warps": 4, "num_stages": 2},
    "outputs": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3},
}
"""Tile sizes and launch options of each kernel."""


@cache
def has_fla() -> bool:
    """Whether fla-core is installed."""
    return importlib.util.find_spec("fla") is not None


@cache
def _kernel(name: str) -> Any:
    """A kernel below its autotuner and heuristics: every constexpr must be given."""
    module, function = _KERNELS[name]
    kernel = getattr(importlib.import_module(module), function)
    while hasattr(kernel.fn, "fn"):  # what lies innermost is the Python function
        kernel = kernel.fn
    return kernel


def chunked_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    options: Mapping[str, Mapping[str, int]] = OPTIONS,
) -> tuple[Tensor, Tensor]:
    """One sequence in chunks of CHUNK rows, all inputs contiguous.

    With G the running sum of g in a chunk and D_ij = exp(G_i - G_j) for j <= i, else 0:

        A = (1 + strict lower part of diag(beta) D * (K K^T))^-1
        w = A diag(beta exp(G)) K;   u = A diag(beta) V
        v' = u - w S^T;   o = diag(exp(G)) Q S^T + (D * (Q K^T)) v'
        S <- exp(G_last) S + v'^T diag(exp(G_last - G)) K

    Args:
        queries, keys: [T, HK, K], 16 bits, keys of length 1, queries scaled.
        values: [T, HV, V], the same type.
        g, beta: [T, HV] float32.
        state: [HV, V, K] float32, not modified.

    Returns:
        Outputs [T, HV, V] and the state [HV, V, K] float32 after the last row.
    """
    sums, w, u = _corrections(keys, values, g, beta, options)
    return _outputs(queries, keys, w, u, sums, state, options)


def _corrections(
    keys: Tensor, values: Tensor, g: Tensor, beta: Tensor, options: Mapping[str, Mapping[str, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """G / ln 2 [T, HV], w [T, HV, K] and u [T, HV, V]; none of them looks at the state."""
    (num_rows, heads), key_dim = g.shape, keys.shape[-1]
    num_chunks = -(-num_rows // CHUNK)
    sizes = _sizes(keys, values)
    # Sums and exponentials are to the base 2.
    sums = torch.empty_like(g)
    _kernel("sum_decays")[(num_chunks * heads,)](
        s=g, o=sums, scale=1 / math.log(2), chunk_indices=None, B=1, REVERSE=False,
        HAS_SCALE=True, H=heads, **_fixed(num_rows), **options["sum_decays"],
    )  # fmt: skip
    # Zero, since only blocks on and below the diagonal are written, and all are read.
    inverse = keys.new_zeros((num_rows, heads, CHUNK))
    _kernel("solve")[(num_chunks, heads)](
        k=keys, g=sums, beta=beta, A=inverse, chunk_indices=None, BC=_SUB_CHUNK, USE_G=True,
        **sizes, **options["solve"],
    )  # fmt: skip
    w, u = keys.new_empty((num_rows, heads, key_dim)), torch.empty_like(values)
    _kernel("weigh")[(num_chunks, heads)](
        k=keys, v=values, beta=beta, w=w, u=u, A=inverse, g=sums, chunk_indices=None, USE_G=True,
        V=values.shape[-1], **sizes, **options["weigh"],
    )  # fmt: skip
    return sums, w, u


def _outputs(
    queries: Tensor,
    keys: Tensor,
    w: Tensor,
    u: Tensor,
    sums: Tensor,
    state: Tensor,
    options: Mapping[str, Mapping[str, int]],
) -> tuple[Tensor, Tensor]:
    """S before every chunk, one after the other; then o [T, HV, V] of all chunks at once, and S."""
    (num_rows, heads, value_dim), key_dim = u.shape, keys.shape[-1]
    num_chunks = -(-num_rows // CHUNK)
    sizes = {**_sizes(keys, u), "V": value_dim}
    states = keys.new_empty((num_chunks, heads, value_dim, key_dim))
    updates, final = torch.empty_like(u), torch.empty_like(state)
    _kernel("states")[(-(-value_dim // options["states"]["BV"]) * heads,)](
        k=keys, v=u, w=w, v_new=updates, g=sums, gk=None, h=states, h0=state, ht=final,
        chunk_offsets=None, USE_G=True, USE_GK=False, USE_INITIAL_STATE=True,
        STORE_FINAL_STATE=True, SAVE_NEW_VALUE=True, STATE_V_FIRST=True, **sizes,
        **options["states"],
    )  # fmt: skip
    outputs = torch.empty_like(u)
    _kernel("outputs")[(-(-value_dim // options["outputs"]["BV"]) * num_chunks, heads)](
        q=queries, k=keys, v=updates, h=states, g=sums, g_gamma=None, o=outputs,
        chunk_indices=None, scale=1.0, USE_G=True, USE_G_GAMMA=False, STATE_V_FIRST=True, **sizes,
        **options["outputs"],
    )  # fmt: skip
    return outputs, final


def _fixed(num_rows: int) -> dict[str, Any]:
    """Arguments of every kernel: one sequence, whole."""
    return {"T": num_rows, "BT": CHUNK, "cu_seqlens": None, "IS_VARLEN": False}


def _sizes(keys: Tensor, values: Tensor) -> dict[str, Any]:
    """Arguments of the kernels that read keys."""
    num_rows, key_heads, key_dim = keys.shape
    return {**_fixed(num_rows), "H": key_heads, "HV": values.shape[1], "K": key_dim}
