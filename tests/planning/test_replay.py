"""Published results: how far the models are off, and how near balanced chunks come to the best of all cuts."""

from __future__ import annotations

import json
import re

import pytest

from pipelined.planning import Replayed, Scenario, replay, replays

KIMI_CHUNKS = (32768, 16192, 12416, 10368, 9088, 8192, 7488, 6912, 6464, 6080, 5760, 5504, 3840)


@pytest.fixture(scope="module")
def every() -> dict[str, Scenario]:
    return {scenario.name: scenario for scenario in replays()}


def one(every: dict[str, Scenario], *parts: str) -> Scenario:
    (found,) = (scenario for name, scenario in every.items() if all(part in name for part in parts))
    return found


def check(row: Replayed) -> None:
    """Never worse than the published setting, and nearly the best there is."""
    assert row.balanced_s <= row.theirs_with_overhead_s
    assert row.efficiency >= 0.95
    assert row.gain == pytest.approx(1 - row.balanced_s / row.theirs_with_overhead_s)
    assert row.optimum_s <= row.balanced_s * (1 + 1e-3)


def test_each_ships_with_what_was_published(every: dict[str, Scenario]) -> None:
    published = [scenario.published for scenario in every.values() if scenario.published is not None]
    assert len(published) == len(every) == 14
    times = {one.ttft_s for one in published}
    assert times >= {10.54, 32.68, 114.33, 420.91, 55.5, 14.896, 11.459, 10.121, 10.297, 12.286, 9.774}
    assert all(not re.search(r"[^\x20-\x7e]", one.note) for one in published)


def test_one_stage(every: dict[str, Scenario]) -> None:
    row = replay(one(every, "Qwen3", "one stage"))
    check(row)
    assert abs(row.error) < 0.03


def test_the_published_dynamic_chunks_come_out_to_the_token(every: dict[str, Scenario]) -> None:
    from pipelined.planning import simulate

    assert simulate(one(every, "Kimi", "128K, PP4, dynamic")).requests[0].chunks == KIMI_CHUNKS


@pytest.mark.slow
@pytest.mark.parametrize("length", ["128K, PP8", "256K", "512K", "1M"])
def test_qwen(every: dict[str, Scenario], length: str) -> None:
    row = replay(one(every, "Qwen3", length))
    check(row)
    assert abs(row.error) < 0.03
    assert row.overhead_s == 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("size", "most"), [(32768, 0.06), (16384, 0.06), (8192, 0.06), (4096, 0.06), (2048, 0.1)])
def test_kimi_fixed(every: dict[str, Scenario], size: int, most: float) -> None:
    row = replay(one(every, "Kimi", f"128K, PP4, fixed {size}"))
    check(row)
    assert abs(row.error) < most
    assert row.overhead_s == 0


@pytest.mark.slow
def test_kimi_dynamic_and_a_hop_that_explains_part_of_it(every: dict[str, Scenario]) -> None:
    plain, hop = (replay(one(every, "Kimi", f"{name}, PP4, dynamic")) for name in ("128K", "hop"))
    for row in (plain, hop):
        check(row)
    assert -0.08 < plain.error < hop.error < -0.04


@pytest.mark.slow
@pytest.mark.parametrize("size", [8192, 4096])
def test_the_hop_predicts_what_it_was_not_fitted_to(every: dict[str, Scenario], size: int) -> None:
    row = replay(one(every, "hop", f"fixed {size}"))
    check(row)
    assert abs(row.error) < 0.005


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from pipelined.cli.main import main

    names = ("name", "setting", "published_s", "theirs_s", "error", "balanced_s", "optimum_s", "gain", "efficiency")
    assert main(["replay", "--json", "--only", "one stage"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert set(names) <= set(row)
    assert main(["replay", "--only", "one stage"]) == 0
    assert "55.50" in capsys.readouterr().out
    assert main(["replay", "--only", "nobody"]) == 2
    assert "is in no published result; there are: Kimi" in capsys.readouterr().err
