"""Train models/tiny-qwen3, a small Qwen3 model, and models/tiny-qwen3-eagle3, its EAGLE3 draft.

Phase 1 trains the target as a language model. Phase 2 freezes it and distils it into the draft by
training-time test (EAGLE-3, arXiv 2503.01840): the draft is unrolled over several steps, each fed
with its own output as in drafting. Symbols: g_t the fused taps of the target at t, x_t the token at
t. Row p of the draft holds (g_p or a recycled output, x_{p+1}) at position p and predicts x_{p+2}.

    python training/qwen3_eagle3.py --corpus .corpus --output models
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    Clock,
    Corpus,
    Log,
    Trainer,
    autocast,
    save_generation_config,
    save_json,
    save_tokenizer,
    save_weights,
    soft_cross_entropy,
    special_ids,
    unroll_mask,
)
from evaluation import load_prompts, report
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3 as modeling

KeysValues = tuple[Tensor, Tensor]  # each [B, heads, T, D], after rotary


def fast_norm(self: Any, x: Tensor) -> Tensor:
    """Qwen3RMSNorm.forward in one kernel."""
    eps = self.variance_epsilon
    return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), eps).type_as(x)


class Attention(nn.Module):
    """Attention of the draft: inputs of 2H, plain rotary, no norm of queries and keys."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        q = config.num_attention_heads * self.head_dim
        kv = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(2 * hidden, q, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, hidden, bias=False)

    def forward(
        self, x: Tensor, rotary: KeysValues, earlier: list[KeysValues], mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = modeling.apply_rotary_pos_emb(q, k, *rotary)
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k.to(v.dtype), v))
        keys = torch.cat([*(pair[0] for pair in earlier), k], 2)
        values = torch.cat([*(pair[1] for pair in earlier), v], 2)
        q = q.to(v.dtype)
        out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


class MidLayer(nn.Module):
    def __init__(self, config: Qwen3Config, draft_config: Qwen3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = modeling.Qwen3RMSNorm(hidden, eps)
        self.input_layernorm = modeling.Qwen3RMSNorm(hidden, eps)
        self.self_attn = Attention(draft_config)
        self.post_attention_layernorm = modeling.Qwen3RMSNorm(hidden, eps)
        self.mlp = modeling.Qwen3MLP(draft_config)


class Eagle3(nn.Module):
    """The draft, named as in EAGLE3 checkpoints."""

    def __init__(self, config: Qwen3Config, draft_config: Qwen3Config, draft_ids: Tensor) -> None:
        """draft_ids [draft vocabulary], ascending: the target id of each draft id."""
        super().__init__()
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config, draft_config)
        self.norm = modeling.Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[draft_ids] = True
        self.register_buffer("t2d", t2d)

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        rotary: KeysValues,
        earlier: list[KeysValues],
        mask: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        """hidden [B, T, H]: fused taps or recycled outputs. Gives the output before `norm`, to be
        recycled, and this step's keys and values; mask as in `unroll_mask`."""
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(hidden)], -1)
        attended, pair = layer.self_attn(x, rotary, earlier, mask)
        x = hidden + attended
        return x + layer.mlp(layer.post_attention_layernorm(x)), pair

    def logits(self, out: Tensor) -> Tensor:
        """Over the draft vocabulary."""
        return self.lm_head(self.norm(out))


