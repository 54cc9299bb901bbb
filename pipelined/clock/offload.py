"""Work that is too long for a loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from pipelined.clock.virtual import VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["off_loop"]

T = TypeVar("T")


async def off_loop(work: Callable[[], T]) -> T:
    """Run `work` in a thread, or at once where time is virtual: there it takes none, and there are no threads."""
    if isinstance(asyncio.get_running_loop(), VirtualTimeLoop):
        return work()
    return await asyncio.to_thread(work)
