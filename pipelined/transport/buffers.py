"""Tensors as bytes and back, and copies that never hold the loop for long."""

from __future__ import annotations

import asyncio
import ctypes
import math
from typing import TYPE_CHECKING

import torch

from pipelined.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import TensorHeader

__all__ = [
    "COPY_SLICE_BYTES",
    "contiguous_sliced",
    "copy_sliced",
    "dtype_of",
    "payload_bytes",
    "raw_bytes",
    "tensor_over",
]

COPY_SLICE_BYTES = 4 << 20
"""About 1 ms of memcpy: the longest that a copy holds the loop at a stretch."""

_STRIDED_SLICE_BYTES = 1 << 20
"""Gathering from a strided tensor is several times slower than a plain copy."""


def _transportable() -> dict[str, torch.dtype]:
    """Name -> dtype of everything whose memory can be seen as bytes."""
    names = [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ]
    return {name: getattr(torch, name) for name in names if hasattr(torch, name)}


_DTYPES = _transportable()


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a header names.

    Raises:
        ProtocolError: There is none of that name that may cross a link.
    """
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ProtocolError(f"a tensor header names dtype {name!r}; expected one of {', '.join(_DTYPES)}")
    return dtype


def payload_bytes(header: TensorHeader) -> int:
    """How many bytes the header's shape and dtype take.

    Raises:
        ProtocolError: Unknown dtype or negative size.
    """
    for size in header.shape:
        if size < 0:
            raise ProtocolError(f"a tensor header has shape {list(header.shape)}; sizes are 0 or more")
    return math.prod(header.shape) * dtype_of(header.dtype).itemsize


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor: works for every dtype, bf16 and fp8 included."""
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def tensor_over(raw: torch.Tensor, header: TensorHeader) -> torch.Tensor:
    """The flat uint8 tensor `raw` seen with the header's shape and dtype; no copy."""
    dtype = dtype_of(header.dtype)
    if raw.numel() == 0:
        return torch.empty(header.shape, dtype=dtype)
    flat = raw.view(dtype)
    return flat if len(header.shape) == 1 else flat.view(header.shape)


def _copy(target: torch.Tensor, source: torch.Tensor, start: int, end: int) -> None:
    if target.is_cpu and source.is_cpu:
        # Not `copy_`: that would wake torch's worker threads, which then spin beside the stage's own work.
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, end - start)
    else:
        target[start:end].copy_(source[start:end])


def copy_sliced(
    target: torch.Tensor, source: torch.Tensor, then: Callable[[], None], wanted: Callable[[], bool] | None = None
) -> None:
    """Copy between flat uint8 tensors, then call `then`; large ones in slices, so that the loop stays responsive.

    Args:
        target: At least as long as `source`.
        source: What is copied.
        then: Called when the copy is complete or given up: before returning for small copies, later for large ones.
        wanted: Asked before each further slice; the copy is given up once it says no.
    """
    if source.numel() <= COPY_SLICE_BYTES:
        _copy(target, source, 0, source.numel())
        then()
    else:
        _SlicedCopy(target, source, then, wanted).step()


class _SlicedCopy:
    """A copy under way. Not a closure: one that names itself would keep both tensors until the next collection."""

    def __init__(
        self, target: torch.Tensor, source: torch.Tensor, then: Callable[[], None], wanted: Callable[[], bool] | None
    ) -> None:
        self._target = target
        self._source = source
        self._then = then
        self._wanted = wanted
        self._at = 0

    def step(self) -> None:
        total, at = self._source.numel(), self._at
        if at and self._wanted is not None and not self._wanted():
            self._then()
            return
        self._at = min(total, at + COPY_SLICE_BYTES)
        _copy(self._target, self._source, at, self._at)
        if self._at < total:
            asyncio.get_running_loop().call_soon(self.step)
        else:
            self._then()


def contiguous_sliced(tensor: torch.Tensor, then: Callable[[torch.Tensor], None]) -> None:
    """Call `then` with a contiguous tensor of the same values: itself if it is, else a copy made in slices."""
    total_bytes = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous() or total_bytes <= _STRIDED_SLICE_BYTES:
        then(tensor.contiguous())
        return
    _SlicedGather(tensor.detach(), then).step()


class _SlicedGather:
    """A strided tensor on its way into contiguous memory, along its longest dimension."""

    def __init__(self, source: torch.Tensor, then: Callable[[torch.Tensor], None]) -> None:
        self._source = source
        self._copy = torch.empty(source.shape, dtype=source.dtype)
        self._then = then
        self._dim = max(range(source.dim()), key=lambda dim: source.shape[dim])
        self._rows = source.shape[self._dim]
        self._slice_rows = max(1, self._rows * _STRIDED_SLICE_BYTES // source.nbytes)
        self._at = 0

    def step(self) -> None:
        rows = min(self._slice_rows, self._rows - self._at)
        self._copy.narrow(self._dim, self._at, rows).copy_(self._source.narrow(self._dim, self._at, rows))
        self._at += rows
        if self._at < self._rows:
            asyncio.get_running_loop().call_soon(self.step)
        else:
            self._then(self._copy)
