"""The rules for logits once more: one row at a time, in plain Python, from their definitions.

A row knows nothing but its own text. What the engine computes for all rows of a block together has
to be what each row would get alone.
"""

from __future__ import annotations

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
    prompt, output = text[: rules.num_prompt], text[rules.num_prompt :]
    row: list[float] = []
    for token, score in enumerate(logits):
        if allowed is not None and token not in allowed:
            score = -INF
        score += sum(value for biased, value in rules.logit_bias if biased == token)
        if token in prompt or token in output:
            penalty = rules.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        score -= rules.frequency_penalty * list(output).count(token)
        score -= rules.presence_penalty * (token in output)
        if token in stop_token_ids and len(output) < rules.min_tokens:
            score = -INF
        if any(word[-1] == token and ends_with(text, word[:-1]) for word in rules.bad_words):
            score = -INF
        row.append(score)
    return row


def ends_with(text: Sequence[int], head: Sequence[int]) -> bool:
    return len(text) >= len(head) and list(text[len(text) - len(head) :]) == list(head)
