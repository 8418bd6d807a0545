"""Tokens to text and back, with a small byte-level BPE that is trained here."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from outrider.errors import CheckpointError, RequestError
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer

CORPUS = [
    "the rider went out ahead of the column and came back with what was seen",
    "def push(self, token_ids): return self.text[len(self.text) - 1 :]",
    "naïve café, größer, 東京 and Москва",
]
TEXTS = [
    "the rider",
    "  two  spaces ",
    "naïve 東京",
    "🏇🏽",
    "👩‍👩‍👧",
    "e\u0301",
    "\ufffd",
    "\n\n\tx",
    "",
]


def byte_level(prefix_space: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think >"])
    return backend


PLAIN = Tokenizer(byte_level())
PREFIXED = Tokenizer(byte_level(prefix_space=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_ids(text: str) -> None:
    assert PLAIN.decode(PLAIN.encode(text)) == text


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = PLAIN.encode("the<|turn|>rider<|end|>")
    assert PLAIN.decode(ids) == "therider"
    assert PLAIN.decode(ids, skip_special_tokens=False) == "the<|turn|>rider<|end|>"


def test_vocab_size_counts_added_tokens_and_ids_beyond_it_have_no_token() -> None:
    assert PLAIN.vocab_size == max(PLAIN.encode("<think >")) + 1
    assert PLAIN.has_token(PLAIN.vocab_size - 1)
    assert not PLAIN.has_token(PLAIN.vocab_size)


# Incremental text.


def texts_of(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool = True) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(stream.push(piece) for piece in pieces), stream.flush()]


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` cut into pieces of the sizes `cuts`, the last taking what is left."""
    pieces: list[list[int]] = []
    for size in cuts:
        pieces.append(ids[:size])
        ids = ids[size:]
    return [*pieces, ids]


ANY_IDS = st.lists(st.integers(0, PLAIN.vocab_size + 3), max_size=80)
BYTE_IDS = st.lists(
    st.sampled_from([i for i in range(260) if len(PLAIN.decode([i])) == 1]), max_size=80
)
TEXT_IDS = st.lists(st.sampled_from(TEXTS) | st.text(max_size=8), max_size=12).map(
    lambda parts: PLAIN.encode("".join(parts))
)
CUTS = st.lists(st.integers(0, 5), max_size=60)


@settings(max_examples=300, deadline=None)
@given(ids=ANY_IDS | BYTE_IDS | TEXT_IDS, cuts=CUTS, skip=st.booleans(), prefixed=st.booleans())
def test_pushes_and_flush_together_are_the_decoded_text_for_any_ids_and_any_split(
    ids: list[int], cuts: list[int], skip: bool, prefixed: bool
) -> None:
    tokenizer = PREFIXED if prefixed else PLAIN
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    for pieces in (split(ids, cuts), [[i] for i in ids], [ids]):
        given_out = ""
        for text in texts_of(tokenizer, pieces, skip):
            given_out += text
            assert whole.startswith(given_out)
        assert given_out == whole


@settings(max_examples=200, deadline=None)
@given(ids=ANY_IDS | BYTE_IDS, tail=ANY_IDS | BYTE_IDS)
def test_the_prompt_before_it_does_not_change_byte_level_text(
    ids: list[int], tail: list[int]
) -> None:
    stream = IncrementalDetokenizer(PLAIN, prompt_tail=tail)
    text = "".join([stream.push([i]) for i in ids]) + stream.flush()
    assert text == PLAIN.decode(ids)


def test_an_emoji_in_four_tokens_appears_with_the_fourth() -> None:
    ids = PLAIN.encode("🏇")
    assert len(ids) == 4
    assert texts_of(PLAIN, [[i] for i in ids]) == ["", "", "", "🏇", ""]


def test_half_a_character_at_the_end_appears_when_the_text_ends() -> None:
    ids = PLAIN.encode("a🏇")
    assert texts_of(PLAIN, [ids[:-1]]) == ["a", "\ufffd"]


def test_bytes_that_cannot_be_completed_appear_with_the_next_token() -> None:
    lead = PLAIN.encode("🏇")[:2]
    a = PLAIN.encode("a")
    assert texts_of(PLAIN, [lead, a, a]) == ["", "\ufffda", "a", ""]


def test_a_long_run_of_broken_bytes_holds_back_one_character_at_most() -> None:
    broken = PLAIN.encode("é")[1:2]
    given_out = texts_of(PLAIN, [broken] * 100)
    assert given_out == ["", *["\ufffd"] * 99, "\ufffd"]


