"""Which layers go to which stage. Pure."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from pipelined.errors import PartitionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.stage import ModelInfo

__all__ = ["partition_layers"]


def partition_layers(info: ModelInfo, pp_size: int, sizes: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Layers `[from, to)` of each stage.

    Without `sizes`, as even as the legal cuts allow; what does not divide goes to the later stages, which wait for the
    earlier ones at the beginning anyway.

    Raises:
        PartitionError: `sizes` has the wrong count or sum, or a cut is not legal; or there are more stages than layers.
    """
    if pp_size > info.layers:
        raise PartitionError(f"{pp_size} stages for {info.layers} layers; expected at most {info.layers}")
    if sizes is None:
        sizes = _even(info, pp_size)
    if len(sizes) != pp_size:
        raise PartitionError(f"layer_partition has {len(sizes)} parts for pp_size={pp_size}; expected one a stage")
    if min(sizes) < 1:
        raise PartitionError(f"layer_partition={list(sizes)}: every stage needs at least one layer")
    if sum(sizes) != info.layers:
        raise PartitionError(
            f"layer_partition={list(sizes)} adds up to {sum(sizes)}; the model has {info.layers} layers"
        )
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    for cut in bounds[1:-1]:
        if cut not in info.cuts:
            near = min(info.cuts, key=lambda legal: abs(legal - cut), default=None)
            advice = f"the nearest legal cut is before layer {near}" if near else "it cannot be cut at all"
            raise PartitionError(f"{info.architecture} may not be cut before layer {cut}; {advice}")
    return list(pairwise(bounds))


def _even(info: ModelInfo, pp_size: int) -> list[int]:
    """Sizes with the smallest largest part that the legal cuts allow, the larger ones last."""
    ends = [*sorted(info.cuts), info.layers]
    if len(ends) < pp_size:
        raise PartitionError(
            f"{info.architecture} has {len(info.cuts)} legal cuts: at most {len(ends)} stages, not {pp_size}"
        )
    small, extra = divmod(info.layers, pp_size)
    sizes = [small] * (pp_size - extra) + [small + 1] * extra
    if all(cut in info.cuts for cut in list(accumulate(sizes))[:-1]):
        return sizes
    largest = _smallest_largest(ends, pp_size)
    # Of the divisions that keep to it: the most even one, then the one with the smaller parts first.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(pp_size):
        best = {
            end: min(
                (squares + (end - start) ** 2, (*parts, end - start))
                for start, (squares, parts) in best.items()
                if 0 < end - start <= largest
            )
            for end in ends
            if any(0 < end - start <= largest for start in best)
        }
    return list(best[info.layers][1])


def _smallest_largest(ends: list[int], pp_size: int) -> int:
    """The least size that the largest part of a division into `pp_size` parts can have."""
    best = {0: 0}
    for _ in range(pp_size):
        best = {
            end: min(max(largest, end - start) for start, largest in best.items() if start < end)
            for end in ends
            if any(start < end for start in best)
        }
    return best[ends[-1]]
