"""Reference: the separate operations, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from outrider.ops.kv_cache.reference import write_kv_reference
from outrider.ops.rms_norm.reference import rms_norm_reference
from outrider.ops.rotary.reference import rotary_reference

if TYPE_CHECKING:
    from outrider.ops.attention_inputs import HeadLayout, HeadNorms


def attention_inputs_reference(
    projected: Tensor,
    layout: HeadLayout,
    norms: HeadNorms | None,
    angles: tuple[Tensor, Tensor],
    kv_pool: Tensor,
    kv_index: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """projected [R, width] -> queries [R, Hq, D], gate [R, Hq, D] or None."""
    num_rows, head_dim = projected.shape[0], layout.head_dim
    kv_columns = layout.num_kv_heads * head_dim
    queries, keys, values = projected.split(
        (layout.width - 2 * kv_columns, kv_columns, kv_columns), dim=-1
    )
    queries = queries.view(num_rows, layout.num_heads, -1)
    gate = queries[..., head_dim:] if layout.gated else None
    queries = queries[..., :head_dim]
    keys = keys.view(num_rows, layout.num_kv_heads, head_dim)
    values = values.view(num_rows, layout.num_kv_heads, head_dim)
    if norms is not None:
        queries = rms_norm_reference(queries, norms.query_weight, norms.eps, norms.zero_centred)
        keys = rms_norm_reference(keys, norms.key_weight, norms.eps, norms.zero_centred)
    write_kv_reference(rotary_reference(keys, *angles), values, kv_pool, kv_index)
    return rotary_reference(queries, *angles), gate
