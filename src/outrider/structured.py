"""Grammars: which tokens may follow, along a chain of drafts that may break the rules.

Only target rows are masked. A draft that the grammar forbids keeps its place in the block with
probability 0, so the verification rule itself refuses it; rows after it do not matter.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.params import StructuredOutput
from outrider.tokenizer import Tokenizer


class GrammarCompiler:
    """Compiles grammars for one tokenizer; needs the optional package xgrammar."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        """
        Args:
            vocab_size: of the model's head, which may be larger than the tokenizer's.
            stop_token_ids: ids that a finished grammar allows.
        """
        self._vocab_size = vocab_size
        self._stop_token_ids = list(stop_token_ids)
        self._tokenizer = tokenizer
        self._compiler: Any = None
        self._lock = threading.Lock()  # the compiler itself is safe in several threads

    def matcher(self, wanted: StructuredOutput) -> GrammarMatcher:
        """A matcher at the beginning of the grammar.

        Raises:
            RequestError: xgrammar is not installed, the grammar does not compile, or no text
                follows it.
        """
        xgrammar = _import_xgrammar()
        with self._lock:
            if self._compiler is None:
                self._compiler = self._build(xgrammar)
        try:
            if wanted.kind == "json_schema":
                json.loads(wanted.text)
                compiled = self._compiler.compile_json_schema(wanted.text)
            elif wanted.kind == "json_object":
                compiled = self._compiler.compile_json_schema('{"type": "object"}')
            elif wanted.kind == "regex":
                compiled = self._compiler.compile_regex(wanted.text)
            else:
                compiled = self._compiler.compile_grammar(wanted.text)
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"structured output: the {wanted.kind} does not compile ({error})", got=wanted.text
            ) from error
        matcher = GrammarMatcher(
            xgrammar.GrammarMatcher(compiled), self._vocab_size, self._stop_token_ids
        )
        if matcher.is_dead_end():
            raise RequestError(
                f"structured output: no text follows the {wanted.kind}", got=wanted.text
            )
        return matcher

    def _build(self, xgrammar: Any) -> Any:
        # A special token leaves no text, so it may not stand for its spelling.
        special = self._tokenizer.special_ids
        spellings = enumerate(self._tokenizer.vocabulary(self._vocab_size))
        info = xgrammar.TokenizerInfo(
            ["" if token_id in special else spelling for token_id, spelling in spellings],
            vocab_type=xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=self._vocab_size,
            stop_token_ids=self._stop_token_ids,
        )
        return xgrammar.GrammarCompiler(info)


class GrammarMatcher:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._stop_token_ids = frozenset(stop_token_ids)

    def is_dead_end(self) -> bool:
        """Nothing may follow, not even the end of the text."""
        return not self._allowed().any()

    def _allowed(self) -> Tensor:
        """[words] int32: what may follow now."""
        mask = torch.full((1, self._num_words), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(mask)
        return mask[0]

    def _end_only(self) -> Tensor:
        """[words] int32: the stop ids and nothing else."""
        words = [0] * self._num_words
        for token_id in self._stop_token_ids:
            words[token_id // 32] |= 1 << token_id % 32
        return torch.tensor(words, dtype=torch.int64).to(torch.int32)

    def masks(self, draft_token_ids: Sequence[int]) -> Tensor:
        """[len(draft_token_ids) + 1, words] int32: what may follow after 0, 1, ... of the drafts.

        In a dead end of the grammar the text may end. Leaves the matcher where it was.
        """
        masks = torch.full((len(draft_token_ids) + 1, self._num_words), -1, dtype=torch.int32)
        advanced = 0
        for row in range(len(draft_token_ids) + 1):
            if self._matcher.is_terminated():
                break
            allowed = self._allowed()
            masks[row] = allowed if allowed.any() else self._end_only()
            is_last = row == len(draft_token_ids)
            if is_last or not self._matcher.accept_token(draft_token_ids[row]):
                break
            advanced += 1
        if advanced:
            self._matcher.rollback(advanced)
        return masks

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow emitted tokens; the masks have made each of them legal."""
        for token_id in token_ids:
            accepted = self._matcher.is_terminated() or self._matcher.accept_token(token_id)
            accepted = accepted or token_id in self._stop_token_ids  # out of a dead end
            assert accepted, f"token {token_id} was emitted against the grammar"


def _import_xgrammar() -> Any:
    try:
        import xgrammar  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RequestError(
            "structured_output needs the package xgrammar", hint="pip install 'outrider[grammar]'"
        ) from error
    return xgrammar
