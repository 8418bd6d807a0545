"""Servers that several tests share. What a test changes in one, it puts back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.serving import MODEL, MTP, Server

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- message['content'] + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{- '<think>\\n' }}{% endif %}{%- endif %}"""
"""A chat template that has a place for tools, earlier calls and opened reasoning."""


@pytest.fixture(scope="session")
def model_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with a chat template that shows tools."""
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def server(model_with_tools: Path) -> Iterator[Server]:
    """Serves with speculation."""
    with Server(*MTP, model=model_with_tools) as running:
        yield running


@pytest.fixture(scope="session")
def plain_server(model_with_tools: Path) -> Iterator[Server]:
    """Serves the same model without speculation."""
    with Server(model=model_with_tools) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
