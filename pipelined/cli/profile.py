"""`pipelined profile`: what chunks and decodes take on every stage, measured, and the cost models fitted to it.

The file is for `--profile` of other commands: balanced chunks then are right from the first prompt on. It is good for
the same model, layers, machine, type and threads alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.cli.measure import run_async
from pipelined.cli.options import add_engine_options, engine_config, output_file
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from pipelined.costs import Sample
    from pipelined.planning.profile import Measurement, StageFit

__all__ = ["add_parser"]

_MOST_ROWS = 32


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("profile", help="measure what chunks and decodes take", description=__doc__)
    add_engine_options(parser)
    parser.add_argument(
        "-o", "--output", type=output_file, metavar="FILE", required=True, help="where the profile goes (JSON)"
    )
    parser.add_argument(
        "--budget-s", type=float, default=120.0, metavar="S", help="time to measure in, ranks ready (default: 120)"
    )
    parser.add_argument("--longest", type=int, metavar="N", help="tokens of the longest prompt; default the context")
    parser.add_argument("--text", metavar="FILE", help="prompts are made of this text; default one that Python has")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw the fit beside the points (HTML)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    from pipelined.costs import encode_profile
    from pipelined.planning.profile_page import write_page

    config = engine_config(arguments)
    if config.profile is not None:
        raise ConfigError("--profile is for using one; `pipelined profile` makes one: leave it out")
    text = _text(arguments.text)
    found = _measure(arguments, config, text)
    if arguments.plot:
        write_page(found, arguments.plot)
    if arguments.json:
        print(json.dumps(as_json(found)))
    else:
        _print(found)
    found.check()
    _write(arguments.output, encode_profile(found.profile))
    return 0


def _measure(arguments: argparse.Namespace, config: Any, text: str | None) -> Measurement:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from pipelined.planning.profile import measure

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)

        def tell(share: float, what: str) -> None:
            progress.update(task, completed=share, description=what)

        found: Measurement = run_async(
            measure(config, budget_s=arguments.budget_s, longest_tokens=arguments.longest, text=text, tell=tell)
        )
    return found


def _text(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the text file {name!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the text file {name!r} is not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise ConfigError(f"the text file {name!r} is empty; expected some pages of text")
    return text


def _write(name: str, content: bytes) -> None:
    try:
        Path(name).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"the profile {name!r} cannot be written: {error.strerror}") from error


def as_json(found: Measurement) -> dict[str, Any]:
    """All that was measured, with what the fit makes of it."""
    import msgspec

    return {
        "fingerprint": msgspec.to_builtins(found.profile.fingerprint),
        "seconds": found.seconds,
        "stages": [
            {
                "rank": stage.rank,
                "layers": list(stage.layers),
                "cost": msgspec.to_builtins(profiled.cost),
                "r2": stage.fit.r2,
                "mean_error": stage.fit.mean_error,
                "worst_error": stage.fit.worst_error,
                "outliers": len(stage.fit.dropped),
                "problem": stage.fit.problem,
                "points": [
                    {
                        "chunks": sample.work.chunks,
                        "decodes": sample.work.decodes,
                        "context_tokens": sample.work.context_tokens,
                        "measured_s": sample.seconds,
                        "predicted_s": stage.fit.cost.launch_s(sample.work),
                        "outlier": place in stage.fit.dropped,
                    }
                    for place, sample in enumerate(stage.samples)
                ],
            }
            for stage, profiled in zip(found.stages, found.profile.stages, strict=True)
        ],
    }


def _print(found: Measurement) -> None:
    """The fit beside the points."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for stage in found.stages:
        cost = stage.fit.cost
        first, end = stage.layers
        console.print(f"stage {stage.rank}, layers {first}-{end - 1}: {stage.fit.verdict}", highlight=False)
        console.print(f"  seconds = {formula(cost)}", highlight=False)
        table = Table("work", "measured", "fit", "error", box=None)
        for place, sample in _shown(stage):
            predicted_s = cost.launch_s(sample.work)
            mark = "  outlier" if place in stage.fit.dropped else ""
            table.add_row(
                described(sample.work),
                f"{1e3 * sample.seconds:.1f} ms",
                f"{1e3 * predicted_s:.1f} ms",
                f"{predicted_s / sample.seconds - 1:+.1%}{mark}",
            )
        console.print(table, highlight=False)
        if (more := len(stage.samples) - _MOST_ROWS) > 0:
            console.print(f"  and {more} more: --plot and --json show all", highlight=False)


def _shown(stage: StageFit) -> list[tuple[int, Sample]]:
    """Outliers, and of the other points so many that the table stays short; the smallest work first."""
    dropped = set(stage.fit.dropped)
    order = sorted(enumerate(stage.samples), key=lambda item: item[1].work)
    room = max(1, _MOST_ROWS - len(dropped))
    others = [item for item in order if item[0] not in dropped]
    kept = {others[at * len(others) // room][0] for at in range(room)} if others else set()
    return [item for item in order if item[0] in dropped or item[0] in kept]


def formula(cost: Any) -> str:
    """The model of a stage, with its numbers."""
    parts = [f"{cost.c:.3g}", f"{cost.b:.3g} x", f"{cost.d:.3g} L", f"{cost.a:.3g} (2Lx + x²)"]
    for window in cost.windows:
        parts.append(f"{window.a:.3g} (2Lx + x² within {window.tokens}) + {window.d:.3g} min(L, {window.tokens})")
    if cost.per_decode is not None:
        parts.append(f"{cost.per_decode:.3g} each decode")
    if cost.per_context is not None:
        parts.append(f"{cost.per_context:.3g} each token of its context")
    return " + ".join(parts)


def described(work: Any) -> str:
    """A micro-batch in words: `256@1024` is 256 tokens behind 1024."""
    parts = [f"{tokens}@{prefix}" for prefix, tokens in work.chunks]
    if work.decodes:
        parts.append(f"{work.decodes} decodes, context {work.context_tokens}")
    return " + ".join(parts)
