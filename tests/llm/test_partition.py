"""Layers onto stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.errors import PartitionError
from pipelined.llm.partition import partition_layers
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
