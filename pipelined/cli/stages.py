"""`pipelined stages`: which model families are installed, and whether a model's stages keep the contract."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("stages", help="list model families, or check a model's stages", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_list)
    kinds = parser.add_subparsers(metavar="check")
    check = kinds.add_parser("check", help="run the conformance kit on a model", description="Run the conformance kit.")
    check.add_argument("model", metavar="MODEL", help="directory, hub id, .gguf file, alias, or a family's URI: toy://")
    check.add_argument("--quick", action="store_true", help="fewer cuts and random batches")
    check.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    check.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights")
    check.add_argument("--page-size", type=int, default=8, metavar="N", help="tokens of a KV page (default: 8)")
    check.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=run_check)


def run_list(arguments: argparse.Namespace) -> int:
    """List the families that are installed."""
    from importlib.metadata import entry_points

    from pipelined.rank.description import FAMILIES

    points = sorted(entry_points(group=FAMILIES), key=lambda point: point.name)
    rows = [{"family": point.name, "from": point.dist.name if point.dist else ""} for point in points]
    if arguments.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['family']:12} {row['from']}")
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Run the kit; exit code 0 only if nothing failed."""
    from rich.console import Console

    from pipelined.errors import ConfigError
    from pipelined.stage import LoadOptions
    from pipelined.testing import CheckResult, check_stage, render_results

    if arguments.page_size < 1:
        raise ConfigError(f"--page-size {arguments.page_size}: expected 1 or more")
    options = LoadOptions(
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        trust_remote_code=arguments.trust_remote_code,
        page_size=arguments.page_size,
        kv_cache_tokens=64 * arguments.page_size,
    )
    results: list[CheckResult] = []
    with Console(stderr=True).status(f"checking {arguments.model}") as status:

        def progress(result: Any) -> None:
            results.append(result)
            status.update(f"checking {arguments.model}: {result.rule} {result.name} {result.outcome}")

        data = check_stage(arguments.model, options=options, quick=arguments.quick, on_result=progress)
    if arguments.json:
        print(json.dumps(data))
    else:
        Console().print(render_results(results, arguments.model))
    return 1 if data["failed"] else 0
