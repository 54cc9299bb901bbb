"""The engine: `LLM` for scripts, `AsyncLLM` for servers."""

from pipelined.llm.config import EngineConfig
from pipelined.llm.engine import AsyncLLM, inspect_model
from pipelined.llm.offline import LLM
from pipelined.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "inspect_model",
]
