"""The attribution as a short table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pipelined.trace.idle import StageUse

__all__ = ["stage_table"]


def stage_table(uses: Sequence[StageUse], *, title: str | None = None) -> Table:
    """One line a stage: how long it was busy and idle, and what it waited for, the longest first."""
    from rich.table import Table  # not needed by ranks, which import this package for its tracer
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("stage")
    for name in ("busy", "", "idle"):
        table.add_column(name, justify="right")
    table.add_column("idle because of")
    for use in uses:
        longest = sorted(use.causes.items(), key=lambda cause: -cause[1])[:3]
        why = ", ".join(f"{cause.replace('_', ' ')} {_percent(seconds, use.wall_s)}" for cause, seconds in longest)
        table.add_row(
            str(use.rank),
            Text(use.label),  # not markup: labels are the user's
            f"{use.busy_s:.3f} s",
            _percent(use.busy_s, use.wall_s),
            f"{use.idle_s:.3f} s",
            why,
        )
    return table


def _percent(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.1f} %" if whole_s else "-"
