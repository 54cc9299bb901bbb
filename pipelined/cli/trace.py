"""`pipelined trace show`: where the time of a recorded run went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pipelined.cli.options import output_file
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("trace", help="look at a recorded trace", description=__doc__)
    kinds = parser.add_subparsers(required=True, metavar="show")
    show = kinds.add_parser("show", help="busy and idle time of each stage, by cause")
    show.add_argument("file", metavar="TRACE.json", help="as written by --trace")
    show.add_argument("--timeline", type=output_file, metavar="FILE", help="write the picture too (HTML)")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the attribution."""
    from rich.console import Console

    from pipelined.trace import attribute, critical_path, path_text, read_chrome, stage_table, write_timeline

    if not Path(arguments.file).is_file():
        raise ConfigError(f"there is no trace file {arguments.file!r}; write one with --trace")
    try:
        trace = read_chrome(arguments.file)
    except OSError as error:
        raise ConfigError(f"the trace file {arguments.file!r} cannot be read: {error.strerror}") from error
    uses, path = attribute(trace), critical_path(trace)
    if arguments.json:
        parts = path.parts_ns()
        rows = [
            {
                "rank": use.rank,
                "stage": use.label,
                "busy_s": use.busy_s,
                "idle_s": use.idle_s,
                "causes_s": use.causes,
                "critical_ns": {what: ns for (what, rank), ns in parts.items() if rank == use.rank},
            }
            for use in uses
        ]
        print(json.dumps(rows))
    else:
        console = Console()
        console.print(stage_table(uses, title=f"{trace.wall_s:.3f} s"))
        console.print(path_text(path), highlight=False, soft_wrap=True)
    if arguments.timeline:
        write_timeline(trace, arguments.timeline)
    return 0
