"""A GPU as a device: a forward stream, a copy stream, and events that are polled from the loop without blocking it.

Written against torch's CUDA interface and not yet run on hardware.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pipelined.clock.alarm import Alarm
from pipelined.errors import ConfigError
from pipelined.stage.completion import DeviceLaunch
from pipelined.stage.serial import SerialDevice

if TYPE_CHECKING:
    import torch

    from pipelined.clock import Clock
    from pipelined.stage.base import Payload
    from pipelined.transport.base import Event

__all__ = ["CudaDevice"]

_POLL_S = 1e-4


class CudaDevice(SerialDevice):
    """Enqueues the work's kernels on a stream of its own. Outputs are known at once, readable after the event.

    The work must only enqueue: a kernel that waits for the host (`.item()`, `.cpu()`) holds up the loop.
    """

    def __init__(self, clock: Clock, index: int = 0, name: str = "") -> None:
        """Use GPU number `index`.

        Raises:
            ConfigError: torch was built without CUDA, or there is no such GPU.
        """
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "device 'cuda' needs an NVIDIA GPU and a torch built with CUDA; found "
                f"torch {torch.__version__} and no usable GPU; use device 'cpu'"
            )
        if not 0 <= index < torch.cuda.device_count():
            raise ConfigError(f"there is no GPU {index}; found {torch.cuda.device_count()}, counted from 0")
        super().__init__(clock, name or f"cuda:{index}")
        self._device = torch.device("cuda", index)
        cuda: Any = torch.cuda  # its streams and events are not annotated
        self._forward: torch.cuda.Stream = cuda.Stream(self._device)
        self._copy: torch.cuda.Stream = cuda.Stream(self._device)
        self._running: deque[_Pending] = deque()
        self._copying: deque[_Pending] = deque()
        self._alarm = Alarm(clock, self._poll)
        self._polling = False
        self._polled_s = clock.now()
        self._anchor = self._record(self._forward)
        self._anchor.synchronize()
        self._anchor_s = clock.now()

    @property
    def torch_device(self) -> torch.device:
        """See `Device`."""
        return self._device

    @property
    def stream(self) -> torch.cuda.Stream:
        """The forward stream, for transports that order themselves after it."""
        return self._forward

    def to_host(self, outputs: Payload, after: Event) -> DeviceLaunch:
        """See `Device`: into pinned memory, on the copy stream."""
        import torch

        self._check_open()
        launch = DeviceLaunch(f"{self.name} to host")
        sources = [value for value in outputs.values() if isinstance(value, torch.Tensor) and value.is_cuda]
        hosts = {id(s): torch.empty(s.shape, dtype=s.dtype, device="cpu", pin_memory=True) for s in sources}
        launch.keep_value({key: hosts.get(id(value), value) for key, value in outputs.items()})

        def begin() -> None:
            self._outstanding += 1
            with torch.inference_mode(), torch.cuda.stream(self._copy):
                started = self._record(self._copy)
                for source in sources:
                    hosts[id(source)].copy_(source, non_blocking=True)
                    source.record_stream(self._copy)
                self._watch(self._copying, launch, started, self._record(self._copy))

        # The event has been seen to fire by the host, so the copy stream need not wait for the forward stream.
        after.add_done_callback(begin)
        return launch

    def _begin(self, launch: DeviceLaunch) -> None:
        import torch

        # Events of the forward stream are ordered already, and the gate has waited for all others on the host.
        with torch.cuda.device(self._device), torch.cuda.stream(self._forward):
            started = self._record(self._forward)
            launch.run()
            ended = self._record(self._forward)
        self._watch(self._running, launch, started, ended)
        launch.tell_known()

    def _record(self, stream: torch.cuda.Stream) -> Any:
        import torch

        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _watch(self, queue: deque[_Pending], launch: DeviceLaunch, started: Any, ended: Any) -> None:
        queue.append(_Pending(launch, started, ended))
        if not self._polling:
            self._polling = True
            self._polled_s = self.clock.now()
            self._alarm.set(self._polled_s + _POLL_S)

    def _poll(self) -> None:
        now_s = self.clock.now()
        try:
            for queue in (self._running, self._copying):
                while queue and queue[0].ended.query():
                    pending = queue.popleft()
                    self._date(pending, now_s)
                    self._complete(pending.launch)
        finally:
            self._polled_s = now_s
            self._polling = bool(self._running or self._copying)
            if self._polling:
                self._alarm.set(now_s + _POLL_S)

    def _date(self, pending: _Pending, now_s: float) -> None:
        """The device's times on the rank's clock: since the last known end, within what polling has shown."""
        ended_s = self._anchor_s + self._anchor.elapsed_time(pending.ended) / 1e3
        pending.launch.ended_s = min(max(ended_s, self._polled_s), now_s)
        pending.launch.started_s = pending.launch.ended_s - pending.started.elapsed_time(pending.ended) / 1e3
        self._anchor, self._anchor_s = pending.ended, pending.launch.ended_s

    async def _stop(self) -> None:
        self._alarm.close()


class _Pending:
    """A launch between two recorded `torch.cuda.Event`s."""

    __slots__ = ("ended", "launch", "started")

    def __init__(self, launch: DeviceLaunch, started: Any, ended: Any) -> None:
        self.launch = launch
        self.started = started
        self.ended = ended
