"""Runs a scenario: the real scheduler, ranks and links, on emulated devices, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec

from pipelined.chunking import DynamicChunks, Runtime
from pipelined.clock import LoopClock
from pipelined.clock.virtual import run
from pipelined.costs import encode_costs
from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.pipeline import TaskWorld
from pipelined.scheduler import Scheduler, SchedulerConfig
from pipelined.trace import CriticalPath, RankTrace, StageUse, Trace, attribute, critical_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.planning.scenario import Arrival, Scenario
    from pipelined.rank import Planner
    from pipelined.rank.description import RankDescription
    from pipelined.stage import Stage

__all__ = ["Percentiles", "Served", "Simulation", "serve_arrival", "simulate"]

_SPANS = 1 << 21
_FOREVER_S = 1e12


@dataclass(frozen=True)
class Percentiles:
    """Of some times, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """Nearest-rank percentiles; None of nothing."""
        if not seconds:
            return None
        ordered = sorted(seconds)

        def at(share: float) -> float:
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

        return cls(sum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99), ordered[-1])


@dataclass(frozen=True)
class Served:
    """What became of one request.

    Attributes:
        arrived_s: When it came, from the start.
        prompt_tokens: Its length.
        token_times_s: When each token came, from the start.
        chunks: Tokens of each chunk of its prompt.
        preemptions: How often it lost its pages.
    """

    arrived_s: float
    prompt_tokens: int
    token_times_s: tuple[float, ...]
    chunks: tuple[int, ...]
    preemptions: int

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.arrived_s

    @property
    def itls_s(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]


@dataclass(frozen=True)
class Simulation:
    """What a scenario came to.

    Attributes:
        requests: In the order of arrival.
        wall_s: From the start to the last token.
        trace: Of all ranks.
        stages: Busy and idle time of each stage with its causes; they add up to the wall time, to the nanosecond.
        dropped: The trace had no room for its beginning; then `stages` are of its end alone.
    """

    scenario: Scenario
    requests: tuple[Served, ...]
    wall_s: float
    trace: Trace
    stages: tuple[StageUse, ...]
    dropped: bool = False

    @cached_property
    def critical_path(self) -> CriticalPath:
        """What the wall time consists of; its pieces add up to it, to the nanosecond."""
        return critical_path(self.trace)

    @property
    def ttft(self) -> Percentiles:
        """Times to first token."""
        found = Percentiles.of([request.ttft_s for request in self.requests])
        assert found is not None, "a scenario has requests"
        return found

    @property
    def itl(self) -> Percentiles | None:
        """Times between tokens; None where each request has one."""
        return Percentiles.of([itl for request in self.requests for itl in request.itls_s])

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of prompts, over the whole time."""
        return sum(request.prompt_tokens for request in self.requests) / self.wall_s

    @property
    def output_tokens_per_s(self) -> float:
        """Of answers, over the whole time."""
        return sum(len(request.token_times_s) for request in self.requests) / self.wall_s


def simulate(scenario: Scenario) -> Simulation:
    """Run it; takes no real time but that of the planning. Not to be called on a running loop.

    Raises:
        ConfigError: A setting cannot be.
        PipelinedError: A request could not be served.
    """
    return run(_simulate(scenario))


async def _simulate(scenario: Scenario) -> Simulation:
    world = _World(scenario)
    llm = AsyncLLM(_model(scenario), world=world, **_settings(scenario))
    world.planner = _planner(scenario, llm.scheduling)
    async with llm:
        await llm.trace()
        started_s = llm.now()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(serve_arrival(llm, arrival, [1] * arrival.prompt_tokens, started_s))
                for arrival in scenario.requests()
            ]
        requests = tuple(task.result() for task in tasks)
        wall_s = max(request.token_times_s[-1] for request in requests)
        spans = await llm.trace()
    ranks = [RankTrace(rank, f"stage {rank}", own) for rank, own in spans.items()]
    meta = {"model": scenario.name, "pp_size": len(ranks), "policy": scenario.chunking.policy}
    trace = Trace.of(ranks, started_s=started_s, ended_s=started_s + wall_s, meta=meta)
    dropped = any(len(rank.spans) >= _SPANS for rank in ranks)
    return Simulation(scenario, requests, wall_s, trace, tuple(attribute(trace)), dropped)


async def serve_arrival(llm: AsyncLLM, arrival: Arrival, prompt: Sequence[int], started_s: float) -> Served:
    """One request from its arrival, counted from `started_s` by the engine's clock, to its last token."""
    await asyncio.sleep(started_s + arrival.at_s - llm.now())
    arrived_s = llm.now()
    params = SamplingParams(max_tokens=arrival.output_tokens, temperature=0, seed=0, ignore_eos=True)
    times: list[float] = []
    async for output in llm.generate(prompt, params):
        times += [llm.now() - started_s] * (len(output.outputs[0].token_ids) - len(times))
    metrics = output.metrics
    return Served(
        arrived_s - started_s, arrival.prompt_tokens, tuple(times), tuple(metrics.chunks), metrics.preemptions
    )


