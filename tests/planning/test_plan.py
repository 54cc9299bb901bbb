"""Layouts compared: what is predicted, what fits, what is recommended and why the others are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.costs import (
    Fingerprint,
    MicroBatch,
    PipelineCost,
    Profile,
    Sample,
    StageCost,
    StageProfile,
    Window,
    encode_profile,
    fit,
)
from pipelined.errors import ConfigError, ModelError
from pipelined.planning import decode_scenario, simulate
from pipelined.planning.layouts import Layout
from pipelined.planning.plan import Plan, make_plan
from pipelined.planning.plan_costs import shared
from pipelined.planning.plan_hardware import HARDWARE, Hardware, estimated_layers, measure_here, parse_hardware
from pipelined.planning.plan_source import Subject, of_model, of_profile, of_scenario, read_plan_file
from pipelined.planning.plan_units import parse_link
from pipelined.stage import ModelInfo

FAST, SLOW = parse_link("400GB/s,2us"), parse_link("1GB/s,50us")
DEVICE = Hardware("a device", 1e14, 1e12, 24e9, launch_s=1e-3)


def model(**fields: Any) -> ModelInfo:
    layers = fields.pop("layers", 32)
    return ModelInfo(
        **{
            "ref": "some/model",
            "path": "/models/some",
            "family": "hf",
            "architecture": "LlamaForCausalLM",
            "layers": layers,
            "cuts": tuple(range(1, layers)),
            "layer_bytes": (400_000_000,) * layers,
            "embedding_bytes": 500_000_000,
            "head_bytes": 500_000_000,
            "kv_bytes_per_token": (4096,) * layers,
            "hidden_size": 4096,
            "vocab_size": 32_000,
            "context_length": 65_536,
            "eos_token_ids": (2,),
            "dtype": "bfloat16",
            "fingerprint": "abc",
            "heads": 32,
            "kv_heads": 8,
            "attention_width": 4096,
            **fields,
        }
    )


def plan(subject: Subject, devices: int = 4, link: Any = SLOW, lengths: tuple[int, ...] = (8192,), **more: Any) -> Plan:
    return make_plan(subject, lengths, devices, link, **more)


def names(found: Plan) -> list[str]:
    return [str(one.layout) for one in found.candidates if not one.problem]


def test_a_pipeline_wins_over_a_slow_link_and_predictions_say_so_of_a_fast_one() -> None:
    subject = of_model(model(), DEVICE)
    slow, fast = plan(subject, 2), plan(subject, 2, FAST)
    assert slow.recommended is not None
    assert slow.recommended is slow.best
    assert str(slow.recommended.layout) == "PP2"
    assert fast.best is not None
    assert fast.recommended is not None
    assert fast.best.layout.runnable is False
    assert str(fast.recommended.layout) == "PP2"
    assert "cannot be run yet" in fast.best.estimates[0].why
    tensor = next(one for one in slow.candidates if str(one.layout) == "TP2")
    assert tensor.estimates[0].moved is not None
    assert "waiting for each other" in tensor.estimates[0].why
    short = next(one for one in slow.candidates if str(one.layout) == "one device")
    assert "1 of 2 devices" in short.estimates[0].why
    assert slow.recommended.estimates[0].why == ""
    assert [one.score for one in slow.candidates] == sorted(one.score for one in slow.candidates)


def test_a_pipeline_is_predicted_by_the_scheduler_itself() -> None:
    subject = of_scenario(
        decode_scenario(b"pp_size = 4\nstage = {b = 1e-6, c = 1e-3}\narrivals = [{prompt_tokens = 9}]"), "s.toml"
    )
    (found,) = (one for one in plan(subject).candidates if one.layout == Layout(4))
    again = simulate(
        decode_scenario(
            b"""
            pp_size = 4
            stage = {b = 1e-6, c = 1e-3}
            link = {bandwidth_gbytes_per_s = 1, latency_us = 50}
            chunking = {max_micro_batch_tokens = 8192}
            arrivals = [{prompt_tokens = 8192}]
            """
        )
    )
    (estimate,) = found.estimates
    assert estimate.ttft_s == pytest.approx(again.ttft.mean, rel=1e-9)
    idle = sum(use.idle_ns for use in again.stages) / sum(use.wall_ns for use in again.stages)
    assert estimate.bubble == pytest.approx(idle)
    assert estimate.moved is None
    assert found.kv_tokens is None
    assert estimate.queued == 16
    assert estimate.tokens_per_s > 8192 / estimate.ttft_s


def test_what_does_not_fit_is_said() -> None:
    subject = of_model(model(), DEVICE)
    found = plan(subject, lengths=(1024,), memory_bytes=8e9)
    problems = {str(one.layout): one.problem for one in found.candidates}
    assert "13.8 GB of weights on rank 0; a device has 8 GB" in problems["one device"]
    assert problems["PP4"] == ""
    best = found.recommended
    assert best is not None
    each = 8 * 4096
    left = 0.9 * 8e9 - 8 * 400_000_000 - 500_000_000
    assert best.kv_tokens == int(left / each)
    tight = plan(subject, lengths=(8192,), memory_bytes=4.2e9)
    assert {one.layout: one.problem for one in tight.candidates}[Layout(4)].startswith("room for ")
    assert tight.recommended is None
    short = plan(subject, lengths=(512, 8192), memory_bytes=4.2e9)
    assert short.recommended is None
    four = next(one for one in short.candidates if one.layout == Layout(4))
    assert four.kv_tokens is not None
    assert 512 <= four.kv_tokens < 8192
    assert [one.tokens for one in four.estimates] == [512]  # the shorter ones are served all the same
    assert four.estimate(8192) is None
    assert plan(subject, memory_bytes=1e9).recommended is None
    assert plan(subject, memory_bytes=1e9).best is None


def test_heads_and_cuts_bound_the_layouts() -> None:
    found = plan(of_model(model(layers=2, heads=9, kv_heads=3), DEVICE), devices=4)
    problems = {str(one.layout): one.problem for one in found.candidates if one.problem}
    assert "2 stages at most" in problems["PP4"]
    assert problems["TP4"] == problems["TP2 CP2"].replace("by 2", "by 4") == "9 heads are not to be divided by 4"
    assert found.recommended is not None
    assert str(found.recommended.layout) == "PP2"


def test_lengths_beyond_the_context_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(of_model(model(), DEVICE), lengths=(1024, 131_072, 1 << 20))
    assert "context of some/model, 65536 tokens: 128K (131072 tokens), 1M (1048576 tokens)" in str(caught.value)
    with pytest.raises(ConfigError, match="expected 1 to 1024"):
        plan(of_model(model(), DEVICE), devices=0)


COSTS = st.builds(
    StageCost,
    *(st.floats(0, 1e-3),) * 4,
    windows=st.lists(st.builds(Window, st.sampled_from([64, 512]), *(st.floats(0, 1e-3),) * 2), max_size=2).map(tuple),
    per_decode=st.none() | st.floats(0, 1e-3),
)
WORK = MicroBatch(((100, 50), (0, 700)), 3, 900)


@given(COSTS, st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 8]))
def test_ranks_that_share_a_stage_take_as_much_less_as_their_links_allow(cost: StageCost, tp: int, cp: int) -> None:
    sizes: dict[str, Any] = {"layers": 4, "hidden_bytes": 8192, "kv_bytes": 16_384}
    work = MicroBatch(((1000, 512),))
    free = shared(cost, Layout(1, tp, cp), parse_link("1000000GB/s,0"), **sizes)
    whole = cost.launch_s(work)
    assert whole / tp / cp - 1e-9 <= free.launch_s(work) <= whole / tp + 1e-6
    slow = shared(cost, Layout(1, tp, cp), parse_link("1GB/s,5us"), **sizes)
    told = 512 * (4 * 4 * (tp - 1) / tp * 8192 / cp + (cp - 1) / cp * 16_384 / tp) / 1e9
    hops = 4 * (4 * (tp - 1) + cp - 1) * 5e-6
    assert slow.launch_s(work) - free.launch_s(work) == pytest.approx(told + hops, rel=1e-3, abs=1e-9)
    assert shared(cost, Layout(7), parse_link("1GB/s"), **sizes) is cost


def test_estimates_count_operations_and_bytes() -> None:
    info = model(windows=(512,) + (0,) * 31, active_bytes=(100_000_000,) * 32)
    windowed, full, *_ = estimated_layers(info, DEVICE)
    rate = DEVICE.flops * DEVICE.efficiency
    assert full.b == pytest.approx(100_000_000 / rate)  # two operations a weight of two bytes
    assert full.c == pytest.approx(400_000_000 / DEVICE.bytes_per_s)  # but a chunk reads all experts
    assert full.chunk_s(0, 1000) - full.b * 1000 == pytest.approx(2 * 4096 * 1000**2 / rate)
    assert windowed.chunk_s(100_000, 10) < full.chunk_s(100_000, 10)
    assert windowed.a == 0


def test_hardware_by_name_or_by_rates() -> None:
    assert parse_hardware("H100") is HARDWARE["h100"]
    assert parse_hardware("148TFLOPS,4TB/s,96GB", 0.5) == Hardware("a device", 148e12, 4e12, 96e9, 0.5)
    assert "60% of the operations" in parse_hardware("h20").text
    for text, said in [
        ("h1000", "did you mean 'h100'"),
        ("148TFLOPS", "expected operations"),
        ("1TFLOPS,2GB,3GB", "ex"),
    ]:
        with pytest.raises(ConfigError, match=said):
            parse_hardware(text)
    here = measure_here(64)
    assert here.flops > 1e8
    assert here.measured


def profile(**fields: Any) -> Profile:
    costs = [StageCost(1e-10, 2e-6, 1e-3), StageCost(2e-10, 4e-6, 2e-3)]
    samples = [
        [Sample.of(at, size, cost.c + cost.chunk_s(at, size)) for at in (0, 1000) for size in (64, 512, 1024)]
        for cost in costs
    ]
    stages = [StageProfile.of(points, fit(points)) for points in samples]
    return Profile.of(Fingerprint(**{"model": "some/model", "layers": (8, 24), "machine": "this", **fields}), stages)


def test_a_profile_keeps_what_was_measured_and_shares_the_rest_out() -> None:
    subject = of_profile(profile(), "p.json", model())
    assert subject.ref == "some/model"
    assert subject.stages(2, (8, 24)) == profile().cost()
    one = subject.stages(1).stages[0]
    assert one.launch_s(MicroBatch(((0, 512),))) == pytest.approx(
        sum(profile().cost().times_s(MicroBatch(((0, 512),))))
    )
    even = subject.stages(2).stages
    assert even[0].b == pytest.approx(2e-6 + 8 * 4e-6 / 24, rel=1e-3)
    assert "p.json, measured on this with layers 8-24" in subject.basis


def test_the_digest_of_a_profile_counts_more_than_a_name() -> None:
    assert of_profile(profile(model="renamed", digest="abc"), "p.json", model()).ref == "some/model"


@pytest.mark.parametrize("fields", [{"model": "another"}, {"layers": (8, 8)}, {"digest": "other"}])
def test_a_profile_of_another_model_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"p\.json is of another model: .*(another|16 layers|other weights)"):
        of_profile(profile(**fields), "p.json", model())


def inspect(ref: str) -> ModelInfo:
    if ref != "some/model":
        raise ModelError(f"no {ref}")
    return model()


def test_files_are_told_apart(tmp_path: Path) -> None:
    measured, told = tmp_path / "p.json", tmp_path / "s.json"
    measured.write_bytes(encode_profile(profile()))
    told.write_bytes(b'{"stage": {"b": 1e-6}, "arrivals": [{"prompt_tokens": 9}]}')
    found = read_plan_file(str(measured), inspect, None)
    assert found is not None
    assert found[0].info == model()
    found = read_plan_file(str(told), inspect, None)
    assert found is not None
    assert found[1] is not None
    assert "it has no cost of a launch, 5 ms are taken" in found[0].basis
    shipped = read_plan_file("kimi-pp4-3-fixed-4096", inspect, None)
    assert shipped is not None
    assert shipped[0].stages(4) == PipelineCost.even(StageCost(3.25e-10, 6.03e-6, 26.1e-3, 5.39e-7), 4)
    assert shipped[0].stages(8).stages[0].c == pytest.approx(26.1e-3 / 2)
    assert read_plan_file("some/model", inspect, None) is None


def test_a_profile_whose_model_is_not_here_still_plans_pipelines(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(encode_profile(profile(model="digest")))
    found = read_plan_file(str(path), inspect, None)
    assert found is not None
    subject, _ = found
    assert (subject.info, subject.ref) == (None, "")
    assert sorted(names(plan(subject))) == ["PP2", "PP4", "one device"]
    with pytest.raises(ConfigError, match="is of another model: 'digest', not 'some/model'"):
        read_plan_file(str(path), inspect, "some/model")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"fingerprint": 3}', b'{"version": 1}', b"[" * 100_000]
)
def test_one_line_for_a_file_that_is_neither(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_plan_file(str(path), inspect, None)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_plan_file(str(tmp_path / "none.json"), inspect, None)


def test_partitions_of_a_subject_without_sizes() -> None:
    bare = of_profile(profile(model="digest"), "p.json", None)
    assert [end - start for start, end in bare.parts(3)] == [10, 11, 11]
    assert [end - start for start, end in bare.parts(3, (30, 1, 1))] == [30, 1, 1]
