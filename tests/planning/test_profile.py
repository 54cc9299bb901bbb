"""The profiler on stages whose costs are known: it finds them, keeps to its time, refuses nonsense."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from pipelined.costs import MicroBatch, Sample, StageProfile, decode_profile, encode_profile, fit
from pipelined.errors import ConfigError
from pipelined.llm import EngineConfig
from pipelined.planning.profile import Measurement, StageFit, condensed, cuts_for, measure, sample_of
from pipelined.planning.profile_page import write_page
from pipelined.planning.profile_predict import predict_ttft_s
from pipelined.planning.profile_text import TextTokens, prose
from pipelined.trace import Span

COSTS = '[{"a":1e-9,"b":1e-5,"c":0.002,"d":3e-8},{"a":2e-9,"b":1.5e-5,"c":0.002,"per_decode":0.001,"per_context":1e-7}]'
CONFIG = EngineConfig(
    model=f"emulated://?layers=8&context=4000&hidden=64&costs={COSTS}", pp_size=2, device="emulated", workers="task"
)


@pytest.fixture
def found() -> Measurement:
    said: list[tuple[float, str]] = []
    measured: Measurement = asyncio.run(measure(CONFIG, budget_s=1.5, tell=lambda *what: said.append(what)))
    assert said[0] == (0.0, "starting ranks")
    assert [share for share, _ in said] == sorted(share for share, _ in said)
    return measured


def test_it_finds_the_costs_of_every_stage(found: Measurement, tmp_path: Path) -> None:
    found.check()
    first, second = (stage.fit.cost for stage in found.stages)
    assert (first.a, first.b, first.c, first.d) == pytest.approx((1e-9, 1e-5, 0.002, 3e-8), rel=0.01)
    assert (second.a, second.b, second.c) == pytest.approx((2e-9, 1.5e-5, 0.002), rel=0.01)
    assert (second.per_decode, second.per_context) == pytest.approx((0.001, 1e-7), rel=0.02)
    for stage in found.stages:
        sizes = {tokens for sample in stage.samples for _, tokens in sample.work.chunks}
        assert len(sizes) >= 5
        assert max(prefix for sample in stage.samples for prefix, _ in sample.work.chunks) > 1000
        assert {sample.work.decodes for sample in stage.samples} >= {0, 1}
    assert decode_profile(encode_profile(found.profile)) == found.profile
    assert found.profile.fingerprint.layers == (4, 4)

    path = tmp_path / "p.json"
    path.write_bytes(encode_profile(found.profile))
    config = EngineConfig(
        model=CONFIG.model, pp_size=2, device="emulated", workers="task", chunking="balanced", profile=str(path)
    )
    from pipelined.llm import AsyncLLM

    llm = AsyncLLM(config)
    assert llm.scheduling.costs().profiled
    predicted_s = predict_ttft_s(config, llm.info, llm.layers, 3000)
    least_s = max(cost.launch_s(MicroBatch(((0, 3000),))) for cost in (first, second))
    assert least_s < predicted_s < 2.5 * least_s

    page = tmp_path / "fit.html"
    write_page(found, page)
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "<script" not in text
    assert not re.search(r"https?://", text)


def test_the_time_is_kept() -> None:
    slow = EngineConfig(
        model="emulated://?layers=8&context=100000&a=1e-9&b=1e-4&hidden=64", device="emulated", workers="task"
    )
    found = asyncio.run(measure(slow, budget_s=2, longest_tokens=4000))
    assert found.seconds < 5, "the prompt under way ends, no other begins"
    with pytest.raises(ConfigError, match="a budget of 0 s is too short"):
        asyncio.run(measure(slow, budget_s=0))
    with pytest.raises(ConfigError, match="prompts of 100001 tokens: expected 1 to 99992"):
        asyncio.run(measure(slow, budget_s=1, longest_tokens=100_001))


def test_a_bad_fit_is_refused_with_the_stage_and_the_reason() -> None:
    samples = [Sample.of(0, 64 * size, 0.1 + (size * 7919 % 13)) for size in range(1, 12)]
    stage = StageFit(1, (0, 4), tuple(samples), fit(samples))
    found = Measurement(None, (stage,), 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"stage 1: the cost model does not fit: .*; no profile was written"):
        found.check()
    assert StageProfile.of(samples, stage.fit).mean_error > 0.15


def test_spans_say_what_was_measured() -> None:
    def of(detail: str, track: str = "device") -> Sample | None:
        return sample_of(Span(track, "forward", 1.0, 1.5, 3, detail))

    assert of("#7 prefill 256@512") == Sample.of(512, 256, 0.5)
    assert of("#7 prefill 256@0, #3 decode 1@90, #4 decode 1@10") == Sample(MicroBatch(((0, 256),), 2, 100), 0.5)
    assert of("#7 prefill 256@512", track="launch") is None
    assert of("12") is None
    assert of("") is None


@pytest.mark.parametrize("context", [100, 8000, 1 << 20])
@pytest.mark.parametrize("page_size", [16, 64, 2048])
def test_cuts_have_sizes_of_all_kinds(context: int, page_size: int) -> None:
    cuts = cuts_for(context, page_size)
    sizes = {size for cut in cuts for size in cut.sizes}
    assert all(size % page_size == 0 and size >= page_size for size in sizes)
    if page_size == 64:
        assert len(sizes) == 5
        assert max(sizes) <= 8192


def test_prompts_are_of_text_and_begin_differently() -> None:
    class Words:
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    class Info:
        vocab_size, tokenizer = 100, "here"

    assert len(prose()) > 10_000
    source = TextTokens(Words(), Info(), "some words of various lengths go here " * 3000)  # type: ignore[arg-type]
    prompts = [source.prompt(100) for _ in range(20)]
    assert all(len(prompt) == 100 for prompt in prompts)
    assert len({tuple(prompt[:16]) for prompt in prompts}) > 3
    assert len(TextTokens(Words(), Info(), "too short").prompt(1000)) == 1000  # type: ignore[arg-type]


def test_what_was_measured_several_times_counts_once() -> None:
    chunk = [Sample.of(512, 64, seconds) for seconds in (3.0, 1.0, 2.0)]
    decodes = [Sample(MicroBatch((), 2, 200 + 2 * step), 0.1 * step) for step in range(1, 6)]
    far = Sample(MicroBatch((), 2, 9000), 7.0)
    assert condensed([*chunk, *decodes, far]) == [chunk[2], decodes[2], far]
