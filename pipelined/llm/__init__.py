"""The engine: `LLM` for scripts, `AsyncLLM` for servers.

Loaded on first use: the command line reads `EngineConfig` for its defaults, and needs no torch to print its help.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelined.llm.config import EngineConfig
    from pipelined.llm.describing import inspect_model
    from pipelined.llm.engine import AsyncLLM
    from pipelined.llm.epochs import EngineState
    from pipelined.llm.offline import LLM
    from pipelined.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineState",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "inspect_model",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pipelined.llm' has no attribute {name!r}")
    home = {
        "LLM": "offline",
        "AsyncLLM": "engine",
        "inspect_model": "describing",
        "EngineConfig": "config",
        "EngineState": "epochs",
    }
    return getattr(import_module(f"pipelined.llm.{home.get(name, 'outputs')}"), name)
