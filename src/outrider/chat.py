"""`outrider chat`: a conversation in the terminal, with a local model or with a server.

On a terminal there are commands, and Ctrl-C stops an answer and the program goes on. Elsewhere
every line of standard input that is not blank is a message, whatever it begins with; answers go to
standard output, and everything else to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TextIO

from outrider import render
from outrider.chat_sources import LocalModel, Message, ServerModel, Source, Span, Turn
from outrider.cli_flags import (
    SAMPLING_FLAGS,
    SPECULATION_FLAGS,
    add_engine_flags,
    add_flags,
    check_drafts,
    destination,
    engine_options,
    flag_names,
    given,
    read_json_object,
    sampling_options,
)
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.http_client import ApiClient
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.tokenizer import CONVERSATION_VARIABLES
from outrider.trace import SpeculationStats

SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "speculation",
    "max_draft_tokens",
    "draft_sampling",
)
"""What can be asked of answers, here and of a server: all that a person who talks may want."""

_SPECULATION_FIELDS = {
    "speculation": "enabled",
    "max_draft_tokens": "max_draft_tokens",
    "draft_sampling": "draft_sampling",
}
"""Their names in the object `speculation` of a request."""

_OK, _PARTIAL = 0, 1
_MOST_DRAFTS_SHOWN = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command can be told."""
    parser.add_argument(
        destination(EngineConfig, "model"),
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="folder or hub id of a model to run here; or give --url",
    )
    server = parser.add_argument_group("server", "in place of MODEL and the engine's flags")
    server.add_argument(
        "--url", metavar="URL", help="base of an OpenAI API, such as http://127.0.0.1:8000/v1"
    )
    server.add_argument("--model", metavar="NAME", help="model there (default: the first listed)")
    server.add_argument(
        "--api-key", metavar="KEY", help="key for the server (default: from OUTRIDER_API_KEY)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--chat-template-kwargs",
        type=read_json_object,
        default={},
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}',
    )
    add_engine_flags(parser, without=("model",))
    group = parser.add_argument_group("sampling", "what is not given is the model's own choice")
    add_flags(group, SamplingParams, SAMPLING_FLAGS, SAMPLING_FIELDS)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends; returns the exit code."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Inherited from a script that ran this in the background; Ctrl-C is a key of ours.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    color = render.use_color(args.color, sys.stdout, os.environ)
    source = _source(args, color)
    dims = render.use_color(args.color, sys.stderr, os.environ)
    session = Session(source, args.system, Screen(sys.stdout, sys.stderr, color, dims))
    return _on_terminal(session) if is_terminal else _on_lines(session, sys.stdin)


def _source(args: argparse.Namespace, color: bool) -> Source:
    engine = given(args, EngineConfig)
    sampling = sampling_options(args)
    own = sorted(set(CONVERSATION_VARIABLES) & set(args.chat_template_kwargs))
    if own:
        raise ConfigError("--chat-template-kwargs: these are the conversation's own", got=own)
    if args.url is None:
        if "model" not in engine:
            raise ConfigError("nobody to talk to", hint="name a MODEL, or a server with --url URL")
        for flag in ("model", "api_key"):
            if getattr(args, flag) is not None:
                name = f"--{flag.replace('_', '-')}"
                raise ConfigError(f"{name} goes with --url only", hint="leave it out")
        options = engine_options(args)
        check_drafts(options, sampling)
        llm = LLM(**options)
        return LocalModel(llm, engine["model"], sampling, args.chat_template_kwargs, color)
    flags = flag_names(args, EngineConfig) + flag_names(args, SpeculativeConfig, SPECULATION_FLAGS)
    if flags:
        raise ConfigError(
            "the engine of a server cannot be set from here",
            got=" ".join(flags),
            hint="leave --url out to run a model here, or leave these out",
        )
    key = args.api_key
    if key is None:  # a server may know several; the first will do
        key = os.environ.get("OUTRIDER_API_KEY", "").split(",")[0].strip() or None
    client = ApiClient(args.url, key)
    return ServerModel(client, args.model, _fields(sampling, args.chat_template_kwargs), color)


