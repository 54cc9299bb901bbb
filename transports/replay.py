"""`replay://?path=/tmp/run`: all peers of one endpoint, played from what `record+` wrote.

For looking into one rank of a run that went wrong, alone, in a debugger, as often as you like: nothing else runs, no
other process, no driver. Run the rank with the links of the record::

    plan = LinkPlan.choose("replay://?path=/tmp/run", processes=False)
    description = RankDescription(config=RankConfig("pipeline", rank=2, size=4, window=6, ...), links=plan)
    await run_rank(description, stage=MyStage(), rendezvous=MemoryRendezvous())

The configuration must be the one that was recorded. What came is played as soon as everything that left before it on
the record has left again, so that an answer never comes before its question. What leaves goes nowhere; tensors that are
not as they were are noted in `ReplayEndpoint.differences`. When all has been played, the peers end.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipelined.clock import off_loop
from pipelined.errors import ConfigError
from pipelined.transport import Capabilities, Lane
from pipelined.transport.buffers import raw_bytes
from pipelined.transport.endpoint import BaseEndpoint
from pipelined.transport.lanes import MessageLane, OwnedParcel, TensorLane
from pipelined.transport.options import known_options

from .record import RecordedFrame, read_record, record_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import Peer, TensorHeader
    from pipelined.transport import EndpointSpec

    Place = tuple[Peer, Lane, bool]

__all__ = ["ReplayEndpoint", "ReplayTransport"]

_MOST_DIFFERENCES = 1_000


class ReplayTransport:
    """See the module. Option `path`: the folder."""

    scheme = "replay"
    capabilities = Capabilities(messages=True, tensors=True)

    def __init__(self, **options: str) -> None:
        known_options(self.scheme, options, ("path",))
        self._folder = options.get("path", "")

    async def open(self, spec: EndpointSpec) -> ReplayEndpoint:
        """See `Transport`.

        Raises:
            ConfigError: There is no record of that peer and epoch.
        """
        if not self._folder:
            raise ConfigError("replay:// reads what record+ wrote: say where, as in replay://?path=/tmp/run")
        frames = await off_loop(lambda: _frames(Path(self._folder), spec))
        endpoint = await ReplayEndpoint(spec, self.capabilities, frames).connect_first()
        endpoint.loop.call_soon(endpoint.play)
        return endpoint


def _frames(folder: Path, spec: EndpointSpec) -> list[RecordedFrame]:
    files = record_files(folder, spec.me, spec.epoch)
    if not files:
        raise ConfigError(f"{folder} holds no record of {spec.me} in epoch {spec.epoch}")
    frames = [frame for file in files for frame in read_record(file)]
    return frames if len(files) == 1 else sorted(frames, key=lambda frame: frame.at_s)


class ReplayEndpoint(BaseEndpoint):
    """The one peer that is real.

    Attributes:
        differences: What left otherwise than on the record, in words; tensors only, since messages tell times.
    """

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities, frames: list[RecordedFrame]) -> None:
        super().__init__(spec, capabilities)
        self.differences: list[str] = []
        self._frames = frames
        self._next = 0
        self._sent: Counter[Place] = Counter()
        self._passed: Counter[Place] = Counter()  # of what left on the record, how much is behind `_next`
        self._left: dict[Place, list[RecordedFrame]] = {}
        for frame in frames:
            if frame.leaving:
                self._left.setdefault(_place(frame), []).append(frame)

    def play(self) -> None:
        """Go on with the record as far as what has left allows."""
        while self._next < len(self._frames) and not self._closed:
            frame = self._frames[self._next]
            place = _place(frame)
            if frame.leaving:
                if self._sent[place] <= self._passed[place]:
                    return
                self._passed[place] += 1
            elif frame.peer in self._fates:
                self._arrive(frame)
            self._next += 1
        if not self._closed:
            for peer in self._open_peers():
                self._peer_ended(peer)

    def _arrive(self, frame: RecordedFrame) -> None:
        if frame.header is None:
            self.messages(frame.peer, Lane(frame.lane)).arrive(frame.body)
        else:
            raw = raw_bytes(frame.tensor())
            self.tensors(frame.peer, Lane(frame.lane)).arrive(OwnedParcel(frame.header, raw, lambda: None))

    def left(self, place: Place, header: TensorHeader | None, body: torch.Tensor | None) -> None:
        """The live side sent something."""
        recorded = self._left.get(place, ())
        number = self._sent[place]
        self._sent[place] += 1
        if header is not None and body is not None and len(self.differences) < _MOST_DIFFERENCES:
            then = recorded[number] if number < len(recorded) else None
            if then is None or then.header != header or then.body != raw_bytes(body).numpy().tobytes():
                peer, lane, _ = place
                self.differences.append(f"to {peer} on {lane.name}, frame {number}: {header!r}; recorded: {then!r}")
        self.loop.call_soon(self.play)

    def _make_messages(self, peer: Peer, lane: Lane) -> MessageLane:
        return _Messages(self, peer, lane)

    def _make_tensors(self, peer: Peer, lane: Lane) -> TensorLane:
        return _Tensors(self, peer, lane)

    async def _connect(self, peer: Peer) -> None:
        self._attach(peer)

    def _say_bye(self, peer: Peer) -> None:
        pass

    def _shut(self) -> None:
        pass


def _place(frame: RecordedFrame) -> Place:
    return frame.peer, Lane(frame.lane), frame.header is not None


class _Messages(MessageLane):
    def __init__(self, near: ReplayEndpoint, peer: Peer, lane: Lane) -> None:
        super().__init__(near.me, peer, lane, near.spec.epoch, near.spec.window, near.spec.max_message_bytes)
        self._near = near

    def transmit(self, frame: bytes) -> None:
        self._near.left((self.peer, self.lane, False), None, None)
        self._near.loop.call_soon(self.grant)

    def consumed(self) -> None:
        pass


class _Tensors(TensorLane):
    def __init__(self, near: ReplayEndpoint, peer: Peer, lane: Lane) -> None:
        super().__init__(near.me, peer, lane, near.spec.epoch, near.spec.window)
        self._near = near

    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        self._near.left((self.peer, self.lane, True), header, tensor)
        sent()
        self._near.loop.call_soon(self.grant)
