"""A GPU's stream for tests, in process: whoever reads early reads garbage, whoever lets go early spoils the result.

What a launch computes is known at once and reads as poison until its event fires; inputs that changed before the event
leave the outputs poisoned for ever; copies to the host go over a stream of their own under the same rules. A runtime
that gives right results here orders what it does after events, as on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipelined.errors import ConfigError
from pipelined.stage.completion import DeviceLaunch
from pipelined.stage.emulated import EmulatedDevice
from pipelined.stage.poison import Snapshot, map_tensors, overlaps, poison, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipelined.clock import Clock
    from pipelined.stage.base import Payload
    from pipelined.transport.base import Event

__all__ = ["StreamDevice"]


class _Veil:
    """An output that reads as poison while its true value is kept aside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.true = Snapshot(tensor)
        self.covered = Snapshot(tensor)
        self.spoilt = False

    @staticmethod
    def cover(veils: Iterable[_Veil]) -> None:
        """Poison them all, then remember how they look: they may share memory."""
        veils = list(veils)
        for veil in veils:
            poison(veil.true.tensor)
        for veil in veils:
            veil.covered.take()


class StreamDevice(EmulatedDevice):
    """See the module. `faults` lists, in words, each use of memory that no GPU would have forgiven."""

    def __init__(
        self,
        clock: Clock,
        delay_s: float = 1e-4,
        name: str = "stream",
        *,
        time_of: Callable[[Any], float] | None = None,
    ) -> None:
        """Args: delay_s: from the begin of a launch or copy to its event. time_of: the same, by cost, for launches.

        Raises:
            ConfigError: `delay_s` is negative.
        """
        if delay_s < 0:
            raise ConfigError(f"delay_s={delay_s}: expected 0 or more")
        super().__init__(clock, time_of or (lambda _: delay_s), name or "stream")
        self._delay_s = delay_s
        self.faults: list[str] = []
        self._veils: dict[DeviceLaunch, list[_Veil]] = {}
        self._reads: dict[DeviceLaunch, list[Snapshot]] = {}
        self._copies = _CopyStream(clock, delay_s, f"{self.name} copies", self.faults)

    def to_host(self, outputs: Payload, after: Event) -> DeviceLaunch:
        """See `Device`: known at once, poisoned until the event; the source is read from `after` until the event."""
        return self._copies.copy(outputs, after)

    def retire(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Device`: poisons them. They must be writable."""
        for tensor in tensors:
            poison(tensor)

    def _cost_s(self, cost: Any) -> float:
        return self._delay_s if cost is None else super()._cost_s(cost)

    def _first(self, launch: DeviceLaunch) -> None:
        self._alarm.set(launch.ended_s)  # an event never fires within the launch

    def _run(self, launch: DeviceLaunch) -> None:
        self._reads[launch] = [Snapshot(tensor) for tensor in launch.reads]
        # The work runs in a world where everything launched before has completed, as its kernels would.
        pending = [(earlier, veil) for earlier, veils in self._veils.items() for veil in veils]
        for _, veil in pending:
            veil.spoilt |= not veil.covered.same()
            veil.true.restore()
        launch.run()
        for earlier, veil in pending:
            if not veil.true.same():
                self.faults.append(f"{launch.label} wrote into an output of {earlier.label} before its event")
                veil.true.take()
        veils = self._veils[launch] = []
        if launch.error is None:
            outputs = map_tensors(launch.outputs(), lambda tensor: self._own(tensor, launch.reads))
            launch.keep_value(outputs)
            veils += [_Veil(tensor) for tensor in tensors_in(outputs)]
        _Veil.cover([*(veil for _, veil in pending), *veils])

    def _own(self, tensor: torch.Tensor, reads: Sequence[torch.Tensor]) -> torch.Tensor:
        """An output that can be poisoned without harm: neither memory of an input, nor one element seen many times."""
        repeats = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if repeats or any(overlaps(tensor, read) for read in reads):
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor

    def _end(self, launch: DeviceLaunch) -> None:
        changed = [snapshot for snapshot in self._reads.pop(launch) if not snapshot.same()]
        if changed:
            self.faults.append(f"an input of {launch.label} changed before its event")
        veils = self._veils.pop(launch)
        if any(veil.spoilt or not veil.covered.same() for veil in veils):
            self.faults.append(f"an output of {launch.label} was written to before its event")
        if changed:
            return
        for veil in veils:
            veil.true.restore()
        # Memory that a later launch has for its output as well is that one's now, and stays garbage until its event.
        pending = [later for others in self._veils.values() for later in others]
        _Veil.cover(later for later in pending if any(overlaps(later.true.tensor, veil.true.tensor) for veil in veils))

    async def _stop(self) -> None:
        await super()._stop()
        await self._copies.aclose()


class _CopyStream(EmulatedDevice):
    """The stream that copies to the host."""

    def __init__(self, clock: Clock, delay_s: float, name: str, faults: list[str]) -> None:
        super().__init__(clock, lambda _: delay_s, name)
        self._faults = faults
        self._hosts: dict[DeviceLaunch, list[torch.Tensor]] = {}
        self._sources: dict[DeviceLaunch, list[Snapshot]] = {}

    def copy(self, outputs: Payload, after: Event) -> DeviceLaunch:
        hosts: list[torch.Tensor] = []

        def host_of(source: torch.Tensor) -> torch.Tensor:
            host = torch.empty_like(source, memory_format=torch.contiguous_format)
            poison(host)
            hosts.append(host)
            return host

        payload = map_tensors(outputs, host_of)
        self._check_open()
        self._launched += 1
        launch = DeviceLaunch(
            f"{self.name}#{self._launched}",
            after=(after,),
            reads=tensors_in(outputs),
            cost_s=self._cost_s(True),
        )
        launch.keep_value(payload)
        self._hosts[launch] = hosts
        self._gate.add(launch)
        return launch

    def _first(self, launch: DeviceLaunch) -> None:
        self._alarm.set(launch.ended_s)

    def _run(self, launch: DeviceLaunch) -> None:
        self._sources[launch] = [Snapshot(source) for source in launch.reads]

    def _end(self, launch: DeviceLaunch) -> None:
        for source, host in zip(self._sources.pop(launch), self._hosts.pop(launch), strict=True):
            if source.same():
                source.restore(host)
            else:
                self._faults.append(f"what {launch.label} copied changed before its event")

    async def _stop(self) -> None:
        self._hosts.clear()  # of copies that were dropped
        await super()._stop()
