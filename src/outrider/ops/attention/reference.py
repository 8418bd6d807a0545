"""Reference paged attention.

The context is cut into tiles of TILE tokens by absolute position. Every tile is a matrix product of
the same shape, and the tiles' sums are added in order of position, so tiles past a row's own
position (all weights zero) leave its bits alone.
"""

import torch
from torch import Tensor

from outrider.ops.elementwise import sigmoid
from outrider.ops.linear.reference import pad_rows

TILE = 64


def paged_attention_reference(
    queries: Tensor,
    kv_pool: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    num_rows: Tensor,
    gate: Tensor | None,
) -> Tensor:
    """queries [B, T, Hq, D] -> [B, T, Hq, D]; see the public function for the contract."""
    batch, rows, num_heads, head_dim = queries.shape
    num_kv_heads, block_size = kv_pool.shape[2], kv_pool.shape[3]
    group = num_heads // num_kv_heads
    ends = starts + num_rows  # [B]
    num_tiles = -(-int(ends.max()) // TILE)

    tokens = torch.arange(num_tiles * TILE, device=queries.device)
    written = tokens < ends[:, None]  # [B, L]
    block_index = (tokens // block_size).clamp(max=block_tables.shape[1] - 1)
    # Slots that nobody wrote may hold NaN, and 0 * NaN would reach every row.
    kept = kv_pool[:, block_tables[:, block_index], :, tokens % block_size].float()  # [B, L, 2, ...
    kept = torch.where(written[:, :, None, None, None], kept, 0.0)
    keys, values = kept.permute(2, 0, 3, 1, 4).reshape(
        2, batch * num_kv_heads, num_tiles, TILE, head_dim
    )

    packed = queries.float().view(batch, rows, num_kv_heads, group, head_dim)
    packed = packed.transpose(1, 2).reshape(batch * num_kv_heads, rows * group, head_dim)
    packed = pad_rows(packed, dim=1)
    seen = tokens <= (starts[:, None] + torch.arange(rows, device=queries.device))[..., None]
    seen = seen[:, None, :, None].expand(-1, num_kv_heads, -1, group, -1)  # [B, Hkv, T, group, L]
    seen = pad_rows(seen.reshape(batch * num_kv_heads, rows * group, -1), dim=1)

    num_packed = packed.shape[1]
    repeated = packed[:, None].expand(-1, num_tiles, -1, -1).reshape(-1, num_packed, head_dim)
    scores = torch.bmm(repeated, keys.flatten(0, 1).transpose(1, 2)) * head_dim**-0.5
    scores = scores.view(-1, num_tiles, num_packed, TILE)
    visible = seen.view(-1, num_packed, num_tiles, TILE).transpose(1, 2)
    scores = scores.masked_fill(~visible, float("-inf"))
    # Padding rows see nothing; a reference of 0 keeps their weights at exp(-inf) = 0, not NaN.
    highest = scores.amax(dim=(1, 3), keepdim=True)
    weights = torch.exp(scores - torch.where(highest.isinf(), 0.0, highest))
    partial = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1))
    partial = partial.view(-1, num_tiles, num_packed, head_dim)
    partial_sums = weights.sum(-1, keepdim=True)

    output, total = partial[:, 0], partial_sums[:, 0]
    for tile in range(1, num_tiles):
        output = output + partial[:, tile]
        total = total + partial_sums[:, tile]
    output = (output / total)[:, : rows * group]
    output = output.view(batch, num_kv_heads, rows, group, head_dim).transpose(1, 2)
    output = output.reshape(batch, rows, num_heads, head_dim).to(queries.dtype)
    return output if gate is None else output * sigmoid(gate)
