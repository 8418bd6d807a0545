"""Which files are held out of training, and the prompts cut from them."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator

from extract import Document
from tokenizers import Tokenizer

HELD_OUT_BOOKS = {"NORTHANGER ABBEY"}
NOT_QUOTED = {
    "debian-faq",
    "debian-policy",
    "debian-reference-en",
    "doc-debian",
    "exim4-doc-html",
    "git-doc",
    "gnome-user-docs",
    "gnuplot-doc",
    "linux-doc-6.1",
    "manpages",
    "manpages-dev",
    "mercurial-common",
    "octave-doc",
    "perl-doc",
    "shorewall-doc",
    "vim-runtime",
}
"""Held-out sources whose licences ask more than a notice: heldout.jsonl quotes none of them."""


def choose_heldout(documents: list[Document], per_source: int) -> set[tuple[str, str]]:
    by_source: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        if 2_000 < len(document.text) < 80_000:
            by_source[document.source].append(document)
    chosen = {(d.source, d.path) for d in documents if d.path in HELD_OUT_BOOKS}
    for files in by_source.values():
        if len(files) >= 8:
            first = sorted(files, key=lambda d: d.order)[:per_source]
            chosen |= {(d.source, d.path) for d in first}
    return chosen


def prompts(document: Document, tokenizer: Tokenizer, limit: int) -> Iterator[str]:
    """Up to `limit` starts of a function or paragraph, 40 to 120 tokens, cut at a line or word."""
    if document.source in NOT_QUOTED:
        return
    rng = random.Random(document.order)
    if document.kind == "code":
        heads = re.finditer(r"(?m)^(?:def|class|@|    def) ?\w+", document.text)
        starts = [m.start() for m in heads]
        cut = r"\n"
    else:
        starts = [m.end() for m in re.finditer(r"\n\n(?=[A-Z\"])", document.text)]
        cut = r"[.,;?!](?=\s)|\w(?= )"
    rng.shuffle(starts)
    found = 0
    for start in starts:
        if found == limit:
            return
        passage = document.text[start : start + 480]
        if document.kind == "prose":
            passage = passage.split("\n\n")[0]
            letters = sum(c.isalpha() or c in " \n,.'\"" for c in passage) / max(1, len(passage))
            if letters < 0.97 or passage.count(". ") + passage.count(".\n") < 1:
                continue
        target = rng.randint(45, 110)
        ends = [m.end() for m in re.finditer(cut, passage)]
        sized = [(abs(len(tokenizer.encode(passage[:end]).ids) - target), end) for end in ends]
        if not sized:
            continue
        text = passage[: min(sized)[1]]
        if 40 <= len(tokenizer.encode(text).ids) <= 120:
            found += 1
            yield text


def windows(text: str, stride: int = 1) -> set[str]:
    """Every 40-character window of the text with its blanks made equal."""
    flat = " ".join(text.split())
    return {flat[i : i + 40] for i in range(0, len(flat) - 39, stride)}


def shared_windows(texts: list[str], documents: list[Document]) -> set[str]:
    """Windows of the prompts found in the documents; no shared run of 64 characters is missed."""
    wanted = set().union(*map(windows, texts))
    found: set[str] = set()
    for document in documents:
        found |= windows(document.text, 24) & wanted
    return found
