"""What arrives on a tensor lane, and what the owner of the lane gets to hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from pipelined.errors import ClosedError
from pipelined.transport.buffers import tensor_over

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pipelined.messages import TensorHeader

__all__ = ["OwnedParcel", "Parcel", "ReceivedParcel"]


class Parcel(Protocol):
    """What a transport hands to `TensorLane.arrive`: a header and memory that holds the data.

    A parcel that becomes garbage without `release` must see to its memory and its credit by itself, and not before the
    last tensor over that memory is garbage too.
    """

    @property
    def header(self) -> TensorHeader:
        """What it is."""
        ...

    @property
    def size_bytes(self) -> int:
        """How much data there is."""
        ...

    @property
    def raw(self) -> torch.Tensor:
        """The data, flat uint8."""
        ...

    def tensor(self) -> torch.Tensor:
        """The data with the header's shape and dtype; no copy. The header has been checked against `size_bytes`."""
        ...

    def release(self) -> None:
        """The memory is free again; tell the sender. Idempotent."""
        ...


class OwnedParcel:
    """A parcel whose memory belongs to the tensor itself, so that releasing it is only a matter of credits."""

    __slots__ = ("_loop", "_on_release", "header", "raw")

    def __init__(self, header: TensorHeader, raw: torch.Tensor, on_release: Callable[[], None]) -> None:
        """Args: header: what it is. raw: flat uint8. on_release: gives the sender its credit; called on the loop."""
        self.header = header
        self.raw = raw
        self._on_release: Callable[[], None] | None = on_release
        self._loop = asyncio.get_running_loop()

    @property
    def size_bytes(self) -> int:
        """See `Parcel`."""
        return self.raw.numel()

    def tensor(self) -> torch.Tensor:
        """See `Parcel`."""
        return tensor_over(self.raw, self.header)

    def release(self) -> None:
        """See `Parcel`."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __del__(self) -> None:
        # Garbage is found on any thread and in the middle of anything, so the credit goes through the loop.
        if self._on_release is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_release)


class ReceivedParcel:
    """A `Received` over a parcel, or over the buffer that it was copied into."""

    __slots__ = ("_parcel", "_tensor", "header")

    def __init__(self, header: TensorHeader, tensor: torch.Tensor, parcel: Parcel | None) -> None:
        self.header = header
        self._tensor: torch.Tensor | None = tensor
        self._parcel = parcel

    def __repr__(self) -> str:
        return f"<Received {self.header.step}.{self.header.index} {self.header.name!r} {list(self.header.shape)}>"

    @property
    def tensor(self) -> torch.Tensor:
        """See `Received`."""
        if self._tensor is None:
            raise ClosedError(f"{self!r} was released; its memory belongs to the sender again")
        return self._tensor

    def release(self) -> None:
        """See `Received`."""
        self._tensor = None
        parcel, self._parcel = self._parcel, None
        if parcel is not None:
            parcel.release()
