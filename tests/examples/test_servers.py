"""The examples that serve: each is started as its reader would start it, asked, and ended."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

httpx2 = pytest.importorskip("httpx2")
pytest.importorskip("fastapi")

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def started(name: str, *arguments: str, path: str):
    """A client of the example, once it answers at `path`."""
    port = free_port()
    process = subprocess.Popen([sys.executable, EXAMPLES / name, *arguments, str(port)])
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(1200):
                assert process.poll() is None
                try:
                    client.get(path)
                    break
                except httpx2.TransportError:
                    time.sleep(0.1)
            yield client
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def test_a_pipeline_behind_http():
    with started("http_pipeline.py", path="/openapi.json") as client:
        answer = client.post("/letters", json={"text": "Banana Bread, a classic"})
        assert answer.json() == {"most": "a", "times": 6}
        assert client.post("/letters", json={"text": "é"}).status_code == 422
        assert client.post("/letters", json={"text": "zzz"}).json()["most"] == "z"


def test_a_chat_page():
    with started("chat_page.py", "toy://?layers=4&vocab=997&hidden=4&context=2048&kv=65536", path="/health") as client:
        page = client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "/v1/chat/completions" in page.text
        answer = client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] >= 1
