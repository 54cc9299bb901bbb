"""The web application: which routers and which parts it is made of, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import pipelined
from pipelined.serving import admin, chat, completions, dashboard, health, metrics, models, tokens
from pipelined.serving.guard import Guard
from pipelined.serving.problems import install_problems
from pipelined.serving.settings import ServerSettings
from pipelined.serving.state import ServerState

if TYPE_CHECKING:
    from pipelined.llm import AsyncLLM

__all__ = ["create_app"]

_ROUTERS = (
    completions.router,
    chat.router,
    models.router,
    tokens.router,
    health.router,
    admin.router,
    metrics.router,
    dashboard.router,
)
_DESCRIPTION = "An OpenAI-compatible API of a language model over a pipeline of ranks."


def create_app(engine: AsyncLLM, settings: ServerSettings | None = None) -> FastAPI:
    """An application that serves `engine`, which is open while requests come.

    `app.state.server` is its `ServerState`.
    """
    settings = settings or ServerSettings()
    app = FastAPI(title="pipelined", version=pipelined.__version__, description=_DESCRIPTION)
    app.state.server = ServerState(engine, settings)
    install_problems(app)
    for router in _ROUTERS:
        app.include_router(router)
    metrics.install_metrics(app, engine)
    app.add_middleware(Guard, settings=settings)
    if settings.allowed_origins:  # outermost: a browser asks whether it may before it sends a key
        origins = list(settings.allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app
