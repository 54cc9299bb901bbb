from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelined.cli.bench_serve import _bench, _client, _save, _wanted
from pipelined.cli.bench_serve_load import (
    Load,
    Sample,
    arrivals_s,
    file_samples,
    http_client,
    random_samples,
    run_load,
)
from pipelined.cli.bench_serve_metrics import Outcome, detailed, summarize
from pipelined.cli.main import _parser
from pipelined.errors import ConfigError

HEAD = "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency"
FIGURES = (
    "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
    "output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests"
)
STATISTICS = {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")}
VLLM_KEYS = {*HEAD.split(), *FIGURES.split(), *STATISTICS}


def arguments(*words: str) -> Any:
    return _parser().parse_args(["bench", "serve", *words])


def test_the_figures_by_hand() -> None:
    outcomes = [
        Outcome(start_s=0.0, ttft_s=1.0, latency_s=3.0, itl_s=[1.0, 1.0], prompt_tokens=10, output_tokens=3),
        Outcome(start_s=1.0, ttft_s=0.5, latency_s=0.5, prompt_tokens=5, output_tokens=1),
        Outcome(start_s=3.0, ttft_s=2.0, latency_s=6.0, itl_s=[2.0, 2.0], prompt_tokens=10, output_tokens=3),
        Outcome(start_s=2.0, error="status 500"),
    ]
    found = summarize(
        outcomes,
        10.0,
        metrics=("ttft", "tpot", "itl", "e2el"),
        percentiles=(50, 99.9),
        goodput_s={"ttft": 1.0, "e2el": 3.0},
    )
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (25, 7)
    assert found["request_throughput"] == pytest.approx(0.3)
    assert found["output_throughput"] == pytest.approx(0.7)
    assert found["total_token_throughput"] == pytest.approx(3.2)
    assert found["request_goodput"] == pytest.approx(0.2)
    assert found["mean_ttft_ms"] == pytest.approx(3500 / 3)
    assert found["std_ttft_ms"] == pytest.approx(1e3 * statistics.pstdev([1.0, 0.5, 2.0]))
    assert found["mean_tpot_ms"] == pytest.approx(1500)
    assert found["median_itl_ms"] == pytest.approx(1500)
    assert found["p50_e2el_ms"] == pytest.approx(3000)
    assert found["p99.9_ttft_ms"] == pytest.approx(2000, rel=1e-2)
    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == 2
    assert len(detailed(outcomes)["itls"]) == 4


def test_when_all_have_failed() -> None:
    found = summarize([Outcome(error="gone")], 1.0)
    assert (found["completed"], found["failed"], found["mean_ttft_ms"]) == (0, 1, 0.0)
    assert found["request_goodput"] is None


def test_random_prompts_are_the_same_for_a_seed() -> None:
    samples = random_samples(50, 100, 20, 0.5, 7, vocab=64, text=False)
    assert samples == random_samples(50, 100, 20, 0.5, 7, vocab=64, text=False)
    lengths = [len(sample.prompt) for sample in samples]
    assert 50 <= min(lengths) < 80 < 120 < max(lengths) <= 150
    assert all(token < 64 for sample in samples for token in sample.prompt)  # type: ignore[operator]
    assert {len(s.prompt) for s in random_samples(5, 9, 3, 0.0, 7, vocab=64, text=False)} == {9}
    text = random_samples(1, 9, 3, 0.0, 7, vocab=64, text=True)[0].prompt
    assert isinstance(text, str)
    assert len(text.split()) == 9
    with pytest.raises(ConfigError):
        random_samples(1, 9, 3, 1.0, 7, vocab=64, text=True)


def test_arrivals_keep_their_rate() -> None:
    assert arrivals_s(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    for burstiness in (0.5, 1.0, 10.0):
        found = arrivals_s(4000, 10.0, burstiness, 1)
        assert found == sorted(found)
        assert found[-1] == pytest.approx(400, rel=0.1)
    with pytest.raises(ConfigError):
        arrivals_s(3, 0.0, 1.0, 0)


def test_datasets(tmp_path: Path) -> None:
    lines = tmp_path / "custom.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt": "b", "output_tokens": 5}\n', encoding="utf-8")
    assert file_samples(str(lines), 3, None) == [Sample("a", 128), Sample("b", 5), Sample("a", 128)]
    shared = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello to you"}]
    shared.write_text(json.dumps([{"conversations": turns[:1]}, {"conversations": turns}]), encoding="utf-8")
    assert file_samples(str(shared), 1, None) == [Sample("hi", 3)]
    assert file_samples(str(shared), 1, 7) == [Sample("hi", 7)]
    for text in ("", "[", '{"x": 1}\n', "[]"):
        lines.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError):
            file_samples(str(lines), 1, None)


