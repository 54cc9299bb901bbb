"""Chunk policies: how prompts are cut into chunks that flow like micro-batches."""

from pipelined.chunking.balanced import BalancedChunks
from pipelined.chunking.base import Budget, ChunkPolicy, Load
from pipelined.chunking.dynamic import DynamicChunks, Runtime
from pipelined.chunking.fixed import FixedChunks
from pipelined.chunking.optimum import Cut, cut_seconds, optimum
from pipelined.chunking.policies import POLICIES, make_policy
from pipelined.chunking.target import Target, Task, find_target

__all__ = [
    "POLICIES",
    "BalancedChunks",
    "Budget",
    "ChunkPolicy",
    "Cut",
    "DynamicChunks",
    "FixedChunks",
    "Load",
    "Runtime",
    "Target",
    "Task",
    "cut_seconds",
    "find_target",
    "make_policy",
    "optimum",
]
