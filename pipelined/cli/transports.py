"""`pipelined transports`: what is installed, and whether it keeps the contract."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipelined.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("transports", help="list transports, or check one", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_list)
    kinds = parser.add_subparsers(metavar="check")
    check = kinds.add_parser("check", help="run the conformance kit on one", description="Run the conformance kit.")
    check.add_argument("uri", metavar="URI", help="scheme://?options, or package.module:Class")
    check.add_argument("--world", type=int, default=4, metavar="N", help="endpoints (default: 4)")
    check.add_argument("--quick", action="store_true", help="smaller sizes")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=run_check)


def run_list(arguments: argparse.Namespace) -> int:
    """List what is installed, with the install line of what is missing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pipelined.testing import list_transports

    rows = list_transports()
    if arguments.json:
        print(json.dumps(rows))
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("scheme", "carries", "reaches", "leases", "from", ""):
        table.add_column(column)
    for row in rows:
        table.add_row(*map(Text, _cells(row)))  # text: [ucx] is no markup
    Console().print(table)
    return 0


def _cells(row: dict[str, Any]) -> list[str]:
    capabilities = row["capabilities"]
    if capabilities is None:
        note = "wraps another: " + row["scheme"] + "+shm://" if row["wraps"] else row["install"] or row["error"]
        return [row["scheme"], "", "", "", row["from"], note]
    carries = " ".join(kind for kind in ("messages", "tensors") if capabilities[kind])
    reaches = "hosts" if capabilities["hosts"] else "processes" if capabilities["processes"] else "tasks"
    return [row["scheme"], carries, reaches, "yes" if capabilities["leases"] else "no", row["from"], row["install"]]


def run_check(arguments: argparse.Namespace) -> int:
    """Run the kit; exit code 0 only if nothing failed."""
    from rich.console import Console

    from pipelined.testing import render_results, results_as_data, run_checks

    if arguments.world < 2:
        raise ConfigError(f"--world {arguments.world}: expected 2 or more")
    console = Console(stderr=True)
    with console.status(f"checking {arguments.uri}") as status:

        def progress(result: Any) -> None:
            status.update(f"checking {arguments.uri}: {result.rule} {result.name} {result.outcome}")

        results = run_checks(arguments.uri, world=arguments.world, quick=arguments.quick, on_result=progress)
    data = results_as_data(arguments.uri, results)
    if arguments.json:
        print(json.dumps(data))
    else:
        Console().print(render_results(results, arguments.uri))
    return 1 if data["failed"] else 0