def test_wrong_options() -> None:
    for words in (
        ["--percentile-metrics", "ttf"],
        ["--goodput", "itl:5"],
        ["--goodput", "ttft"],
        ["--metric-percentiles", "many"],
    ):
        with pytest.raises(ConfigError):
            _wanted(arguments(*words))
    with pytest.raises(ConfigError):
        http_client("localhost:8000")


class Server:
    """Answers every request with what it is given."""

    def __init__(self, answer: Callable[[str, bytes], list[bytes]]) -> None:
        self._answer = answer
        self.most = self._now = 0
        self.seen: list[tuple[str, bytes]] = []

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next(
            (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0
        )
        body = await reader.readexactly(size)
        self.seen.append((head.split(" ")[1], body))
        for piece in self._answer(head.split(" ")[1], body):
            writer.write(piece)
            await asyncio.sleep(0)
        self._now -= 1
        writer.close()


def chunked(*events: bytes) -> list[bytes]:
    pieces = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
    return [*pieces, *(f"{len(e):x}\r\n".encode() + e + b"\r\n" for e in events), b"0\r\n\r\n"]


def answer(path: str, body: bytes) -> list[bytes]:
    if path == "/v1/models":
        text = b'{"data": [{"id": "m"}]}'
        return [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text]
    if json.loads(body)["max_tokens"] == 13:
        return [b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull"]
    if json.loads(body)["max_tokens"] == 14:
        return [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda"]
    if json.loads(body)["max_tokens"] == 15:
        return chunked(b'data: {"error":{"message":"lost"}}\n\ndata: [DONE]\n\n')
    token = b'data: {"choices":[{"text":"x"}]}\n\n'
    last = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\n'
    return chunked(b": comment\n\n", token, token[:9], token[9:] + token, last, b"data: [DONE]\n\n")


async def test_a_run_has_the_keys_that_scripts_expect(tmp_path: Path) -> None:
    async with Server(answer) as server:
        words = [
            "--base-url",
            server.url,
            "--num-prompts",
            "6",
            "--max-concurrency",
            "2",
            "--num-warmups",
            "1",
            "--random-input-len",
            "4",
            "--random-output-len",
            "3",
            "--metadata",
            "a=b",
            "--save-detailed",
        ]
        given = await asyncio.to_thread(arguments, *words, "--result-dir", str(tmp_path))
        result, outcomes = await _bench(given, await asyncio.to_thread(_client, given))
    assert set(result) == VLLM_KEYS | {"a"}
    assert (result["completed"], result["total_output_tokens"], result["request_rate"]) == (6, 18, "inf")
    assert server.most <= 2
    assert len(server.seen) == 1 + 1 + 6
    sent = json.loads(server.seen[-1][1])
    assert sent["ignore_eos"]
    assert sent["stream"]
    assert [one.text for one in outcomes] == ["xxx"] * 6
    assert all(len(one.itl_s) == 2 for one in outcomes)
    await asyncio.to_thread(_save, given, result)
    (path,) = await asyncio.to_thread(lambda: list(tmp_path.iterdir()))
    assert path.name.startswith("openai-infqps-concurrency2-m-")


async def test_failures_are_counted_and_told() -> None:
    async with Server(answer) as server:
        given = await asyncio.to_thread(arguments, "--base-url", server.url)
        samples = [Sample([1], 13), Sample([1], 14), Sample([1], 15), Sample([1], 3)]
        async with await asyncio.to_thread(http_client, server.url) as client:
            load = Load(client, "/v1/completions", chat=False, body={"model": "m"})
            outcomes, _ = await run_load(load, samples, [0.0] * 4)
    assert [bool(one.error) for one in outcomes] == [True, True, True, False]
    assert "status 429: full" in outcomes[0].error
    assert "closed" in outcomes[1].error
    assert outcomes[2].error == "lost"
    with pytest.raises(ConfigError, match="no server answers"):
        await _bench(given, await asyncio.to_thread(_client, given))
