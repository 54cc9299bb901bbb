"""`faulty+`: faults by seed in front of any transport: `faulty+memory://?seed=7&drop=0.01&delay=0.1&delay_ms=20`.

What happens to a frame depends on the seed, the epoch, (from, to, lane) and the frame's number on its lane, never on
timing. Faults happen to frames on their way out.

With `detect=1` (the default) the wrapper numbers and checksums what it sends, as a careful transport does. A frame that
is damaged, or a message whose predecessor is missing, makes the receiving side report `PeerLost`; one that comes twice
is dropped. A lost tensor shows as `LaneMismatch` at the next one; the payload of tensors above 1 MiB is not checked.
With `detect=0` all is handed on as it came: wrong bytes, and frames twice or not at all. In either case what is lost
and has no successor is for deadlines to notice.
"""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from pipelined.errors import ConfigError, nearest
from pipelined.messages import DRIVER
from pipelined.transport import Lane
from pipelined.transport.buffers import raw_bytes
from pipelined.transport.message_lane import MessageLane
from pipelined.transport.options import integer_option, number_option
from pipelined.transport.taps import HoldingTap, Outgoing, nothing

from .wrapped import WrappedTransport

if TYPE_CHECKING:
    from pipelined.messages import Peer, TensorHeader
    from pipelined.transport import EndpointSpec, Transport
    from pipelined.transport.endpoint import BaseEndpoint
    from pipelined.transport.lane_end import LaneEnd
    from pipelined.transport.parcels import Parcel

__all__ = ["FaultEvent", "FaultyTransport", "fault_events"]

_MOST_EVENTS = 10_000
_MOST_CHECKED_BYTES = 1 << 20
_STAMP = struct.Struct("<II")  # number, checksum
_BOARD = "faulty"


class FaultEvent(NamedTuple):
    """Something that was done on purpose, or ("noticed") found by the stamps. `frame` counts from 0 on its lane."""

    at_s: float
    kind: str
    source: Peer
    target: Peer
    lane: str
    carries: str
    frame: int
    detail: str = ""


@dataclass(frozen=True)
class _Plan:
    """What may happen, and where. Probabilities are for each frame."""

    seed: int
    drop: float
    duplicate: float
    corrupt: float
    delay: float
    delay_s: float
    stall: float
    stall_s: float
    kill_after: int | None
    lanes: frozenset[Lane]
    ranks: frozenset[int] | None
    detect: bool


class FaultyTransport(WrappedTransport):
    """See the module. Options, all faults off by default.

    - `seed`: of everything random.
    - `drop`, `duplicate`, `corrupt`, `delay`, `stall`: the probability of each for a frame, 0 to 1.
    - `delay_ms`: how long a delayed frame takes at most (20; giving it alone means `delay=1`); those behind it wait.
    - `stall_ms`: how long a stalled lane stops (for ever).
    - `kill_after`: the endpoint aborts instead of sending that frame, counted from 0 over all its lanes.
    - `lanes=HIDDEN,RESULTS`, `ranks=0,2,driver`: only there; `ranks` are those that send.
    - `detect`: see the module. `window`: as in the spec.

    `events` lists what was done, up to 10,000 entries; `fault_events` gives those of all endpoints of one process.
    """

    name = "faulty"
    options = (
        *("seed", "drop", "duplicate", "corrupt", "delay", "delay_ms", "stall", "stall_ms"),
        *("kill_after", "lanes", "ranks", "detect", "window"),
    )
    adds_frames = True

    def __init__(self, inner: Transport, options: dict[str, str]) -> None:
        super().__init__(inner, options)

        def share(name: str, default: float = 0.0) -> float:
            return number_option(self.scheme, options, name, default, at_most=1.0)

        self.plan = _Plan(
            seed=integer_option(self.scheme, options, "seed") or 0,
            drop=share("drop"),
            duplicate=share("duplicate"),
            corrupt=share("corrupt"),
            delay=share("delay", 1.0 if "delay_ms" in options else 0.0),
            delay_s=number_option(self.scheme, options, "delay_ms", 20.0) * 1e-3,
            stall=share("stall"),
            stall_s=number_option(self.scheme, options, "stall_ms", math.inf) * 1e-3,
            kill_after=integer_option(self.scheme, options, "kill_after"),
            lanes=_lanes(options.get("lanes")),
            ranks=_ranks(options.get("ranks")),
            detect=bool(share("detect", 1.0)),
        )
        self.events: deque[FaultEvent] = deque(maxlen=_MOST_EVENTS)

    def tapped(self, spec: EndpointSpec) -> EndpointSpec:
        """See `WrappedTransport`."""
        objects = getattr(spec.rendezvous, "objects", None)
        logs = (
            [self.events] if objects is None else [self.events, objects.setdefault(_BOARD, deque(maxlen=_MOST_EVENTS))]
        )
        faults = _Faults(self.plan, logs, spec.max_message_bytes)
        room = _STAMP.size if self.plan.detect else 0
        return replace(spec, taps=(*spec.taps, faults.tap), max_message_bytes=spec.max_message_bytes + room)


