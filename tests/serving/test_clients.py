"""Clients that people use, against a server in a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from processes import ServerProcess, server_process

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[ServerProcess]:
    words = ("--pp", "2", "--workers", "task", "--served-model-name", "tiny", "--api-key", "k", "--page-size", "4")
    with server_process(tiny, *words, "--chunked-prefill-size", "32", "--threads-per-rank", "1") as found:
        yield found


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0, timeout=60) as found:
        yield found


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "pipelined"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Once", max_tokens=8, temperature=0, logprobs=1, echo=True)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 12
    stream = client.completions.create(model="tiny", prompt="Once", max_tokens=8, temperature=0, stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    ids = client.completions.create(model="tiny", prompt=[[1, 2], [3]], max_tokens=2, n=2, extra_body={"top_k": 5})
    assert len(ids.choices) == 4


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2, seed=1, stop=["%%%"]
    )
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs is not None
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, max_tokens=8, temperature=0, stop=[text[4:6]]
    ) as events:
        assert events.get_final_completion().choices[0].message.content == text[: text.index(text[4:6])]


def test_errors(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as absent:
        client.completions.create(model="large", prompt="x")
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")


async def test_many_async_streams(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0, timeout=60) as client:

        async def one(number: int) -> str:
            text = ""
            async for chunk in await client.completions.create(
                model="tiny", prompt=f"number {number % 4}", max_tokens=16, temperature=0, stream=True
            ):
                text += chunk.choices[0].text
            return text

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(24)]
        texts = [task.result() for task in tasks]
        assert texts[:4] * 6 == texts
        # One that goes away in the middle.
        stream = await client.completions.create(
            model="tiny", prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(60):
            inside = 1
            while inside:
                await asyncio.sleep(0.05)
                inside = (await client.get("/../server_info", cast_to=object))["requests"]["inside"]  # type: ignore[index]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: ServerProcess) -> None:
    def curl(*words: str) -> str:
        return subprocess.run(
            ["curl", "-sN", "-H", "Authorization: Bearer k", *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    body = json.dumps({"prompt": "Once", "max_tokens": 3, "stream": True})
    told = curl(server.url + "/v1/completions", "-H", "Content-Type: application/json", "-d", body)
    assert told.endswith("data: [DONE]\n\n")
    assert "application/json" in curl(server.url + "/v1/completions", "-d", body)
    assert json.loads(curl(server.url + "/health"))["status"] == "ready"
    assert json.loads(curl(server.url + "/health_generate"))["status"] == "ok"
    assert "swagger" in curl(server.url + "/docs")
