"""Many clients at once, some of which vanish: every text is right and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import httpx
import pytest

from outrider import LLM, SamplingParams
from tests.server.serving import MODEL, MTP, Server, wait_until

PROMPTS = ["import os", "def f(", "The weather", "class A:", "x = [", "return", "#", "a b c"]
LEAVES = 0.2


def wanted_texts() -> dict[tuple[str, int], str]:
    """By prompt and number of tokens, of the model alone."""
    llm = LLM(str(MODEL), dtype="float32", kv_cache_memory_gib=0.02, max_model_len=512)
    texts: dict[tuple[str, int], str] = {}
    for num_tokens in (4, 8, 12):
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        outputs = llm.generate(PROMPTS, params)
        assert isinstance(outputs, list)
        texts.update({(p, num_tokens): o.text for p, o in zip(PROMPTS, outputs, strict=True)})
    return texts


class Client:
    """One of many: sends requests one after the other until there are none left."""

    def __init__(self, http: httpx.AsyncClient, seed: int, texts: dict[tuple[str, int], str]):
        self._http = http
        self._random = random.Random(seed)
        self._texts = texts
        self.num_right = self.num_left = 0

    async def send(self) -> None:
        prompt, num_tokens = self._random.choice(sorted(self._texts))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        leaves_after = self._random.randrange(4) if self._random.random() < LEAVES else None
        if leaves_after is None and self._random.random() < 0.3:
            answer = await self._http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["text"]
        else:
            text = await self._stream(body | {"stream": True}, leaves_after)
        if text is None:
            self.num_left += 1
        else:
            assert text == self._texts[prompt, num_tokens]
            self.num_right += 1

    async def _stream(self, body: dict[str, Any], leaves_after: int | None) -> str | None:
        pieces: list[str] = []
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if leaves_after is not None and len(pieces) >= leaves_after:
                    return None
                if line == "data: [DONE]":
                    return "".join(pieces)
                if line:
                    chunk = json.loads(line.removeprefix("data: "))
                    pieces.append(chunk["choices"][0]["text"])
        raise AssertionError("the stream ended without [DONE]")


async def churn(server: Server, num_clients: int, num_requests: int) -> list[Client]:
    texts = wanted_texts()
    todo = iter(range(num_requests))
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
        clients = [Client(http, seed, texts) for seed in range(num_clients)]

        async def work(client: Client) -> None:
            for _ in todo:
                await client.send()

        await asyncio.gather(*(work(client) for client in clients))
    return clients


@pytest.mark.parametrize(
    ("num_clients", "num_requests"),
    [(16, 60), pytest.param(64, 2000, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_every_text_is_right_while_clients_come_and_go(num_clients: int, num_requests: int) -> None:
    flags = ("--max-num-seqs", "8", "--max-waiting", "64", "--debug-checks")
    with Server(*MTP, *flags) as server:
        pid = server.engine_pid()
        clients = asyncio.run(churn(server, num_clients, num_requests))
        num_right = sum(client.num_right for client in clients)
        num_left = sum(client.num_left for client in clients)
        assert num_right + num_left == num_requests
        assert 0 < num_left < num_requests / 2
        wait_until(server.is_idle, "an idle engine", 5)
        assert server.engine_pid() == pid
        ended = {
            reason: server.metric("request_success_total", finished_reason=reason)
            for reason in ("stop", "length")
        }
        assert sum(ended.values()) >= num_right
        print(
            f"{num_right} right, {num_left} left; engine's mean step "
            f"{server.metric('round_duration_seconds_sum') * 1000 / _steps(server):.1f} ms "
            f"over {_steps(server):.0f} steps (pid {os.getpid()})"
        )


def _steps(server: Server) -> float:
    return server.metric("round_duration_seconds_count")
