"""`pipelined fuzz`: random workloads on random pipelines under random faults, in virtual time."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from pipelined.testing.fuzz import Found, Summary

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("fuzz", help="run the runtime under random faults, by seed", description=__doc__)
    parser.add_argument("--seeds", default="0:100", metavar="FIRST:END", help="which seeds (default: 0:100)")
    parser.add_argument(
        "--faults",
        default="all",
        metavar="KINDS",
        help="of drop,delay,kill,cancel,capacity,skew,corrupt,duplicate,stage; or none (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Play the seeds; exit code 1 if one failed, or if a thousand or more covered too little."""
    from pipelined.testing.fuzz import fuzz, parse_faults, parse_seeds

    seeds, faults = parse_seeds(arguments.seeds), parse_faults(arguments.faults)
    summary = _with_progress(seeds, faults) if sys.stderr.isatty() else fuzz(seeds, faults)
    if arguments.json:
        print(json.dumps(summary.as_data()))
    else:
        _print(summary)
    return 1 if summary.found or summary.missed else 0


def _with_progress(seeds: range, faults: tuple[str, ...]) -> Summary:
    from rich.console import Console
    from rich.progress import Progress

    from pipelined.testing.fuzz import fuzz

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("fuzz", total=len(seeds))

        def on_seed(so_far: Summary) -> None:
            text = f"seed {seeds.start + so_far.seeds - 1}, {len(so_far.found)} failed, {so_far.rate:,.0f} rank-steps/s"
            progress.update(bar, completed=so_far.seeds, description=text)

        return fuzz(seeds, faults, on_seed=on_seed)


def _print(summary: Summary) -> None:
    data = summary.as_data()
    for found in summary.found:
        _print_found(found)
    kinds = ", ".join(summary.faults) or "none"
    print(f"seeds {summary.first}:{summary.first + summary.seeds}, faults: {kinds}")
    print(
        f"{len(summary.found)} failed; {data['rank_steps']:,} rank-steps, {data['rank_steps_per_s']:,} a second, "
        f"{data['median_rank_steps']:,.0f} in the median run"
    )
    print("covered: " + ", ".join(f"{name} {count:,}" for name, count in data["coverage"].items()))
    for missed in summary.missed:
        print(f"too little of {missed}")


def _print_found(found: Found) -> None:
    print(f"seed {found.seed} FAILED; again: {found.command}")
    for failure in found.failures:
        print(f"  {failure}")
    print("  what still fails:")
    for line in found.shrunk:
        print(f"    {line}")
    print("  the end of its timeline:")
    for line in found.timeline:
        print(f"    {line}")
