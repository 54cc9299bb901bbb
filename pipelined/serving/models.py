"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from pipelined.serving.state import Server, ServerState

__all__ = ["router"]

router = APIRouter(tags=["models"])


def _card(server: ServerState, name: str) -> dict[str, Any]:
    info = server.engine.info
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "pipelined",
        "root": info.ref,
        "parent": None,
        "max_model_len": info.context_length,
    }


@router.get("/v1/models")
async def list_models(server: Server) -> dict[str, Any]:
    """The model, by each of its names."""
    return {"object": "list", "data": [_card(server, name) for name in server.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, server: Server) -> dict[str, Any]:
    """One of them."""
    return _card(server, server.check_model(name))