class Model:
    """The target and its draft, with the passes that training and evaluation need."""

    def __init__(
        self,
        config: Qwen3Config,
        draft_config: Qwen3Config,
        draft_ids: Tensor,
        device: torch.device,
    ) -> None:
        self.target = Qwen3ForCausalLM(config).to(device)
        self.draft = Eagle3(config, draft_config, draft_ids).to(device)
        self.draft_config, self.device = draft_config, device
        self.draft_ids = draft_ids.to(device)
        layers = config.num_hidden_layers
        self.taps = sorted({2, layers // 2, layers - 3})

    def taps_and_logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream entering each tapped layer, concatenated [B, T, 3H], and logits."""
        result = self.target(ids, use_cache=False, output_hidden_states=True)
        return torch.cat([result.hidden_states[i] for i in self.taps], -1), result.logits

    def language_loss(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
        with autocast(self.device):
            logits = self.target(ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return loss, {"loss": loss.detach()}, ids.numel()

    def rotary(self, embedding: Tensor) -> KeysValues:
        positions = torch.arange(embedding.shape[1], device=self.device)[None]
        return self.target.model.rotary_emb(embedding, positions)

    def distil_loss(self, ids: Tensor, steps: int) -> tuple[Tensor, dict[str, Tensor], int]:
        """Row p of every step is taught by the target at p + 1, over the draft vocabulary only."""
        with autocast(self.device):
            with torch.no_grad():
                taps, teacher = self.taps_and_logits(ids)
                best = teacher[:, 1:].argmax(-1)
                teacher = teacher[:, 1:, self.draft_ids]
                embedding = self.target.model.embed_tokens(ids[:, 1:])
                rotary = self.rotary(embedding)
            hidden, earlier, losses, values = self.draft.fc(taps[:, :-1]), [], [], {}
            for step in range(1, steps + 1):
                mask = unroll_mask(hidden.shape[1], step, self.device) if step > 1 else None
                out, pair = self.draft(hidden, embedding, rotary, earlier, mask)
                earlier.append(pair)
                logits = self.draft.logits(out[:, step - 1 :])
                losses.append(soft_cross_entropy(logits, teacher[:, step - 1 :]).mean())
                with torch.no_grad():
                    same = self.draft_ids[logits.argmax(-1)] == best[:, step - 1 :]
                    values[f"agree_{step}"] = same.float().mean()
                hidden = F.pad(out[:, :-1], (0, 0, 1, 0))
        weights = [1.0, 0.9, 0.8, 0.7][:steps]
        loss = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
        return loss, {"distil_loss": loss.detach(), **values}, ids.numel()

    @torch.no_grad()
    def validation_loss(self, corpus: Corpus) -> float:
        losses = [self.language_loss(ids)[0] for ids in corpus.validation_batches(32, 512)]
        return float(torch.stack(losses).mean())

    def target_pass(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device):
            taps, logits = self.taps_and_logits(ids)
            return self.draft.fc(taps).float(), logits.float()

    def draft_pass(self, hidden: Tensor, ids: Tensor, known: Tensor, k: int) -> Tensor:
        """The chain as an engine runs it, over whole rows instead of a cache."""
        rows = torch.arange(len(known), device=self.device)
        hidden, ids, place = hidden.clone(), ids.clone(), known - 2
        drafts: list[Tensor] = []
        for _ in range(k):
            with autocast(self.device):
                embedding = self.target.model.embed_tokens(ids[:, 1:])
                rotary = self.rotary(embedding)
                out, _ = self.draft(hidden[:, :-1], embedding, rotary, [], None)
                last = out[rows, place]
                drafts.append(self.draft_ids[self.draft.logits(last).argmax(-1)])
            ids[rows, place + 2] = drafts[-1]
            hidden[rows, place + 1] = last.to(hidden.dtype)
            place = place + 1
        return torch.stack(drafts, 1)

    def save_target(self, folder: Path) -> int:
        weights = {k: v for k, v in self.target.state_dict().items() if k != "lm_head.weight"}
        config = self.target.config.to_dict()
        config |= {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
        save_json(folder / "config.json", config)
        return save_weights(folder, weights)

    def save_draft(self, folder: Path) -> int:
        c = self.draft_config
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope_parameters["rope_theta"],
            "max_position_embeddings": c.max_position_embeddings,
            "vocab_size": c.vocab_size,
            "draft_vocab_size": len(self.draft_ids),
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self.taps},
        }
        save_json(folder / "config.json", config)
        return save_weights(folder, self.draft.state_dict())


def make_config(tokenizer: Tokenizer, smoke: bool) -> Qwen3Config:
    _, eos = special_ids(tokenizer)
    size = {"hidden_size": 256, "intermediate_size": 608, "num_hidden_layers": 8, "head_dim": 64}
    if smoke:
        size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "head_dim": 32}
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        **size,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=eos,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--output", type=Path, required=True, help="folder of both model folders")
    parser.add_argument("--log", type=Path, help="default: tiny-qwen3/train_log.jsonl")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "heldout.jsonl")
    parser.add_argument("--minutes", type=float, default=5.0, help="wall time of phase 1")
    parser.add_argument("--distil-minutes", type=float, default=2.5, help="wall time of phase 2")
    parser.add_argument("--rows", type=int, default=64, help="rows of 1024 tokens in a batch")
    parser.add_argument("--unroll", type=int, default=3, help="steps of phase 2")
    parser.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer files")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a micro model")
    arguments = parser.parse_args()
    smoke = arguments.smoke

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    modeling.Qwen3RMSNorm.forward = fast_norm
    tokenizer = Tokenizer.from_file(str(arguments.corpus / "tokenizer.json"))
    by_frequency = json.loads((arguments.corpus / "draft_vocab.json").read_text())
    draft_ids = torch.tensor(sorted(by_frequency[: 512 if smoke else 2048]))
    target_folder, draft_folder = (
        arguments.output / name for name in ("tiny-qwen3", "tiny-qwen3-eagle3")
    )
    log = Log(arguments.log or target_folder / "train_log.jsonl")
    corpus = Corpus(arguments.corpus, device)
    config = make_config(tokenizer, smoke)
    draft_config = make_config(tokenizer, smoke)
    draft_config.intermediate_size = 96 if smoke else 1024
    model = Model(config, draft_config, draft_ids, device)
    save_generation_config(target_folder, tokenizer)
    if not arguments.no_tokenizer:
        save_tokenizer(target_folder, arguments.corpus)
    log(phase="start", device=str(device), torch=torch.__version__, tokens=len(corpus.train),
        parameters=model.save_target(target_folder),
        draft_parameters=model.save_draft(draft_folder))  # fmt: skip

    rows = 2 if smoke else arguments.rows

    def language_step(step: int) -> tuple[Tensor, dict[str, Tensor], int]:
        if step % 8 == 7 and not smoke:  # every eighth batch has long rows
            return model.language_loss(corpus.batch(max(1, rows // 4), 4097))
        return model.language_loss(corpus.batch(rows, 130 if smoke else 1025))

    clock = Clock(arguments.minutes, 12 if smoke else None)
    table = model.target.lm_head.weight
    trainer = Trainer(list(model.target.parameters()), [table], 3e-3, clock, log)
    trainer.run("language", language_step)
    model.save_target(target_folder)
    if not smoke:
        log(phase="language", validation_loss=model.validation_loss(corpus))

    def distil_step(_: int) -> tuple[Tensor, dict[str, Tensor], int]:
        return model.distil_loss(corpus.batch(2 * rows, 64 if smoke else 513), arguments.unroll)

    model.target.requires_grad_(False)
    clock = Clock(arguments.distil_minutes, 4 if smoke else None)
    table = model.draft.lm_head.weight
    trainer = Trainer(list(model.draft.parameters()), [table], 2e-3, clock, log)
    trainer.run("distil", distil_step)
    model.save_draft(draft_folder)

    prompts = load_prompts(arguments.prompts, tokenizer, device, limit=4 if smoke else 160)
    report(model.target_pass, model.draft_pass, prompts, special_ids(tokenizer)[1], log,
           new_tokens=8 if smoke else 64)  # fmt: skip


if __name__ == "__main__":
    main()