def _fields(sampling: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    """What a request says beside its messages."""
    fields = {k: v for k, v in sampling.items() if k not in _SPECULATION_FIELDS}
    speculation = {_SPECULATION_FIELDS[k]: v for k, v in sampling.items() if k not in fields}
    if speculation:
        fields["speculation"] = speculation
    if template:
        fields["chat_template_kwargs"] = template
    return fields


@dataclass(frozen=True)
class Screen:
    """Where a session writes: answers to `out`, everything else to `notes`; which in colour."""

    out: TextIO
    notes: TextIO
    color: bool = False
    notes_color: bool = False

    def note(self, text: str) -> None:
        """A line beside the conversation."""
        shown = render.paint(render.harmless(text), render.DIM if self.notes_color else "")
        print(shown, file=self.notes, flush=True)


class Session:
    """One conversation: what was said, and what it took.

    Args:
        system: the system message; None is none.
    """

    def __init__(self, source: Source, system: str | None, screen: Screen) -> None:
        self.source = source
        self.screen = screen
        self.messages: list[Message] = []
        self._system = system
        self._stats = SpeculationStats()
        self._seconds = 0.0
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/reset": ("forget the conversation", self._reset),
            "/system": ("TEXT: set the system message; alone: none", self._set_system),
            "/stats": ("tokens, acceptance and speed of the whole session", self._show_stats),
            "/help": ("this list", self._help),
        }

    def handle(self, line: str) -> bool:
        """One line typed at a terminal, a command or a message; False where it ends the session.

        A message that begins with // begins with / for the model.

        Raises:
            OutriderError: the message could not be answered; it is not part of the conversation.
            KeyboardInterrupt: the answer was stopped; what had come of it is.
        """
        text = line.strip()
        if not text:
            return True
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text.partition(" ")
            if name == "/quit":
                return False
            if name not in self._commands:
                raise RequestError("no such command", got=name, allowed=[*self._commands, "/quit"])
            self._commands[name][1](rest.strip())
            return True
        self.ask(line.removeprefix("/") if text.startswith("//") else line)
        return True

    def ask(self, question: str) -> None:
        """One message, whatever it looks like; raises as `handle` does."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked = {"role": "user", "content": question}
        answer = self.source.answer([*system, *self.messages, asked])
        printer = _Printer(self.screen)
        try:
            turn = printer.show(answer)
        except KeyboardInterrupt:
            answer.close()  # here and now, not when the memory is collected
            if printer.content:
                self._keep(asked, printer.content)
            raise
        finally:
            printer.close()
        self._keep(asked, printer.content)
        self._stats += turn.stats
        self._seconds += turn.seconds
        self.screen.note(turn_line(turn))

    def _keep(self, asked: Message, answer: str) -> None:
        self.messages += [asked, {"role": "assistant", "content": answer}]

    def _reset(self, _: str) -> None:
        self.messages = []
        self.screen.note("[the conversation is forgotten]")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self.screen.note(f"[system message: {text}]" if text else "[no system message]")

    def _show_stats(self, _: str) -> None:
        for line in render.statistics_lines(self._stats, self._seconds):
            self.screen.note(line)

    def _help(self, _: str) -> None:
        for name, (text, _run) in self._commands.items():
            self.screen.note(f"{name:9}{text}")
        self.screen.note("/quit    end, as the end of the input does")
        if self.screen.color:
            print(render.legend(_MOST_DRAFTS_SHOWN), file=self.screen.notes, flush=True)


class _Printer:
    """Writes an answer as it comes: reasoning dimmed, or between its tags without colours."""

    def __init__(self, screen: Screen) -> None:
        self._out = screen.out
        self._color = screen.color
        self._cleans = screen.color or screen.out.isatty()
        self._content: list[str] = []
        self._in_reasoning = False
        self._at_line_start = True

    @property
    def content(self) -> str:
        """The answer so far, without the reasoning."""
        return "".join(self._content)

    def show(self, answer: Generator[Span, None, Turn]) -> Turn:
        """All of an answer."""
        while True:
            try:
                span = next(answer)
            except StopIteration as end:
                return end.value
            if span.is_reasoning != self._in_reasoning:
                self._turn(span.is_reasoning)
            if not span.is_reasoning:
                self._content.append(span.text)
            shown = render.harmless(span.text) if self._cleans else span.text
            code = render.DIM if span.is_reasoning else span.code
            self._write(shown, code if self._color else "")

    def close(self) -> None:
        """The answer has ended, or was stopped."""
        if self._in_reasoning:
            self._turn(False)
        if not self._at_line_start:
            self._write("\n")

    def _turn(self, to_reasoning: bool) -> None:
        """From the answer to the reasoning before it, or back."""
        self._in_reasoning = to_reasoning
        tag = "" if self._color else ("<think>" if to_reasoning else "</think>")
        if not self._at_line_start:
            self._write("\n")
        if tag or not to_reasoning:
            self._write(f"{tag}\n")

    def _write(self, text: str, code: str = "") -> None:
        if text:
            self._at_line_start = text.endswith("\n")
            self._out.write(render.paint(text, code))
            self._out.flush()


def turn_line(turn: Turn) -> str:
    """What one answer took."""
    stats = turn.stats
    speed = stats.num_tokens / turn.seconds if turn.seconds > 0 else 0.0
    parts = [f"{stats.num_tokens} tokens", f"{turn.seconds:.2f} s", f"{speed:.1f} tokens/s"]
    if stats.acceptance_length is not None:
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
    if turn.is_cut:
        parts.append("cut at its limit of tokens")
    return f"[{', '.join(parts)}]"


def _on_terminal(session: Session) -> int:
    with contextlib.suppress(ImportError):
        import_module("readline")  # lines can be edited, and earlier ones called back
    session.screen.note(
        f"[{session.source.name}: /help lists the commands, Ctrl-C stops an answer]"
    )
    while True:
        try:
            goes_on = session.handle(input("> "))
        except EOFError:
            print()
            return _OK
        except KeyboardInterrupt:
            session.screen.note("[stopped; /quit or Ctrl-D ends]")
        except OutriderError as error:
            print(render.error_line(error), file=sys.stderr, flush=True)
        else:
            if not goes_on:
                return _OK


def _on_lines(session: Session, lines: TextIO) -> int:
    code = _OK
    while True:
        try:
            line = lines.readline()
            if not line:
                return code
            if line.strip():
                session.ask(line.removesuffix("\n"))
        except UnicodeDecodeError as error:
            raise RequestError(f"the input is not text ({error})") from error
        except OutriderError as error:
            print(render.error_line(error), file=sys.stderr, flush=True)
            code = _PARTIAL
