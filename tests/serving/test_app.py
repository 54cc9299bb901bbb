from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from serving_tools import Served

import pipelined
from pipelined.errors import ConfigError, RankLostError
from pipelined.llm import AsyncLLM
from pipelined.serving import ServerSettings
from pipelined.serving.probe import Probe

BODY = {"prompt": [1], "max_tokens": 1}


async def test_health_version_and_info(serve: Any) -> None:
    async with serve(server={"api_keys": ("secret-key",), "chat_template": "mine"}) as served:
        served.client.headers["Authorization"] = "Bearer secret-key"
        assert (await served.get("/health"))["status"] == "ready"
        assert await served.get("/health_generate") == {"status": "ok"}
        assert await served.get("/version") == {"version": pipelined.__version__}
        info = await served.get("/server_info")
        assert info["engine"]["pp_size"] == 2
        assert set(info["ranks"]) == {"0", "1"}
        assert "secret-key" not in json.dumps(info)
        served.state.gate.closed = True
        assert (await served.get("/health", 503))["status"] == "draining"
        assert (await served.post("/v1/completions", BODY, 503))["error"]["code"] == "shutting_down"


async def test_health_tells_of_a_dead_engine() -> None:
    llm = AsyncLLM("toy://?layers=4&vocab=997&hidden=4&context=2048&kv=65536", workers="task", pp_size=2)
    async with llm, Served(llm, ServerSettings()) as served:
        died = asyncio.Event()
        llm.on_state = lambda state: died.set() if state.name == "dead" else None
        llm.lose(RankLostError("for the test", rank=1))
        await died.wait()
        assert (await served.get("/health", 503))["status"] == "dead"
        assert "for the test" in (await served.get("/health", 503))["reason"]
        assert (await served.get("/health_generate", 503))["error"]["code"] == "unhealthy"
        assert (await served.post("/v1/completions", BODY, 503))["error"]["code"] == "engine_unavailable"
        assert (await served.get("/server_info"))["ranks"] == {}


async def test_health_stays_good_while_a_long_prompt_is_computed(serve: Any) -> None:
    async with serve("emulated://?layers=4&context=4096&c=0.05", device="emulated") as served:
        async with asyncio.TaskGroup() as group:
            long = group.create_task(served.post("/v1/completions", {"prompt": [1] * 640, "max_tokens": 1}))
            await served.busy()
            while not long.done():
                assert (await served.get("/health"))["status"] == "ready"
                await asyncio.sleep(0.1)
        await served.get("/health_generate")


async def test_probes_do_not_pile_up(serve: Any) -> None:
    async with serve() as served:
        asked = 0
        generate = served.engine.generate

        def counted(*args: Any, **more: Any) -> Any:
            nonlocal asked
            asked += 1
            return generate(*args, **more)

        served.engine.generate = counted
        probe = Probe(served.engine, 30.0)
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(probe.run())
        assert asked == 2, "the first one's own, and the next one for all who came meanwhile"
        await served.get("/health_generate")
        assert asked == 3


async def test_a_probe_without_a_token_is_unhealthy(serve: Any) -> None:
    async with serve(server={"probe_timeout_s": 0.05}) as served:

        async def never(*_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()
            yield

        served.engine.generate = never
        found = await served.get("/health_generate", 503)
        assert "no token within 0.05 s" in found["error"]["message"]


async def test_keys(serve: Any) -> None:
    async with serve(server={"api_keys": ("one", "two")}) as served:
        for header in (None, "Bearer three", "one", "Bearer", "Basic !!!", "Bearer \xfc"):
            headers = {} if header is None else {"Authorization": header.encode("latin-1")}
            refused = await served.post("/v1/completions", BODY, 401, headers=headers)
            assert refused["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/server_info", "/openapi.json", "/health_generate", "/nothing"):
            await served.get(path, 401)
        await served.get("/health")
        for header in ("Bearer one", "bearer two", "Basic " + base64.b64encode(b"me:two").decode()):
            await served.post("/v1/completions", BODY, headers={"Authorization": header})
        response = await served.client.get("/docs", headers={"Accept": "text/html"})
        assert response.headers["www-authenticate"].startswith("Basic")


async def test_large_bodies_are_refused(serve: Any) -> None:
    async with serve(server={"max_body_bytes": 1000}) as served:
        large = {"prompt": [1] * 1000}
        assert (await served.post("/v1/completions", large, 413))["error"]["code"] == "request_too_large"

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        response = await served.client.post(
            "/v1/completions", content=pieces(), headers={"content-type": "application/json"}
        )
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]
        await served.post("/v1/completions", BODY)


