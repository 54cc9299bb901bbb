"""`pipelined replay`: published results on the real scheduler in virtual time, beside balanced chunks and the best."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from pipelined.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.table import Table

    from pipelined.planning import Replayed, Scenario

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("replay", help="published results, replayed in virtual time", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="those whose name or setting has this in it")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    from pipelined.planning import replay, replays

    chosen = _chosen(replays(), arguments.only)
    rows = []
    for number, scenario in enumerate(chosen, 1):
        status = f"\r{number}/{len(chosen)} {scenario.name:78.78}" if sys.stderr.isatty() else ""
        print(status, end="", file=sys.stderr, flush=True)
        rows.append(replay(scenario))
    print("\r" + " " * 90 + "\r" if sys.stderr.isatty() else "", end="", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return 0
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(_table(rows))
    for text, setting in {row.note: row.setting for row in rows if row.note}.items():
        console.print(f"{setting}: {text}", highlight=False, markup=False)
    return 0


def _chosen(every: Sequence[Scenario], text: str | None) -> Sequence[Scenario]:
    chosen = [one for one in every if text is None or text.lower() in one.name.lower()]
    if not chosen:
        names = "; ".join(one.name for one in every)
        raise ConfigError(f"--only {text!r} is in no published result; there are: {names}")
    return chosen


def _table(rows: Sequence[Replayed]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, caption_justify="left")
    table.caption = (
        "seconds to the first token; +: with so much more for each launch, where the model has no such cost; "
        "gain: of balanced over theirs"
    )
    table.add_column("result")
    table.add_column("setting")
    for name in ("published", "theirs", "error", "+", "theirs+", "balanced+", "best+", "gain", "of best's"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            row.setting,
            f"{row.published_s:.2f}",
            f"{row.theirs_s:.2f}",
            f"{100 * row.error:+.1f}%",
            f"{1e3 * row.overhead_s:.0f}ms",
            f"{row.theirs_with_overhead_s:.2f}",
            f"{row.balanced_s:.2f}",
            f"{row.optimum_s:.2f}",
            f"{100 * row.gain:.1f}%",
            f"{100 * row.efficiency:.1f}%",
        )
    return table