def test_each_token_costs_the_same_however_long_the_text_is() -> None:
    sizes: list[int] = []

    class Counting(Tokenizer):
        def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
            sizes.append(len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    stream = IncrementalDetokenizer(Counting(byte_level()))
    ids = PLAIN.encode("the rider 🏇 went out ") * 100
    for token_id in ids:
        stream.push([token_id])
    assert max(sizes) <= 32
    assert len(sizes) <= 2 * len(ids) + 2


def test_after_a_flush_the_text_starts_afresh() -> None:
    stream = IncrementalDetokenizer(PLAIN)
    assert stream.push(PLAIN.encode("the")) + stream.flush() == "the"
    assert stream.flush() == ""
    assert stream.push(PLAIN.encode("rider")) == "rider"


def test_a_decoder_that_strips_the_first_space_keeps_it_after_a_prompt() -> None:
    words = {"▁the": 0, "▁rider": 1, "▁went": 2}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="▁the"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    stream = IncrementalDetokenizer(tokenizer, prompt_tail=[0])
    assert stream.push([1]) == " rider"
    assert "".join(stream.push([2]) for _ in range(60)) == " went" * 60
    assert "".join(texts_of(tokenizer, [[0], [1]])) == "the rider"


# Files of a checkpoint.


def test_a_folder_without_special_files_has_text_and_nothing_else(folder: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("the rider")) == "the rider"
    assert tokenizer.eos_token_id is None


@pytest.mark.parametrize("token", ["<|end|>", {"content": "<|end|>", "lstrip": False}])
def test_the_end_token_is_read_as_a_string_or_an_object(folder: Path, token: Any) -> None:
    assert Tokenizer.from_pretrained(write(folder, eos_token=token)).eos_token_id == 0


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_pretrained(folder)


def test_a_config_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="allowed: a JSON object"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", [3, [{"name": "default"}], ["x"]], ids=str)
def test_a_template_of_the_wrong_type_is_refused(folder: Path, template: Any) -> None:
    with pytest.raises(CheckpointError, match="chat_template"):
        Tokenizer.from_pretrained(write(folder, chat_template=template))


# Chat templates.

CHAT = """{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('system goes first') }}
    {%- endif %}
<|turn|>{{ message.role }}
{{ message.content }}{{ eos_token }}
{% endfor %}
{% if tools %}{{ tools | tojson }}
{% endif %}
{% if add_generation_prompt %}
<|turn|>assistant
{% endif %}
"""
MESSAGES = [{"role": "user", "content": "<b>é?</b>"}]


@pytest.fixture
def chat(folder: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(write(folder, chat_template=CHAT, eos_token="<|end|>"))


def test_a_conversation_becomes_a_prompt_unescaped(chat: Tokenizer) -> None:
    turn = "<|turn|>user\n<b>é?</b><|end|>\n"
    assert chat.apply_chat_template(MESSAGES) == f"{turn}<|turn|>assistant\n"
    assert chat.apply_chat_template(MESSAGES, add_generation_prompt=False) == turn


def test_tools_are_written_as_json_in_their_own_letters(chat: Tokenizer) -> None:
    text = chat.apply_chat_template(MESSAGES, False, tools=[{"name": "größe"}])
    assert text.endswith('[{"name": "größe"}]\n')


def test_the_template_file_goes_before_the_one_in_the_config(folder: Path) -> None:
    write(folder, chat_template="config")
    (folder / "chat_template.jinja").write_text("file {{ mood }}", encoding="utf-8")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(MESSAGES, mood="fine") == "file fine"


def test_of_named_templates_the_one_for_tools_is_used_with_tools(folder: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = Tokenizer.from_pretrained(write(folder, chat_template=named))
    assert tokenizer.apply_chat_template(MESSAGES) == "d"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "t"


def test_templates_can_tell_the_time_and_break_loops(folder: Path) -> None:
    template = (
        "{{ strftime_now('%Y') | length }}{% for x in [1, 2] %}{{ x }}{% break %}{% endfor %}"
    )
    tokenizer = Tokenizer.from_pretrained(write(folder, chat_template=template))
    assert tokenizer.apply_chat_template(MESSAGES) == "41"


@pytest.mark.parametrize("name", ["mood", "name", "kwargs", "context"])
def test_a_template_variable_may_have_any_name_but_one(folder: Path, name: str) -> None:
    tokenizer = Tokenizer.from_pretrained(write(folder, chat_template=f"[{{{{ {name} }}}}]"))
    variables: dict[str, Any] = {name: "fine"}
    assert tokenizer.apply_chat_template(MESSAGES, **variables) == "[fine]"
    variables = {"self": "fine"}
    with pytest.raises(RequestError, match=r"variable self.*allowed: any other name"):
        tokenizer.apply_chat_template(MESSAGES, **variables)


def test_a_request_that_the_template_refuses_carries_its_reason(chat: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "system", "content": "late"}]
    with pytest.raises(RequestError, match="system goes first"):
        chat.apply_chat_template(messages)


@pytest.mark.parametrize("template", ["{{ messages[0].a.b.c }}", "{{ 'a' + 1 }}", "{{ [][1].x }}"])
def test_a_failure_inside_the_template_is_a_request_error(folder: Path, template: str) -> None:
    tokenizer = Tokenizer.from_pretrained(write(folder, chat_template=template))
    with pytest.raises(RequestError, match="refuses these messages"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"]
)
def test_templates_run_in_a_sandbox(folder: Path, template: str) -> None:
    tokenizer = Tokenizer.from_pretrained(write(folder, chat_template=template))
    with pytest.raises(RequestError, match="refuses these messages"):
        tokenizer.apply_chat_template(list(MESSAGES))


def test_a_broken_template_is_the_checkpoints_fault(folder: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(write(folder, chat_template="{% if %}"))
    with pytest.raises(CheckpointError, match="chat template default is broken"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_tokenizer_without_template_cannot_chat() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        PLAIN.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "messages", [[], [{}], [{"role": 3}], ["hello"], "hello", 5, float("nan"), None], ids=str
)
def test_messages_without_roles_are_refused(chat: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError, match="chat messages: got "):
        chat.apply_chat_template(messages)
