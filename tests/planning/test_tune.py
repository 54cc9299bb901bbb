"""The search: its steps, its winner, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from pipelined.costs import StageCost, added
from pipelined.errors import ConfigError
from pipelined.llm import EngineConfig, inspect_model
from pipelined.planning import Arrival, decode_scenario
from pipelined.planning.plan_source import Subject, of_scenario
from pipelined.planning.simulate import Served
from pipelined.planning.tune import Setting, Tuned, Tuner
from pipelined.planning.tune_measure import Measured, too_large
from pipelined.planning.tune_workload import Workload

DEFAULT = Setting("fixed", 256)
STAGES = of_scenario(
    decode_scenario(b"pp_size = 2\nstage = {a = 1e-9, b = 1e-5, c = 2e-2}\narrivals = [{prompt_tokens = 9}]"), "s.toml"
)


def workload(*arrivals: Arrival) -> Workload:
    found = arrivals or (Arrival(prompt_tokens=4000, output_tokens=2),)
    return Workload(found, tuple(f"w: line {number}" for number in range(len(found))))


def tuned(**fields: Any) -> Tuned:
    given = {"subject": STAGES, "workload": workload(), "pp_size": 2, "default": DEFAULT, "known_costs": True, **fields}
    return Tuner(**given).search()


def test_the_steps_of_the_guide_and_a_winner() -> None:
    found = tuned()
    assert found.default.setting == DEFAULT
    assert found.winner.score < 0.9 * found.default.score
    assert found.winner.score <= found.trials[0].score * 1.002
    assert found.gain == pytest.approx(1 - found.winner.score / found.default.score)
    assert not found.cut_short
    assert [trial.score for trial in found.trials] == sorted(trial.score for trial in found.trials)
    fixed = min((one for one in found.trials if one.step in ("fixed size", "default")), key=lambda one: one.score)
    size = fixed.setting.chunked_prefill_size
    first = {one.setting.chunked_prefill_size for one in found.trials if one.step == "dynamic, first size"}
    assert first == {size, 2 * size, 3 * size, 4 * size}
    smoothed = {one.setting.smoothing_factor for one in found.trials if one.step == "smoothing factor"}
    assert smoothed == {0.6, 0.65, 0.7, 0.8, 0.85, 1.0}
    assert {one.step for one in found.trials} >= {"balanced", "window"}
    assert found.winner.setting.policy == "balanced"  # nothing tuned is better where the costs are known


def test_every_setting_is_one_that_the_engine_takes() -> None:
    for trial in tuned().trials:
        config = EngineConfig(model="m", pp_size=2, **trial.setting.settings())
        assert config.chunking == trial.setting.policy
        assert trial.setting.text
        assert trial.setting.chunked_prefill_size % config.page_size == 0


def test_layers_move_away_from_the_slowest_stage() -> None:
    layer, head = StageCost(0.0, 1e-6, 1e-4), StageCost(0.0, 4e-6, 1e-4)
    subject = Subject("m", "m", "made up", added([layer] * 12), (layer,) * 12, head)
    found = tuned(subject=subject, goal="throughput", workload=workload(Arrival(prompt_tokens=2000, count=3)))
    partition = found.winner.setting.partition
    assert partition is not None
    assert sum(partition) == 12
    assert partition[0] > partition[1]
    assert f"layers {partition[0]}-{partition[1]}" in found.winner.setting.text


def test_a_search_without_time_has_the_default_alone() -> None:
    found = tuned(budget_s=0.0)
    assert found.cut_short
    assert found.winner is found.default
    assert found.gain == 0


def test_the_default_stays_where_nothing_is_better() -> None:
    best = tuned().winner.setting
    again = tuned(default=best)
    assert again.winner is again.default
    assert again.default.setting == best


def test_goals_differ() -> None:
    mixed = workload(Arrival(prompt_tokens=500, output_tokens=12), Arrival(at_s=0.05, prompt_tokens=3000))
    by = {goal: tuned(goal=goal, workload=mixed, budget_s=1e9) for goal in ("ttft", "latency")}
    assert by["ttft"].winner.ttft.mean <= by["latency"].winner.ttft.mean * 1.002
    assert by["latency"].winner.latency_s <= by["ttft"].winner.latency_s * 1.002
    with pytest.raises(ConfigError, match="did you mean 'ttft'"):
        tuned(goal="tfft")


def test_what_cannot_be_served_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="w: line 0: 4000 prompt tokens and 2 of output are more than a KV cache"):
        tuned(kv_cache_tokens=1024)


def test_progress_names_what_is_tried() -> None:
    told: list[str] = []
    tuned(budget_s=0.0, progress=lambda text, best: told.append(f"{text} {best:.1f}"))
    assert told == ["fixed 256, window P+2 0.0"]


def test_measured_rounds_come_to_medians() -> None:
    rounds = [
        Measured.of([Served(0.0, 9, (first, first + 1.0), (9,), 0), Served(1.0, 9, (first + 2.0,), (9,), 0)])
        for first in (1.0, 5.0, 2.0)
    ]
    middle = Measured.median(rounds)
    assert middle == Measured(ttft_s=2.5, latency_s=3.0, wall_s=4.0, itl_s=1.0)
    assert [middle.score(goal) for goal in ("ttft", "latency", "throughput")] == [2.5, 3.0, 4.0]


def test_a_model_too_large_for_the_machine() -> None:
    info = inspect_model(EngineConfig(model="toy://?layers=4"))
    assert too_large(info) == ""
    assert "its weights take 1e+06 GB" in too_large(structs.replace(info, layer_bytes=(10**15,)))


def test_texts() -> None:
    assert DEFAULT.text == "fixed 256, window P+2"
    assert replace(DEFAULT, policy="dynamic", smoothing_factor=0.8).text == "dynamic from 256, σ 0.8, window P+2"
    assert replace(DEFAULT, policy="balanced", max_micro_batch_tokens=64).text.startswith("balanced, at most 64 tokens")
    assert replace(DEFAULT, policy="balanced", partition=(3, 4)).settings() == {
        "chunking": "balanced",
        "depth": 2,
        "layer_partition": (3, 4),
    }
