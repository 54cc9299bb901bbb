"""`/dashboard`: a live page of the pipeline, its requests and their latencies; and the JSON that it asks for.

The page needs nothing but this server. What it is told is bounded, however much goes on.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Query
from starlette.responses import Response

import pipelined
from pipelined.clock import off_loop
from pipelined.serving.encoding import JsonResponse
from pipelined.serving.metrics_ranks import KEPT_S
from pipelined.serving.state import ERRORS, Server, ServerState, calendar_s
from pipelined.trace import BUSY, CAUSES
from pipelined.trace.packing import MEANING, Tables, merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipelined.serving.metrics_requests import Watched
    from pipelined.trace import Segment

__all__ = ["live_data", "page", "router"]

_MOST_PIECES: Final = 1_600
_MOST_REQUESTS: Final = 60
_MOST_FINISHED: Final = 12
_MOST_CHARACTERS: Final = 160
_SHARES: Final = (0.5, 0.9, 0.99)

router = APIRouter(tags=["observability"], responses=ERRORS)


@router.get("/dashboard", response_class=Response)
async def dashboard() -> Response:
    """A page that shows what the server does, as it does it."""
    text, policy = await off_loop(page)
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(text, media_type="text/html", headers=headers)


@router.get("/dashboard/data")
async def dashboard_data(server: Server, window_s: Annotated[float, Query(ge=1, le=KEPT_S)] = 10.0) -> JsonResponse:
    """What the page shows; the pipeline's timeline over the last `window_s` seconds."""
    await server.feed.refresh()
    return JsonResponse(live_data(server, window_s))


def page() -> tuple[str, str]:
    """The page, and the content security policy that it needs: its own script, this server, and nobody else."""
    own, shared = files("pipelined.serving").joinpath("page"), files("pipelined.trace").joinpath("page")
    style = shared.joinpath("page.css").read_text(encoding="utf-8")
    style += own.joinpath("dashboard.css").read_text(encoding="utf-8")
    script = own.joinpath("dashboard.js").read_text(encoding="utf-8")
    text = own.joinpath("dashboard.html").read_text(encoding="utf-8")
    text = text.replace("%%STYLE%%", style).replace("%%SCRIPT%%", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def live_data(server: ServerState, window_s: float) -> dict[str, Any]:
    """All that the page shows, as JSON."""
    engine, tally, feed = server.engine, server.tally, server.feed
    state, now_s = engine.state, engine.now()
    draining = server.gate.closed
    return {
        "version": pipelined.__version__,
        "model": server.model_names[0],
        "now_s": now_s - feed.origin_s,
        "up_s": calendar_s() - server.created,
        "reachable": feed.reachable,
        "state": {
            "name": "draining" if draining else state.name,
            "reason": "the server is shutting down" if draining else state.reason,
            "epoch": state.epoch,
            "restarts": state.restarts,
            "peers_lost": state.peers_lost,
            "latest_loss": state.history[-1] if state.history else "",
        },
        "totals": {
            "requests": tally.requests,
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": tally.cached_tokens,
            "generation_tokens": tally.generation_tokens,
            "preemptions": feed.preemptions,
        },
        "latency": _latency(server),
        "requests": _requests(server, now_s),
        "pages": {name: feed.planner.get(name, 0) for name in ("pages", "available_pages", "cached_pages")},
        "sequences": {name: feed.planner.get(name, 0) for name in ("running", "waiting")},
        "ranks": _ranks(server),
        "timeline": _timeline(server, window_s),
    }


def _latency(server: ServerState) -> dict[str, list[float] | None]:
    """Medians and tails of late: of the last few hundred requests, or tokens."""
    finished = server.tally.finished
    return {
        "ttft_s": _quantiles(one.ttft_s for one in finished if one.ttft_s is not None),
        "itl_s": _quantiles(server.tally.recent_itl_s),
        "e2e_s": _quantiles(one.e2e_s for one in finished if one.reason in ("stop", "length")),
    }


def _quantiles(values: Iterable[float]) -> list[float] | None:
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in _SHARES] if ordered else None