async def test_a_full_queue_says_when_to_come_back(serve: Any) -> None:
    async with serve(server={"max_queued_requests": 2}, max_running_requests=2) as served:
        long = {"prompt": [1, 2], "max_tokens": 2000, "ignore_eos": True, "n": 4}
        async with asyncio.TaskGroup() as group:
            task = group.create_task(served.client.post("/v1/completions", json=long))
            await served.busy()
            for stream in (True, False):
                response = await served.client.post("/v1/completions", json={**BODY, "stream": stream})
                assert response.status_code == 429
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["type"] == "rate_limit_error"
            assert (await served.get("/health"))["status"] == "ready"
            await served.post("/abort", {"abort_all": True})
            assert (await task).json()["choices"][0]["finish_reason"] == "abort"
        await served.post("/v1/completions", BODY)
        await served.post("/v1/completions", {**BODY, "n": 5}, 400)


async def test_slow_requests_are_ended(serve: Any) -> None:
    async with serve(server={"request_timeout_s": 0.05}) as served:
        long = {"prompt": [1, 2], "max_tokens": 2000, "ignore_eos": True}
        refused = await served.post("/v1/completions", long, 504)
        assert refused["error"]["type"] == "timeout_error"
        response = await served.client.post("/v1/completions", json={**long, "stream": True})
        assert '"code":"timeout"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
        await served.at_rest()


async def test_silent_streams_are_kept_alive(serve: Any) -> None:
    async with serve(server={"keep_alive_s": 0.01}) as served:

        async def slow(*_: Any, **__: Any) -> Any:
            await asyncio.sleep(0.1)
            return
            yield

        served.engine.generate = slow
        response = await served.client.post("/v1/completions", json={**BODY, "stream": True})
        assert response.text.startswith(": still working\n\n")


async def test_a_long_prefill_tells_how_far_it_is(serve: Any) -> None:
    async with serve(
        "emulated://?layers=4&context=4096&c=0.05", device="emulated", server={"keep_alive_s": 0.05}
    ) as served:
        body = {"prompt": [1] * 640, "max_tokens": 1, "stream": True}
        text = (await served.client.post("/v1/completions", json=body)).text
        told = [line for line in text.split("\n\n") if line.startswith(": prefill")]
        assert told
        assert told[0].endswith("of 640 tokens")
        body["stream_options"] = {"include_progress": True}
        body["prompt"] = [2] * 640
        events = await served.events("/v1/completions", body)
        done = [event["progress"]["done"] for event in events if "progress" in event]
        assert done
        assert done == sorted(done)
        assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_profile(serve: Any, tmp_path: Path) -> None:
    async with serve(server={"profile_dir": str(tmp_path / "profiles")}) as served:
        await served.post("/stop_profile", None, 409)
        await served.post("/start_profile", None)
        await served.post("/start_profile", None, 409)
        await served.post("/v1/completions", {"prompt": [1] * 100, "max_tokens": 3})
        path = (await served.post("/stop_profile", None))["path"]
        trace = json.loads(await asyncio.to_thread(Path(path).read_text))
        assert any(event.get("name") == "forward" for event in trace["traceEvents"])


async def test_browsers_of_allowed_pages(serve: Any) -> None:
    async with serve(server={"api_keys": ("k",), "allowed_origins": ("https://chat.example",)}) as served:
        asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        response = await served.client.options("/v1/chat/completions", headers=asked)
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        response = await served.client.get("/health", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_every_route_is_documented(serve: Any) -> None:
    async with serve() as served:
        paths = set((await served.get("/openapi.json"))["paths"])
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"} <= paths
        assert {"/health", "/health_generate", "/version", "/server_info", "/abort", "/start_profile"} <= paths
        await served.get("/nothing", 404)
        await served.get("/v1/completions", 405)


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"host": "192.0.2.1"},
        {"host": "example.org"},
        {"port": 70000},
        {"max_body_bytes": 0},
        {"max_queued_requests": -1},
        {"request_timeout_s": 0},
        {"watchdog_timeout_s": float("nan")},
        {"drain_timeout_s": -1},
        {"tls_certfile": "cert.pem"},
        {"api_keys": ("",)},
        {"tool_call_parser": "guess"},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**settings)


def test_without_a_key_only_this_machine_may_come() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert ServerSettings(host=host).local
    assert not ServerSettings(host="0.0.0.0", api_keys=("k",)).local
    assert ServerSettings(host="0.0.0.0", allow_anonymous=True).url == "http://0.0.0.0:8000"
    assert "k-e-y" not in repr(ServerSettings(api_keys=("k-e-y",)))
