"""What all devices share: launches begin in order, each once its events have fired, and closing waits for them."""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from pipelined.errors import EngineClosedError
from pipelined.stage.completion import DeviceLaunch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pipelined.clock import Clock
    from pipelined.stage.base import Payload
    from pipelined.transport.base import Event

__all__ = ["Gate", "SerialDevice"]


class Gate:
    """Lets launches through in order, each once all of its `after` events have fired."""

    def __init__(self, begin: Callable[[DeviceLaunch], None]) -> None:
        self._begin = begin
        self._held: deque[DeviceLaunch] = deque()
        self._open = False
        self._waits: Event | None = None

    def add(self, launch: DeviceLaunch) -> None:
        """Queue a launch; begins it before returning if nothing holds it up."""
        self._held.append(launch)
        self._pass()

    def drop(self, error: BaseException) -> None:
        """Fail and complete whatever is held."""
        while self._held:
            launch = self._held.popleft()
            launch.keep_error(error)
            launch.complete()

    def __len__(self) -> int:
        return len(self._held)

    def _pass(self) -> None:
        if self._open:  # called back from within `_begin`: the loop below goes on
            return
        self._open = True
        try:
            while self._held and self._may_begin(self._held[0]):
                self._begin(self._held.popleft())
        finally:
            self._open = False

    def _may_begin(self, launch: DeviceLaunch) -> bool:
        for event in launch.after:
            if not event.done():
                if self._waits is not event:
                    self._waits = event
                    event.add_done_callback(self._pass)
                return False
        launch.after = ()
        self._waits = None
        return True


class SerialDevice(abc.ABC):
    """A `Device` whose launches begin one after the other. Subclasses say what beginning means.

    Bound to the loop of the first launch.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self._gate = Gate(self._enter)
        self._launched = 0
        self._outstanding = 0
        self._closed = False
        self._idle: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._outstanding} running, {len(self._gate)} held"
        return f"<{type(self).__name__} {self.name!r} {state}>"

    @property
    def torch_device(self) -> torch.device:
        """See `Device`: the CPU."""
        import torch

        return torch.device("cpu")

    def launch(
        self,
        work: Callable[[], Any],
        *,
        after: Sequence[Event] = (),
        reads: Sequence[torch.Tensor] = (),
        cost: Any = None,
    ) -> DeviceLaunch:
        """See `Device`.

        Raises:
            EngineClosedError: The device was closed.
        """
        self._check_open()
        self._launched += 1
        launch = DeviceLaunch(
            f"{self.name}#{self._launched}", work, after=after, reads=reads, cost_s=self._cost_s(cost)
        )
        self._gate.add(launch)
        return launch

    def to_host(self, outputs: Payload, after: Event) -> DeviceLaunch:
        """See `Device`: the tensors are on the host already."""
        launch = DeviceLaunch(f"{self.name} to host")
        launch.keep_value(outputs)

        def there() -> None:
            launch.started_s = launch.ended_s = self.clock.now()
            launch.complete()

        after.add_done_callback(there)
        return launch

    def retire(self, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027 - most devices have nothing to do
        """See `Device`: nothing to do."""

    async def aclose(self) -> None:
        """See `Device`. Launches held by an event that nothing on this device will fire end with EngineClosedError."""
        self._closed = True
        while self._outstanding:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)
        self._gate.drop(EngineClosedError(f"{self!r} was closed before the inputs of this launch were there"))
        await self._stop()

    async def _stop(self) -> None:  # noqa: B027 - likewise
        """Let go of threads and descriptors. Called again by every `aclose`."""

    def _cost_s(self, cost: Any) -> float:
        return 0.0

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"nothing can be launched on {self!r}")

    def _enter(self, launch: DeviceLaunch) -> None:
        self._outstanding += 1
        self._begin(launch)

    @abc.abstractmethod
    def _begin(self, launch: DeviceLaunch) -> None:
        """Everything before it has begun and its events have fired. Must lead to `_complete(launch)`, in order."""

    def _complete(self, launch: DeviceLaunch) -> None:
        self._outstanding -= 1
        try:
            launch.complete()
        finally:
            if not self._outstanding and self._idle is not None:
                if not self._idle.done():
                    self._idle.set_result(None)
                self._idle = None
