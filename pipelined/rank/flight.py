"""A step on its way through one rank: what it holds, and when it lets go."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pipelined.messages import ErrorInfo
from pipelined.rank.payload import join
from pipelined.stage import Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.messages import Step
    from pipelined.stage import Device, Launch
    from pipelined.transport import Received, Transfer

__all__ = ["Flight"]


class Flight:
    """One step with rows, from `prepare` to the release of its last buffer.

    The buffers that its inputs lie in are given back once everything that may read them has ended: the launch, the
    copies to the host, the sends of outputs (an output may be an input passed through). Each of these is a hold.
    """

    __slots__ = ("_holds", "_known", "batch", "error", "inputs", "launch", "received", "step", "transfers")

    def __init__(self, step: Step, batch: Any) -> None:
        self.step = step
        self.batch = batch
        self.transfers: list[Transfer[Received]] = []
        self.received: list[Received] = []
        self.inputs: Payload = {}
        self.launch: Launch | None = None
        self.error: ErrorInfo | None = None
        self._holds = 0
        self._known: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "void" if self.error else "launched" if self.launch else "prepared"
        return f"<Flight {self.step.epoch}.{self.step.number} {state}>"

    def take_inputs(self, received: list[Received]) -> None:
        """The inputs have arrived; a void step's are its error."""
        self.received = received
        payload = join(received) if received else {}
        if isinstance(payload, ErrorInfo):
            self.error = payload
        else:
            self.inputs = payload

    def reads(self) -> Sequence[Any]:
        """The tensors that the launch reads."""
        return [frame.tensor for frame in self.received]

    def launched(self, launch: Launch) -> None:
        """The device has it."""
        self.launch = launch
        self._known = asyncio.get_running_loop().create_future()
        launch.when_known(self._set_known)

    def _set_known(self, _launch: Launch) -> None:
        if self._known is not None and not self._known.done():
            self._known.set_result(None)

    async def known(self) -> None:
        """Wait until the outputs may be named (or at once, for a void step)."""
        if self._known is not None:
            await self._known

    def hold(self) -> None:
        """Something more reads the inputs."""
        self._holds += 1

    def let_go(self, device: Device) -> None:
        """One of the holders has ended; the last one gives the buffers back."""
        self._holds -= 1
        assert self._holds >= 0, self
        if self._holds == 0:
            received, self.received, self.inputs = self.received, [], {}
            if received:
                device.retire([frame.tensor for frame in received])
            for frame in received:
                frame.release()
