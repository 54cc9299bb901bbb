"""`/metrics`: what the server counts, as Prometheus reads it. One registry an application.

Names begin with `pipelined_`; where vLLM and SGLang count the same thing, the rest of the name is theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

import pipelined
from pipelined.serving.state import ERRORS, Server, ServerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastapi import FastAPI
    from prometheus_client.core import Metric

    from pipelined.llm import AsyncLLM
    from pipelined.serving.metrics_ranks import RankFeed
    from pipelined.serving.metrics_requests import RequestTally
    from pipelined.trace import Histogram

__all__ = ["Metrics", "install_metrics", "router"]

_STATES: Final = ("starting", "ready", "recovering", "draining", "stopped", "dead")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pipelined_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"pipelined_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = CounterMetricFamily(f"pipelined_{name}", text, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family


def _histograms(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], Histogram]]
) -> Metric:
    family = HistogramMetricFamily(f"pipelined_{name}", text, labels=labels)
    for keys, histogram in values:
        buckets = [("+Inf" if bound is None else str(float(bound)), count) for bound, count in histogram.cumulated()]
        family.add_metric(list(keys), buckets, histogram.total)
    return family


class Metrics:
    """What Prometheus gets: made from the engine, the tally of requests and the feed of the ranks when it asks."""

    def __init__(self, engine: AsyncLLM, tally: RequestTally, feed: RankFeed) -> None:
        self._engine = engine
        self._tally = tally
        self._feed = feed
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        yield from self._engine_wide()
        yield from self._latencies()
        yield from self._totals()
        yield from self._kv()
        yield from self._stages()
        yield from self._lanes()

    def _engine_wide(self) -> Iterator[Metric]:
        state, engine = self._engine.state, self._engine
        info = GaugeMetricFamily("pipelined_build_info", "What runs", labels=["version", "model", "stages"])
        info.add_metric([pipelined.__version__, engine.info.ref, str(len(engine.layers))], 1)
        yield info
        states = GaugeMetricFamily("pipelined_engine_state", "1 for the state that the engine is in", labels=["state"])
        for name in _STATES:
            states.add_metric([name], float(state.name == name))
        yield states
        yield _counter("peer_lost", "Losses of a rank, each of which ended an epoch", state.peers_lost)
        yield _counter("restarts", "Epochs begun after the first", state.restarts)

    def _latencies(self) -> Iterator[Metric]:
        tally = self._tally
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token", tally.ttft_s),
            ("inter_token_latency_seconds", "From one token of a continuation to its next", tally.itl_s),
            ("e2e_request_latency_seconds", "From a request's arrival to its end, of those that finished", tally.e2e_s),
            ("request_prompt_tokens", "Prompt tokens of a request", tally.request_prompt_tokens),
            ("request_generation_tokens", "Tokens generated for a request", tally.request_tokens),
            ("chunk_tokens", "Tokens of the chunks that prompts were cut into", tally.chunk_tokens),
        ):
            yield _histograms(name, text, (), [((), histogram)])

    def _totals(self) -> Iterator[Metric]:
        tally, planner = self._tally, self._feed.planner
        waiting = sum(watched.phase == "waiting" for watched in tally.live.values())
        reachable = self._feed.reachable
        yield _gauge(
            "num_requests_running",
            "Sequences that hold pages and are computed",
            planner.get("running", 0) if reachable else 0,
        )
        yield _gauge(
            "num_requests_waiting",
            "Sequences that wait for pages or a place; while there is no pipeline, all requests",
            planner.get("waiting", 0) if reachable else max(waiting, len(tally.live)),
        )
        yield _counter("prompt_tokens", "Prompt tokens of requests that have their first token", tally.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated", tally.generation_tokens)
        yield _counter("cached_tokens", "Prompt tokens found in the prefix cache", tally.cached_tokens)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", tally.prompt_tokens)
        yield _counter("prefix_cache_hits", "Prompt tokens found there", tally.cached_tokens)
        yield _counter("num_preemptions", "Sequences that lost their pages and began anew", self._feed.preemptions)
        yield _counter("requests", "Requests taken", tally.requests)
        yield _counters(
            "request_success",
            "Continuations that are over, by how they ended",
            "finished_reason",
            sorted(tally.ended_by.items()),
        )
        yield _counters("request_failures", "Requests that failed", "error", sorted(tally.errors.items()))

    def _kv(self) -> Iterator[Metric]:
        planner = self._feed.planner
        pages, available = planner.get("pages", 0), planner.get("available_pages", 0)
        used = 1 - available / pages if pages else 0.0
        yield _gauge("kv_cache_usage_ratio", "Share of the KV pages that sequences hold, 0 to 1", used)
        yield _gauge("kv_pages", "KV pages in all", pages)
        yield _gauge("kv_pages_cached", "KV pages that the prefix cache holds", planner.get("cached_pages", 0))
        yield _counter("kv_pages_evicted", "KV pages that the prefix cache gave up", self._feed.evicted_pages)

    def _stages(self) -> Iterator[Metric]:
        ranks = {str(rank): totals for rank, totals in self._feed.ranks.items()}
        for name, text, key in (
            ("stage_busy_seconds", "Time that a stage's device computed", "busy_s"),
            ("stage_steps", "Micro-batches that left a stage", "steps_done"),
            ("stage_void_steps", "Micro-batches that failed on a stage", "steps_void"),
            ("transfer_bytes", "Bytes of tensors that a stage sent on", "sent_bytes"),
        ):
            yield _counters(name, text, "stage", ((rank, totals.counts[key]) for rank, totals in ranks.items()))
        text = "Time that a stage's device was idle, by cause; known while somebody scrapes"
        bubbles = CounterMetricFamily("pipelined_stage_bubble_seconds", text, labels=["stage", "cause"])
        memory = GaugeMetricFamily("pipelined_stage_resident_bytes", "Memory of a rank's process", labels=["stage"])
        for rank, totals in ranks.items():
            for cause, seconds in totals.idle_s.items():
                bubbles.add_metric([rank, cause], seconds)
            memory.add_metric([rank], totals.latest.get("rss_bytes", 0))
        yield bubbles
        yield memory
        yield _histograms(
            "chunk_duration_seconds",
            "Time of a stage's device for a micro-batch with prompt tokens",
            ("stage",),
            (((rank,), totals.histograms["chunk_s"]) for rank, totals in ranks.items() if totals.histograms),
        )
        error = self._feed.planner.get("prediction_error")
        yield _gauge(
            "chunk_prediction_error_ratio",
            "By what share the predicted times were wrong lately, on the stage where that was most",
            float("nan") if error is None else error,
        )

    def _lanes(self) -> Iterator[Metric]:
        waits = {"input": ("HIDDEN", "input_wait_s"), "credit": ("HIDDEN", "credit_wait_s")}
        values: list[tuple[tuple[str, ...], Histogram]] = []
        for rank, totals in self._feed.ranks.items():
            for what, (lane, key) in waits.items():
                if totals.histograms:
                    values.append(((str(rank), lane, what), totals.histograms[key]))
            if rank == 0 and totals.histograms:
                values.append((("0", "RESULTS", "result"), totals.histograms["result_wait_s"]))
        yield _histograms(
            "transfer_wait_seconds",
            "How long a stage with work waited for an input, for a free buffer, or (the first) for a result",
            ("stage", "lane", "what"),
            values,
        )


router = APIRouter(tags=["observability"], responses=ERRORS)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, server: Server) -> Response:
    """For Prometheus."""
    await server.feed.refresh()
    encoder, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(request.app.state.metrics.registry), headers={"Content-Type": content_type})


def install_metrics(app: FastAPI, engine: AsyncLLM) -> None:
    """Give the application its registry."""
    server: ServerState = app.state.server
    app.state.metrics = Metrics(engine, server.tally, server.feed)
