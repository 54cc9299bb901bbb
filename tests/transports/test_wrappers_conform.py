"""`sim://` and every wrapper keep the contract of transports, as far as their nature allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelined.testing import CHECKS, run_check
from pipelined.testing.check import Check
from pipelined.testing.world import transport_from

URIS = {
    "sim": "sim://?latency_us=50",
    "delay": "delay+memory://?latency_us=100&jitter_us=300&bandwidth_gbytes_per_s=2",
    "faulty": "faulty+memory://?seed=2&delay=0.2&delay_ms=1",
    "lockstep": "lockstep+memory://",
    "record": "record+memory://?path=",
    "several": "lockstep+delay+faulty+sim://?latency_us=20&duplicate=0.1",
    "over_shm": "delay+shm://?latency_us=100",
    "lockstep_over_shm": "lockstep+shm://",
    "faulty_over_shm": "faulty+shm://?duplicate=0.3",
    "faulty_over_tcp": "faulty+tcp://?duplicate=0.1",
}
SKIPPED = {"the_loop_is_not_held": ("record",)}  # it copies large tensors in one go
ALONE = [check for check in CHECKS if "processes" not in check.needs and check.rule != "R15"]
QUICK = [check for check in ALONE if check.rule in ("R1", "R2", "R3", "R5", "R7", "R8", "R9", "R11")]


def conforms(name: str, check: Check, path: Path) -> None:
    uri = URIS[name] + (str(path) if name == "record" else "")
    if name in SKIPPED.get(check.name, ()):
        pytest.skip("not for this one")
    result = run_check(check, uri, capabilities=transport_from(uri).capabilities, quick=True)
    if result.outcome == "skip":
        pytest.skip(result.reason)
    assert result.outcome == "pass", result.reason


@pytest.mark.may_block
@pytest.mark.parametrize("name", ["sim", "delay", "faulty", "lockstep", "record"])
def test_in_short(name: str, tmp_path: Path) -> None:
    for check in QUICK:
        try:
            conforms(name, check, tmp_path)
        except pytest.skip.Exception:
            continue


@pytest.mark.slow
@pytest.mark.may_block
@pytest.mark.parametrize("check", ALONE, ids=lambda check: f"{check.rule}-{check.name}")
@pytest.mark.parametrize("name", URIS)
def test_every_rule(name: str, check: Check, tmp_path: Path) -> None:
    conforms(name, check, tmp_path)


def test_lockstep_says_what_it_lacks() -> None:
    without = [check.name for check in CHECKS if "buffered" in check.needs]
    assert 0 < len(without) <= 6
    assert not transport_from(URIS["lockstep"]).capabilities.buffered
    assert transport_from(URIS["delay"]).capabilities.buffered
