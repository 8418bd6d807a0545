"""Tiny random checkpoints, written by transformers' own classes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class TinyShape:
    """Shape of a random Qwen3.5 checkpoint."""

    num_key_heads: int = 2
    num_value_heads: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden_size: int = 64
    linear_head_dim: int = 16
    num_layers: int = 4
    interval: int = 4
    vocab_size: int = 128
    tied: bool = True

    @property
    def label(self) -> str:
        ratio = self.num_value_heads // self.num_key_heads
        return f"ratio{ratio}-h{self.hidden_size}-{'tied' if self.tied else 'untied'}"


SHAPES = (
    TinyShape(),
    TinyShape(num_value_heads=2, tied=False),
    TinyShape(num_value_heads=6, num_heads=2, num_kv_heads=1),
    TinyShape(num_key_heads=1, num_value_heads=3, hidden_size=48, tied=False, num_layers=8),
    TinyShape(num_key_heads=4, num_value_heads=4, head_dim=64, num_heads=2, num_kv_heads=2),
    TinyShape(hidden_size=96, linear_head_dim=32, num_layers=6, interval=2, vocab_size=211),
    TinyShape(num_heads=6, num_kv_heads=2, head_dim=16, tied=False, num_layers=5),
)


def text_config(shape: TinyShape):
    """transformers' configuration of a shape."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.hidden_size * 2,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        linear_key_head_dim=shape.linear_head_dim,
        linear_value_head_dim=shape.linear_head_dim,
        linear_num_key_heads=shape.num_key_heads,
        linear_num_value_heads=shape.num_value_heads,
        full_attention_interval=shape.interval,
        max_position_embeddings=1024,
        tie_word_embeddings=shape.tied,
        eos_token_id=1,
        dtype="float32",
    )


def write_qwen3_5(path: Path, shape: TinyShape, seed: int = 0) -> None:
    """Write a random checkpoint with an MTP head; no parameter is at its neutral value."""
    from transformers import Qwen3_5ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(text_config(shape)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight", "dt_bias")):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif not name.endswith("A_log"):
                parameter.normal_(0, 0.12)
    model.save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    save_file(weights | mtp_weights(shape, seed + 1), path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))


def mtp_weights(shape: TinyShape, seed: int) -> dict[str, torch.Tensor]:
    """The 15 tensors of a random MTP head, by their checkpoint names."""
    generator = torch.Generator().manual_seed(seed)
    size, wide = shape.hidden_size, shape.hidden_size * 2
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = {
        "fc": (size, wide),
        "layers.0.self_attn.q_proj": (2 * query, size),
        "layers.0.self_attn.k_proj": (kv, size),
        "layers.0.self_attn.v_proj": (kv, size),
        "layers.0.self_attn.o_proj": (size, query),
        "layers.0.mlp.gate_proj": (wide, size),
        "layers.0.mlp.up_proj": (wide, size),
        "layers.0.mlp.down_proj": (size, wide),
    }
    norms = {
        "pre_fc_norm_embedding": size,
        "pre_fc_norm_hidden": size,
        "norm": size,
        "layers.0.input_layernorm": size,
        "layers.0.post_attention_layernorm": size,
        "layers.0.self_attn.q_norm": shape.head_dim,
        "layers.0.self_attn.k_norm": shape.head_dim,
    }
    weights = {n: torch.randn(s, generator=generator) * 0.15 for n, s in matrices.items()}
    weights |= {n: torch.randn(s, generator=generator) * 0.2 for n, s in norms.items()}
    return {f"mtp.{name}.weight": weight for name, weight in weights.items()}
