"""Which layers go to which stage. Pure."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from pipelined.errors import PartitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipelined.stage import ModelInfo

__all__ = ["partition_by_cost", "partition_layers"]


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
    return _cheapest(ends, pp_size, lambda start, end: end - start)


def partition_by_cost(
    info: ModelInfo,
    pp_size: int,
    layer_s: Sequence[float],
    *,
    embedding_s: float = 0.0,
    head_s: float = 0.0,
    stage_bytes: int | None = None,
    kv_tokens: int = 0,
) -> list[tuple[int, int]]:
    """Layers `[from, to)` of each stage, so that the slowest stage is as fast as can be.

    Of divisions that are equal in that: the one whose stages are most even, then the one with the smaller parts first.
    Times within a hundredth of a layer count as equal.

    Args:
        info: The model.
        pp_size: Stages.
        layer_s: What each layer takes for a micro-batch.
        embedding_s: What the first stage takes besides.
        head_s: Likewise the last.
        stage_bytes: Memory of each stage, for weights and for the KV of `kv_tokens` tokens; None: no limit.
        kv_tokens: See there.

    Raises:
        PartitionError: There are too few legal cuts, or no division keeps to the memory.
    """
    if len(layer_s) != info.layers:
        raise PartitionError(f"times of {len(layer_s)} layers; {info.ref} has {info.layers}")
    if len(info.cuts) + 1 < pp_size:
        partition_layers(info, pp_size)  # says what is wrong
    unit = sum(layer_s) / info.layers / 100 or 1.0
    times = list(accumulate((round(seconds / unit) for seconds in layer_s), initial=0))
    weights = [weight + kv * kv_tokens for weight, kv in zip(info.layer_bytes, info.kv_bytes_per_token, strict=True)]
    sizes = list(accumulate(weights, initial=0))

    def cost(start: int, end: int) -> int | None:
        first, last = start == 0, end == info.layers
        size = sizes[end] - sizes[start] + first * info.embedding_bytes + last * info.head_bytes
        if stage_bytes is not None and size > stage_bytes:
            return None
        return times[end] - times[start] + first * round(embedding_s / unit) + last * round(head_s / unit)

    found = _cheapest([*sorted(info.cuts), info.layers], pp_size, cost)
    if not found:
        raise PartitionError(
            f"no division of {info.layers} layers among {pp_size} stages keeps to {stage_bytes} bytes a stage with "
            f"{kv_tokens} tokens of KV; use more stages or a smaller KV cache"
        )
    return partition_layers(info, pp_size, found)


def _cheapest(ends: Sequence[int], pp_size: int, cost: Callable[[int, int], int | None]) -> list[int]:
    """Sizes with the least largest cost of a part; then the least sum of squares, then the smaller parts first.

    Args:
        ends: Where parts may end, the last one where all do.
        pp_size: Parts.
        cost: Of the layers from one place to another; None: such a part cannot be.

    Returns:
        Nothing where no division can be.
    """
    costs = {(start, end): cost(start, end) for start in (0, *ends) for end in ends if start < end}
    known = {pair: value for pair, value in costs.items() if value is not None}
    least = {0: 0}
    for _ in range(pp_size):
        step: dict[int, int] = {}
        for (start, end), value in known.items():
            if start in least:
                step[end] = min(step.get(end, max(least[start], value)), max(least[start], value))
        least = step
    if ends[-1] not in least:
        return []
    most = least[ends[-1]]
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(pp_size):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for (start, end), value in known.items():
            if value <= most and start in best:
                squares, parts = best[start]
                other = (squares + value * value, (*parts, end - start))
                found[end] = min(found.get(end, other), other)
        best = found
    return list(best[ends[-1]][1])
