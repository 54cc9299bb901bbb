"""Layers onto stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.errors import PartitionError
from pipelined.llm.partition import partition_by_cost, partition_layers
from pipelined.stage import ModelInfo


def model(layers: int, cuts: tuple[int, ...] | None = None) -> ModelInfo:
    return ModelInfo(
        ref="m",
        path="",
        family="toy",
        architecture="Toy",
        layers=layers,
        cuts=tuple(range(1, layers)) if cuts is None else cuts,
        layer_bytes=(1,) * layers,
        embedding_bytes=1,
        head_bytes=1,
        kv_bytes_per_token=(1,) * layers,
        hidden_size=1,
        vocab_size=1,
        context_length=1,
        eos_token_ids=(),
        dtype="int64",
    )


def sizes_of(parts: list[tuple[int, int]]) -> list[int]:
    return [to - start for start, to in parts]


@given(layers=st.integers(1, 80), data=st.data())
def test_even(layers: int, data: st.DataObject) -> None:
    pp_size = data.draw(st.integers(1, layers))
    parts = partition_layers(model(layers), pp_size)
    sizes = sizes_of(parts)
    assert len(parts) == pp_size
    assert (parts[0][0], parts[-1][1]) == (0, layers)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes)


@given(layers=st.integers(1, 40), data=st.data())
def test_legal_cuts_are_kept(layers: int, data: st.DataObject) -> None:
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, layers - 1)) if layers > 1 else st.just(set()))))
    pp_size = data.draw(st.integers(1, len(cuts) + 1))
    parts = partition_layers(model(layers, cuts), pp_size)
    assert len(parts) == pp_size
    assert sum(sizes_of(parts)) == layers
    assert min(sizes_of(parts)) >= 1
    assert all(start in cuts for start, _ in parts[1:])
    # No other choice of legal cuts has a smaller largest part.
    if len(cuts) <= 8:
        best = min(
            max(b - a for a, b in itertools.pairwise((0, *chosen, layers)))
            for chosen in itertools.combinations(cuts, pp_size - 1)
        )
        assert max(sizes_of(parts)) == best


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_what_is_asked_for_is_done(sizes: list[int]) -> None:
    assert sizes_of(partition_layers(model(sum(sizes)), len(sizes), sizes)) == sizes


@pytest.mark.parametrize(
    ("info", "pp_size", "sizes", "match"),
    [
        (model(4), 5, None, "at most 4"),
        (model(8), 2, [4, 2, 2], "3 parts for pp_size=2"),
        (model(8), 2, [5, 4], "adds up to 9; the model has 8"),
        (model(8), 2, [8, 0], "at least one layer"),
        (model(8), 2, [9, -1], "at least one layer"),
        (model(8, (4,)), 2, [3, 5], "may not be cut before layer 3; the nearest legal cut is before layer 4"),
        (model(8, ()), 2, [3, 5], "cannot be cut at all"),
        (model(8, (4,)), 3, None, "1 legal cuts: at most 2 stages"),
        (model(8), 2, [], "0 parts"),
    ],
)
def test_what_cannot_be(info: ModelInfo, pp_size: int, sizes: list[int] | None, match: str) -> None:
    with pytest.raises(PartitionError, match=match):
        partition_layers(info, pp_size, sizes)


def every_division(ends: list[int], pp_size: int) -> list[list[tuple[int, int]]]:
    return [
        list(itertools.pairwise((0, *chosen, ends[-1]))) for chosen in itertools.combinations(ends[:-1], pp_size - 1)
    ]


@given(data=st.data())
def test_by_cost_is_the_best_of_all_divisions(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 9))
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, layers - 1)) if layers > 1 else st.just(set()))))
    pp_size = data.draw(st.integers(1, len(cuts) + 1))
    # a hundred units each on average, so that times are exact
    times = data.draw(st.lists(st.integers(1, 6), min_size=layers, max_size=layers))
    embedding, head = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    limit = data.draw(st.none() | st.integers(1, layers + 4))
    unit = sum(times) / layers / 100

    def cost(start: int, end: int) -> int:
        own = sum(round(seconds / unit) for seconds in times[start:end])
        return own + (start == 0) * round(embedding / unit) + (end == layers) * round(head / unit)

    def fits(start: int, end: int) -> bool:
        # bytes: 1 a layer, 1 the embedding, 1 the head, and 2 of KV a layer for 2 tokens
        return limit is None or 3 * (end - start) + (start == 0) + (end == layers) <= 3 * limit

    legal = [
        parts for parts in every_division([*cuts, layers], pp_size) if all(fits(start, end) for start, end in parts)
    ]

    def find() -> list[tuple[int, int]]:
        return partition_by_cost(
            model(layers, cuts),
            pp_size,
            times,
            embedding_s=embedding,
            head_s=head,
            stage_bytes=None if limit is None else 3 * limit,
            kv_tokens=2,
        )

    if not legal:
        with pytest.raises(PartitionError, match="no division of"):
            find()
        return
    values = {tuple(sizes_of(parts)): [cost(start, end) for start, end in parts] for parts in legal}
    best = min(values, key=lambda sizes: (max(values[sizes]), sum(v * v for v in values[sizes]), sizes))
    assert tuple(sizes_of(find())) == best


@given(layers=st.integers(1, 60), data=st.data())
def test_layers_alike_are_divided_evenly_larger_parts_later(layers: int, data: st.DataObject) -> None:
    pp_size = data.draw(st.integers(1, layers))
    noise = [1.0 + data.draw(st.floats(0, 0.004)) for _ in range(layers)]
    found = partition_by_cost(model(layers), pp_size, noise)
    assert found == partition_layers(model(layers), pp_size), "times within a hundredth of a layer count as equal"


def test_embedding_and_head_count() -> None:
    assert sizes_of(partition_by_cost(model(30), 2, [1.0] * 30, head_s=4.0)) == [17, 13]
    assert sizes_of(partition_by_cost(model(30), 2, [1.0] * 30, embedding_s=2.0)) == [14, 16]
    assert sizes_of(partition_by_cost(model(6), 3, [5.0, 1, 1, 1, 1, 1])) == [1, 2, 3]
    with pytest.raises(PartitionError, match="times of 3 layers"):
        partition_by_cost(model(6), 3, [1.0] * 3)
    with pytest.raises(PartitionError, match="legal cuts"):
        partition_by_cost(model(6, (2,)), 3, [1.0] * 6)
