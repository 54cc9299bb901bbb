"""What the ranks did between two moments: busy and idle time, trace files, a table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pipelined.trace import RankTrace, Span, Trace, attribute, stage_table, write_chrome, write_timeline

if TYPE_CHECKING:
    from pathlib import Path

    from pipelined.llm import AsyncLLM, RequestOutput
    from pipelined.trace import CriticalPath

__all__ = ["Report", "path_as_json"]


def path_as_json(path: CriticalPath) -> dict[str, Any]:
    """Whole nanoseconds, so that sums are exact. `parts`: by what it was and whose; `pieces`: from start to end."""
    return {
        "wall_ns": path.wall_ns,
        "parts": [{"what": what, "rank": rank, "ns": ns} for (what, rank), ns in path.parts_ns().items()],
        "pieces": [
            {
                "start_ns": run.start_ns,
                "end_ns": run.end_ns,
                "what": run.what,
                "rank": run.rank,
                "step": run.step,
                "steps": run.steps,
            }
            for run in path.runs()
        ],
    }


class Report:
    """Begin it, run something on the engine, end it, look at it."""

    def __init__(self, llm: AsyncLLM, started_s: float) -> None:
        self._llm = llm
        self._started_s = started_s
        self._stats: dict[int, dict[str, Any]] = {}
        self.trace: Trace = Trace((), 0.0, 0.0)

    @classmethod
    async def begin(cls, llm: AsyncLLM) -> Report:
        """From now on; what the ranks recorded before is dropped."""
        await llm.trace()
        return cls(llm, llm.now())

    async def end(self) -> None:
        """Until now."""
        ended_s = self._llm.now()
        spans = await self._llm.trace()
        self._stats = await self._llm.stats()
        ranks = [RankTrace(rank, self._label(rank), own) for rank, own in spans.items()]
        meta = {"model": self._llm.info.ref, "pp_size": len(ranks), "threads_per_rank": self._llm.config.threads}
        self.trace = Trace(ranks, self._started_s, ended_s, meta)

    def _label(self, rank: int) -> str:
        first, end = self._llm.layers[rank]
        return f"layers {first}-{end - 1}"

    def spans(self, name: str = "forward") -> list[list[Span]]:
        """Spans of the devices, by rank."""
        return [
            [span for span in rank.spans if span.track == "device" and span.name == name] for rank in self.trace.ranks
        ]

    def stages(self) -> list[dict[str, Any]]:
        """Busy and idle seconds of each stage; `layers` is [from, to)."""
        return [
            {"rank": use.rank, "layers": list(self._llm.layers[use.rank]), "busy_s": use.busy_s, "idle_s": use.idle_s}
            for use in attribute(self.trace)
        ]

    def print_table(self, output: RequestOutput) -> None:
        """TTFT, rates, and the stages' use, on standard error."""
        from rich.console import Console

        metrics, choice = output.metrics, output.outputs[0]
        assert metrics.ttft_s is not None
        assert metrics.e2e_s is not None
        prompt, completion = len(output.prompt_token_ids), len(choice.token_ids)
        computed = prompt - metrics.cached_tokens
        parts = [
            f"prompt {prompt} tokens" + (f" ({metrics.cached_tokens} cached)" if metrics.cached_tokens else ""),
            f"TTFT {metrics.ttft_s:.3f} s ({computed / metrics.ttft_s:.1f} tokens/s)",
            f"{completion} tokens out",
        ]
        if completion > 1 and metrics.e2e_s > metrics.ttft_s:
            parts.append(f"{(completion - 1) / (metrics.e2e_s - metrics.ttft_s):.1f} tokens/s")
        console = Console(file=sys.stderr)
        console.print()
        console.print(", ".join(parts), highlight=False)
        console.print(stage_table(attribute(self.trace)))

    def write(self, trace: str | Path | None, timeline: str | Path | None) -> None:
        """The files that were asked for."""
        if trace:
            write_chrome(self.trace, trace)
        if timeline:
            write_timeline(self.trace, timeline, title=f"{self._llm.info.ref}, {len(self.trace.ranks)} ranks")
