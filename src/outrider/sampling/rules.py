"""Rules that change logits before they become a distribution: penalties, bias, masks, bans.

Every verified row gets them for its own prefix: row i of a block stands after the drafts 1 .. i, so
they count for it and for it only. Nothing is kept of a draft that is refused, because counts are
made from the committed text each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch import SlotSetup
from outrider.sampling.padded import PaddedLists

NEVER = float("-inf")


@dataclass(frozen=True)
class BlockContext:
    """The text that each verified row stands after.

    Attributes:
        history: [S, L] int64, committed tokens; entries past num_committed are ignored.
        num_committed: [S] int64.
        draft_token_ids: [S, T - 1] int64; row i stands after the first i.
        stop_token_ids: [S, M] int64; unused entries are negative.
        masks: [S, T, ceil(V / 32)] int32, bit t of word w allows token 32 w + t; None allows all.
    """

    history: Tensor
    num_committed: Tensor
    draft_token_ids: Tensor
    stop_token_ids: Tensor
    masks: Tensor | None


class RuleTable:
    """Each slot's rules as device arrays."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        def floats(value: float) -> Tensor:
            return torch.full((num_slots,), value, device=device)

        self.repetition = floats(1.0)
        self.presence = floats(0.0)
        self.frequency = floats(0.0)
        self.num_prompt = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.min_tokens = torch.zeros_like(self.num_prompt)
        self.bias_ids = PaddedLists(num_slots, torch.int64, device, 0)
        self.bias_values = PaddedLists(num_slots, torch.float32, device, 0)
        self._bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}

    def store(self, setup: SlotSetup) -> None:
        """Overwrite the entry of one slot."""
        slot, rules = setup.slot, setup.rules
        self.repetition[slot] = rules.repetition_penalty
        self.presence[slot] = rules.presence_penalty
        self.frequency[slot] = rules.frequency_penalty
        self.num_prompt[slot] = rules.num_prompt
        self.min_tokens[slot] = rules.min_tokens
        self.bias_ids.store(slot, [token_id for token_id, _ in rules.logit_bias])
        self.bias_values.store(slot, [value for _, value in rules.logit_bias])
        self._bad_words[slot] = rules.bad_words

    def apply(self, logits: Tensor, slots: Tensor, context: BlockContext) -> Tensor:
        """Changed logits [S, T, V] float32; logits [S, T, V], slots [S]."""
        logits = logits.float().clone()
        if context.masks is not None:
            logits = logits.masked_fill(~unpack_mask(context.masks, logits.shape[-1]), NEVER)
        self._add_bias(logits, slots)
        logits = self._penalise(logits, slots, context)
        self._hold_back_stops(logits, slots, context)
        self._ban_words(logits, slots, context)
        return logits

    def _add_bias(self, logits: Tensor, slots: Tensor) -> None:
        ids, used = self.bias_ids.rows(slots)
        values = torch.where(used, self.bias_values.rows(slots)[0], 0.0)
        rows = ids[:, None].expand(-1, logits.shape[1], -1)
        logits.scatter_add_(-1, rows, values[:, None].expand_as(rows))

    def _penalise(self, logits: Tensor, slots: Tensor, context: BlockContext) -> Tensor:
        place = torch.arange(context.history.shape[1], device=logits.device)
        committed = place < context.num_committed[:, None]
        is_prompt = place < self.num_prompt[slots][:, None]
        in_block = _draft_counts(context.draft_token_ids, logits.shape)  # [S, T, V]
        output = _counts(context.history, committed & ~is_prompt, logits.shape[-1])
        output = output[:, None] + in_block
        prompt = _counts(context.history, committed & is_prompt, logits.shape[-1])[:, None]
        repetition = self.repetition[slots][:, None, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(output + prompt > 0, repeated, logits)
        logits = logits - self.frequency[slots][:, None, None] * output
        return logits - self.presence[slots][:, None, None] * (output > 0)

    def _hold_back_stops(self, logits: Tensor, slots: Tensor, context: BlockContext) -> None:
        """No stop id before min_tokens output tokens."""
        row = torch.arange(logits.shape[1], device=logits.device)
        written = (context.num_committed - self.num_prompt[slots])[:, None] + row  # [S, T]
        early = written < self.min_tokens[slots][:, None]
        ids = context.stop_token_ids.clamp(min=0)
        wanted = early[:, :, None] & (context.stop_token_ids >= 0)[:, None]
        ban = torch.where(wanted, NEVER, 0.0)
        logits.scatter_add_(-1, ids[:, None].expand_as(ban), ban)

    def _ban_words(self, logits: Tensor, slots: Tensor, context: BlockContext) -> None:
        """The last token of a bad word may not follow its others."""
        if not any(self._bad_words.values()):
            return  # on a GPU the rest waits for it
        for sequence, slot in enumerate(slots.tolist()):
            for word in self._bad_words.get(slot, ()):
                banned = self._completes(word, sequence, context)
                logits[sequence, banned, word[-1]] = NEVER

    def _completes(self, word: tuple[int, ...], sequence: int, context: BlockContext) -> Tensor:
        """[T] bool: the text before the row ends with all of the word but its last token."""
        num_rows = context.draft_token_ids.shape[1] + 1
        head = torch.tensor(word[:-1], dtype=torch.int64, device=context.history.device)
        committed = context.history[sequence, : int(context.num_committed[sequence])]
        if committed.shape[0] < len(head):
            # A window that would begin before the text matches nothing.
            missing = len(head) - committed.shape[0]
            committed = torch.nn.functional.pad(committed, (missing, 0), value=-1)
        text = torch.cat(
            (committed[committed.shape[0] - len(head) :], context.draft_token_ids[sequence])
        )
        windows = torch.stack([text[row : row + len(head)] for row in range(num_rows)])
        return (windows == head).all(-1)


def unpack_mask(masks: Tensor, vocab_size: int) -> Tensor:
    """[..., ceil(V / 32)] int32 -> [..., V] bool."""
    bits = torch.arange(32, device=masks.device)
    allowed = (masks.long()[..., None] >> bits) & 1
    return allowed.flatten(-2)[..., :vocab_size].bool()


def _counts(tokens: Tensor, counted: Tensor, vocab_size: int) -> Tensor:
    """tokens, counted [S, L] -> how often each id occurs where counted, [S, V] float32."""
    counts = torch.zeros((tokens.shape[0], vocab_size), device=tokens.device)
    ids = torch.where(counted, tokens, 0)  # what lies past the text may be no token at all
    return counts.scatter_add_(-1, ids, counted.float())


def _draft_counts(draft_token_ids: Tensor, shape: torch.Size) -> Tensor:
    """[S, T, V]: row i counts the drafts 1 .. i."""
    counts = torch.zeros(shape, device=draft_token_ids.device)
    one = torch.ones_like(draft_token_ids, dtype=torch.float32)
    counts[:, 1:].scatter_(-1, draft_token_ids[..., None], one[..., None])
    return counts.cumsum(1)
