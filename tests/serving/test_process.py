"""The life of a server process: it opens its port when it can answer, ends gracefully, or says why it could not."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest
from processes import ServerProcess, client_of, server_process

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

TOY = "toy://?layers=4&vocab=997&hidden=4&context=2048&kv=65536"
LONG = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "return_token_ids": True}


def test_requests_under_way_are_finished_after_sigterm(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: '{TOY}'\npp-size: 2\ndrain-timeout: 60\n", encoding="utf-8")
    with server_process("--config", str(config)) as server, client_of(server) as client:
        assert any("rank 1 (layers 2-3)" in line for line in server.log)
        tokens = 0
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            tokens = 1 + sum('"token_ids":[' in line and '"token_ids":[]' not in line for line in lines)
        assert tokens > 100
        assert server.wait() == 0
        assert any("SIGTERM: no new requests; 1 sequences under way" in line for line in server.log)
        with pytest.raises(httpx2.ConnectError):
            client.get("/health")


def test_requests_that_take_too_long_to_drain_are_ended() -> None:
    model = "emulated://?layers=4&context=4096&c=0.2"
    words = ("--drain-timeout", "1", "--device", "emulated", "--workers", "task")
    with (
        server_process(model, *words) as server,
        client_of(server) as client,
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):
        next(response.iter_lines())
        assert server.end() == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with server_process(TOY, "--workers", "task") as server, client_of(server) as client:
        asked = threading.Thread(target=lambda: client.post("/v1/completions", json={**LONG, "max_tokens": 2000}))
        asked.start()
        server.process.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
        asked.join()


def test_a_rank_that_dies_too_often_ends_it() -> None:
    import psutil

    with server_process(TOY, "--pp", "2", "--no-recover") as server:
        ranks = [
            child for child in psutil.Process(server.process.pid).children() if "rank" in " ".join(child.cmdline())
        ]
        assert len(ranks) == 2
        ranks[1].kill()
        assert server.wait() == 3
        assert any("engine: dead" in line for line in server.log)


def test_the_key_comes_from_the_environment() -> None:
    environment = {**os.environ, "PIPELINED_API_KEY": "secret"}
    with server_process(TOY, "--workers", "task", env=environment) as server, client_of(server) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert "secret" not in "".join(server.log)


def test_a_port_that_is_taken_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "pipelined", "serve", TOY, "--port", str(taken.getsockname()[1])]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 2
    assert "cannot be listened on: Address already in use" in found.stderr
    assert "loading" not in found.stderr


def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {certificate}"
    command = ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    with server_process(
        TOY, "--tls-certfile", str(certificate), "--tls-keyfile", str(key), "--workers", "task"
    ) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx2.Client(base_url=server.url, verify=context) as client:
            assert client.get("/health").status_code == 200
    absent = ServerProcess(TOY, "--tls-certfile", "/none.pem", "--tls-keyfile", str(key), "--workers", "task")
    assert absent.wait() == 2
    assert "TLS files cannot be used" in "".join(absent.log)
