"""`pipelined bench overhead`: the same pipeline measured, and run in virtual time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pipelined.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Sequence


def measured(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, float]:
    small: Sequence[str] = ("--pp-size", "2", "--micro-batches", "20", "--stage-ms", "5", "--hidden-bytes", "4096")
    assert main(["bench", "overhead", "--transport", "memory", "--repeat", "1", "--json", *small, *more]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_virtual_time_charges_stages_and_links_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    link = "sim://?latency_us=1000&bandwidth_gbytes_per_s=1"
    found = measured(capsys, "--sim-link", link)
    assert found["simulated_link"] == link
    # Three hops of the first input, 1 ms each, and perhaps the way of a step or an announcement.
    assert found["ideal_s"] + 0.003 <= found["simulated_makespan_s"] <= found["ideal_s"] + 0.008
    assert found["simulation_error"] == pytest.approx(found["simulated_makespan_s"] / found["makespan_s"] - 1)
    assert measured(capsys, "--sim-link", link)["simulated_makespan_s"] == found["simulated_makespan_s"]


def test_threads_take_their_own_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert "simulated_makespan_s" not in measured(capsys, "--device", "thread")
