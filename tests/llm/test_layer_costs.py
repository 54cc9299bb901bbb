"""Layers that differ, an embedding and a head: measured on the real runtime, or taken from a profile."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.costs import Profile, Sample, StageCost, StageProfile, decode_costs, encode_profile, fit
from pipelined.errors import ConfigError
from pipelined.llm import EngineConfig, inspect_model
from pipelined.llm.layer_costs import LayerCosts, measure_layers, measuring_sizes, with_auto_partition
from pipelined.llm.profiles import fingerprint

MODEL = "emulated://?layers=8&context=4000&hidden=64"
CONFIG = EngineConfig(model=MODEL, pp_size=2, device="emulated", workers="task")


@given(data=st.data())
def test_stages_to_measure_on_have_layers_of_one_kind(data: st.DataObject) -> None:
    layers = data.draw(st.integers(3, 24))
    kinds = data.draw(st.lists(st.integers(1, 3), min_size=layers, max_size=layers))
    info = msgspec.structs.replace(
        inspect_model(CONFIG),
        layers=layers,
        cuts=tuple(range(1, layers)),
        layer_bytes=tuple(kinds),
        kv_bytes_per_token=(1,) * layers,
    )
    sizes = measuring_sizes(info)
    assert sum(sizes) == layers
    assert sizes[0] == sizes[-1] == 1
    parts = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    pure = {kinds[start] for start, end in parts[1:-1] if len(set(kinds[start:end])) == 1}
    assert pure == set(kinds[1:-1])


def test_layers_alike_are_measured_on_three_stages() -> None:
    assert measuring_sizes(inspect_model(CONFIG)) == [1, 6, 1]


def test_embedding_and_head_are_told_from_layers() -> None:
    # three stages, of 1, 6 and 1 layers of 2 ms: the first does 1 ms more, the last 4
    costs = '[{"a":0,"b":0,"c":0.003},{"a":0,"b":0,"c":0.012},{"a":0,"b":0,"c":0.006}]'
    config = dataclasses.replace(CONFIG, model=f"{MODEL}&costs={costs}", pp_size=3)
    found = asyncio.run(measure_layers(config, inspect_model(config)))
    assert found.layers == pytest.approx([0.002] * 8, rel=1e-6)
    assert (found.embedding_s, found.head_s) == pytest.approx((0.001, 0.004), rel=1e-6)
    auto = with_auto_partition(config)
    assert auto.layer_partition == (3, 3, 2), "7, 6 and 8 ms"
    assert found.slowest_s([(0, 3), (3, 6), (6, 8)]) == pytest.approx(0.008)


def test_where_there_is_one_way_nothing_is_measured() -> None:
    one = dataclasses.replace(CONFIG, model="emulated://?layers=2")
    assert with_auto_partition(one).layer_partition is None
    assert with_auto_partition(dataclasses.replace(CONFIG, pp_size=1)).layer_partition is None


def profiled(folder: Path, *costs: StageCost) -> EngineConfig:
    """The configuration with a profile of stages of four layers each."""
    stages = []
    for cost in costs:
        samples = [
            Sample.of(at, size, cost.c + cost.chunk_s(at, size)) for size in (64, 128, 512) for at in (0, 512, 2048)
        ]
        stages.append(StageProfile.of(samples, fit(samples)))
    mark = fingerprint(CONFIG, inspect_model(CONFIG), [(0, 4), (4, 8)])
    path = folder / "p.json"
    path.write_bytes(encode_profile(Profile.of(mark, stages)))
    return dataclasses.replace(CONFIG, profile=str(path))


def test_a_profile_tells_layers(tmp_path: Path) -> None:
    slow, fast = StageCost(3e-9, 3e-5, 1e-3, 1e-8), StageCost(1e-9, 1e-5, 1e-3, 1e-8)
    auto = with_auto_partition(profiled(tmp_path, slow, fast))
    assert auto.layer_partition == (3, 5)
    assert auto.profile is None
    first, second = decode_costs(auto.stage_costs).stages
    assert (first.a, first.b, first.c) == pytest.approx((3e-9 * 3 / 4, 3e-5 * 3 / 4, 1e-3), rel=1e-3)
    assert (second.b, second.d) == pytest.approx((1e-5 + 3e-5 / 4, 1.25e-8), rel=1e-3)


def test_a_profile_of_stages_as_good_is_kept(tmp_path: Path) -> None:
    cost = StageCost(3e-9, 3e-5, 1e-3, 1e-8)
    config = profiled(tmp_path, cost, cost)
    auto = with_auto_partition(config)
    assert (auto.layer_partition, auto.profile) == ((4, 4), config.profile)
    four = with_auto_partition(dataclasses.replace(config, pp_size=4))
    assert four.layer_partition == (2, 2, 2, 2)
    assert len(decode_costs(four.stage_costs).stages) == 4
    with pytest.raises(ConfigError, match="of another set-up: model"):
        with_auto_partition(dataclasses.replace(config, model="emulated://?layers=9"))


def test_costs_of_stages_are_those_of_their_layers() -> None:
    costs = LayerCosts((1.0, 2.0, 3.0), embedding_s=0.5, head_s=1.5)
    assert costs.slowest_s([(0, 1), (1, 3)]) == 6.5
    assert costs.slowest_s([(0, 2), (2, 3)]) == 4.5
