"""What the kit found, for people (a table) and programs (plain data), and what is installed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pipelined.errors import MissingDependencyError, PipelinedError
from pipelined.testing.check import FAIL, PASS, SKIP
from pipelined.testing.kit import run_checks
from pipelined.transport import installed, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipelined.testing.check import CheckResult

__all__ = ["check_transport", "list_transports", "render_results", "results_as_data"]

_COLOURS = {PASS: "green", FAIL: "bold red", SKIP: "yellow"}


def render_results(results: Sequence[CheckResult], title: str = "") -> Table:
    """A table with a line for each check and the counts below it; print it with `rich`."""
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in (PASS, FAIL, SKIP)}
    caption = f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[SKIP]} skipped"
    table = Table(title=title or None, caption=caption)
    for column in ("rule", "check"):
        table.add_column(column, no_wrap=True)
    table.add_column("outcome")
    table.add_column("s", justify="right")
    table.add_column("reason", overflow="fold", ratio=1)
    for result in results:
        colour = _COLOURS[result.outcome]
        name = result.name.replace("_", " ")
        outcome = f"[{colour}]{result.outcome}[/]"
        table.add_row(result.rule, name, outcome, f"{result.seconds:.1f}", result.reason.replace("[", r"\["))
    return table


def results_as_data(source: str, results: Sequence[CheckResult]) -> dict[str, Any]:
    """The same as builtins, for JSON: `{transport, passed, failed, skipped, results: [...]}`."""
    return {
        "transport": source,
        "passed": sum(result.outcome == PASS for result in results),
        "failed": sum(result.outcome == FAIL for result in results),
        "skipped": sum(result.outcome == SKIP for result in results),
        "results": [asdict(result) for result in results],
    }


def check_transport(
    source: str, *, world: int = 4, quick: bool = False, on_result: Callable[[CheckResult], None] | None = None
) -> dict[str, Any]:
    """Run the kit on `source`; `results_as_data` of what it found."""
    return results_as_data(source, run_checks(source, world=world, quick=quick, on_result=on_result))


def list_transports() -> list[dict[str, Any]]:
    """Every registered transport and wrapper: `{scheme, from, wraps, capabilities, install, error}`.

    `capabilities` is None where it can't be loaded; `install` then holds the line that installs what is missing.
    """
    return [_described(scheme) for scheme in sorted(installed())]


def _described(scheme: str) -> dict[str, Any]:
    point = installed()[scheme]
    row: dict[str, Any] = {
        "scheme": scheme,
        "from": point.dist.name if point.dist else "",
        "wraps": False,
        "capabilities": None,
        "install": "",
        "error": "",
    }
    try:
        row["wraps"] = bool(getattr(point.load(), "wraps", False))
        if not row["wraps"]:
            row["capabilities"] = asdict(resolve(scheme).capabilities)
    except MissingDependencyError as error:
        row["install"], row["error"] = error.install, str(error)
    except (PipelinedError, ImportError, AttributeError) as error:
        row["error"] = f"{type(error).__name__}: {error}"
    return row
