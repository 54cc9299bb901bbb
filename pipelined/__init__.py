"""Pipeline-parallel work as asyncio actors; first of all long-context LLM inference.

Everything public is loaded on first use, so that `import pipelined.scheduler` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelined.llm import LLM, AsyncLLM
    from pipelined.messages import SamplingParams
    from pipelined.pipeline import Pipeline
    from pipelined.stage import Stage

__all__ = ["LLM", "AsyncLLM", "Pipeline", "SamplingParams", "Stage", "__version__"]

__version__ = "0.1.0"

_HOME = {
    "LLM": "pipelined.llm",
    "AsyncLLM": "pipelined.llm",
    "Pipeline": "pipelined.pipeline",
    "SamplingParams": "pipelined.messages",
    "Stage": "pipelined.stage",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pipelined' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
