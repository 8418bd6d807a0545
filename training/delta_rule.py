"""The gated delta net's two sequence operations in plain PyTorch, with gradients, fast on a GPU.

Drop-in for the functions of the same role in transformers' Qwen3.5, without caches. Written because
the public Triton kernel refuses its backward pass on Hopper GPUs with Triton 3.4 to 3.7.0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def shifted_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu", **_: Any
) -> Tensor:
    """Causal depthwise convolution as a sum of shifts. x [B, C, T], weight [C, W]."""
    assert bias is None and activation == "silu"
    length, width = x.shape[-1], weight.shape[-1]
    padded = F.pad(x.transpose(1, 2), (0, 0, width - 1, 0))
    weight = weight.to(x.dtype)
    y = sum(padded[:, i : i + length] * weight[:, i] for i in range(width))
    return F.silu(y).transpose(1, 2)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular [..., C, C], C a power of two, at least 16.

    Blocks of 16 by the product (I - L)(I + L^2)(I + L^4)(I + L^8), exact as L^16 = 0; then pairs
    of blocks are joined. Larger powers would lose all digits when the keys of a chunk are alike.
    """
    size = lower.shape[-1]
    if size == 16:
        eye = torch.eye(16, device=lower.device)
        inverse, power = eye - lower, lower
        for _ in range(3):
            power = power @ power
            inverse = inverse + inverse @ power
        return inverse
    half = size // 2
    diagonal = torch.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, second = unit_lower_inverse(diagonal)
    corner = -second @ lower[..., half:, :half] @ first
    top = torch.cat([first, torch.zeros_like(first)], -1)
    return torch.cat([top, torch.cat([corner, second], -1)], -2)


def chunk_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """The gated delta rule in chunks of 64, with only a 64 x 64 recurrence left sequential.

    query, key, value [B, T, heads, D]; g (log decay), beta [B, T, heads]. Per chunk, with G the
    running sum of g: inv = (I + tril(beta_i k_i.k_j exp(G_i - G_j), -1))^-1, u = inv (beta v),
    w = inv (beta exp(G) k), S' = (exp(G_C) I - kd^T w) S + kd^T u where kd = exp(G_C - G) k, and
    o = (exp(G) q) S + tril(q k^T exp(G_i - G_j)) (u - w S).
    Dot products take the dtype of `value`; decays, the inverse and the state stay fp32.
    """
    assert options.get("initial_state") is None and not options.get("output_final_state")
    chunk, dtype, length = 64, value.dtype, value.shape[1]
    with torch.autocast(value.device.type, enabled=False):
        pad = -length % chunk
        q, k = (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-6)
                for x in (query, key))  # fmt: skip
        q = q * query.shape[-1] ** -0.5
        q, k, v = (F.pad(x.to(dtype), (0, 0, 0, 0, 0, pad)) for x in (q, k, value))
        q, k, v = (x.transpose(1, 2).unflatten(2, (-1, chunk)) for x in (q, k, v))
        g, b = (F.pad(x.float(), (0, 0, 0, pad)).transpose(1, 2).unflatten(2, (-1, chunk))
                for x in (g, beta))  # fmt: skip
        total = g.cumsum(-1)  # [B, heads, N, C]
        upper = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).exp()
        lower = (b[..., None] * (k @ k.transpose(-1, -2)).float() * decay).tril(-1)
        inverse = unit_lower_inverse(lower) * b[..., None, :]
        u = inverse.to(dtype) @ v
        w = (inverse * total.exp()[..., None, :]).to(dtype) @ k
        within = ((q @ k.transpose(-1, -2)).float() * decay).to(dtype)
        last = total[..., -1:]
        k_decayed = (k * (last - total).exp()[..., None]).to(dtype).transpose(-1, -2)
        eye = torch.eye(k.shape[-1], device=q.device)
        step = last[..., None].exp() * eye - (k_decayed @ w).float()
        add = (k_decayed @ u).float()
        state = torch.zeros_like(add[:, :, 0])
        states: list[Tensor] = []
        for step_n, add_n in zip(step.unbind(2), add.unbind(2), strict=True):
            states.append(state)
            state = step_n @ state + add_n
        before = torch.stack(states, 2).to(dtype)  # the state entering each chunk
        out = (q * total.exp()[..., None]).to(dtype) @ before + within @ (u - w @ before)
    return out.flatten(2, 3).transpose(1, 2)[:, :length].contiguous(), None
