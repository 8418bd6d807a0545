"""Which of the target's token ids a trimmed draft head covers: read, checked, brought in order.

Any choice is lossless: the draft's distribution is zero for the other ids, and the verification
rules ask for nothing else. Knows files of ids; the command that makes them is in draft_vocab.py.

A table is a JSON object with `token_ids`, those first that matter most, so that the first N of them
are the best choice of N ids. A bare JSON list and a text of one id a line are taken as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from outrider.checks import check_int
from outrider.errors import CheckpointError, ConfigError, OutriderError
from outrider.models.build import Checkpoint
from outrider.models.files import user_path

TABLE_NAME = "draft_vocab.json"
"""The table in a checkpoint's folder that a bare number of ids refers to."""

_RECIPE = "outrider draft-vocab MODEL TEXTFILE... --size N --out FILE"


def draft_ids(choice: str | int, checkpoint: Checkpoint) -> Tensor:
    """The ids of SpeculativeConfig.draft_vocab, on the CPU.

    Returns:
        [N] int64, ascending: where two scores are equal, the first is then the lowest target id,
        as it is with the whole head.

    Raises:
        ConfigError: the file cannot be read or holds something else than distinct ids of the
            target's vocabulary, or a number of ids has no table or is larger than it.
        CheckpointError: the checkpoint's own table is broken.
    """
    vocab_size = checkpoint.config.vocab_size
    if isinstance(choice, str):
        ids = read_ids(user_path(ConfigError, "draft_vocab", choice), vocab_size, ConfigError)
    elif checkpoint.files is None:  # dummy weights: any ids cost the same
        check_int(ConfigError, "draft_vocab", choice, 1, vocab_size)
        ids = list(range(choice))
    else:
        ids = _first_of_table(checkpoint.path / TABLE_NAME, choice, vocab_size)
    return torch.tensor(sorted(ids), dtype=torch.int64)


def read_ids(path: Path, vocab_size: int, error: type[OutriderError]) -> list[int]:
    """The ids in a file, in its order.

    Args:
        error: what a file that will not do raises.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as problem:
        raise error(
            f"draft vocabulary cannot be read ({problem})",
            got=str(path),
            allowed="a file of token ids",
            hint=f"make one with: {_RECIPE}",
        ) from problem
    if text.lstrip().startswith(("[", "{")):
        items = _json_items(path, text, vocab_size, error)
    else:
        items = [_as_int(word) for word in text.split()]
    return _checked(path, items, vocab_size, error)


def _first_of_table(path: Path, number: int, vocab_size: int) -> list[int]:
    if not path.exists():
        raise ConfigError(
            f"draft_vocab: a number of ids needs a table, and the checkpoint has no {TABLE_NAME}",
            got=number,
            allowed="a file of token ids",
            hint=f"make one with: {_RECIPE}; then name FILE, or put it into the folder as "
            f"{TABLE_NAME}",
        )
    ids = read_ids(path, vocab_size, CheckpointError)
    hint = f"name a larger table, made with: {_RECIPE}"
    check_int(ConfigError, f"draft_vocab of {path}", number, 1, len(ids), hint)
    return ids[:number]


def _json_items(
    path: Path, text: str, vocab_size: int, error: type[OutriderError]
) -> Sequence[object]:
    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"draft vocabulary {path} cannot be read as JSON ({problem})") from problem
    if isinstance(content, dict):
        table = cast(dict[str, object], content)
        made_for = table.get("vocab_size", vocab_size)
        if made_for != vocab_size:
            raise error(
                f"draft vocabulary {path} was made for another model: vocab_size",
                got=made_for,
                allowed=f"{vocab_size}, the target's",
                hint=f"make one with: {_RECIPE}",
            )
        content = table.get("token_ids")
    if not isinstance(content, list):
        raise error(
            f"draft vocabulary {path}",
            got=content,
            allowed="a JSON list of token ids, or a JSON object with such a list as token_ids",
        )
    return cast(list[object], content)


def _as_int(word: str) -> object:
    try:
        return int(word)
    except ValueError:
        return word


def _checked(
    path: Path, items: Sequence[object], vocab_size: int, error: type[OutriderError]
) -> list[int]:
    if not items:
        raise error(f"draft vocabulary {path} is empty", got=0, allowed="one token id or more")
    seen: dict[int, int] = {}
    for index, item in enumerate(items):
        what = f"draft vocabulary {path}: entry {index}"
        check_int(error, what, item, 0, vocab_size - 1)
        token_id = cast(int, item)
        if token_id in seen:
            raise error(
                f"{what} repeats entry {seen[token_id]}", got=token_id, allowed="distinct token ids"
            )
        seen[token_id] = index
    return list(seen)
