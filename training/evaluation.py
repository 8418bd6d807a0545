"""Acceptance of a draft on held-out prompts, by plain speculative decoding without caches.

Knows no architecture; a target and its draft come in as functions on tensors.
Shapes: N prompts, L positions, V vocabulary, k draft tokens.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import Log
from tokenizers import Tokenizer
from torch import Tensor, nn


class Prompts(NamedTuple):
    kind: str
    ids: Tensor  # [N, L] right-padded
    lengths: Tensor  # [N]


def load_prompts(
    path: Path, tokenizer: Tokenizer, device: torch.device, limit: int
) -> list[Prompts]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    result: list[Prompts] = []
    for kind in ("code", "prose"):
        texts = [row["text"] for row in rows if row["kind"] == kind][:limit]
        ids = [torch.tensor(e.ids, device=device) for e in tokenizer.encode_batch(texts)]
        lengths = torch.tensor([len(i) for i in ids], device=device)
        result.append(Prompts(kind, nn.utils.rnn.pad_sequence(ids, batch_first=True), lengths))
    return result


class Acceptance(NamedTuple):
    length: float  # mean tokens a target pass yields: accepted drafts + 1
    rate: list[float]  # share of verifications in which draft 1, 2, ... was accepted


# Target: ids [N, L] -> (whatever its draft needs, logits [N, L, V]).
# Draft: (that, ids, known [N], k) -> draft ids [N, k], where ids[:, known - 1] is the newest token
# and the target's values are valid up to position known - 2.
TargetPass = Callable[[Tensor], tuple[Any, Tensor]]
DraftPass = Callable[[Any, Tensor, Tensor, int], Tensor]


@torch.no_grad()
def acceptance(
    target: TargetPass,
    draft: DraftPass,
    prompts: Prompts,
    end_ids: list[int],
    temperature: float = 0.0,
    k: int = 3,
    new_tokens: int = 64,
    seed: int = 0,
) -> Acceptance:
    """Speculative decoding without caches: a draft is kept when it equals the target's own token.

    Padding on the right is harmless, because every layer is causal.
    """
    device = prompts.ids.device
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.arange(len(prompts.lengths), device=device)
    ids = F.pad(prompts.ids, (0, new_tokens + 2 * k + 2))
    known, goal = prompts.lengths.clone(), prompts.lengths + new_tokens

    def choose(logits: Tensor) -> Tensor:  # [N, n, V] -> [N, n]
        if temperature == 0:
            return logits.argmax(-1)
        p = F.softmax(logits.float() / temperature, -1)
        return torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(p.shape[:2])

    state, logits = target(ids)
    ids[rows, known] = choose(logits[rows, known - 1][:, None])[:, 0]
    known = known + 1
    active = torch.ones_like(known, dtype=torch.bool)
    passes, emitted = 0, 0
    accepted_at = torch.zeros(k, device=device)
    ends = torch.tensor(end_ids, device=device)
    while bool(active.any()):
        drafts = draft(state, ids, known, k)
        places = known[:, None] + torch.arange(k + 1, device=device)  # [N, k + 1]
        ids.scatter_(1, places[:, :k], drafts)
        state, logits = target(ids)
        chosen = choose(logits[rows[:, None], places - 1])  # the target's tokens at `places`
        same = (chosen[:, :k] == drafts).long().cumprod(1)
        number = same.sum(1)
        ids[rows, places[rows, number]] = chosen[rows, number]
        passes += int(active.sum())
        emitted += int((number + 1)[active].sum())
        accepted_at += same[active].sum(0)
        produced = torch.arange(k + 1, device=device) <= number[:, None]
        ended = (torch.isin(chosen, ends) & produced).any(1)
        known = torch.where(active, known + number + 1, known)
        active = active & (known < goal) & ~ended
    return Acceptance(emitted / passes, (accepted_at / passes).tolist())


def report(
    target: TargetPass, draft: DraftPass, prompts: list[Prompts], end_ids: list[int], log: Log,
    new_tokens: int = 64,
) -> None:  # fmt: skip
    """Log the acceptance of each kind of prompt at temperatures 0 and 1, then print a table."""
    lines = ["prompts  temperature  acceptance length (k = 3)  accepted at 1, 2, 3"]
    for temperature in (0.0, 1.0):
        for group in prompts:
            found = acceptance(target, draft, group, end_ids, temperature, new_tokens=new_tokens)
            log(phase="evaluation", kind=group.kind, temperature=temperature,
                acceptance_length=found.length, rate=[round(r, 3) for r in found.rate])  # fmt: skip
            rates = "  ".join(f"{r:.3f}" for r in found.rate)
            lines.append(f"{group.kind:7}  {temperature:11}  {found.length:25.3f}  {rates}")
    print("\n".join(lines), flush=True)
