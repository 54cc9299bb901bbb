"""The engine over HTTP: an OpenAI-compatible API, metrics, a dashboard.

Loaded on first use: the command line reads `ServerSettings` for its defaults, and needs no web framework to print its
help.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelined.serving.app import create_app
    from pipelined.serving.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pipelined.serving' has no attribute {name!r}")
    home = {"create_app": "app", "ServerSettings": "settings"}
    return getattr(import_module(f"pipelined.serving.{home[name]}"), name)
