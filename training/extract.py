"""Documents: plain text out of the formats that packages use."""

import hashlib
import html
import re
import unicodedata
import zlib
from collections.abc import Iterator
from typing import NamedTuple


class Document(NamedTuple):
    kind: str  # "code" or "prose"
    source: str  # package name
    path: str  # file inside the package
    text: str

    @property
    def order(self) -> str:
        """A fixed pseudo-random sort key."""
        return hashlib.sha1(f"{self.source}/{self.path}".encode()).hexdigest()


def clean(text: str) -> str:
    """NFC, no trailing blanks, at most one empty line in a row."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\x0c", "\n"))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"


def html_to_text(source: str) -> str:
    source = re.sub(r"(?is)<(script|style|head|nav|footer)\b.*?</\1>|<!--.*?-->", " ", source)
    blocks = r"(?i)</?(p|div|h\d|ul|ol|dl|table|pre|blockquote|section)\b[^>]*>"
    source = re.sub(blocks, "\n\n", source)
    source = re.sub(r"(?i)</?(li|dt|dd|tr|br)\b[^>]*>", "\n", source)
    text = html.unescape(re.sub(r"<[^>]+>", "", source)).replace("\xa0", " ").replace("¶", "")
    return re.sub(r"\n[ \t]*\n\s*\n", "\n\n", text)


def man_to_text(source: str) -> str:
    """The running text of a troff man page; good enough for prose, tables are lost."""
    lines: list[str] = []
    for line in source.splitlines():
        if match := re.match(r"\.(B|I|BR|IR|RB|BI|RI|SH|SS|TP)\b ?(.*)", line):
            line = match[2].replace('"', "")
            line = f"\n{line.upper()}\n" if match[1] in ("SH", "SS") else line
        elif line.startswith((".PP", ".P", ".IP", ".LP")):
            line = ""
        elif line.startswith((".", "'")):
            continue
        lines.append(re.sub(r"\\f.|\\&|\\c", "", line).replace("\\-", "-").replace("\\e", "\\"))
    return "\n".join(lines)


def pod_to_text(source: str) -> str:
    source = re.sub(r"(?m)^=(?:head\d|item) ?", "", source)
    source = re.sub(r"(?m)^=\w+.*$", "", source)
    for _ in range(2):
        source = re.sub(r"[A-Z]<<? ?([^<>]*?) ?>>?", r"\1", source)
    return source


def r_books(database: bytes) -> Iterator[tuple[str, str]]:
    """Title and text of each character vector in an R lazy-load database, one line a string."""
    offset = 0
    while offset < len(database):
        inflate = zlib.decompressobj()
        data = inflate.decompress(database[offset + 4 :])
        offset = len(database) - len(inflate.unused_data)
        lines: list[str] = []
        mark = b"\x00\x04\x00\x09"  # a string follows: its size in four bytes, then its bytes
        position = data.find(mark)
        while data[position : position + 4] == mark:
            size = int.from_bytes(data[position + 4 : position + 8], "big")
            lines.append(data[position + 8 : position + 8 + size].decode("utf-8", "replace"))
            position += 8 + size
        yield lines[0], "\n".join(lines)


def ascii_share(text: str) -> float:
    return sum(character < "\x7f" for character in text[:20000]) / max(1, len(text[:20000]))