def _requests(server: ServerState, now_s: float) -> dict[str, Any]:
    tally = server.tally
    order = {"prefill": 0, "decode": 1, "waiting": 2}
    live = sorted(tally.live.values(), key=lambda watched: (order[watched.phase], watched.arrived_s))
    return {
        "live": len(live),
        "shown": [_request(watched, now_s) for watched in live[:_MOST_REQUESTS]],
        "finished": [
            {**one._asdict(), "id": _short(one.id)} for one in reversed(list(tally.finished)[-_MOST_FINISHED:])
        ],
    }


def _request(watched: Watched, now_s: float) -> dict[str, Any]:
    return {
        "id": _short(watched.id),
        "phase": watched.phase,
        "prompt_tokens": watched.prompt_tokens,
        "cached_tokens": watched.cached_tokens,
        "prefill_done": watched.prefill_done,
        "prefill_total": watched.prefill_total,
        "sequences": watched.sequences,
        "tokens": watched.tokens,
        "age_s": now_s - watched.arrived_s,
        "ttft_s": None if watched.first_s is None else watched.first_s - watched.arrived_s,
    }


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _ranks(server: ServerState) -> list[dict[str, Any]]:
    layers = server.engine.layers
    return [
        {
            "rank": rank,
            "label": f"layers {layers[rank][0]}-{layers[rank][1] - 1}",
            "resident_bytes": totals.latest.get("rss_bytes", 0),
            "steps": int(totals.counts["steps_done"]),
            "sent_bytes": int(totals.counts["sent_bytes"]),
        }
        for rank, totals in server.feed.ranks.items()
    ]


def _timeline(server: ServerState, window_s: float) -> dict[str, Any]:
    """Pieces of the last seconds, up to what is known, as `Tables` packs them; the ends in seconds of `now_s`."""
    feed = server.feed
    to_ns = round((feed.known_s - feed.origin_s) * 1e9)
    begins_ns = max((totals.pieces[0].start_ns for totals in feed.ranks.values() if totals.pieces), default=to_ns)
    from_ns = max(begins_ns, to_ns - round(window_s * 1e9))
    rows = [_clipped(totals.pieces, from_ns, to_ns) for totals in feed.ranks.values()]
    quantum_ns = 0
    if sum(len(row) for row in rows) > _MOST_PIECES:
        quantum_ns = (to_ns - from_ns) * len(rows) // (_MOST_PIECES // 2) or 1
    tables = Tables("request" if any("#" in str(piece.detail) for row in rows for piece in row) else "micro-batch")
    ranks = []
    for row in rows:
        spent_ns = dict.fromkeys((BUSY, *CAUSES), 0)
        for piece in row:
            spent_ns[piece.cause] += piece.end_ns - piece.start_ns
        items = [number for item in merged(row, quantum_ns, tables) for number in item]
        ranks.append({"items": items, "spent_s": {cause: ns / 1e9 for cause, ns in spent_ns.items() if ns}})
    return {
        "from_s": from_ns / 1e9,
        "to_s": to_ns / 1e9,
        "merged_s": quantum_ns / 1e9,
        "causes": [[cause, *MEANING[cause]] for cause in CAUSES],
        "by": tables.by,
        "groups": list(tables.groups),
        "mixes": list(tables.mixes),
        "details": [_short(text) for text in tables.details],
        "labels": list(tables.labels),
        "ranks": ranks,
    }


def _clipped(pieces: Sequence[Segment], from_ns: int, to_ns: int) -> list[Segment]:
    return [
        piece._replace(start_ns=max(piece.start_ns, from_ns), end_ns=min(piece.end_ns, to_ns))
        for piece in pieces
        if piece.end_ns > from_ns and piece.start_ns < to_ns
    ]
