from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelined.trace import CAUSES

PROMPT = list(range(1, 200))


async def scraped(served: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples, by name and labels."""
    await served.state.feed.refresh(0.0)
    response = await served.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(samples: dict[Any, float], name: str, **labels: str) -> float:
    return samples["pipelined_" + name, frozenset(labels.items())]


async def test_counts_what_requests_did(serve: Callable[..., Any]) -> None:
    async with serve() as served:
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        first = await served.post("/v1/completions", body)
        again = await served.post("/v1/completions", {**body, "n": 2, "max_tokens": 3})
        samples = await scraped(served)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 100
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert value(samples, "prompt_tokens_total") == 2 * len(PROMPT)
        assert value(samples, "generation_tokens_total") == 6 + 2 * 3
        assert value(samples, "cached_tokens_total") == value(samples, "prefix_cache_hits_total") == cached
        assert value(samples, "requests_total") == 2
        assert value(samples, "request_success_total", finished_reason="length") == 3
        assert value(samples, "time_to_first_token_seconds_count") == 2
        assert value(samples, "inter_token_latency_seconds_count") == 5 + 2 * 2
        assert value(samples, "e2e_request_latency_seconds_count") == 2
        assert value(samples, "chunk_tokens_sum") == 2 * len(PROMPT) - cached
        assert value(samples, "num_requests_running") == value(samples, "num_requests_waiting") == 0
        assert value(samples, "kv_cache_usage_ratio") == 0
        assert value(samples, "engine_state", state="ready") == 1


async def test_stage_times_add_up(serve: Callable[..., Any]) -> None:
    async with serve() as served:
        await served.state.feed.refresh(0.0)
        origin_s = served.state.feed.origin_s
        await served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True})
        samples = await scraped(served)
        known_s = served.state.feed.known_s - origin_s
        assert known_s > 0
        for stage in ("0", "1"):
            busy_s = value(samples, "stage_busy_seconds_total", stage=stage)
            idle_s = sum(value(samples, "stage_bubble_seconds_total", stage=stage, cause=cause) for cause in CAUSES)
            assert busy_s > 0
            assert busy_s + idle_s == pytest.approx(known_s, rel=1e-3)
            steps = value(samples, "stage_steps_total", stage=stage)
            assert steps >= 19 + len(PROMPT) // 32
            chunks = value(samples, "chunk_duration_seconds_count", stage=stage)
            assert len(PROMPT) // 32 <= chunks < steps
        assert value(samples, "transfer_bytes_total", stage="0") > 0
        waits = value(samples, "transfer_wait_seconds_count", stage="1", lane="HIDDEN", what="input")
        assert waits == value(samples, "stage_steps_total", stage="1")


async def test_sees_a_loss_and_goes_on_counting(serve: Callable[..., Any]) -> None:
    from pipelined.errors import RankLostError

    async with serve(recover=True) as served:
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        await served.post("/v1/completions", body)
        before = await scraped(served)
        served.engine.lose(RankLostError("was seen to be lost", rank=1))
        await served.post("/v1/completions", body)
        after = await scraped(served)
        assert value(after, "peer_lost_total") == value(after, "restarts_total") == 1
        for name in ("stage_busy_seconds_total", "stage_steps_total"):
            assert value(after, name, stage="1") > value(before, name, stage="1") > 0


async def test_failures_and_aborts_are_told_apart(serve: Callable[..., Any]) -> None:
    async with serve() as served:
        body = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        async with asyncio.TaskGroup() as group:
            request = group.create_task(served.post("/v1/completions", body))
            await served.busy()
            samples = await scraped(served)
            assert value(samples, "num_requests_running") + value(samples, "num_requests_waiting") <= 1
            await served.post("/abort", {"abort_all": True})
            await request
        samples = await scraped(served)
        assert value(samples, "request_success_total", finished_reason="abort") == 1
        assert value(samples, "e2e_request_latency_seconds_count") == 1


async def test_probes_are_not_counted(serve: Callable[..., Any]) -> None:
    async with serve() as served:
        await served.get("/health_generate")
        assert value(await scraped(served), "requests_total") == 0


async def test_applications_share_no_registry(serve: Callable[..., Any]) -> None:
    async with serve() as one, serve() as other:
        await one.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})
        assert value(await scraped(one), "requests_total") == 1
        assert value(await scraped(other), "requests_total") == 0


# ---- the Grafana file and the documentation ----


def expressions(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["expr"]] if isinstance(node.get("expr"), str) else []
        own += [node["query"]] if isinstance(node.get("query"), str) and "pipelined_" in node["query"] else []
        return own + [found for value in node.values() for found in expressions(value)]
    return [found for value in node for found in expressions(value)] if isinstance(node, list) else []


_SELECTOR = re.compile(r"(pipelined_\w+)\s*(?:\{([^}]*)\})?")
_BY = re.compile(r"by\s*\(([^)]*)\)")


async def test_grafana_asks_only_for_what_is_exported(serve: Callable[..., Any]) -> None:
    dashboard = json.loads(files("pipelined.serving").joinpath("page/grafana.json").read_text())
    asked = expressions(dashboard)
    assert len(asked) > 15
    async with serve() as served:
        await served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True})
        samples = await scraped(served)
    known: dict[str, set[str]] = {}
    for name, labels in samples:
        known.setdefault(name, set()).update(key for key, _ in labels)
    for expression in asked:
        used = _SELECTOR.findall(expression)
        assert used, expression
        for name, labels in used:
            assert name in known, f"{name} of {expression!r} is not exported"
            wanted = {part.partition("=")[0].strip(" !~") for part in labels.split(",") if part}
            assert wanted <= known[name] | {"job", "instance"}, expression
        labels_of_all = set().union(*(known[name] for name, _ in used)) | {"job", "instance"}
        for group in _BY.findall(expression):
            assert {part.strip() for part in group.split(",")} <= labels_of_all, expression


async def test_all_metrics_are_documented(serve: Callable[..., Any]) -> None:
    page = Path(__file__).parents[2] / "docs" / "observability.md"
    told = set(re.findall(r"`(pipelined_\w+)", page.read_text()))
    async with serve() as served:
        await served.state.feed.refresh(0.0)
        text = (await served.client.get("/metrics")).text
        exported = set(re.findall(r"^# TYPE (pipelined_\w+)", text, re.MULTILINE))
    assert told == exported


def test_a_histogram_counts_by_size() -> None:
    from pipelined.trace import Histogram

    histogram = Histogram((1.0, 2.0, 4.0))
    for number in (0.5, 1.0, 1.5, 3.0, 100.0):
        histogram.add(number)
    assert histogram.counts == [2, 1, 1, 1]
    assert histogram.total == 106.0
    assert list(histogram.cumulated()) == [(1.0, 2), (2.0, 3), (4.0, 4), (None, 5)]
