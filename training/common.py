"""What both training scripts share: batches, the clock, the optimiser, saving and evaluation.

Nothing here knows an architecture; a model comes in as functions on tensors.
Shapes: B rows, T positions, H hidden, V vocabulary, K draft tokens.
"""

import json
import lzma
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{{- message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VALIDATION_TOKENS = 262_144  # the tail of the stream, never trained on


class Log:
    """JSON lines in a file and on the terminal, each with the seconds since the start."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")
        self.start = time.monotonic()

    def __call__(self, **values: Any) -> None:
        row = {"seconds": round(time.monotonic() - self.start, 1)}
        row |= {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)


class Corpus:
    """The token stream on the device; rows are random crops of it."""

    def __init__(self, folder: Path, device: torch.device, seed: int = 0) -> None:
        packed = (folder / "train.u16.xz").read_bytes()
        stream = np.frombuffer(lzma.decompress(packed), np.uint16).astype(np.int32)
        self.train = torch.from_numpy(stream[:-VALIDATION_TOKENS]).to(device)
        self.validation = torch.from_numpy(stream[-VALIDATION_TOKENS:]).to(device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def batch(self, rows: int, length: int) -> Tensor:
        """[rows, length] int64 token ids."""
        high = len(self.train) - length
        starts = torch.randint(high, (rows, 1), generator=self.generator, device=self.train.device)
        return self.train[starts + torch.arange(length, device=starts.device)].long()

    def validation_batches(self, rows: int, length: int) -> Iterator[Tensor]:
        usable = len(self.validation) // (rows * length) * (rows * length)
        yield from self.validation[:usable].view(-1, rows, length).long()


class Clock:
    """Progress of a phase from 0 to 1 by wall time (or by steps, for a smoke test)."""

    def __init__(self, minutes: float, max_steps: int | None = None) -> None:
        self.seconds, self.max_steps = minutes * 60, max_steps
        self.start = time.monotonic()
        self.step = 0

    def tick(self) -> float | None:
        """Progress before the next step, or None when the phase is over."""
        if self.max_steps is not None:
            progress = self.step / self.max_steps
        else:
            progress = (time.monotonic() - self.start) / self.seconds
        self.step += 1
        return progress if progress < 1 else None


def learning_rate(peak: float, progress: float, step: int, warmup_steps: int = 100) -> float:
    """Linear warm-up by steps, then a cosine to 2 % of the peak by progress."""
    warmup = min(1.0, (step + 1) / warmup_steps)
    return peak * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizers(
    parameters: list[nn.Parameter], tables: list[nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the vocabulary tables and everything small.

    Muon's updates are scaled to the size of AdamW's, so that both share one learning rate.
    """
    hidden = [p for p in parameters if p.ndim == 2 and min(p.shape) >= 16]
    hidden = [p for p in hidden if all(p is not table for table in tables)]
    rest = [p for p in parameters if all(p is not matrix for matrix in hidden)]
    groups = [{"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.1},
              {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    fused = parameters[0].device.type == "cuda"
    return [
        torch.optim.Muon(hidden, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=fused),
    ]


class Trainer:
    """One phase of training: steps until the clock runs out, with clipping and logging.

    `tables` are those parameters that are vocabulary tables.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        tables: list[nn.Parameter],
        peak: float,
        clock: Clock,
        log: Log,
    ) -> None:
        self.parameters, self.peak, self.clock, self.log = parameters, peak, clock, log
        self.optimizers = make_optimizers(parameters, tables)
        self.tokens = 0

    def run(
        self, name: str, loss_of: Callable[[int], tuple[Tensor, dict[str, Tensor], int]]
    ) -> None:
        """`loss_of(step)` gives the loss, values to log and the number of tokens of the batch."""
        last_tokens, last_time = 0, time.monotonic()
        while (progress := self.clock.tick()) is not None:
            step = self.clock.step - 1
            rate = learning_rate(self.peak, progress, step)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
            loss, values, tokens = loss_of(step)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
            if step % 20 == 0 and not bool(torch.isfinite(norm)):
                raise FloatingPointError(f"{name}: gradient norm {float(norm)} at step {step}")
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.tokens += tokens
            if step in (1, 5, 20) or step % 100 == 0:
                shown = {k: float(v) for k, v in values.items()}
                now = time.monotonic()
                speed = (self.tokens - last_tokens) / max(1e-9, now - last_time)
                last_tokens, last_time = self.tokens, now
                self.log(phase=name, step=step, progress=progress, lr=rate,
                         tokens=self.tokens, tokens_per_second=round(speed), **shown)  # fmt: skip


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def soft_cross_entropy(logits: Tensor, teacher: Tensor, hard_weight: float = 0.3) -> Tensor:
    """Cross entropy to the teacher's distribution, plus a share to its argmax. [..., V] -> [...].

    The first term has the gradient of KL(teacher || draft); the second presses on the one token
    that a greedy chain proposes.
    """
    log_q = F.log_softmax(logits.float(), -1)
    soft = -(F.softmax(teacher.float(), -1) * log_q).sum(-1)
    hard = -log_q.gather(-1, teacher.argmax(-1, keepdim=True)).squeeze(-1)
    return (soft + hard_weight * hard) / (1 + hard_weight)


def unroll_mask(length: int, step: int, device: torch.device) -> Tensor:
    """Where row p of unrolled step `step` (from 1) looks: [T, step * T], blocks by source step.

    Rows of step 1 up to p - step + 1, which hold true hiddens; then one row of each later step i,
    at p - step + i: the chain's own recycled rows, the last of them row p itself.
    """
    p, j = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None]
    blocks = [j <= p - step + 1] + [j == p - step + i for i in range(2, step + 1)]
    return torch.cat(blocks, 1)


# Saving


def save_weights(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> int:
    """Write floating tensors as bf16 safetensors, split into shards of about equal size.

    Returns the number of parameters written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t.detach().to(torch.bfloat16) if t.is_floating_point() else t).cpu().contiguous()
        for name, t in tensors.items()
    }
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    written = 0
    for name, tensor in tensors.items():
        parts[min(shards - 1, written * shards // total)][name] = tensor
        written += tensor.numel() * tensor.element_size()
    if shards == 1:
        save_file(parts[0], folder / "model.safetensors", {"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05d}-of-{shards:05d}.safetensors"
            save_file(part, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return sum(t.numel() for t in tensors.values() if t.is_floating_point())


def save_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def special_ids(tokenizer: Tokenizer) -> tuple[int, list[int]]:
    """The pad (and document end) id, and the ids that end a generation."""
    end, im_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    return end, [end, im_end]


def save_generation_config(folder: Path, tokenizer: Tokenizer) -> None:
    pad, eos = special_ids(tokenizer)
    values = {"do_sample": False, "eos_token_id": eos, "pad_token_id": pad}
    save_json(folder / "generation_config.json", values)


def save_tokenizer(folder: Path, corpus: Path) -> None:
    """The tokenizer files of a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(corpus / "tokenizer.json", folder / "tokenizer.json")
    save_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "bos_token": None,
            "unk_token": None,
            "add_bos_token": False,
            "additional_special_tokens": [IM_START, IM_END],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
