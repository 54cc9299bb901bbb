"""`/health`, `/health_generate`, `/version`: is it alive, does it work, and what is it."""

from __future__ import annotations

from fastapi import APIRouter

import pipelined
from pipelined.errors import PipelinedError
from pipelined.serving.encoding import JsonResponse
from pipelined.serving.problems import Problem
from pipelined.serving.state import ERRORS, Server

__all__ = ["router"]

router = APIRouter(tags=["health"], responses=ERRORS)


@router.get("/health")
async def health(server: Server) -> JsonResponse:
    """200 while the engine works; 503 while it cannot: a rank was lost and the pipeline begins anew, or it ends."""
    state = server.engine.state
    body = {"status": state.name, "reason": state.reason, "epoch": state.epoch, "restarts": state.restarts}
    if server.gate.closed:
        body |= {"status": "draining", "reason": "the server is shutting down"}
    ready = state.name == "ready" and not server.gate.closed
    return JsonResponse(body, 200 if ready else 503, None if ready else {"Retry-After": "2"})


@router.get("/health_generate")
async def health_generate(server: Server) -> dict[str, str]:
    """200 once a token has really been generated; one probe runs at a time, and who asks meanwhile shares the next."""
    try:
        await server.probe.run()
    except (TimeoutError, PipelinedError) as error:
        reason = str(error) or f"no token within {server.settings.probe_timeout_s:g} s"
        raise Problem(503, reason, code="unhealthy", headers={"Retry-After": "5"}) from error
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    """Of this server."""
    return {"version": pipelined.__version__}
