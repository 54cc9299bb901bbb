"""`pipelined simulate`: a scenario on the real scheduler in virtual time, and where the time of each stage went."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from pipelined.cli.options import output_file

if TYPE_CHECKING:
    import argparse

    from pipelined.planning import Percentiles, Simulation

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "simulate", help="latency and idle time of a pipeline that is only described", description=__doc__
    )
    parser.add_argument("file", metavar="SCENARIO", help=".toml or .json: stage costs, policy, links, arrivals")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeline", type=output_file, metavar="FILE", help="write a picture of what each stage did when (HTML)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    from pipelined.planning import read_scenario, simulate
    from pipelined.trace import write_timeline

    scenario = read_scenario(arguments.file)
    result = simulate(scenario)
    if arguments.json:
        print(json.dumps(_as_json(result)))
    else:
        _print(result)
    if arguments.timeline:
        write_timeline(result.trace, arguments.timeline, title=scenario.name)
    return 0


def _as_json(result: Simulation) -> dict[str, Any]:
    from pipelined.cli.report import path_as_json

    scenario = result.scenario
    return {
        "name": scenario.name,
        "pp_size": len(result.stages),
        "policy": scenario.chunking.policy,
        "wall_s": result.wall_s,
        "ttft_s": dataclasses.asdict(result.ttft),
        "itl_s": dataclasses.asdict(result.itl) if result.itl else None,
        "prompt_tokens_per_s": result.prompt_tokens_per_s,
        "output_tokens_per_s": result.output_tokens_per_s,
        "trace_is_whole": not result.dropped,
        "stages": [
            {
                "rank": use.rank,
                "wall_s": use.wall_s,
                "busy_s": use.busy_s,
                "idle_s": use.idle_s,
                "causes_s": use.causes,
            }
            for use in result.stages
        ],
        "critical_path": path_as_json(result.critical_path),
        "requests": [
            {
                "at_s": request.arrived_s,
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": len(request.token_times_s),
                "ttft_s": request.ttft_s,
                "e2e_s": request.token_times_s[-1] - request.arrived_s,
                "chunks": request.chunks,
                "preemptions": request.preemptions,
            }
            for request in result.requests
        ],
    }


def _print(result: Simulation) -> None:
    from rich.console import Console

    from pipelined.trace import path_text, stage_table

    console = Console()
    count = len(result.requests)
    chunks = sum(len(request.chunks) for request in result.requests)
    console.print(
        f"{result.scenario.name}: {count} request{'s' * (count > 1)}, {chunks} chunks, {result.wall_s:.3f} s, "
        f"{result.prompt_tokens_per_s:.0f} prompt tokens/s, {result.output_tokens_per_s:.1f} tokens/s out",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    _line(console, "time to first token", result.ttft)
    if result.itl:
        _line(console, "inter-token latency", result.itl)
    if result.dropped:
        console.print("the trace had no room for the beginning: what follows is of the end alone")
    console.print(stage_table(result.stages))
    console.print(path_text(result.critical_path), highlight=False, soft_wrap=True)


def _line(console: Any, name: str, times: Percentiles) -> None:
    parts = [f"{key} {value:.3f} s" for key, value in dataclasses.asdict(times).items()]
    console.print(f"{name}: {', '.join(parts)}", highlight=False, soft_wrap=True)
