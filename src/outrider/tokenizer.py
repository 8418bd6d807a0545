"""Text to token ids and back: the tokenizer, chat templates, and text that grows token by token.

Knows the tokenizer's files in a checkpoint folder and nothing of models or requests.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import tokenizers
from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.checks import check_text
from outrider.errors import CheckpointError, RequestError

REPLACEMENT = "\ufffd"
"""What bytes that are not UTF-8, or not yet a whole character, decode to."""

CONVERSATION_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Of chat templates: what a conversation sets, and nobody beside it."""

_CONTEXT = 8  # ids; what others are decoded after, so that they can complete a character


class Tokenizer:
    """A tokenizer.json with the special tokens and chat templates that stand beside it.

    Args:
        backend: the tokenizer proper.
        config: contents of tokenizer_config.json.
        templates: chat templates by name; the usual one is "default".
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, object] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._special_tokens = _special_tokens(config or {})
        self._templates = dict(templates or {})
        self._compiled: dict[str, Template] = {}
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

    @classmethod
    def from_pretrained(cls, path: Path) -> Tokenizer:
        """Read tokenizer.json and, where they exist, tokenizer_config.json and chat_template.jinja.

        Raises:
            CheckpointError: tokenizer.json is missing, or a file cannot be read.
        """
        file = path / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(
                "tokenizer.json is missing",
                got=str(path),
                hint="name a folder that has one, or set tokenizer=",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} cannot be read ({error})") from error
        config = _read_config(path / "tokenizer_config.json")
        return cls(backend, config, _read_templates(path, config))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return self._special_ids

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, or None where the tokenizer names none."""
        token = self._special_tokens.get("eos_token")
        return None if token is None else self._backend.token_to_id(token)

    def vocabulary(self, size: int) -> list[str]:
        """The tokens of ids 0 .. size - 1 as the tokenizer spells them; "" where there is none."""
        return [self._backend.id_to_token(token_id) or "" for token_id in range(size)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: add what the tokenizer puts around a text; off for the output of a
                chat template, which holds its special tokens already.

        Raises:
            RequestError: the text holds half of a surrogate pair, which no UTF-8 text does.
        """
        if text:
            check_text(RequestError, "text", text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_after(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """Text that `token_ids` would add to a text that ends with `before`, special ones shown."""
        context = list(before[-_CONTEXT:])
        given = self.decode(context, skip_special_tokens=False).rstrip(REPLACEMENT)
        both = self.decode([*context, *token_ids], skip_special_tokens=False)
        return both[len(given) :]

    def has_token(self, token_id: int) -> bool:
        """Whether the id stands for a token: vocabularies may have holes."""
        return self._backend.id_to_token(token_id) is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # so that a variable may have any name
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's own template.

        Args:
            messages: each with a "role" and, as a rule, "content".
            add_generation_prompt: end with what opens the assistant's turn.
            **kwargs: variables of the template, such as `tools` or `enable_thinking`. With
                `tools`, a template named "tool_use" is preferred.

        Raises:
            RequestError: no messages, no template, or messages that the template refuses.
            CheckpointError: the template itself is broken.
        """
        # The type first: an array would refuse to say whether it is empty.
        if (
            not isinstance(messages, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
            or not messages
            or not all(_has_role(message) for message in messages)
        ):
            raise RequestError(
                "chat messages", got=messages, allowed='one or more objects with a "role"'
            )
        if "self" in kwargs:  # Jinja gives it a meaning of its own, and this value none
            raise RequestError(
                "chat template variable self", got=kwargs["self"], allowed="any other name"
            )
        template = self._template("tool_use" if kwargs.get("tools") else "default")
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        try:
            return template.render(
                {
                    **variables,
                    **kwargs,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestError(
                f"the chat template refuses these messages ({error})", got=messages
            ) from error

    def _template(self, wanted: str) -> Template:
        name = wanted if wanted in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                "the tokenizer has no chat template",
                hint="send a prompt, or a checkpoint made for chat",
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._templates[name])
            except TemplateSyntaxError as error:
                raise CheckpointError(f"chat template {name} is broken ({error})") from error
        return self._compiled[name]


class IncrementalDetokenizer:
    """Text of a growing list of token ids, given out as soon as it can no longer change.

    All pushes and the flush together are `tokenizer.decode` of all pushed ids, for byte-level
    decoders, however the ids are split into pushes. What is held back is at most one character: a
    final U+FFFD, which later bytes may turn into a real one.

    A window of recent ids is decoded, not the whole text. It may begin in the middle of a
    character, which garbles its first characters only: UTF-8 finds itself again at the next lead
    byte, and those characters have been given out already. Text is therefore counted from the end.

    Args:
        tokenizer: decodes the window.
        skip_special_tokens: leave special tokens out of the text.
        prompt_tail: last ids of the prompt, so that decoders which strip a leading space do not
            take the output for the start of a text.
    """

    _KEEP = 8  # ids; 4 would do, since each is a byte or more and U+FFFD stands for at most 4
    _LIMIT = 24

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._visible(prompt_tail)[-self._KEEP :]
        text = self._decode()
        if text.endswith(REPLACEMENT):  # a prompt that ends inside a character stands alone
            self._window, text = [], ""
        self._num_given = len(text)  # characters of the window's text that have been given out

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more ids; returns the text that became final, which may be empty."""
        self._window += self._visible(token_ids)
        text = self._decode()
        num_held = 1 if text.endswith(REPLACEMENT) else 0
        final = text[self._num_given : len(text) - num_held]
        self._num_given = len(text) - num_held
        if len(self._window) > self._LIMIT:
            self._window = self._window[-self._KEEP :]
            self._num_given = len(self._decode()) - num_held
        return final

    def flush(self) -> str:
        """End the text: returns what was held back. Ids pushed later start afresh."""
        text = self._decode()[self._num_given :]
        self._window, self._num_given = [], 0
        return text

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        """The ids that decode to something: the window must hold bytes, not silence."""
        skipped = self._tokenizer.special_ids if self._skip_special_tokens else frozenset[int]()
        return [
            token_id
            for token_id in token_ids
            if token_id not in skipped and self._tokenizer.has_token(token_id)
        ]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)


def _environment() -> ImmutableSandboxedEnvironment:
    """Templates come with checkpoints, so they run in a sandbox and cannot change their input."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions = cast(dict[str, Any], environment.globals)
    functions.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _has_role(message: object) -> bool:
    match message:
        case {"role": str()}:
            return True
        case _:
            return False


def _read_config(path: Path) -> Mapping[str, object]:
    if not path.exists():
        return {}
    try:
        config: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}", got=config, allowed="a JSON object")
    return cast(dict[str, object], config)


def _read_templates(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Templates by name; chat_template.jinja goes before what tokenizer_config.json holds."""
    file = path / "chat_template.jinja"
    if file.exists():
        return {"default": file.read_text(encoding="utf-8")}
    match config.get("chat_template"):
        case None:
            return {}
        case str(template):
            return {"default": template}
        case list(entries):
            templates: dict[str, str] = {}
            for entry in cast(list[object], entries):
                match entry:
                    case {"name": str(name), "template": str(template)}:
                        templates[name] = template
                    case _:
                        raise CheckpointError(
                            "tokenizer_config.json: chat_template",
                            got=entry,
                            allowed="objects with name and template",
                        )
            return templates
        case other:
            raise CheckpointError(
                "tokenizer_config.json: chat_template",
                got=other,
                allowed="a string or a list of named templates",
            )


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token and the like, which are strings or objects with their content."""
    tokens: dict[str, str] = {}
    for key, value in config.items():
        match value:
            case str(token) | {"content": str(token)} if key.endswith("_token"):
                tokens[key] = token
            case _:
                pass
    return tokens
