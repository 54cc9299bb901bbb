"""Scenarios on the real runtime in virtual time: times that can be worked out by hand, and books that balance."""

from __future__ import annotations

import msgspec
import pytest

from pipelined.costs import MicroBatch, makespan
from pipelined.planning import Arrival, Chunking, Link, Percentiles, Scenario, decode_scenario, simulate
from pipelined.planning.scenario import StagePart
from pipelined.trace import CAUSES

BASE = decode_scenario(b"""
pp_size = 4
stage = {a = 3e-10, b = 6e-6, c = 2e-2, d = 5e-7}
arrivals = [{prompt_tokens = 20_000}]
""")


def changed(**fields: object) -> Scenario:
    return msgspec.structs.replace(BASE, **fields)


@pytest.mark.parametrize("policy", ["fixed", "dynamic", "balanced"])
def test_a_lone_prompt_takes_what_its_chunks_say(policy: str) -> None:
    result = simulate(changed(chunking=Chunking(policy=policy, chunked_prefill_size=4096)))
    (request,) = result.requests
    assert sum(request.chunks) == 20_000
    at, times = 0, []
    for size in request.chunks:
        times.append(BASE.cost.times_s(MicroBatch(((at, size),))))
        at += size
    assert request.ttft_s == pytest.approx(makespan(times)[-1, -1], rel=1e-9)
    assert result.wall_s == request.ttft_s
    assert result.itl is None


def test_fixed_chunks_are_fixed_and_balanced_ones_are_sooner() -> None:
    fixed = simulate(changed(chunking=Chunking(policy="fixed", chunked_prefill_size=4096)))
    balanced = simulate(changed(chunking=Chunking(policy="balanced")))
    assert fixed.requests[0].chunks == (4096, 4096, 4096, 4096, 3616)
    assert list(balanced.requests[0].chunks) == sorted(balanced.requests[0].chunks, reverse=True)
    assert balanced.requests[0].ttft_s < 0.97 * fixed.requests[0].ttft_s


def test_a_policy_that_learns_gets_there_with_the_second_prompt() -> None:
    arrivals = (Arrival(prompt_tokens=20_000), Arrival(at_s=5, prompt_tokens=20_000))
    told, learns = (
        simulate(changed(arrivals=arrivals, chunking=Chunking(policy="balanced", known_costs=known)))
        for known in (True, False)
    )
    assert told.requests[0].ttft_s == pytest.approx(told.requests[1].ttft_s, rel=1e-3)
    assert learns.requests[1].ttft_s < 1.03 * told.requests[1].ttft_s
    assert learns.requests[0].ttft_s > learns.requests[1].ttft_s


def test_every_microsecond_is_busy_or_has_a_cause() -> None:
    arrivals = (
        Arrival(prompt_tokens=9_000, output_tokens=12),
        Arrival(at_s=0.1, prompt_tokens=3_000, output_tokens=5, count=3),
        Arrival(at_s=9.0, prompt_tokens=700, output_tokens=2),
    )
    link = Link(latency_us=40, bandwidth_gbytes_per_s=2)
    result = simulate(changed(arrivals=arrivals, link=link))
    assert [len(request.token_times_s) for request in result.requests] == [12, 5, 5, 5, 2]
    assert [request.arrived_s for request in result.requests] == pytest.approx([0, 0.1, 0.1, 0.1, 9.0])
    for use in result.stages:
        assert use.busy_ns + sum(use.causes_ns.values()) == use.wall_ns
        assert set(use.causes_ns) <= set(CAUSES)
        assert use.wall_s == pytest.approx(result.wall_s, abs=2e-9)
        assert use.causes["no_work"] > 5  # until the last request comes
        if use.rank:
            assert use.causes["link"] > 0
    path = result.critical_path
    assert path.wall_ns == result.stages[0].wall_ns
    assert path.pieces[0].what == "no_work"  # the last request came when all others were done
    assert path.pieces[0].length_ns == pytest.approx(9e9, rel=1e-3)
    assert {piece.what for piece in path.pieces} >= {"busy", "link"}
    assert not result.dropped
    assert result.itl is not None
    assert 0 < result.itl.p50 <= result.itl.p90 <= result.itl.p99 <= result.itl.max
    assert result.prompt_tokens_per_s == pytest.approx(18_700 / result.wall_s)
    assert result.output_tokens_per_s == pytest.approx(29 / result.wall_s)


