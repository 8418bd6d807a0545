"""`outrider draft-vocab`: finds the token ids that a text uses most, for a trimmed draft head.

Most of a draft step is reading the output head, one row for each id of the vocabulary. Few ids
make up nearly all of a text, so a head over the most frequent ones costs a fraction and loses few
drafts. Knows tokenizers and counts; how the ids are used is in spec/draft_ids.py.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.checks import check_int, check_overwrites_none
from outrider.errors import CheckpointError, ConfigError
from outrider.models.config import ModelConfig
from outrider.models.files import resolve_checkpoint
from outrider.tokenizer import Tokenizer

_MOST_BY_DEFAULT = 32768
_PIECE_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class DraftVocab:
    """A table of ids, as it stands in its file.

    Attributes:
        model: what the ids are of, as it was named.
        vocab_size: ids that the model has.
        size: ids in the table.
        num_tokens: tokens of the text that was counted.
        coverage: share of them whose id is in the table.
        num_padding: ids that the text does not hold and that fill the table up.
        token_ids: special and end-of-sequence ids, then the others, most frequent first.
    """

    model: str
    vocab_size: int
    size: int
    num_tokens: int
    coverage: float
    num_padding: int
    token_ids: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command can be told."""
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of the target")
    parser.add_argument(
        "texts",
        metavar="TEXTFILE",
        nargs="+",
        type=Path,
        help="text like the one that will be generated; a model's own answers are best",
    )
    parser.add_argument(
        "--size",
        type=int,
        metavar="N",
        help=f"ids ({_MOST_BY_DEFAULT}, or a quarter of the vocabulary where that is less)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="where the ids are written, as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Count, choose, write, and say what came of it."""
    check_overwrites_none(ConfigError, "--out", args.out, args.texts)
    folder = resolve_checkpoint(args.model)
    config = ModelConfig.from_hf(folder)
    size = args.size
    if size is None:
        size = max(min(_MOST_BY_DEFAULT, config.vocab_size // 4), 1)
    check_int(ConfigError, "--size", size, 1, config.vocab_size)
    tokenizer = Tokenizer.from_pretrained(folder)
    counts = count_ids(tokenizer, args.texts)
    table = choose(args.model, config, tokenizer.special_ids, counts, size)
    try:
        args.out.write_text(json.dumps(asdict(table)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the ids cannot be written ({error})", got=str(args.out)) from error
    print(f"{args.out}: {table.size} of the {table.vocab_size} ids of {table.model}")
    print(
        f"they are {table.coverage:.2%} of {table.num_tokens} tokens, which have "
        f"{len(counts)} distinct ids; {table.num_padding} ids are padding"
    )
    print(f"draft with them: --speculative-algorithm mtp --speculative-draft-vocab {args.out}")
    return 0


def count_ids(tokenizer: Tokenizer, files: Sequence[Path]) -> Counter[int]:
    """How often each id occurs in some texts.

    Raises:
        ConfigError: a file cannot be read, or there is no text in any of them.
    """
    counts: Counter[int] = Counter()
    for file in files:
        for piece in _pieces(file):
            counts.update(tokenizer.encode(piece, add_special_tokens=False))
    if not counts:
        names = ", ".join(str(file) for file in files)
        raise ConfigError("there is no text to count", got=names, allowed="files that hold text")
    return counts


def choose(
    model: str,
    config: ModelConfig,
    special_ids: Collection[int],
    counts: Mapping[int, int],
    size: int,
) -> DraftVocab:
    """The table of `size` ids: the special ones, then by frequency, then the lowest unused ones.

    Raises:
        ConfigError: the size is smaller than the number of special ids.
        CheckpointError: the tokenizer gives ids that the model does not have.
    """
    if max(counts) >= config.vocab_size:
        raise CheckpointError(
            "the tokenizer gives an id that the model does not have",
            got=max(counts),
            allowed=f"below {config.vocab_size}, the model's vocab_size",
        )
    # Special tokens beyond the model's vocabulary exist in published checkpoints.
    special = {i for i in (*special_ids, *config.eos_token_ids) if i < config.vocab_size}
    what = f"--size (the model has {len(special)} special ids, which are always in the table)"
    check_int(ConfigError, what, size, max(len(special), 1), config.vocab_size)
    by_frequency = sorted(
        counts.keys() - special, key=lambda token_id: (-counts[token_id], token_id)
    )
    unused = (i for i in range(config.vocab_size) if i not in counts and i not in special)
    token_ids = (*sorted(special), *by_frequency, *unused)[:size]
    num_tokens = sum(counts.values())
    return DraftVocab(
        model=model,
        vocab_size=config.vocab_size,
        size=size,
        num_tokens=num_tokens,
        coverage=sum(counts.get(token_id, 0) for token_id in token_ids) / num_tokens,
        num_padding=max(size - len(special) - len(by_frequency), 0),
        token_ids=token_ids,
    )


def _pieces(file: Path) -> Iterator[str]:
    """A text in pieces of about a megabyte, so that a large one need not be held whole.

    Pieces end with a line. A token that would span two of them is counted as its parts, once in a
    megabyte.
    """
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            while piece := lines.readlines(_PIECE_CHARACTERS):
                yield "".join(piece)
    except (OSError, ValueError) as error:
        raise ConfigError(f"text file cannot be read ({error})", got=str(file)) from error
