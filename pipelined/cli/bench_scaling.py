"""`pipelined bench scaling`: how time to first token falls with the number of stages, and how far from ideal it is."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from pipelined.cli.measure import measure_prefill, median, prompt_tokens, run_async
from pipelined.cli.options import add_engine_options, add_trace_option, engine_config, int_list
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from pipelined.cli.report import Report

__all__ = ["add_parser"]


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the kind."""
    parser = kinds.add_parser("scaling", help="speed-up over the number of stages", description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--prompt-tokens", type=int, default=4096, metavar="N", help="length (default: 4096)")
    parser.add_argument(
        "--pp-sizes", type=int_list, default=(1, 2), metavar="P,P", help="default: 1,2; must begin with 1"
    )
    parser.add_argument("--requests", type=int, default=3, metavar="R", help="rounds over all sizes (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_trace_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    if arguments.pp_sizes[0] != 1:
        raise ConfigError(f"--pp-sizes {arguments.pp_sizes}: expected 1 first; the others are compared with it")
    if arguments.requests < 1:
        raise ConfigError(f"--requests {arguments.requests}: expected 1 or more")
    rows = run_async(_scaling(arguments))
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return 0
    print(f"{'stages':>6} {'TTFT':>9} {'tokens/s':>9} {'speedup':>8} {'efficiency':>10} {'ideal':>9}")
    for row in rows:
        print(
            f"{row['pp_size']:6} {row['ttft_s']:7.3f} s {row['tokens_per_s']:9.1f} {row['speedup']:8.3f} "
            f"{row['efficiency']:10.3f} {row['ideal_s']:7.3f} s"
        )
    return 0


async def _scaling(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from pipelined.cli.report import Report
    from pipelined.llm import AsyncLLM

    threads = arguments.threads_per_rank or 1
    engines = [
        AsyncLLM(engine_config(arguments, pp_size=size, threads_per_rank=threads, disable_radix_cache=True))
        for size in arguments.pp_sizes
    ]
    tokens = prompt_tokens(engines[0].info, arguments.prompt_tokens)
    times: dict[int, list[float]] = {size: [] for size in arguments.pp_sizes}
    chunks: list[list[float]] = []
    last: Report | None = None
    async with AsyncExitStack() as stack:
        for llm in engines:
            await stack.enter_async_context(llm)
            await measure_prefill(llm, tokens[: min(len(tokens), 512)])
        for _ in range(arguments.requests):  # in turn, so that the machine's moods strike all sizes alike
            for size, llm in zip(arguments.pp_sizes, engines, strict=True):
                last = await Report.begin(llm)
                times[size].append(await measure_prefill(llm, tokens))
                await last.end()
                if size == 1:
                    chunks.append([span.end_s - span.start_s for span in last.spans()[0]])
    assert last is not None
    last.write(arguments.trace, arguments.timeline)
    chunk_s = [median(samples) for samples in zip(*chunks, strict=True)]
    one_s = median(times[1])
    return [_row(size, median(times[size]), one_s, chunk_s, len(tokens)) for size in arguments.pp_sizes]


def _row(size: int, ttft_s: float, one_s: float, chunk_s: list[float], tokens: int) -> dict[str, Any]:
    return {
        "pp_size": size,
        "ttft_s": ttft_s,
        "tokens_per_s": tokens / ttft_s,
        "speedup": one_s / ttft_s,
        "efficiency": one_s / ttft_s / size,
        "ideal_s": (sum(chunk_s) + (size - 1) * max(chunk_s)) / size,
    }
