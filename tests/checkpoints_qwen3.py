"""Tiny random Qwen3 checkpoints, and EAGLE3 drafts for them in both layouts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Qwen3Shape:
    """Shape of a random Qwen3 checkpoint."""

    hidden_size: int = 64
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 128
    tied: bool = True
    yarn: bool = False

    @property
    def label(self) -> str:
        name = f"h{self.hidden_size}-{self.num_heads}:{self.num_kv_heads}x{self.head_dim}"
        return f"{name}-{'tied' if self.tied else 'untied'}{'-yarn' if self.yarn else ''}"


QWEN3_SHAPES = (
    Qwen3Shape(),
    Qwen3Shape(tied=False, num_kv_heads=4),
    Qwen3Shape(num_kv_heads=1, head_dim=16),
    Qwen3Shape(hidden_size=48, num_heads=6, num_kv_heads=3, tied=False, vocab_size=131),
    Qwen3Shape(head_dim=64, num_heads=2, num_kv_heads=2, num_layers=9),
    Qwen3Shape(yarn=True),
    Qwen3Shape(yarn=True, tied=False, head_dim=64),
)


def write_qwen3(path: Path, shape: Qwen3Shape, seed: int = 0) -> None:
    """Write a random checkpoint; every parameter is away from its neutral value."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    if shape.yarn:
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.hidden_size * 2,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1024,
        rope_parameters=rope,
        tie_word_embeddings=shape.tied,
        eos_token_id=1,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.12)
    model.save_pretrained(path)


def eagle3_weights(
    shape: Qwen3Shape, draft_vocab_size: int, seed: int, *, own_embedding: bool = False
) -> dict[str, torch.Tensor]:
    """Tensors of a random draft by their usual names; d2t and t2d choose random target ids."""
    generator = torch.Generator().manual_seed(seed)
    size, wide = shape.hidden_size, 2 * shape.hidden_size
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = {
        "fc": (size, 3 * size),
        "midlayer.self_attn.q_proj": (query, wide),
        "midlayer.self_attn.k_proj": (kv, wide),
        "midlayer.self_attn.v_proj": (kv, wide),
        "midlayer.self_attn.o_proj": (size, query),
        "midlayer.mlp.gate_proj": (wide, size),
        "midlayer.mlp.up_proj": (wide, size),
        "midlayer.mlp.down_proj": (size, wide),
        "lm_head": (draft_vocab_size, size),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    weights = {n: torch.randn(s, generator=generator) * 0.15 for n, s in matrices.items()}
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        weights[name] = 1 + torch.randn(size, generator=generator) * 0.2
    if own_embedding:
        weights["embed_tokens"] = torch.randn((shape.vocab_size, size), generator=generator) * 0.15
    tensors = {f"{name}.weight": weight for name, weight in weights.items()}
    if draft_vocab_size < shape.vocab_size:
        chosen = torch.randperm(shape.vocab_size, generator=generator)[:draft_vocab_size].sort()
        tensors["d2t"] = chosen.values - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
        tensors["t2d"][chosen.values] = True
    return tensors


def write_eagle3(
    path: Path,
    shape: Qwen3Shape,
    draft_vocab_size: int = 40,
    seed: int = 0,
    *,
    own_embedding: bool = False,
    speculators: bool = False,
    tensors: dict[str, torch.Tensor] | None = None,
    **extra: Any,
) -> None:
    """Write a draft in the usual layout or in that of `speculators`; `extra` goes to its config."""
    path.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = eagle3_weights(shape, draft_vocab_size, seed, own_embedding=own_embedding)
    layer: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
    }
    top: dict[str, Any] = {"draft_vocab_size": draft_vocab_size} | extra
    if speculators:
        tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer} | top
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"]} | layer | top
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
