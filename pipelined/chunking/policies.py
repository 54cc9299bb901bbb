"""Chunk policies by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelined.chunking.fixed import FixedChunks
from pipelined.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pipelined.chunking.base import ChunkPolicy

__all__ = ["make_policy"]


def make_policy(name: str, *, chunked_prefill_size: int) -> ChunkPolicy:
    """The policy of that name.

    Raises:
        ConfigError: There is none, or the size is no chunk size.
    """
    if name == "fixed":
        return FixedChunks(chunked_prefill_size)
    raise ConfigError(f"unknown chunk policy {name!r}{nearest(name, ['fixed'])}")
