"""Making memory visibly wrong, and seeing whether somebody changed it. Only for devices that test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Snapshot", "map_tensors", "overlaps", "poison", "tensors_in"]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a payload, nested dicts, lists and tuples included."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with `change(tensor)` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def poison(tensor: torch.Tensor) -> None:
    """Overwrite in place: NaN for floats, -1 for signed, the maximum for unsigned integers, the opposite for bools."""
    dtype = tensor.dtype
    with torch.inference_mode():
        if dtype.is_floating_point or dtype.is_complex:
            tensor.fill_(float("nan"))
        elif dtype is torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(-1 if dtype.is_signed else torch.iinfo(dtype).max)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one behind the last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they may share memory."""
    (a_from, a_to), (b_from, b_to) = _extent(a), _extent(b)
    return a_from < b_to and b_from < a_to


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Snapshot:
    """The bytes of a tensor at one moment."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._value = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self.take()

    def take(self) -> None:
        """Remember the value it has now."""
        with torch.inference_mode():
            self._value.copy_(self.tensor)

    def same(self) -> bool:
        """Whether it still has that value, bit for bit."""
        return not self.tensor.numel() or torch.equal(_bits(self.tensor), _bits(self._value))

    def restore(self, into: torch.Tensor | None = None) -> None:
        """Write the value back, or into another tensor."""
        with torch.inference_mode():
            (self.tensor if into is None else into).copy_(self._value)
