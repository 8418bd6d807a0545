"""Train models/tiny-qwen3.5: a small Qwen3.5 text model with its multi-token-prediction head.

Phase 1 trains the target and, at weight 0.3, the head's first step together. Phase 2 freezes the
target and distils it into the head unrolled over several steps, each fed with the head's own output
as in drafting. Symbols: h_t the target's hidden after its final norm, x_t the token at t. Row p of
the head holds (hidden, x_{p+1}) at position p and predicts x_{p+2}.

    python training/qwen3_5_mtp.py --corpus .corpus --output models/tiny-qwen3.5
"""

import argparse
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
from delta_rule import chunk_delta_rule, shifted_conv
from evaluation import load_prompts, report
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

KeysValues = tuple[Tensor, Tensor]  # each [B, heads, T, D], after rotary


def fast_norm(self: Any, x: Tensor) -> Tensor:
    """Qwen3_5RMSNorm.forward in one kernel."""
    weight = 1.0 + self.weight.float()
    return F.rms_norm(x.float(), (x.shape[-1],), weight, self.eps).type_as(x)


class MtpHead(nn.Module):
    """The head, named as in checkpoints: fc, two input norms, one gated-attention layer, norm."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        full = config.layer_types.index("full_attention")
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        nn.init.normal_(self.fc.weight, std=config.initializer_range)
        self.pre_fc_norm_embedding = modeling.Qwen3_5RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = modeling.Qwen3_5RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([modeling.Qwen3_5DecoderLayer(config, full)])
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
        self.norm = modeling.Qwen3_5RMSNorm(hidden, eps)

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        rotary: KeysValues,
        earlier: list[KeysValues],
        mask: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        """Output after `norm` [B, T, H] and this step's keys and values.

        `earlier` are the keys and values of the previous unrolled steps; mask [T, len(earlier) * T
        + T] is True where a row may look, None for plain causal attention.
        """
        layer, attention = self.layers[0], self.layers[0].self_attn
        x = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        residual = self.fc(x)
        x = layer.input_layernorm(residual)
        heads = (*x.shape[:-1], -1, attention.head_dim)
        q, gate = attention.q_proj(x).unflatten(-1, (-1, 2 * attention.head_dim)).chunk(2, -1)
        q = attention.q_norm(q).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(x).view(heads)).transpose(1, 2)
        v = attention.v_proj(x).view(heads).transpose(1, 2)
        q, k = modeling.apply_rotary_pos_emb(q, k, *rotary)
        k, v = (t.repeat_interleave(attention.num_key_value_groups, 1) for t in (k, v))
        keys = torch.cat([*(pair[0] for pair in earlier), k], 2)
        values = torch.cat([*(pair[1] for pair in earlier), v], 2)
        q, keys = q.to(values.dtype), keys.to(values.dtype)
        out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=mask is None)
        out = out.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid()
        x = residual + attention.o_proj(out)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x), (k, v)


class Model:
    """The target and its head, with the passes that training and evaluation need."""

    def __init__(self, config: Qwen3_5TextConfig, device: torch.device) -> None:
        self.target = Qwen3_5ForCausalLM(config).to(device)
        self.head = MtpHead(config).to(device)
        self.device = device

    def hidden(self, ids: Tensor) -> Tensor:
        return self.target.model(ids, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.target.lm_head.weight)

    def rotary(self, embedding: Tensor) -> KeysValues:
        positions = torch.arange(embedding.shape[1], device=self.device).view(1, 1, -1)
        positions = positions.expand(3, embedding.shape[0], -1)
        return self.target.model.rotary_emb(embedding, positions)

    def joint_loss(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
        with autocast(self.device):
            hidden = self.hidden(ids[:, :-1])
            loss = F.cross_entropy(self.logits(hidden).flatten(0, 1), ids[:, 1:].flatten())
            embedding = self.target.model.embed_tokens(ids[:, 1:-1])
            out, _ = self.head(hidden[:, :-1], embedding, self.rotary(embedding), [], None)
            mtp = F.cross_entropy(self.logits(out).flatten(0, 1), ids[:, 2:].flatten())
        return loss + 0.3 * mtp, {"loss": loss.detach(), "mtp_loss": mtp.detach()}, ids.numel()

    def distil_loss(self, ids: Tensor, steps: int) -> tuple[Tensor, dict[str, Tensor], int]:
        """Steps share teacher rows: row p of every step is taught by the target at p + 1."""
        with autocast(self.device):
            with torch.no_grad():
                h = self.hidden(ids)
                teacher = self.logits(h[:, 1:])
                embedding = self.target.model.embed_tokens(ids[:, 1:])
                rotary = self.rotary(embedding)
            hidden, earlier, losses, values = h[:, :-1], [], [], {}
            for step in range(1, steps + 1):
                mask = unroll_mask(hidden.shape[1], step, self.device) if step > 1 else None
                out, pair = self.head(hidden, embedding, rotary, earlier, mask)
                earlier.append(pair)
                logits = self.logits(out)[:, step - 1 :]
                losses.append(soft_cross_entropy(logits, teacher[:, step - 1 :]).mean())
                with torch.no_grad():
                    same = logits.argmax(-1) == teacher[:, step - 1 :].argmax(-1)
                    values[f"agree_{step}"] = same.float().mean()
                hidden = F.pad(out[:, :-1], (0, 0, 1, 0))
        weights = [1.0, 0.9, 0.8, 0.7][:steps]
        loss = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
        return loss, {"distil_loss": loss.detach(), **values}, ids.numel()

    @torch.no_grad()
    def validation_loss(self, corpus: Corpus) -> float:
        losses: list[Tensor] = []
        for ids in corpus.validation_batches(32, 512):
            with autocast(self.device):
                logits = self.logits(self.hidden(ids[:, :-1]))
                losses.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        return float(torch.stack(losses).mean())

    def target_pass(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device):
            hidden = self.hidden(ids)
            return hidden, self.logits(hidden).float()

    def draft_pass(self, hidden: Tensor, ids: Tensor, known: Tensor, k: int) -> Tensor:
        """The chain as an engine runs it, over whole rows instead of a cache."""
        rows = torch.arange(len(known), device=self.device)
        hidden, ids, place = hidden.clone(), ids.clone(), known - 2
        drafts: list[Tensor] = []
        for _ in range(k):
            with autocast(self.device):
                embedding = self.target.model.embed_tokens(ids[:, 1:])
                rotary = self.rotary(embedding)
                out, _ = self.head(hidden[:, :-1], embedding, rotary, [], None)
                last = out[rows, place]
                drafts.append(self.logits(last).argmax(-1))
            ids[rows, place + 2] = drafts[-1]
            hidden[rows, place + 1] = last.to(hidden.dtype)
            place = place + 1
        return torch.stack(drafts, 1)

    def save(self, folder: Path) -> int:
        target = {k: v for k, v in self.target.state_dict().items() if k != "lm_head.weight"}
        head = {f"mtp.{k}": v for k, v in self.head.state_dict().items()}
        config = self.target.config.to_dict()
        config |= {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16",
                   "mtp_num_hidden_layers": 1, "full_attention_interval": 4}  # fmt: skip
        save_json(folder / "config.json", config)
        return save_weights(folder, target | head, shards=2)


def make_config(tokenizer: Tokenizer, smoke: bool) -> Qwen3_5TextConfig:
    _, eos = special_ids(tokenizer)
    size = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "head_dim": 64}
    if smoke:
        size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 32}
    return Qwen3_5TextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        **size,
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=size["head_dim"],
        linear_value_head_dim=size["head_dim"],
        full_attention_interval=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        eos_token_id=eos,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--output", type=Path, required=True, help="model folder")
    parser.add_argument("--log", type=Path, help="default: train_log.jsonl beside the weights")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "heldout.jsonl")
    parser.add_argument("--minutes", type=float, default=6.0, help="wall time of phase 1")
    parser.add_argument("--distil-minutes", type=float, default=1.5, help="wall time of phase 2")
    parser.add_argument("--rows", type=int, default=64, help="rows of 1024 tokens in a batch")
    parser.add_argument("--unroll", type=int, default=3, help="steps of phase 2")
    parser.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer files")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a micro model")
    arguments = parser.parse_args()
    smoke = arguments.smoke

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    modeling.Qwen3_5RMSNorm.forward = fast_norm
    modeling.torch_chunk_gated_delta_rule = chunk_delta_rule
    modeling.causal_conv1d_fn = shifted_conv
    tokenizer = Tokenizer.from_file(str(arguments.corpus / "tokenizer.json"))
    log = Log(arguments.log or arguments.output / "train_log.jsonl")
    corpus = Corpus(arguments.corpus, device)
    model = Model(make_config(tokenizer, smoke), device)
    save_generation_config(arguments.output, tokenizer)
    if not arguments.no_tokenizer:
        save_tokenizer(arguments.output, arguments.corpus)
    log(phase="start", device=str(device), torch=torch.__version__, tokens=len(corpus.train),
        parameters=model.save(arguments.output))  # fmt: skip

    rows = 2 if smoke else arguments.rows

    def joint_step(step: int) -> tuple[Tensor, dict[str, Tensor], int]:
        if step % 8 == 7 and not smoke:  # every eighth batch has long rows
            return model.joint_loss(corpus.batch(max(1, rows // 4), 4097))
        return model.joint_loss(corpus.batch(rows, 130 if smoke else 1025))

    parameters = [*model.target.parameters(), *model.head.parameters()]
    clock = Clock(arguments.minutes, 12 if smoke else None)
    Trainer(parameters, [model.target.lm_head.weight], 3e-3, clock, log).run("joint", joint_step)
    model.save(arguments.output)
    if not smoke:
        log(phase="joint", validation_loss=model.validation_loss(corpus))

    def distil_step(_: int) -> tuple[Tensor, dict[str, Tensor], int]:
        return model.distil_loss(corpus.batch(2 * rows, 64 if smoke else 513), arguments.unroll)

    model.target.requires_grad_(False)
    clock = Clock(arguments.distil_minutes, 4 if smoke else None)
    Trainer(list(model.head.parameters()), [], 1.5e-3, clock, log).run("distil", distil_step)
    model.save(arguments.output)

    prompts = load_prompts(arguments.prompts, tokenizer, device, limit=4 if smoke else 160)
    report(model.target_pass, model.draft_pass, prompts, special_ids(tokenizer)[1], log,
           new_tokens=8 if smoke else 64)  # fmt: skip


if __name__ == "__main__":
    main()
