"""What all transports share: order, windows, matching, and the ways a link ends.

A transport subclasses `TensorLane` and `MessageLane` with the few methods that move bytes; that a wrong seq is a
`LaneMismatch`, that a cancelled waiter loses nothing, that a lost peer is `PeerLost` for ever, is written once, there.
"""

from __future__ import annotations

from pipelined.transport.buffers import copy_sliced, payload_bytes, raw_bytes, tensor_over
from pipelined.transport.lane_end import LaneEnd
from pipelined.transport.message_lane import MessageLane
from pipelined.transport.parcels import OwnedParcel, Parcel, ReceivedParcel
from pipelined.transport.tensor_lane import TensorLane

__all__ = [
    "LaneEnd",
    "MessageLane",
    "OwnedParcel",
    "Parcel",
    "ReceivedParcel",
    "TensorLane",
    "copy_sliced",
    "payload_bytes",
    "raw_bytes",
    "tensor_over",
]
