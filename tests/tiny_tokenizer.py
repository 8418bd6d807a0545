"""A tokenizer for tests: one token for each byte, a few for words, and two special ones."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from outrider.tokenizer import Tokenizer
from tests.checkpoints import TinyShape

END, TURN = "<|end|>", "<|turn|>"
SHAPE = TinyShape(vocab_size=272)
"""A checkpoint that the tokenizer fits: its ids are all in the vocabulary, END is id 1."""


def backend() -> tokenizers.Tokenizer:
    """A byte-level BPE of at most SHAPE.vocab_size tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE.vocab_size - 1,
        special_tokens=[TURN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["return self the and of to in"], trainer)
    made.add_tokens(["def"])
    return made


def tokenizer() -> Tokenizer:
    return Tokenizer(backend())


def byte_ids(text: bytes) -> tuple[int, ...]:
    """The ids of single bytes, which need not be UTF-8."""
    made = backend()
    ids = [made.token_to_id(_BYTE_NAMES[byte]) for byte in text]
    return tuple(ids)


def write_tokenizer(folder: Path) -> None:
    backend().save(str(folder / "tokenizer.json"))


def _byte_names() -> list[str]:
    """How byte-level BPE writes each byte: itself where it is printable, else a letter past 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTE_NAMES = _byte_names()
