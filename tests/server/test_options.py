"""The command `serve` before it serves: what it refuses, and that it says so in one line."""

from __future__ import annotations

import sys

import pytest

from outrider.cli import main
from outrider.errors import ConfigError
from outrider.server.options import ServerOptions


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "port: got 70000; allowed: an integer from 0 to 65535"),
        (["--host", ""], "host: got ''"),
        (["--host", "\udcff"], "host"),  # a byte that is no text, as a command line gives it
        (["--host", "é" * 70], "host is no name of a host"),
        (["--host", "a..b"], "host is no name of a host"),
        (["--host", "a\0b"], "host: got 'a\\x00b'; allowed: printable characters"),
        (["--max-waiting", "-1"], "max_waiting: got -1"),
        (["--request-timeout", "0"], "request_timeout: got 0.0; allowed: from 0.1 to 10000000"),
        (["--drain-timeout", "1e300"], "drain_timeout: got 1e+300; allowed: from 0.1 to 10000000"),
        (["--served-model-name", ""], "served_model_name: got ''"),
        (["--served-model-name", "a\udcff"], "served_model_name is not valid Unicode"),
        (["--max-num-seqs", "0"], "max_num_seqs: got 0"),
        (["--tokenizer", "\udcff"], "tokenizer is not valid Unicode"),
        (["--reload"], "unrecognized arguments: --reload"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "MODEL", *flags]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_a_wrong_key_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "MODEL", "--api-key", "gehéim"]) == 2
    assert "gehéim" not in capsys.readouterr().err
    assert "sesame" not in repr(ServerOptions(api_key=("sesame",)))


def test_packages_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "outrider.server.main", raising=False)
    assert main(["serve", "MODEL"]) == 2
    assert capsys.readouterr().err == (
        "outrider: error: serve needs a package that is not installed (uvicorn): "
        "pip install 'outrider[server]'\n"
    )


def test_one_name_and_one_key_are_not_lists_of_letters() -> None:
    for name in ("api_key", "served_model_name"):
        with pytest.raises(ConfigError):
            ServerOptions(**{name: "abc"})  # pyright: ignore[reportArgumentType]
