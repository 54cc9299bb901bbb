"""What the tests of the server share."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2

from pipelined.llm import AsyncLLM
from pipelined.serving import ServerSettings, create_app

TEMPLATE = (
    "{% if tools %}<|system|>tools: {{ tools | tojson }} answer with <tool_call>{...}</tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_model(folder: Path) -> str:
    """Files of a random model; returns the folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=264,
        max_position_embeddings=1024,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Served:
    """An application and a client of it, without a port."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine = engine
        self.app = create_app(engine, settings)
        self.state = self.app.state.server
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://server", timeout=60)

    async def __aenter__(self) -> Served:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.__aexit__(None, None, None)

    async def at_rest(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing is held anywhere."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.state.gate.inside or any(  # noqa: ASYNC110
                    count for held in (await self.engine.integrity()).values() for count in held.values()
                ):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"still held: {self.state.gate} {await self.engine.integrity()}") from None

    async def busy(self) -> None:
        """Wait until a request is inside."""
        while not self.state.gate.inside:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def post(self, path: str, body: Any, status: int = 200, **more: Any) -> dict[str, Any]:
        """The answer's JSON; the status is as expected."""
        response = await self.client.post(path, json=body, **more)
        assert response.status_code == status, response.text
        found: dict[str, Any] = response.json()
        if status != 200:
            assert set(found) == {"error"}
            assert set(found["error"]) == {"message", "type", "param", "code"}
        return found

    async def get(self, path: str, status: int = 200, **more: Any) -> Any:
        """Likewise."""
        response = await self.client.get(path, **more)
        assert response.status_code == status, response.text
        return response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream, which ends as it should."""
        response = await self.client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    """Of the text of a stream."""
    lines = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Client:
    """A raw ASGI client that can go away whenever it likes."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("server", 80),
            "client": ("client", 1),
        }
        self._body = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.heard = asyncio.Event()

    async def run(self) -> None:
        """Until the application returns."""
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": self._body, "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)
            if message.get("body"):
                self.heard.set()

        await self._app(self._scope, receive, send)

    def leave(self) -> None:
        """Go away."""
        self._gone.set()

    @property
    def text(self) -> str:
        """What was heard."""
        return b"".join(message.get("body", b"") for message in self.sent).decode()
