"""The commit coroutine: posts each step's outputs, ordered after its launch, and owns them until they have left.

Backpressure comes from here: while no credit is free it waits, its queue fills, and the launch coroutine waits with it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from pipelined.errors import ConfigError
from pipelined.rank.launch import failed
from pipelined.rank.payload import split, void

if TYPE_CHECKING:
    import torch

    from pipelined.messages import TensorHeader
    from pipelined.rank.core import Core
    from pipelined.rank.flight import Flight
    from pipelined.transport import TensorLink, Transfer

__all__ = ["Committer"]


class Committer:
    """Sends to one downstream link."""

    def __init__(self, core: Core, link: TensorLink, commits: asyncio.Queue[Flight | None]) -> None:
        self._core = core
        self._link = link
        self._commits = commits
        self._pending = 0
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Post until there are no more steps, then wait until all has left."""
        core = self._core
        while (flight := await self._commits.get()) is not None:
            await flight.known()
            for header, tensor in self._frames(flight):
                await self._post(flight, header, tensor)
            flight.let_go(core.device)
        while self._pending and self._failure is None:
            self._changed.clear()
            await core.deadlines.wait(self._changed.wait(), f"rank {core.config.rank}, lane HIDDEN: the last sends")
        self._check()

    def _frames(self, flight: Flight) -> list[tuple[TensorHeader, torch.Tensor]]:
        core, step = self._core, flight.step
        error = failed(flight, core)
        if error is None:
            assert flight.launch is not None
            try:
                return split(flight.launch.outputs(), step=step.number, rows=step.rows)
            except ConfigError as raised:
                error = flight.error = core.error_at(raised, step)
        return void(error, step=step.number, rows=step.rows)

    async def _post(self, flight: Flight, header: TensorHeader, tensor: torch.Tensor) -> None:
        core = self._core
        self._check()
        if self._link.credits() == 0:
            who = f"rank {core.config.rank}, stage {core.stage.name}, lane HIDDEN: a credit for step {header.step}"
            waited_s = core.clock.now()
            await core.deadlines.wait(self._link.ready(), who)
            core.counts.credit_wait_s.add(core.clock.now() - waited_s)
        event = flight.launch.event if flight.launch is not None else None
        transfer = self._link.post_send(tensor, header, after=event)
        self._pending += 1
        flight.hold()
        size_bytes = tensor.numel() * tensor.element_size()
        transfer.add_done_callback(partial(self._sent, flight, core.clock.now(), size_bytes))

    def _sent(self, flight: Flight, posted_s: float, size_bytes: int, transfer: Transfer[None]) -> None:
        core = self._core
        self._pending -= 1
        self._failure = self._failure or transfer.error
        core.counts.sent_bytes += size_bytes
        core.tracer.add("commit", "send", posted_s, core.clock.now(), flight.step.number, size_bytes)
        self._changed.set()
        flight.let_go(core.device)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
