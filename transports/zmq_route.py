"""What comes in over one ZMQ link that a peer dialled: frames, whole tensors, and tensors in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipelined.errors import ProtocolError

from .wire import Channel, Frame, Kind

if TYPE_CHECKING:
    import zmq

    from pipelined.messages import TensorHeader

__all__ = ["COPY_BELOW_BYTES", "PART_BYTES", "WHOLE_BYTES", "Route"]

COPY_BELOW_BYTES = 128 << 10
"""Copying that much costs less than finding out when ZMQ has done without a copy."""
WHOLE_BYTES = 16 << 20
"""A larger tensor goes in parts, so that nobody allocates more than that on a stranger's word."""
PART_BYTES = 4 << 20


class Route:
    """A link that a peer dialled, and the tensor that is coming in parts over it."""

    def __init__(self, channel: Channel, slot: int) -> None:
        self.channel = channel
        self.slot = slot
        self._header: TensorHeader | None = None
        self._raw = torch.empty(0, dtype=torch.uint8)
        self._filled = 0

    def take(self, frame: Frame, parts: list[zmq.Frame]) -> int:
        """A message came in. Returns how many bytes had to be copied here."""
        if frame.kind is Kind.TENSOR and len(parts) == 3 and frame.slot == self.slot:
            self._begin(frame, parts[1], parts[2])
            return 0
        if frame.kind is Kind.PART and len(parts) == 2 and self._header is not None:
            return self._part(self._header, parts[1])
        if frame.kind in (Kind.TENSOR, Kind.PART, Kind.HELLO) or len(parts) != 2 or self.slot:
            raise ProtocolError(f"a {frame.kind.name} frame of {len(parts)} parts on a link of slot {self.slot}")
        self.channel.handle(frame, parts[1].bytes)
        return 0

    def _begin(self, frame: Frame, encoded: zmq.Frame, body: zmq.Frame) -> None:
        if self._header is not None:
            raise ProtocolError("a tensor in the middle of another")
        header, size_bytes = self.channel.begin_tensor(frame, encoded.buffer)
        if size_bytes == len(body):
            self.channel.end_tensor(self.slot, header, _over(body))
        elif len(body):
            raise ProtocolError(f"a tensor of {size_bytes} bytes came with {len(body)}")
        else:
            self._header, self._raw, self._filled = header, torch.empty(size_bytes, dtype=torch.uint8), 0

    def _part(self, header: TensorHeader, body: zmq.Frame) -> int:
        until = self._filled + len(body)
        if until > self._raw.numel() or not len(body):
            raise ProtocolError("the parts of a tensor do not add up to it")
        self._raw[self._filled : until].copy_(torch.frombuffer(body.buffer, dtype=torch.uint8))
        self._filled = until
        if until == self._raw.numel():
            raw, self._raw, self._header = self._raw, torch.empty(0, dtype=torch.uint8), None
            self.channel.end_tensor(self.slot, header, raw)
        return len(body)


def _over(body: zmq.Frame) -> torch.Tensor:
    """A frame's memory as a tensor; a copy of it where it is small (it may share a block) or badly aligned."""
    if not len(body):
        return torch.empty(0, dtype=torch.uint8)
    view = torch.frombuffer(body.buffer, dtype=torch.uint8)
    return view.clone() if len(body) < COPY_BELOW_BYTES or view.data_ptr() % 16 else view