def fault_events(rendezvous: object) -> list[FaultEvent]:
    """What was done so far on all endpoints that share a `MemoryRendezvous`, in order."""
    return list(getattr(rendezvous, "objects", {}).get(_BOARD, ()))


def _lanes(text: str | None) -> frozenset[Lane]:
    if text is None:
        return frozenset(Lane)
    for name in text.split(","):
        if name not in Lane.__members__:
            raise ConfigError(f"faulty+...?lanes={text}: no lane {name!r}{nearest(name, Lane.__members__)}")
    return frozenset(Lane[name] for name in text.split(","))


def _ranks(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    for name in text.split(","):
        if not name.isdecimal() and name != "driver":
            raise ConfigError(f"faulty+...?ranks={text}: expected numbers of ranks, or 'driver', with commas between")
    return frozenset(DRIVER if name == "driver" else int(name) for name in text.split(","))


class _Faults:
    """What the taps of one endpoint share."""

    def __init__(self, plan: _Plan, logs: list[deque[FaultEvent]], max_message_bytes: int) -> None:
        self.plan = plan
        self.frames = 0
        self.dead = False
        self.max_message_bytes = max_message_bytes
        self._logs = logs

    def tap(self, endpoint: BaseEndpoint, lane: LaneEnd) -> _FaultyTap:
        if isinstance(lane, MessageLane):  # the stamp is not the owner's
            lane.max_bytes = min(lane.max_bytes, self.max_message_bytes)
        return _FaultyTap(endpoint, lane, self)

    def log(self, tap: _FaultyTap, kind: str, source: Peer, target: Peer, frame: int, detail: str = "") -> None:
        event = FaultEvent(tap.clock.now(), kind, source, target, tap.lane.lane.name, tap.lane.kind, frame, detail)
        for log in self._logs:
            log.append(event)

    def strikes(self) -> bool:
        """Whether the endpoint dies at this frame, which is counted."""
        self.frames += 1
        return self.plan.kill_after is not None and self.frames > self.plan.kill_after


class _FaultyTap(HoldingTap):
    def __init__(self, endpoint: BaseEndpoint, lane: LaneEnd, faults: _Faults) -> None:
        super().__init__(endpoint, lane)
        lane.narrow(lane.window // 2)
        self._faults = faults
        plan, here = faults.plan, endpoint.me.rank
        self._active = lane.lane in plan.lanes and (plan.ranks is None or here in plan.ranks)
        place = f"{endpoint.me}>{lane.peer} {endpoint.spec.epoch} {lane.lane.name} {lane.kind}"
        self._random = random.Random(f"faulty {plan.seed} {place}")
        self._sent = 0
        self._expected = 0
        self._until_s = -math.inf

    def outgoing(self, item: Outgoing) -> None:
        """See `Tap`."""
        faults, number = self._faults, self._sent
        self._sent += 1
        if faults.dead:
            return
        if faults.plan.detect:
            item = _stamped(item, number)
        if not self._active:
            self.pass_on(item)
        elif faults.strikes():
            faults.dead = True
            self._log("kill", number)
            self.endpoint.loop.call_soon(self.endpoint.abort)
        else:
            self._meddle(item, number)

    def _meddle(self, item: Outgoing, number: int) -> None:
        plan, draw = self._faults.plan, self._random.random
        # Always as many draws, so that one fault's probability does not change what befalls other frames.
        drop, duplicate, corrupt, delay, delay_share, stall, where = (draw() for _ in range(7))
        if drop < plan.drop:
            self._log("drop", number)
            item.sent()
            self.endpoint.loop.call_soon(self.lane.grant)  # nobody there will ever give this credit back
            return
        if corrupt < plan.corrupt:
            item = self._corrupted(item, number, where)
        until_s = self.clock.now()
        if delay < plan.delay:
            until_s += delay_share * plan.delay_s
            self._log("delay", number, f"{delay_share * plan.delay_s:.6f} s")
        if stall < plan.stall:
            until_s += plan.stall_s
            self._log("stall", number, f"{plan.stall_s:g} s")
        self._until_s = until_s = max(until_s, self._until_s)
        twice = duplicate < plan.duplicate and self.lane.put_on_top()
        copy = replace(item, body=_clone(item.body), sent=nothing) if twice else None
        self.hold(item, until_s)
        if copy is not None:
            self._log("duplicate", number)
            self.hold(copy, until_s)

    def _corrupted(self, item: Outgoing, number: int, where: float) -> Outgoing:
        size_bytes = item.body.nbytes if isinstance(item.body, torch.Tensor) else len(item.body)
        if not size_bytes:
            return item
        byte, bit = divmod(int(where * size_bytes * 8), 8)
        self._log("corrupt", number, f"bit {bit} of byte {byte}")
        if isinstance(item.body, torch.Tensor):
            body = _clone(item.body)
            assert isinstance(body, torch.Tensor)
            raw_bytes(body)[byte] ^= 1 << bit
            return replace(item, body=body)
        damaged = bytearray(item.body)
        damaged[byte] ^= 1 << bit
        return replace(item, body=bytes(damaged))

    def incoming(self, body: bytes | Parcel) -> None:
        """See `Tap`."""
        if not self._faults.plan.detect:
            self.pass_up(body)
            return
        content, number, damaged = _unstamped(body)
        if damaged:
            self._lose(f"frame {self._expected} was damaged", body)
        elif number < self._expected:
            self._noticed("came twice", number)
            self._discard(body)
        elif number > self._expected and not self.is_tensors:
            self._lose(f"frame {self._expected} never came", body)
        else:
            self._expected = number + 1
            self.pass_up(content)

    def _lose(self, why: str, body: bytes | Parcel) -> None:
        self._noticed(why, self._expected)
        self._discard(body)
        lane = self.lane
        self.endpoint._peer_lost(lane.peer, f"{why} ({lane.kind} on {lane.lane.name})")

    def _discard(self, body: bytes | Parcel) -> None:
        if isinstance(body, bytes):
            assert isinstance(self.lane, MessageLane)
            self.lane.consumed()
        else:
            body.release()

    def _log(self, kind: str, frame: int, detail: str = "") -> None:
        self._faults.log(self, kind, self.endpoint.me, self.lane.peer, frame, detail)

    def _noticed(self, what: str, frame: int) -> None:
        self._faults.log(self, "noticed", self.lane.peer, self.endpoint.me, frame, what)


def _clone(body: bytes | torch.Tensor) -> bytes | torch.Tensor:
    return body.clone() if isinstance(body, torch.Tensor) else body


# ---- stamps: behind a message, and behind the `meta` of a tensor's header ----


def _checksum(number: int, content: bytes | torch.Tensor) -> int:
    """Of the number and the content; of large tensors the number alone, since it takes the loop's time."""
    start = zlib.crc32(number.to_bytes(4, "little"))
    if isinstance(content, torch.Tensor):
        if not 0 < content.nbytes <= _MOST_CHECKED_BYTES:
            return start
        return zlib.crc32(raw_bytes(content).numpy().data, start)
    return zlib.crc32(content, start)


def _stamped(item: Outgoing, number: int) -> Outgoing:
    stamp = _STAMP.pack(number, _checksum(number, item.body))
    if item.header is None:
        assert isinstance(item.body, bytes)
        return replace(item, body=item.body + stamp)
    return replace(item, header=msgspec.structs.replace(item.header, meta=item.header.meta + stamp))


def _unstamped(body: bytes | Parcel) -> tuple[bytes | Parcel, int, bool]:
    """What was stamped, its number, and whether it is not as it was."""
    stamped = body if isinstance(body, bytes) else body.header.meta
    if len(stamped) < _STAMP.size:
        return body, -1, True
    plain = stamped[: -_STAMP.size]
    number, checksum = _STAMP.unpack(stamped[-_STAMP.size :])
    if isinstance(body, bytes):
        return plain, number, checksum != _checksum(number, plain)
    damaged = checksum != _checksum(number, body.raw)
    return _Relabelled(body, msgspec.structs.replace(body.header, meta=plain)), number, damaged


class _Relabelled:
    """A parcel under another header of the same shape and dtype."""

    __slots__ = ("_parcel", "header")

    def __init__(self, parcel: Parcel, header: TensorHeader) -> None:
        self._parcel = parcel
        self.header = header

    @property
    def size_bytes(self) -> int:
        return self._parcel.size_bytes

    @property
    def raw(self) -> torch.Tensor:
        return self._parcel.raw

    def tensor(self) -> torch.Tensor:
        return self._parcel.tensor()

    def release(self) -> None:
        self._parcel.release()
