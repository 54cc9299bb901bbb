"""The proof of a search: the workload on running engines, with the default's setting and with the winner's, in turn."""

from __future__ import annotations

import asyncio
import os
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipelined.clock import off_loop
from pipelined.messages import SamplingParams
from pipelined.planning.profile_text import TextTokens
from pipelined.planning.simulate import Percentiles, serve_arrival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipelined.llm import AsyncLLM, EngineConfig
    from pipelined.planning.scenario import Arrival
    from pipelined.planning.simulate import Served
    from pipelined.planning.tune_workload import Workload
    from pipelined.stage import ModelInfo

__all__ = ["Measured", "measure", "too_large"]

_WARM_TOKENS: Final = 512
_OF_MEMORY: Final = 0.7


@dataclass(frozen=True)
class Measured:
    """The workload on a running engine; medians over the rounds, in seconds."""

    ttft_s: float
    latency_s: float
    wall_s: float
    itl_s: float | None

    def score(self, goal: str) -> float:
        """What the search made small."""
        return {"ttft": self.ttft_s, "latency": self.latency_s, "throughput": self.wall_s}[goal]

    @classmethod
    def of(cls, requests: Sequence[Served]) -> Measured:
        """Of one round."""
        itl = Percentiles.of([one for request in requests for one in request.itls_s])
        return cls(
            ttft_s=statistics.mean(request.ttft_s for request in requests),
            latency_s=statistics.mean(request.token_times_s[-1] - request.arrived_s for request in requests),
            wall_s=max(request.token_times_s[-1] for request in requests),
            itl_s=itl.mean if itl else None,
        )

    @classmethod
    def median(cls, rounds: Sequence[Measured]) -> Measured:
        """Of several."""
        itls = [one.itl_s for one in rounds if one.itl_s is not None]
        return cls(
            statistics.median(one.ttft_s for one in rounds),
            statistics.median(one.latency_s for one in rounds),
            statistics.median(one.wall_s for one in rounds),
            statistics.median(itls) if itls else None,
        )


def too_large(info: ModelInfo) -> str:
    """Why this machine cannot run the model, as far as can be told; "" if it can."""
    weights = sum(info.layer_bytes) + info.embedding_bytes + info.head_bytes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights > _OF_MEMORY * memory:
        return f"its weights take {weights / 1e9:.3g} GB, this machine has {memory / 1e9:.3g} GB"
    return ""


async def measure(
    configs: Sequence[EngineConfig],
    workload: Workload,
    *,
    rounds: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Serve the workload with each configuration, in turn, so that the machine's moods strike all of them alike.

    Each time the ranks start anew and learn anew, as those of a user would; prompts are of real text.
    """
    found: list[list[Measured]] = [[] for _ in configs]
    for turn in range(rounds):
        for place in range(len(configs)) if turn % 2 == 0 else reversed(range(len(configs))):
            progress(f"round {turn + 1} of {rounds}, setting {place + 1} of {len(configs)}")
            found[place].append(await _serve(configs[place], workload))
    return [Measured.median(of_one) for of_one in found]


async def _serve(config: EngineConfig, workload: Workload) -> Measured:
    from pipelined.llm import AsyncLLM

    engine = await off_loop(lambda: AsyncLLM(config))  # it reads the model's configuration, and a profile
    async with engine as llm:
        texts = await off_loop(lambda: TextTokens(llm.tokenizer, llm.info))
        await _warm(llm, texts)
        pairs = [(arrival, texts.prompt(arrival.prompt_tokens)) for arrival in _each(workload)]
        started_s = llm.now()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(serve_arrival(llm, arrival, prompt, started_s)) for arrival, prompt in pairs]
    return Measured.of([task.result() for task in tasks])


def _each(workload: Workload) -> Iterator[Arrival]:
    for arrival in workload.arrivals:
        for _ in range(arrival.count):
            yield arrival


async def _warm(llm: AsyncLLM, texts: TextTokens) -> None:
    """First launches are slow; a short prompt leaves little to learn from."""
    length = max(1, min(_WARM_TOKENS, llm.info.context_length - 2))
    await llm.complete(texts.prompt(length), SamplingParams(max_tokens=2, temperature=0, seed=0, ignore_eos=True))
