"""`record+`: writes down what passes, so that it can be read or played back: `record+shm://?path=/tmp/run`.

Each endpoint writes a file of its own, `PIPELINE-RANK.EPOCH.SCHEME.rec` in the folder `path`: every frame that leaves
or comes, with its time, header and bytes. `read_record` reads one; `replay://?path=/tmp/run` plays all peers of one
endpoint, see `replay.py`. A thread writes; the loop only copies, a large tensor in one go. Closing waits for the
thread. What a process wrote before it was killed can be read, up to the frame in work.
"""

from __future__ import annotations

import queue
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from pipelined.errors import ConfigError, ProtocolError
from pipelined.messages import DRIVER, Peer, TensorHeader
from pipelined.transport import Lane
from pipelined.transport.buffers import raw_bytes, tensor_over
from pipelined.transport.taps import Outgoing, Tap

from .wrapped import WrappedTransport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from pipelined.transport import EndpointSpec, Transport
    from pipelined.transport.endpoint import BaseEndpoint
    from pipelined.transport.lane_end import LaneEnd
    from pipelined.transport.parcels import Parcel

__all__ = ["RecordTransport", "RecordedFrame", "read_record", "record_files"]

_SIZES = struct.Struct("<IQ")  # of the encoded frame, of its body


class RecordedFrame(msgspec.Struct, array_like=True, omit_defaults=True):
    """A frame that passed.

    Attributes:
        at_s: By the endpoint's clock.
        leaving: Whether it left, else it came.
        peer: Whom to, or from.
        lane: As in `Lane`.
        header: Of a tensor; None for a message.
        body: Its bytes.
    """

    at_s: float
    leaving: bool
    peer: Peer
    lane: int
    header: TensorHeader | None = None
    body: bytes = b""

    def __repr__(self) -> str:
        what = f"{len(self.body)} bytes" if self.header is None else f"{self.header.seq} {list(self.header.shape)}"
        return f"<{self.at_s:.6f} {'to' if self.leaving else 'from'} {self.peer} {Lane(self.lane).name} {what}>"

    def tensor(self) -> torch.Tensor:
        """The tensor that passed."""
        assert self.header is not None, f"{self!r} is a message"
        raw = torch.frombuffer(bytearray(self.body), dtype=torch.uint8) if self.body else torch.empty(0).byte()
        return tensor_over(raw, self.header)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RecordedFrame).decode


class RecordTransport(WrappedTransport):
    """See the module. Option `path`: a folder, made if need be."""

    name = "record"
    options = ("path",)

    def __init__(self, inner: Transport, options: dict[str, str]) -> None:
        super().__init__(inner, options)
        if not options.get("path"):
            raise ConfigError(f"{self.scheme}:// writes files: say where, as in {self.scheme}://?path=/tmp/run")
        self.folder = Path(options["path"])

    def tapped(self, spec: EndpointSpec) -> EndpointSpec:
        """See `WrappedTransport`."""
        file = self.folder / f"{_stem(spec.me, spec.epoch)}.{self.inner.scheme}.rec"
        writer = _Writer(file)

        def tap(endpoint: BaseEndpoint, lane: LaneEnd) -> _RecordTap:
            return _RecordTap(endpoint, lane, writer)

        return replace(spec, taps=(*spec.taps, tap))


def record_files(folder: Path, me: Peer, epoch: int) -> list[Path]:
    """The files that the endpoints of a peer wrote in an epoch, one for each transport that was wrapped."""
    return sorted(folder.glob(f"{_stem(me, epoch)}.*.rec"))


def read_record(file: Path | str) -> Iterator[RecordedFrame]:
    """The frames of a file, in the order in which they passed. A last one that was cut off is left out.

    Raises:
        ProtocolError: The file is no record.
    """
    with Path(file).open("rb") as source:
        while len(sizes := source.read(_SIZES.size)) == _SIZES.size:
            frame_bytes, body_bytes = _SIZES.unpack(sizes)
            encoded, body = source.read(frame_bytes), source.read(body_bytes)
            if len(encoded) + len(body) < frame_bytes + body_bytes:
                return
            try:
                frame = _decode(encoded)
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"{file} is not what record+ writes: {error}") from error
            frame.body = body
            yield frame


def _stem(me: Peer, epoch: int) -> str:
    return f"{me.pipeline.replace('/', '_')}-{'driver' if me.rank == DRIVER else me.rank}.{epoch}"


class _Writer:
    """Appends to a file from a thread of its own, which begins with the first frame."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._queue: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, frame: RecordedFrame, body: bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"record {self._file.name}", daemon=True)
            self._thread.start()
        self._queue.put((_encode(frame), body))

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _work(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("wb") as target:
            while (entry := self._queue.get()) is not None:
                self._append(target, *entry)

    def _append(self, target: BinaryIO, encoded: bytes, body: bytes) -> None:
        target.write(_SIZES.pack(len(encoded), len(body)))
        target.write(encoded)
        target.write(body)
        if self._queue.empty():
            target.flush()


class _RecordTap(Tap):
    def __init__(self, endpoint: BaseEndpoint, lane: LaneEnd, writer: _Writer) -> None:
        super().__init__(endpoint, lane)
        self._writer = writer

    def outgoing(self, item: Outgoing) -> None:
        """See `Tap`."""
        body = item.body if isinstance(item.body, bytes) else _copied(raw_bytes(item.body))
        self._write(body, item.header, leaving=True)
        self.pass_on(item)

    def incoming(self, body: bytes | Parcel) -> None:
        """See `Tap`."""
        if isinstance(body, bytes):
            self._write(body, None, leaving=False)
        else:
            self._write(_copied(body.raw), body.header, leaving=False)
        self.pass_up(body)

    def closed(self) -> None:
        """See `Tap`."""
        self._writer.close()

    def _write(self, body: bytes, header: TensorHeader | None, *, leaving: bool) -> None:
        frame = RecordedFrame(self.clock.now(), leaving, self.lane.peer, int(self.lane.lane), header)
        self._writer.write(frame, body)


def _copied(raw: torch.Tensor) -> bytes:
    return raw.cpu().numpy().tobytes()
