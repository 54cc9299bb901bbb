"""An output that is owed to somebody, and copies for them to keep."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from pipelined.messages import ErrorInfo
from pipelined.transport.buffers import copy_sliced, raw_bytes

if TYPE_CHECKING:
    from pipelined.stage import Payload

__all__ = ["Owed", "own_copy"]


class Owed:
    """An output that somebody waits for. `id` is -1 until all tensors of its input are posted."""

    __slots__ = ("future", "id")

    def __init__(self) -> None:
        self.future: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        self.id = -1

    def __repr__(self) -> str:
        return f"<Owed {self.id} {'done' if self.future.done() else 'pending'}>"

    def settle(self, output: Payload | ErrorInfo) -> None:
        """Hand over the output, or raise the error of its step."""
        if isinstance(output, ErrorInfo):
            self.fail(output.exception())
        elif not self.future.done():
            self.future.set_result(output)

    def fail(self, error: Exception) -> None:
        """Have the wait raise `error`."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # nobody may be waiting: not worth a warning


async def own_copy(view: torch.Tensor) -> torch.Tensor:
    """A copy of the transport's memory, for the caller to keep. Not `clone`: torch's threads would spin beside it."""
    copy = torch.empty(view.shape, dtype=view.dtype)
    copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def landed() -> None:
        if not copied.done():
            copied.set_result(None)

    copy_sliced(raw_bytes(copy), raw_bytes(view), landed)
    if not copied.done():
        await copied
    return copy
