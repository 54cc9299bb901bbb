"""The timeline as one HTML file that needs nothing else: what each stage did when, and why it was idle.

Everything that depends on the trace is handed to the page as JSON; the page's script puts it in place as text, never
as markup.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipelined.trace.critical import critical_path
from pipelined.trace.idle import BUSY, CAUSES, attribute, segments
from pipelined.trace.packing import MEANING, Tables, merged

if TYPE_CHECKING:
    from pipelined.trace.idle import StageUse
    from pipelined.trace.timeline import Trace

__all__ = ["write_timeline"]

_MOST_PIECES: Final = 60_000
_MOST_PATH: Final = 20_000


def write_timeline(trace: Trace, path: str | Path, *, title: str = "Pipeline timeline") -> None:
    """Write a self-contained page that shows `trace`.

    Args:
        trace: What to show; its `meta` stands under the title.
        path: Of the HTML file.
        title: Headline.
    """
    from importlib.resources import files

    page = files("pipelined.trace").joinpath("page")
    parts = {name: page.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    data = msgspec.json.encode(_data(trace, title)).decode()
    # In JSON these can only stand inside strings; escaped, nothing can end the script element early.
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    values = {"TITLE": escape(title), "STYLE": parts["page.css"], "DATA": data, "SCRIPT": parts["page.js"]}
    pieces = parts["page.html"].split("%%")  # markers at odd places, so that no value is searched for markers
    text = "".join(values[piece] if index % 2 else piece for index, piece in enumerate(pieces))
    Path(path).write_text(text, encoding="utf-8")


def _data(trace: Trace, title: str) -> dict[str, Any]:
    pieces = segments(trace)
    uses = attribute(trace)
    wall_ns = uses[0].wall_ns if uses else 0
    unit_ns = max(1, wall_ns // 50_000_000)
    tables = Tables.of(trace)
    count = sum(len(rank) for rank in pieces)
    quantum_ns = 0 if count <= _MOST_PIECES else wall_ns * len(pieces) // (_MOST_PIECES // 2) or 1
    ranks = [
        _rank(use, list(merged(rank, quantum_ns, tables)), unit_ns) for use, rank in zip(uses, pieces, strict=True)
    ]
    return {
        "title": title,
        "meta": [[str(key), str(value)] for key, value in trace.meta.items()],
        "unit_s": unit_ns / 1e9,
        "wall_s": wall_ns / 1e9,
        "merged_s": quantum_ns / 1e9,
        "dropped": sum(rank.dropped for rank in trace.ranks),
        "steps": len({piece.step for rank in pieces for piece in rank if piece.cause == BUSY}),
        "causes": [[cause, *MEANING[cause]] for cause in CAUSES],
        "by": tables.by,
        "groups": list(tables.groups),
        "mixes": list(tables.mixes),
        "details": list(tables.details),
        "labels": list(tables.labels),
        "ranks": ranks,
        "path": _path(trace, unit_ns),
    }


def _path(trace: Trace, unit_ns: int) -> list[int]:
    """The critical path for the page: [row, from, to, busy or not] of each run, in units; of many, the longest."""
    runs = critical_path(trace).runs()
    if len(runs) > _MOST_PATH:
        least_ns = sorted(run.length_ns for run in runs)[-_MOST_PATH]
        runs = [run for run in runs if run.length_ns >= least_ns][:_MOST_PATH]
    rows = {rank.rank: row for row, rank in enumerate(trace.ranks)}
    flat: list[int] = []
    for run in runs:
        flat += [rows.get(run.rank, 0), run.start_ns // unit_ns, run.end_ns // unit_ns, int(run.what == BUSY)]
    return flat


def _rank(use: StageUse, items: list[list[int]], unit_ns: int) -> dict[str, Any]:
    # Pieces lie back to back: each is stored by its length alone, rounded so that errors don't add up.
    ended_ns = written = 0
    flat: list[int] = []
    for length_ns, *rest in items:
        ended_ns += length_ns
        length = round(ended_ns / unit_ns) - written
        written += length
        flat += [length, *rest]
    return {"rank": use.rank, "label": use.label, "busy_s": use.busy_s, "causes": use.causes, "items": flat}
