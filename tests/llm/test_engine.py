"""The whole engine over the toy model, which shows every mistake of the runtime as wrong tokens."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from llm_tools import TOY, at_rest, greedy, right

from pipelined.clock import LoopClock, MonotonicClock
from pipelined.clock.virtual import run
from pipelined.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    ModelError,
    NonFiniteError,
    PartitionError,
    PipelinedError,
    RankLostError,
    StageError,
)
from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.pipeline import TaskWorld
from pipelined.stage.stream import StreamDevice
from pipelined.trace import Span

EOS = TOY + "&eos=7,11,400,401,402,403,404,405,406,407,408,409"


def prompts_of(dice: random.Random, count: int, longest: int = 120) -> list[list[int]]:
    """Random ones; about half begin like an earlier one."""
    made: list[list[int]] = []
    for _ in range(count):
        head = dice.choice(made)[: dice.randrange(1, longest)] if made and dice.random() < 0.5 else []
        tail = [dice.randrange(997) for _ in range(dice.randrange(1, longest))]
        made.append((head + tail)[: 2 * longest])
    return made


# ---- right tokens ----


@pytest.mark.parametrize("device", ["cpu", "stream"])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
async def test_right_tokens_for_many_at_once(pp_size: int, device: str, engine: Any) -> None:
    dice = random.Random(pp_size)
    prompts = prompts_of(dice, 24)
    lengths = [dice.randrange(1, 16) for _ in prompts]
    async with engine(EOS, pp_size=pp_size, device=device) as llm:
        outputs = await asyncio.gather(
            *(llm.complete(prompt, greedy(n)) for prompt, n in zip(prompts, lengths, strict=True))
        )
        for prompt, n, output in zip(prompts, lengths, outputs, strict=True):
            (choice,) = output.outputs
            right(EOS, prompt, choice.token_ids, n)
            ended = choice.token_ids[-1] in llm.info.eos_token_ids
            assert choice.finish_reason == ("stop" if ended else "length")
            assert output.finished
            assert output.prompt_token_ids == prompt
        assert sum(output.cached_tokens for output in outputs) > 0
        assert len({rank["digest"] for rank in (await llm.stats()).values()}) == 1


@pytest.mark.parametrize("seed", range(8))
async def test_right_tokens_with_any_sizes_and_little_memory(seed: int, engine: Any) -> None:
    """Pages run out: requests wait, are preempted, and cached prefixes are evicted."""
    dice = random.Random(seed)
    page = dice.choice([1, 2, 4, 8, 16])
    settings = {
        "pp_size": dice.randint(1, 4),
        "page_size": page,
        "chunked_prefill_size": page * dice.choice([1, 2, 5, 16]),
        "kv_cache_tokens": page * (-(-200 // page)),
        "max_running_requests": dice.choice([2, 8, 64]),
        "depth": dice.choice([1, 2, 4]),
        "disable_radix_cache": dice.random() < 0.3,
        "device": dice.choice(["cpu", "stream"]),
    }
    prompts = prompts_of(dice, 14, longest=70)
    lengths = [dice.randrange(1, 40) for _ in prompts]
    async with engine(EOS, **settings) as llm:
        outputs = await asyncio.gather(
            *(llm.complete(prompt, greedy(n)) for prompt, n in zip(prompts, lengths, strict=True))
        )
        for prompt, n, output in zip(prompts, lengths, outputs, strict=True):
            right(EOS, prompt, output.outputs[0].token_ids, n)


async def test_preemption_happens_and_changes_nothing(engine: Any) -> None:
    prompts = [[n] * 20 for n in range(1, 9)]
    async with engine(pp_size=2, kv_cache_tokens=160) as llm:
        outputs = await asyncio.gather(*(llm.complete(prompt, greedy(60)) for prompt in prompts))
        assert sum(output.metrics.preemptions for output in outputs) > 0
        for prompt, output in zip(prompts, outputs, strict=True):
            right(TOY, prompt, output.outputs[0].token_ids, 60)


async def test_streaming(engine: Any) -> None:
    """Outputs grow by what is new, in order, and the last one is finished."""
    prompt = list(range(50))
    async with engine(pp_size=2) as llm:
        lengths, flags = [], []
        async for output in llm.generate(prompt, greedy(12)):
            lengths.append(len(output.outputs[0].token_ids))
            flags.append(output.finished)
        assert lengths == sorted(lengths)
        assert len(lengths) > 4
        assert flags == [False] * (len(flags) - 1) + [True]
        right(TOY, prompt, output.outputs[0].token_ids, 12)
        assert 0 < output.metrics.ttft_s <= output.metrics.e2e_s


async def test_several_continuations(engine: Any) -> None:
    async with engine(pp_size=2) as llm:
        output = await llm.complete([5] * 30, greedy(6, n=5))
        assert [choice.index for choice in output.outputs] == list(range(5))
        for choice in output.outputs:
            right(TOY, [5] * 30, choice.token_ids, 6)


async def test_ends(engine: Any) -> None:
    """Stop tokens, end of sequence, min_tokens, ignore_eos."""
    prompt = [1, 2, 3]
    plain = []
    async with engine(pp_size=2) as llm:
        plain = (await llm.complete(prompt, greedy(20))).outputs[0].token_ids
        stop = (await llm.complete(prompt, greedy(20, stop_token_ids=(plain[4],)))).outputs[0]
        assert stop.token_ids == plain[: plain.index(plain[4]) + 1]
        assert (stop.finish_reason, stop.stop_reason) == ("stop", plain[4])
    model = f"{TOY}&eos={plain[3]}"
    async with engine(model, pp_size=2) as llm:
        end = (await llm.complete(prompt, greedy(20))).outputs[0]
        assert end.token_ids == plain[: plain.index(plain[3]) + 1]
        assert (end.finish_reason, end.stop_reason) == ("stop", None)
        assert (await llm.complete(prompt, greedy(20, ignore_eos=True))).outputs[0].token_ids == plain
        late = (await llm.complete(prompt, greedy(20, min_tokens=9))).outputs[0].token_ids
        right(model, prompt, late, 20, min_tokens=9)
        assert len(late) >= 9


async def test_logprobs(engine: Any) -> None:
    async with engine(pp_size=2) as llm:
        output = await llm.complete(list(range(70)), greedy(4, logprobs=2, prompt_logprobs=1))
        (choice,) = output.outputs
        assert len(choice.logprobs) == 4
        assert all(token in entry for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
        assert choice.cumulative_logprob == pytest.approx(4 * -1 / 16)
        assert len(output.prompt_logprobs) == 70
        assert output.prompt_logprobs[0] is None
        assert all(
            entry is not None and token in entry
            for token, entry in zip(range(1, 70), output.prompt_logprobs[1:], strict=True)
        )


async def test_context_is_the_end(engine: Any) -> None:
    async with engine(pp_size=2, context_length=40) as llm:
        output = await llm.complete([3] * 35, greedy(100))
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (5, "length")


@pytest.mark.parametrize("capacities", ["4096,512", "512,4096", "4096,600,512"])
async def test_unequal_capacities(capacities: str, engine: Any) -> None:
    """The minimum counts, on every rank."""
    model = TOY.replace("kv=65536", f"kv={capacities}")
    async with engine(model, pp_size=capacities.count(",") + 1) as llm:
        assert llm.kv_tokens == 512
        prompts = [[n] * 100 for n in range(20)]
        outputs = await asyncio.gather(*(llm.complete(prompt, greedy(30)) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            right(model, prompt, output.outputs[0].token_ids, 30)
        with pytest.raises(InvalidRequestError, match="512"):
            await llm.complete([1] * 600, greedy(1))


class Skewed(MonotonicClock):
    """Real time, off by something, and running a little too fast or too slow."""

    def __init__(self, offset_s: float, drift: float) -> None:
        self.offset_s, self.drift = offset_s, drift

    def now(self) -> float:
        return super().now() * (1 + self.drift) + self.offset_s

    def call_at(self, when_s: float, callback: Any, *args: object) -> asyncio.TimerHandle:
        return super().call_at((when_s - self.offset_s) / (1 + self.drift), callback, *args)


@pytest.mark.parametrize("device", ["cpu", "stream"])
async def test_skewed_clocks_change_nothing(device: str, engine: Any) -> None:
    prompts = prompts_of(random.Random(5), 10)
    world = TaskWorld(clock=lambda rank: Skewed(1000.0 * rank - 500, 0.01 * rank))
    async with engine(pp_size=3, world=world, device=device) as llm:
        outputs = await asyncio.gather(*(llm.complete(prompt, greedy(8)) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            right(TOY, prompt, output.outputs[0].token_ids, 8)


# ---- pipelining ----


def test_chunks_of_one_prompt_are_in_flight_together_and_nothing_runs_in_lock_step() -> None:
    """While a step computes, the next is prepared and its inputs are there, and the one before is leaving."""
    spans = run(_spans_of_a_long_prompt())
    runs = {rank: [s for s in of if s.name == "forward"] for rank, of in spans.items()}
    # At least two chunks, on different ranks, at the same time; the prompt takes about (13 + 2) steps, not 3 * 13.
    first, last = runs[0], runs[2]
    overlaps = sum(a.start_s < b.end_s and b.start_s < a.end_s and a.step != b.step for a in first for b in last)
    assert overlaps >= 8
    assert last[-1].end_s - first[0].start_s < 0.010 * 16
    for rank in range(3):
        prepared = {s.step: s.end_s for s in spans[rank] if s.name == "prepare"}
        ends = {s.step: s.end_s for s in runs[rank]}
        ahead = [step for step in ends if step + 1 in ends and prepared[step + 1] < ends[step]]
        assert len(ahead) >= len(ends) // 2, (rank, ahead)
    for rank in range(2):
        starts = {s.step: (s.start_s, s.end_s) for s in runs[rank]}
        sends = {s.step: s for s in spans[rank] if s.name == "send"}
        leaving = [n for n in sends if n + 1 in starts and sends[n].end_s < starts[n + 1][1]]
        assert len(leaving) >= len(sends) // 2, (rank, leaving)


async def _spans_of_a_long_prompt() -> dict[int, list[Span]]:
    world = TaskWorld(lambda _: LoopClock(), lambda _, clock: StreamDevice(clock, 0.01))
    settings: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 32}
    async with AsyncLLM(TOY, pp_size=3, world=world, transport="sim://", **settings) as llm:
        await llm.trace()
        output = await llm.complete(list(range(400)), greedy(1))
        assert output.metrics.chunks == [32] * 12 + [16]
        return await llm.trace()


# ---- aborts ----


async def test_a_closed_generator_is_an_abort(engine: Any) -> None:
    async with engine(pp_size=3) as llm:
        for after in range(5):
            stream = llm.generate(list(range(200)), greedy(500))
            for _ in range(after):
                await anext(stream)
            await stream.aclose()
        await at_rest(llm)
        right(TOY, [1, 2], (await llm.complete([1, 2], greedy(5))).outputs[0].token_ids, 5)


async def test_abort_by_name(engine: Any) -> None:
    async with engine(pp_size=2) as llm:
        outputs = []
        async for output in llm.generate([1] * 50, greedy(1000, n=2), request_id="mine"):
            outputs.append(output)
            if len(outputs) == 5:
                await llm.abort("mine")
        assert output.finished
        assert [choice.finish_reason for choice in output.outputs] == ["abort", "abort"]
        await llm.abort("mine")
        await llm.abort("never heard of it")


async def test_a_name_may_be_used_again_at_once(engine: Any) -> None:
    """Late news of the first request is no news of the second."""
    async with engine(pp_size=3) as llm:
        for n in range(20):
            stream = llm.generate([n] * 40, greedy(50), request_id="the same")
            await anext(stream)
            await stream.aclose()
            got = [output async for output in llm.generate([n + 100] * 9, greedy(7), request_id="the same")]
            right(TOY, [n + 100] * 9, got[-1].outputs[0].token_ids, 7)


async def test_a_name_in_use_is_refused(engine: Any) -> None:
    async with engine() as llm:
        stream = llm.generate([1], greedy(100), request_id="x")
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="'x' is in use"):
            await anext(llm.generate([2], greedy(1), request_id="x"))
        await stream.aclose()


async def storm(llm: AsyncLLM, dice: random.Random, count: int, model: str) -> int:
    """Requests that end in every possible way; returns how many were completed, all of them right."""
    prompts = prompts_of(dice, count, longest=60)

    async def one(prompt: list[int]) -> bool:
        n, how, after = dice.randrange(1, 24), dice.randrange(5), dice.randrange(12)
        await asyncio.sleep(dice.random() * 0.2)
        name = f"storm {id(prompt)}"
        stream = llm.generate(prompt, greedy(n), request_id=name)
        seen = 0
        async for output in stream:  # noqa: B007 - the last one is looked at
            seen += 1
            if seen > after and how == 0:
                await stream.aclose()
                return False
            if seen > after and how == 1:
                await llm.abort(name)
        (choice,) = output.outputs
        if choice.finish_reason == "abort":
            return False
        right(model, prompt, choice.token_ids, n)
        return True

    tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
    for task in tasks:
        if dice.random() < 0.25:
            asyncio.get_running_loop().call_later(dice.random() * 0.4, task.cancel)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    wrong = [end for end in ends if not isinstance(end, bool | asyncio.CancelledError)]
    assert not wrong, wrong[:3]
    return sum(end is True for end in ends)


@pytest.mark.parametrize(("pp_size", "device"), [(1, "cpu"), (3, "stream")])
async def test_a_storm_of_aborts(pp_size: int, device: str, engine: Any) -> None:
    async with engine(EOS, pp_size=pp_size, device=device, kv_cache_tokens=800) as llm:
        assert await storm(llm, random.Random(1), 80, EOS) > 10


@pytest.mark.slow
@pytest.mark.parametrize("pp_size", [2, 4])
async def test_a_larger_storm_of_aborts(pp_size: int, engine: Any) -> None:
    async with engine(EOS, pp_size=pp_size, kv_cache_tokens=600) as llm:
        for seed in range(3):
            assert await storm(llm, random.Random(seed), 300, EOS) > 40
            await at_rest(llm, 30)


async def test_more_requests_than_a_link_holds(engine: Any) -> None:
    """Any number of tasks may submit at the same time."""
    async with engine(pp_size=2) as llm:
        tasks = [asyncio.create_task(llm.complete([n % 900, 1], greedy(2))) for n in range(400)]
        for n, task in enumerate(tasks):
            right(TOY, [n % 900, 1], (await task).outputs[0].token_ids, 2)


# ---- failures ----


@pytest.mark.parametrize("pp_size", [1, 2, 4])
async def test_a_request_that_fails_harms_no_other(pp_size: int, engine: Any) -> None:
    model = TOY + "&fail_seq_token=13&fail_layer=3"
    prompts = [[n] * 50 for n in range(20, 30)]
    bad = [40] * 45 + [13]
    async with engine(model, pp_size=pp_size) as llm:
        tasks = [asyncio.create_task(llm.complete(prompt, greedy(10))) for prompt in prompts]
        failing = asyncio.create_task(llm.complete(bad, greedy(10, n=3)))
        with pytest.raises(NonFiniteError, match="not finite"):
            await failing
        for prompt, task in zip(prompts, tasks, strict=True):
            right(model, prompt, (await task).outputs[0].token_ids, 10)


@pytest.mark.parametrize("pp_size", [1, 2, 4])
async def test_a_stage_that_raises_voids_its_step_alone(pp_size: int, engine: Any) -> None:
    model = TOY + "&raise_token=13&raise_layer=3"
    prompts = [[n] * 20 for n in range(20, 26)]
    async with engine(model, pp_size=pp_size) as llm:
        with pytest.raises(StageError, match="token 13") as caught:
            await llm.complete([40] * 45 + [13], greedy(10))
        assert caught.value.rank == 3 * pp_size // 6
        assert "RuntimeError" in caught.value.remote_traceback
        outputs = await asyncio.gather(*(llm.complete(prompt, greedy(10)) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            right(model, prompt, output.outputs[0].token_ids, 10)
        # Whoever shared the step fails with it, and nobody else: all end, one way or the other.
        jobs = [llm.complete(prompt, greedy(10)) for prompt in [*prompts, [41, 13, 42]]]
        ends = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(ends[-1], StageError)
        for prompt, end in zip(prompts, ends, strict=False):
            if not isinstance(end, StageError):
                right(model, prompt, end.outputs[0].token_ids, 10)


BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "empty"),
    ("", {}, "empty"),
    ([1] * 2048, {}, "context of 2048"),
    ([1] * 600, {}, "512"),
    ([997], {}, "token id 997"),
    ([-1], {}, "token id -1"),
    (["one"], {}, "token id"),
    ([1.5], {}, "token id"),
    ([1], {"n": 0}, "n=0"),
    ([1], {"temperature": -1}, "temperature"),
    ([1], {"temperature": float("nan")}, "temperature"),
    ([1], {"temperature": "hot"}, "wrong type"),
    ([1], {"top_k": -2}, "top_k"),
    ([1], {"top_p": 0.0}, "top_p"),
    ([1], {"top_p": 1.5}, "top_p"),
    ([1], {"min_p": 2.0}, "min_p"),
    ([1], {"seed": -1}, "seed"),
    ([1], {"seed": 2**63}, "seed"),
    ([1], {"seed": 2**80}, "wrong type|seed"),
    ([1], {"repetition_penalty": 0.0}, "repetition_penalty"),
    ([1], {"presence_penalty": 3.0}, "presence_penalty"),
    ([1], {"frequency_penalty": -3.0}, "frequency_penalty"),
    ([1], {"max_tokens": 0}, "max_tokens"),
    ([1], {"max_tokens": 2.5}, "wrong type"),
    ([1], {"max_tokens": None}, "wrong type"),
    ([1], {"min_tokens": 17}, "min_tokens"),
    ([1], {"logprobs": 21}, "logprobs"),
    ([1], {"stop": (3,)}, "wrong type"),
    ([1], {"stop": ("",)}, "stop"),
    ([1], {"stop_token_ids": (-5,)}, "stop_token_ids"),
    ([1], {"stop_token_ids": ("x",)}, "wrong type"),
]


@pytest.mark.parametrize("pp_size", [1, 3])
async def test_bad_requests_harm_nobody(pp_size: int, engine: Any) -> None:
    async with engine(TOY.replace("kv=65536", "kv=512"), pp_size=pp_size) as llm:
        good = asyncio.create_task(llm.complete([8] * 30, greedy(40)))
        for prompt, fields, match in BAD_REQUESTS:
            with pytest.raises(InvalidRequestError, match=match):
                await llm.complete(prompt, SamplingParams(**fields))
        right(TOY, [8] * 30, (await good).outputs[0].token_ids, 40)


async def test_text_without_a_tokenizer_is_refused(engine: Any) -> None:
    async with engine() as llm:
        with pytest.raises((InvalidRequestError, ConfigError), match="tokenizer"):
            await llm.complete("some text", greedy(1))
        right(TOY, [8], (await llm.complete([8], greedy(4))).outputs[0].token_ids, 4)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"model": "toy://?layers=0"}, ModelError, "layers"),
        ({"model": "/no/such/model"}, ModelError, "no/such/model"),
        ({"model": TOY, "pp_size": 7}, PartitionError, "at most 6"),
        ({"model": TOY, "pp_size": 0}, ConfigError, "pp_size=0"),
        ({"model": TOY, "pp_size": 2, "layer_partition": [3, 4]}, PartitionError, "adds up to 7"),
        ({"model": TOY, "transport": "pigeon://"}, ConfigError, "pigeon"),
        ({"model": TOY, "transport": "memory://", "workers": "process"}, ConfigError, "other processes"),
        ({"model": TOY, "chunked_prefill_size": 0}, ConfigError, "chunked_prefill_size"),
        ({"model": TOY, "chunked_prefill_size": -64}, ConfigError, "chunked_prefill_size"),
        ({"model": TOY, "chunked_prefill_size": 100}, ConfigError, "multiple"),
        ({"model": TOY, "page_sise": 4}, ConfigError, "did you mean 'page_size'"),
        ({"model": TOY, "workers": "thread"}, ConfigError, "workers"),
        ({"model": TOY, "context_length": 10**6}, ModelError, "context_length"),
        ({"model": TOY, "kv_cache_tokens": 10}, ConfigError, "kv_cache_tokens"),
        ({"model": TOY, "device": "cpuu"}, ConfigError, "did you mean 'cpu'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(settings: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        AsyncLLM(**settings)


# ---- life ----


async def test_use_outside() -> None:
    llm = AsyncLLM(TOY, workers="task")
    with pytest.raises(ConfigError, match="not running"):
        await llm.complete([1])
    async with llm:
        pass
    with pytest.raises(ConfigError, match="not running"):
        await llm.complete([1])


@pytest.mark.parametrize("device", ["cpu", "stream"])
async def test_closing_with_requests_in_flight(device: str, engine: Any) -> None:
    async with engine(pp_size=3, device=device, healthy=False) as llm:
        tasks = [asyncio.create_task(llm.complete([n] * 90, greedy(1000))) for n in range(20)]
        await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, EngineClosedError) for end in ends), ends


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_rank_that_ends_fails_what_is_in_flight(rank: int, engine: Any) -> None:
    world = TaskWorld()
    async with engine(pp_size=3, world=world, healthy=False) as llm:
        tasks = [asyncio.create_task(llm.complete([n] * 90, greedy(1000))) for n in range(20)]
        await asyncio.sleep(0.05)
        world._tasks[rank].cancel()
        async with asyncio.timeout(1):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, RankLostError) for end in ends), ends
        assert all(end.rank == rank and f"layers {2 * rank}" in str(end.stage) for end in ends), ends
        with pytest.raises(PipelinedError):
            await llm.complete([1], greedy(1))


async def test_opened_again(engine: Any) -> None:
    llm = AsyncLLM(TOY, workers="task", pp_size=2)
    for _ in range(2):
        async with llm:
            right(TOY, [8], (await llm.complete([8], greedy(4))).outputs[0].token_ids, 4)