def test_the_slowest_stage_is_the_busy_one() -> None:
    stages = decode_scenario(b"""
        stages = [{b = 1e-6}, {b = 3e-6}, {b = 1e-6}]
        chunking = {policy = "fixed", chunked_prefill_size = 512}
        arrivals = [{prompt_tokens = 51_200}]
    """)
    result = simulate(stages)
    assert result.requests[0].ttft_s == pytest.approx((51_200 * 3 + 512 * 2) * 1e-6, rel=1e-6)
    assert result.stages[1].busy_share > 0.98
    path = result.critical_path
    assert path.parts_ns()["busy", 1] == pytest.approx(51_200 * 3_000, rel=1e-6)
    assert path.wall_ns == round(result.wall_s * 1e9)
    assert result.stages[2].main_cause == "input"


def test_decodes_have_costs_of_their_own() -> None:
    stage = b"{b = 1e-6, c = 1e-3, per_decode = 0.5, per_context = 0.0}"
    result = simulate(decode_scenario(b"stage = " + stage + b"\narrivals = [{prompt_tokens = 64, output_tokens = 3}]"))
    assert result.requests[0].itls_s == pytest.approx([0.501, 0.501], rel=1e-6)


def test_a_target_latency_is_kept_while_others_prefill() -> None:
    arrivals = (
        Arrival(prompt_tokens=640, output_tokens=60),
        Arrival(at_s=0.5, prompt_tokens=40_000),
    )
    free, bound = (
        simulate(changed(arrivals=arrivals, chunking=Chunking(policy="balanced", target_itl_s=itl)))
        for itl in (None, 0.3)
    )
    assert free.itl is not None
    assert bound.itl is not None
    assert bound.itl.p99 < free.itl.p99
    assert bound.itl.p90 <= 0.3 * 1.02


def test_the_same_each_time() -> None:
    arrivals = (Arrival(prompt_tokens=5_000, output_tokens=4, count=3),)
    first, again = (simulate(changed(arrivals=arrivals)) for _ in range(2))
    assert first.requests == again.requests
    assert first.stages == again.stages


def test_percentiles_are_those_of_nearest_rank() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([3.0]) == Percentiles(3, 3, 3, 3, 3)
    found = Percentiles.of([float(n) for n in range(100, 0, -1)])
    assert found == Percentiles(50.5, 50, 90, 99, 100)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "published"), [(4, 0.828), (8, 0.769)])
def test_strong_scaling_is_better_than_published(stages: int, published: float) -> None:
    """Throughput of 16 prompts of 128K tokens on P stages, over P times that on one; the same policy, untuned."""

    def wall_s(pp_size: int) -> float:
        stage = f"{{a = {2.869e-9 / pp_size}, b = {4.62e-5 / pp_size}, c = 0.02}}"
        content = f"pp_size = {pp_size}\nstage = {stage}\narrivals = [{{prompt_tokens = 131072, count = 16}}]"
        return simulate(decode_scenario(content.encode())).wall_s

    assert wall_s(1) / wall_s(stages) / stages > published


@pytest.mark.parametrize("launch_s", [0.005, 0.05])
def test_on_slow_stages_the_very_first_prompt_is_no_later_than_with_the_best_fixed_size(launch_s: float) -> None:
    """Chunks take a second here: a launch or a prefix wrongly thought dear makes them too large for good."""
    stage = StagePart(a=3.9e-7, b=2.33e-3, c=launch_s, d=5e-6)
    slow = changed(
        pp_size=2, stage=stage, arrivals=(Arrival(prompt_tokens=8000), Arrival(at_s=100, prompt_tokens=8000))
    )
    fixed = [
        simulate(msgspec.structs.replace(slow, chunking=Chunking(policy="fixed", chunked_prefill_size=size)))
        for size in (128, 256, 512)
    ]
    learns = simulate(msgspec.structs.replace(slow, chunking=Chunking(policy="balanced", known_costs=False)))
    best_s = min(one.requests[0].ttft_s for one in fixed)
    assert learns.requests[0].ttft_s < 1.005 * best_s
    assert learns.requests[1].ttft_s < best_s
