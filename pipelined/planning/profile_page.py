"""The fit beside the points, as one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipelined.costs import Sample
    from pipelined.planning.profile import Measurement, StageFit

__all__ = ["write_page"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 560, 320, 64, 40, 28, 110
_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_STEPS = 48
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #1f2937; background: #fff; max-width: 1200px }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin: 1.5rem 0 0 } p { margin: .2rem 0 }
svg { margin: .5rem 1rem .5rem 0; max-width: 100% } svg text { font: 11px system-ui, sans-serif; fill: #4b5563 }
.axis { stroke: #9ca3af; fill: none } .grid { stroke: #e5e7eb } .bad { color: #b91c1c; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  body { background: #111827; color: #e5e7eb } svg text { fill: #9ca3af } .grid { stroke: #374151 }
}
"""


class _Point(NamedTuple):
    x: float
    y: float
    title: str
    dropped: bool


class _Series(NamedTuple):
    name: str
    points: list[_Point]
    line: list[tuple[float, float]]


def write_page(found: Measurement, path: str | Path) -> None:
    """Write it: for each stage chunks by prefix and decodes by context, points measured, lines fitted."""
    mark = found.profile.fingerprint
    threads = f", {mark.threads} threads a rank" if mark.threads else ""
    about = f"{mark.machine}{threads}, {mark.dtype}; measured for {found.seconds:.0f} s"
    parts = [f"<h1>{escape(mark.model)} on {len(found.stages)} stages</h1><p>{escape(about)}</p>"]
    for stage in found.stages:
        first, end = stage.layers
        kind = ' class="bad"' if stage.fit.problem else ""
        parts.append(
            f"<h2>Stage {stage.rank}, layers {first}-{end - 1}</h2><p{kind}>{escape(stage.fit.verdict)}</p>"
            + _chart("Chunks: seconds by prefix, a colour for each size", "prefix tokens", _chunks(stage))
            + _chart(
                "Decodes: seconds by context, a colour for each batch", "tokens of context in all", _decodes(stage)
            )
        )
    head = f'<meta charset="utf-8"><title>{escape(mark.model)}: fit</title><style>{_STYLE}</style>'
    text = f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"
    Path(path).write_text(text, encoding="utf-8")


def _chunks(stage: StageFit) -> list[_Series]:
    """Launches of one chunk each."""
    cost = stage.fit.cost
    alone = [
        (place, sample)
        for place, sample in enumerate(stage.samples)
        if len(sample.work.chunks) == 1 and not sample.work.decodes
    ]
    counts: dict[int, int] = {}
    for _, sample in alone:
        counts[sample.work.chunks[0][1]] = counts.get(sample.work.chunks[0][1], 0) + 1
    sizes = sorted(sorted(counts, key=lambda size: (-counts[size], size))[: len(_COLOURS)])
    far = max((sample.work.chunks[0][0] for _, sample in alone), default=0)
    return [
        _Series(
            str(size),
            [
                _point(stage, place, sample, sample.work.chunks[0][0])
                for place, sample in alone
                if sample.work.chunks[0][1] == size
            ],
            [(L, cost.c + cost.chunk_s(L, size)) for L in _range(far)],
        )
        for size in sizes
    ]


def _decodes(stage: StageFit) -> list[_Series]:
    """Launches of decodes alone."""
    cost = stage.fit.cost
    alone = [(place, sample) for place, sample in enumerate(stage.samples) if not sample.work.chunks]
    batches = sorted({sample.work.decodes for _, sample in alone})[: len(_COLOURS)]
    far = max((sample.work.context_tokens for _, sample in alone), default=0)
    return [
        _Series(
            str(batch),
            [
                _point(stage, place, sample, sample.work.context_tokens)
                for place, sample in alone
                if sample.work.decodes == batch
            ],
            [(context, cost.c + cost.decode_s(batch, int(context))) for context in _range(far)],
        )
        for batch in batches
    ]


def _point(stage: StageFit, place: int, sample: Sample, x: float) -> _Point:
    predicted_s = stage.fit.cost.launch_s(sample.work)
    title = f"measured {1e3 * sample.seconds:.1f} ms, fit {1e3 * predicted_s:.1f} ms"
    return _Point(x, sample.seconds, title, place in stage.fit.dropped)


def _range(far: float) -> list[float]:
    return [far * step / _STEPS for step in range(_STEPS + 1)]


def _chart(title: str, across: str, series: Sequence[_Series]) -> str:
    """An SVG, or nothing where nothing was measured."""
    if not any(one.points for one in series):
        return ""
    far = max(max(point.x for one in series for point in one.points), 1)
    high = max(y for one in series for y in _heights(one)) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across_px = _LEFT + x / far * (_WIDTH - _LEFT - _RIGHT)
        return round(across_px, 1), round(_HEIGHT - _BOTTOM - min(y / high, 1.0) * (_HEIGHT - _BOTTOM - _TOP), 1)

    parts = [f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text x="{_LEFT}" y="14">{escape(title)}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        (left, y), (x, bottom) = place(0, share * high), place(share * far, 0)
        parts.append(f'<line class="grid" x1="{left}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share * high:.3g} s</text>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{share * far:.0f}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) // 2}" y="{_HEIGHT - 6}" text-anchor="middle">{across}</text>')
    for index, one in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        line = " ".join("{},{}".format(*place(x, y)) for x, y in one.line)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts += [_dot(*place(point.x, point.y), colour, point) for point in one.points]
        key_y = _TOP + 18 * index
        parts.append(f'<circle cx="{_WIDTH - _RIGHT + 20}" cy="{key_y}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 30}" y="{key_y + 4}">{escape(one.name)}</text>')
    return "".join(parts) + "</svg>"


def _heights(series: _Series) -> Iterable[float]:
    """What the axis must reach: outliers may stick at its top."""
    yield from (y for _, y in series.line)
    yield from (point.y for point in series.points if not point.dropped)


def _dot(x: float, y: float, colour: str, point: _Point) -> str:
    fill = "none" if point.dropped else colour
    note = " (outlier)" if point.dropped else ""
    return (
        f'<circle cx="{x}" cy="{y}" r="3" fill="{fill}" stroke="{colour}"><title>{point.title}{note}</title></circle>'
    )
