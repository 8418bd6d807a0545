"""The command that counts ids: which it takes, in which order, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.draft_vocab import choose, count_ids
from outrider.errors import CheckpointError, ConfigError
from outrider.models.config import ModelConfig
from outrider.tokenizer import Tokenizer
from tests.checkpoints import TinyShape
from tests.tiny_tokenizer import SHAPE, byte_ids, write_tokenizer


@pytest.fixture
def model(random_checkpoint: Callable[[TinyShape], Path]) -> Path:
    """Special ids 0 and 1 (the end); a token for each byte; six words."""
    folder = random_checkpoint(SHAPE)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def config(model: Path) -> ModelConfig:
    return ModelConfig.from_hf(model)


def ids_of(text: str) -> tuple[int, ...]:
    return byte_ids(text.encode())


def test_special_ids_come_first_then_the_most_frequent_and_of_equals_the_lower(
    config: ModelConfig,
) -> None:
    counts = {9: 4, 5: 7, 30: 4, 1: 2, 200: 1, 100: 1}
    table = choose("m", config, {0}, counts, 6)
    assert table.token_ids == (0, 1, 5, 9, 30, 100)
    assert (table.size, table.num_tokens, table.num_padding) == (6, 19, 0)
    assert table.coverage == 18 / 19


def test_a_table_that_a_text_does_not_fill_is_filled_with_the_lowest_other_ids(
    config: ModelConfig,
) -> None:
    table = choose("m", config, {0, 271, 272, 5000}, {4: 1, 2: 3}, 8)
    assert table.token_ids == (0, 1, 271, 2, 4, 3, 5, 6)  # the model has no ids 272 and 5000
    assert (table.num_padding, table.coverage) == (3, 1.0)
    whole = choose("m", config, {0}, {4: 1}, SHAPE.vocab_size)
    assert sorted(whole.token_ids) == list(range(SHAPE.vocab_size))


def test_a_table_has_room_for_the_special_ids_and_for_no_id_twice(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"2 special ids, .*: got 1; allowed: .* from 2 to 272"):
        choose("m", config, {0}, {4: 1}, 1)
    with pytest.raises(ConfigError, match="got 273"):
        choose("m", config, {0}, {4: 1}, 273)
    assert choose("m", config, {0}, {4: 1}, 2).coverage == 0


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(config: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match="does not have: got 272; allowed: below 272"):
        choose("m", config, {0}, {272: 1, 3: 2}, 4)


def test_ids_are_counted_over_all_files_without_those_that_go_around_a_text(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("xyx\n")
    (tmp_path / "b").write_text("x")
    (tmp_path / "empty").write_text("")
    counts = count_ids(
        Tokenizer.from_pretrained(model), [tmp_path / name for name in ("a", "b", "empty")]
    )
    x, y, newline = ids_of("xy\n")
    assert counts == {x: 3, y: 1, newline: 1}


def test_a_long_text_is_counted_whole_and_lines_keep_their_ends(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.draft_vocab._PIECE_CHARACTERS", 10)
    (tmp_path / "long").write_bytes(b"xxxx\r\n" * 100 + b"y")
    counts = count_ids(Tokenizer.from_pretrained(model), [tmp_path / "long"])
    x, y, carriage, newline = ids_of("xy\r\n")
    assert counts == {x: 400, y: 1, carriage: 100, newline: 100}


def test_the_command_writes_a_table_and_says_how_good_it_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "ids.json"
    text.write_text("zzzzyyyx")
    words = ["draft-vocab", str(model), str(text), "--size", "4", "--out", str(out)]
    assert main(words) == 0
    z, y, _ = ids_of("zyx")
    table = json.loads(out.read_text())
    assert table == {
        "model": str(model),
        "vocab_size": 272,
        "size": 4,
        "num_tokens": 8,
        "coverage": 7 / 8,
        "num_padding": 0,
        "token_ids": [0, 1, z, y],
    }
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        f"{out}: 4 of the 272 ids of {model}",
        "they are 87.50% of 8 tokens, which have 3 distinct ids; 0 ids are padding",
        f"draft with them: --speculative-algorithm mtp --speculative-draft-vocab {out}",
    ]


def test_without_a_size_a_small_vocabulary_gives_a_quarter_of_its_ids(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "ids.json"
    text.write_text("zzy")
    assert main(["draft-vocab", str(model), str(text), "--out", str(out)]) == 0
    table = json.loads(out.read_text())
    z, y = ids_of("zy")
    assert table["size"] == len(table["token_ids"]) == 272 // 4
    assert table["token_ids"][:4] == [0, 1, z, y]
    assert ": 68 of the 272 ids of " in capsys.readouterr().out


def test_the_engine_drafts_with_the_table_that_the_command_wrote(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "ids.json"
    text.write_text("def return the self")
    options = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--max-num-seqs", "2"]
    generate = ["generate", str(model), "--prompt", "def", "--device", "cpu", *options]
    mtp = ["--speculative-algorithm", "mtp", "--speculative-draft-vocab", str(out)]
    assert main(["draft-vocab", str(model), str(text), "--size", "16", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(generate) == 0
    plain = capsys.readouterr().out
    assert main([*generate, *mtp]) == 0
    assert capsys.readouterr().out == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--size", "0"], "--size: got 0; allowed: an integer from 1 to 272"),
        (["--size", "273"], "--size: got 273; allowed: an integer from 1 to 272"),
        (["NONE", "--size", "4"], "text file cannot be read"),
        (["LATIN", "--size", "4"], "text file cannot be read"),
        (["--size", "4", "--out", "NOWHERE/ids.json"], "the ids cannot be written"),
    ],
    ids=["size", "large size", "no file", "not UTF-8", "no folder"],
)
def test_what_cannot_be_done_is_one_line(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("text")
    Path("LATIN").write_bytes(b"\xe4\xf6")
    assert main(["draft-vocab", "--out", "ids.json", str(model), "text.txt", *change]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and not Path("ids.json").exists()
    [line] = printed.err.splitlines()
    assert line.startswith(f"outrider: error: {message}")


def test_files_without_text_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, out = tmp_path / "empty", tmp_path / "ids.json"
    empty.write_text("")
    words = ["draft-vocab", str(model), str(empty), "--size", "4", "--out", str(out)]
    assert main(words) == 2
    assert "there is no text to count" in capsys.readouterr().err and not out.exists()


def test_a_text_is_not_overwritten_by_its_ids(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("abc")
    assert main(["draft-vocab", str(model), str(text), "--out", str(text)]) == 2
    assert "--out would overwrite what is read" in capsys.readouterr().err
    assert text.read_text() == "abc"