def _model(scenario: Scenario) -> str:
    cost = scenario.cost
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in scenario.arrivals)
    pages = sum(
        arrival.count * -(-(arrival.prompt_tokens + arrival.output_tokens) // scenario.page_size)
        for arrival in scenario.arrivals
    )
    sizes = {
        "layers": len(cost.stages),
        "hidden": scenario.hidden,
        "vocab": 32_000,
        "context": longest,
        "kv": scenario.kv_cache_tokens or (pages + 1) * scenario.page_size,
        "costs": encode_costs(cost),
    }
    return f"emulated://?{urlencode(sizes)}"


def _settings(scenario: Scenario) -> dict[str, Any]:
    """Of the engine."""
    chunking = scenario.chunking
    cost = scenario.cost
    return {
        "pp_size": len(cost.stages),
        "page_size": scenario.page_size,
        "chunking": chunking.policy,
        "chunked_prefill_size": chunking.chunked_prefill_size,
        "smoothing_factor": chunking.smoothing_factor,
        "max_micro_batch_tokens": chunking.max_micro_batch_tokens,
        "target_itl_s": chunking.target_itl_s,
        "stage_costs": encode_costs(cost) if chunking.known_costs else "",
        "max_running_requests": scenario.max_running_requests,
        "disable_radix_cache": True,  # prompts are lengths alone: none has a prefix in common with another
        "depth": scenario.depth,
        "transport": scenario.link.uri,
        "device": "emulated",
        "threads_per_rank": 1,
        "step_timeout_s": _FOREVER_S,
    }


def _planner(scenario: Scenario, config: SchedulerConfig) -> Scheduler:
    """The scheduler, as rank 0 would make it; a variant of the dynamic rule is made here."""
    chunking = scenario.chunking
    plain = chunking.least_share == 0.25 and not chunking.prefix_cost
    if chunking.policy != "dynamic" or plain:
        return Scheduler(config)
    slowest = max(scenario.cost.distinct, key=lambda one: one.chunk_s(0, chunking.chunked_prefill_size))
    policy = DynamicChunks(
        chunking.chunked_prefill_size,
        Runtime(slowest.a, slowest.b, slowest.d if chunking.prefix_cost else 0.0),
        smoothing=chunking.smoothing_factor,
        page_size=scenario.page_size,
        least_share=chunking.least_share,
    )
    return Scheduler(config, policy)


class _World(TaskWorld):
    """Ranks of a simulation: traced as a whole, with a planner made here."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(clock=lambda _: LoopClock())
        self.planner: Planner | None = None

    async def start(
        self,
        descriptions: Sequence[RankDescription],
        stages: Sequence[Stage | None],
        planner: Planner | None,
        **options: Any,
    ) -> None:
        """See `World`."""
        traced = [msgspec.structs.replace(one, trace_spans=_SPANS) for one in descriptions]
        await super().start(traced, stages, self.planner or planner, **options)
