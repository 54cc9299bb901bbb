"""`pipelined soak`: many streams on real processes for a while, with users who go away and ranks that are killed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from pipelined.testing.soak import SoakReport

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("soak", help="many streams while ranks are killed", description=__doc__)

    def option(name: str, kind: Any, default: Any, text: str) -> None:
        parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")

    option("--seconds", float, 60.0, "for how long streams begin")
    option("--streams", int, 200, "streams at a time")
    option("--kill-every", float, 10.0, "seconds between kills, on average; 0: none")
    option("--pp-size", int, 2, "ranks")
    option("--seed", int, 0, "of what is random")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it; exit code 1 if a token was lost, doubled or changed, a request failed, or something leaked."""
    import asyncio

    import uvloop

    from pipelined.testing.soak import Soak, SoakPlan

    plan = SoakPlan(
        seconds=arguments.seconds,
        streams=arguments.streams,
        kill_every_s=arguments.kill_every,
        pp_size=arguments.pp_size,
        seed=arguments.seed,
    )
    soak = Soak(plan, _progress if sys.stderr.isatty() else None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(soak.run())
    print(json.dumps(report.as_data()) if arguments.json else _told(report))
    return 1 if report.wrong else 0


def _progress(report: SoakReport) -> None:
    text = f"{report.completed} completed, {report.vanished} gone, {report.kills + report.stops} ranks struck"
    print(f"\r{text}, {len(report.wrong)} wrong ", end="", file=sys.stderr, flush=True)


def _told(report: SoakReport) -> str:
    lines = [f"wrong: {what}" for what in report.wrong]
    lines += [
        f"{report.completed:,} streams completed, {report.vanished:,} left by their users, {report.tokens:,} tokens",
        f"{report.kills} ranks killed, {report.stops} stopped; {report.restarts} restarts; "
        f"longest silence of a stream {report.longest_gap_s:.1f} s",
        f"memory at most {report.rss_bytes[0] >> 20} MiB in the first half, {report.rss_bytes[1] >> 20} MiB in the "
        f"second; descriptors {report.descriptors[0]} before, {report.descriptors[1]} after",
    ]
    return "\n".join(lines)
