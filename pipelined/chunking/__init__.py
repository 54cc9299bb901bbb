"""Chunk policies: how prompts are cut into chunks that flow like micro-batches."""

from pipelined.chunking.base import Budget, ChunkPolicy, Load
from pipelined.chunking.fixed import FixedChunks
from pipelined.chunking.policies import make_policy

__all__ = ["Budget", "ChunkPolicy", "FixedChunks", "Load", "make_policy"]
