"""LiteLLM as a client. Needs `pip install litellm`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import ServerProcess, server_process

litellm = pytest.importorskip("litellm", reason="pip install litellm")

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[ServerProcess]:
    with server_process(tiny, "--workers", "task", "--served-model-name", "tiny", "--api-key", "k") as found:
        yield found


def test_chat_whole_and_streamed(server: ServerProcess) -> None:
    more = {"model": "openai/tiny", "api_base": server.url + "/v1", "api_key": "k", "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(messages=HELLO, **more)
    chunks = litellm.completion(messages=HELLO, stream=True, **more)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 8


def test_completion(server: ServerProcess) -> None:
    more = {"model": "text-completion-openai/tiny", "api_base": server.url + "/v1", "api_key": "k"}
    answer = litellm.text_completion(prompt="Once", max_tokens=4, temperature=0, **more)
    assert answer.usage.completion_tokens == 4


def test_errors(server: ServerProcess) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model="openai/tiny", api_base=server.url + "/v1", api_key="wrong", messages=HELLO)
