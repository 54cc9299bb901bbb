"""`/server_info`, `/abort`, `/start_profile`, `/stop_profile`: for whoever runs the server."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter

import pipelined
from pipelined.clock import off_loop
from pipelined.errors import PipelinedError
from pipelined.serving.problems import Problem
from pipelined.serving.protocol import AbortRequest
from pipelined.serving.state import ERRORS, Server

__all__ = ["router"]

router = APIRouter(tags=["administration"], responses=ERRORS)


@router.get("/server_info")
async def server_info(server: Server) -> dict[str, Any]:
    """What runs here and how: settings, layers, capacity, and what each rank has done."""
    engine, settings = server.engine, server.settings
    try:
        ranks, kv_tokens = await engine.stats(), engine.kv_tokens
    except PipelinedError:  # between two epochs there is nobody to ask
        ranks, kv_tokens = {}, 0
    hidden = ("api_keys", "chat_template")
    return {
        "version": pipelined.__version__,
        "model": engine.info.ref,
        "served_model_names": list(server.model_names),
        "architecture": engine.info.architecture,
        "context_length": engine.info.context_length,
        "kv_tokens": kv_tokens,
        "layers": [list(layers) for layers in engine.layers],
        "engine": dataclasses.asdict(engine.config),
        "server": {name: value for name, value in dataclasses.asdict(settings).items() if name not in hidden},
        "requests": {"inside": server.gate.inside, "limit": server.gate.limit},
        "ranks": {str(rank): stats for rank, stats in ranks.items()},
    }


@router.post("/abort")
async def abort(body: AbortRequest, server: Server) -> dict[str, Any]:
    """End a request by its id (that of its response, or the client's `X-Request-Id`), or all of them."""
    if not body.abort_all and not body.request_id:
        raise Problem(400, "expected a request_id, or abort_all=true", param="request_id")
    name = body.request_id or ""
    known = server.gate.ids if body.abort_all else [each for each in server.gate.ids if each.endswith(name)]
    if not body.abort_all and len(known) > 1:
        known = [each for each in known if name in (each, each.partition("-")[2])]
    for request_id in known:
        await server.abort(request_id)
    return {"aborted": list(known)}


@router.post("/start_profile")
async def start_profile(server: Server) -> dict[str, str]:
    """Begin to record what every rank does."""
    await server.profiler.start()
    return {"status": "recording"}


@router.post("/stop_profile")
async def stop_profile(server: Server) -> dict[str, str]:
    """Write what was recorded as a Chrome trace (for chrome://tracing or ui.perfetto.dev); says where."""
    trace = await server.profiler.stop()
    return {"status": "written", "path": await off_loop(lambda: server.profiler.write(trace))}
