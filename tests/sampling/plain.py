"""The rules for logits once more: one row at a time, in plain Python, from their definitions.

A row knows nothing but its own text. What the engine computes for all rows of a block together has
to be what each row would get alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from outrider.batch import LogitRules

INF = float("inf")


def ruled_row(
    logits: Sequence[float],
    rules: LogitRules,
    text: Sequence[int],
    stop_token_ids: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> list[float]:
    """Logits of the token after `text` (prompt and output), with every rule applied in order."""
    prompt, output = Counter(text[: rules.num_prompt]), Counter(text[rules.num_prompt :])
    held_back = stop_token_ids if output.total() < rules.min_tokens else ()
    banned = {word[-1] for word in rules.bad_words if ends_with(text, word[:-1])}
    bias = dict(rules.logit_bias)
    row: list[float] = []
    for token, score in enumerate(logits):
        if allowed is not None and token not in allowed:
            score = -INF
        score += bias.get(token, 0.0)
        if prompt[token] or output[token]:
            penalty = rules.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        score -= rules.frequency_penalty * output[token]
        score -= rules.presence_penalty * (output[token] > 0)
        if token in held_back or token in banned:
            score = -INF
        row.append(score)
    return row


def ends_with(text: Sequence[int], head: Sequence[int]) -> bool:
    return len(text) >= len(head) and list(text[len(text) - len(head) :]) == list(head)
