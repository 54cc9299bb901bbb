"""Pipelines of one's own, all ranks in this loop."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_stages import Add, Lives, Pass, RaisesOn, Returns

from pipelined.errors import ConfigError, EngineClosedError, PipelinedError, StageError
from pipelined.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]

_tensors = st.builds(
    lambda dtype, shape, start: (
        (torch.arange(start, start + int(torch.tensor(shape).prod()), 1) % 97).to(dtype).reshape(shape)
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple),
    st.integers(0, 50),
)
_builtins = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_payloads = st.dictionaries(st.text(min_size=1, max_size=6), _tensors | _builtins, max_size=6)


def same(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return isinstance(y, torch.Tensor) and x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
    return type(x) is type(y) and x == y


def alike(xs: dict[str, Any], ys: dict[str, Any]) -> bool:
    return xs.keys() == ys.keys() and all(same(xs[key], ys[key]) for key in xs)


def numbers(count: int) -> Iterator[dict[str, Any]]:
    return ({"n": n, "t": torch.full((3,), n)} for n in range(count))


# ---- values ----


@given(payloads=st.lists(_payloads, min_size=1, max_size=8))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_payload_comes_through(payloads: list[dict[str, Any]], device_kind: str, opened: Any) -> None:
    async def main() -> None:
        async with opened([Pass(), Add(2), Pass(), Add(-2)], device=device_kind) as pipe:
            # A stage adds and another one takes away: what comes out is what went in, up to rounding of small integers.
            outputs = [y async for y in pipe.stream(payloads)]
            expected = [Add(-2).forward(Add(2).forward(payload)) for payload in payloads]
            assert len(outputs) == len(payloads)
            assert all(alike(x, y) for x, y in zip(expected, outputs, strict=True)), (expected, outputs)

    asyncio.run(main())


async def test_up_to_64_tensors_and_no_more(device_kind: str, opened: Any) -> None:
    async with opened([Add(), Add()], device=device_kind) as pipe:
        many = {f"t{i}": torch.full((i,), i) for i in range(64)}
        for _ in range(5):
            y = await pipe.submit(many | {"note": "with builtins"})
            assert all(torch.equal(y[f"t{i}"], many[f"t{i}"] + 2) for i in range(64))
            assert y["note"] == "with builtins"
        with pytest.raises(ConfigError, match="65 tensors"):
            await pipe.submit(many | {"one more": torch.zeros(1)})
        assert (await pipe.submit({"n": 1}))["n"] == 3


@pytest.mark.parametrize(
    "bad",
    [
        {"x": object()},
        {"x": 2**70},
        {"x": [torch.zeros(1)]},
        {0: torch.zeros(1)},
        {1: 2},
        {"": torch.zeros(1)},
        {"x": torch.zeros(2, 2).to_sparse()},
        {"x": torch.zeros(2, device="meta")},
        {"x": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)},
        [torch.zeros(1)],
        None,
        "cycle",
    ],
    ids=lambda bad: "cycle" if isinstance(bad, str) else f"{type(bad).__name__} {str(bad)[:20]}",
)
async def test_what_cannot_travel_fails_alone(bad: Any, opened: Any) -> None:
    """As an input, and as what a stage returns: that input alone fails, and the pipeline goes on."""
    if bad == "cycle":
        loop: list[Any] = []
        loop.append(loop)
        bad = {"x": loop}
    async with opened([Pass(), Returns(bad), Pass()]) as pipe:
        with pytest.raises(ConfigError):
            await pipe.submit(bad)
        first, broken, last = await asyncio.gather(*(pipe.submit({"n": n}) for n in range(3)), return_exceptions=True)
        assert (first, last) == ({"n": 0}, {"n": 2})
        assert isinstance(broken, PipelinedError)
        if not isinstance(bad, dict | list) or "x" in bad:
            assert "rank 1" in str(broken), broken


async def test_strided_and_expanded_tensors(device_kind: str, opened: Any) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    x = {"t": base.t(), "every other": base[:, ::2], "wide": torch.ones(1, 1).expand(50, 40), "scalar": torch.tensor(3)}
    async with opened([Pass(), Pass()], device=device_kind) as pipe:
        y = await pipe.submit(x)
        assert alike(x, y)


async def test_large_tensors(device_kind: str, opened: Any) -> None:
    """Copied in slices, off the loop at the end."""
    xs = [torch.full((3, 1 << 20), float(n)) for n in range(4)]
    async with opened([Add(), Pass(), Add()], device=device_kind) as pipe:
        outputs = [y["x"] async for y in pipe.stream({"x": x} for x in xs)]
        assert [y.unique().tolist() for y in outputs] == [[n + 2.0] for n in range(4)]


async def test_outputs_belong_to_the_caller(opened: Any) -> None:
    """They are no view of memory that the pipeline uses again."""
    async with opened([Pass()]) as pipe:
        outputs = [await pipe.submit({"x": torch.full((1000,), n)}) for n in range(20)]
        assert [y["x"].unique().item() for y in outputs] == list(range(20))
        mine = torch.zeros(4)
        y = await pipe.submit({"x": mine})
        y["x"].fill_(7)
        assert mine.sum() == 0


@pytest.mark.parametrize("device", ["cpu", "emulated"])
async def test_a_stage_that_writes_into_its_input_harms_nobody_else(device: str, opened: Any) -> None:
    """Inputs are read-only by contract; where nothing checks it, the damage stays within the input."""

    def scribble(x: dict[str, Any]) -> dict[str, Any]:
        x["x"].add_(1)
        return {"x": x["x"] * 10}

    async with opened([Pass(), scribble, Pass()], device=device) as pipe:
        mine = [torch.full((5,), n) for n in range(10)]
        outputs = [y["x"] async for y in pipe.stream({"x": x} for x in mine)]
        assert [y.unique().item() for y in outputs] == [(n + 1) * 10 for n in range(10)]
        assert [x.unique().item() for x in mine] == list(range(10))


# ---- order and bounds ----


async def test_order(device_kind: str, opened: Any) -> None:
    async with opened([Add(), Pass(), Add()], device=device_kind) as pipe:
        assert [y["n"] async for y in pipe.stream(numbers(60))] == [n + 2 for n in range(60)]
        outputs = await asyncio.gather(*(pipe.submit(x) for x in numbers(60)))
        assert [y["n"] for y in outputs] == [n + 2 for n in range(60)]
        assert [y["t"][0].item() for y in outputs] == [n + 2 for n in range(60)]


async def test_streams_and_submits_at_the_same_time(device_kind: str, opened: Any) -> None:
    async with opened([Add(), Add()], device=device_kind) as pipe:

        async def stream(base: int) -> list[int]:
            return [y["n"] async for y in pipe.stream({"n": base + n} for n in range(30))]

        jobs: list[Any] = [stream(1000), stream(2000), *(pipe.submit({"n": n}) for n in range(40))]
        one, two, *rest = await asyncio.gather(*jobs)
        assert one == [1002 + n for n in range(30)]
        assert two == [2002 + n for n in range(30)]
        assert [y["n"] for y in rest] == [n + 2 for n in range(40)]


async def test_asynchronous_inputs(opened: Any) -> None:
    async def inputs() -> AsyncIterator[dict[str, Any]]:
        for x in numbers(25):
            await asyncio.sleep(0.001 if x["n"] % 5 == 0 else 0)
            yield x

    async with opened([Add(), Add()]) as pipe:
        assert [y["n"] async for y in pipe.stream(inputs())] == [n + 2 for n in range(25)]


async def test_no_inputs(opened: Any) -> None:
    async with opened([Add()]) as pipe:
        assert [y async for y in pipe.stream([])] == []


@pytest.mark.parametrize("depth", [1, 2, 5])
async def test_an_endless_input_is_consumed_only_a_window_ahead(depth: int, opened: Any) -> None:
    taken = 0

    def endless() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for taken in itertools.count(1):
            yield {"n": taken}

    async with opened([Pass(), Pass()], depth=depth) as pipe:
        stream = pipe.stream(endless())
        most_ahead = 0
        for got in range(1, 41):
            assert (await anext(stream))["n"] == got
            await asyncio.sleep(0.002 if got % 10 == 0 else 0)
            most_ahead = max(most_ahead, taken - got)
        await stream.aclose()
        assert 1 <= most_ahead <= 2 * (2 + depth) + 1


async def test_stages_work_at_the_same_time(opened: Any) -> None:
    """Four stages of 20 ms and 12 inputs: 300 ms in step, 960 ms one after the other."""
    async with opened([Add(seconds=0.02) for _ in range(4)], device="emulated") as pipe:
        loop = asyncio.get_running_loop()
        # The emulated device runs the work inline, so it must not really sleep.
        for stage in pipe._stages:
            stage.user.forward_s, stage.user.seconds = stage.user.seconds, 0.0
            stage.user.cost = lambda _: 0.02
        started_s = loop.time()
        assert len([y async for y in pipe.stream(numbers(12))]) == 12
        assert 0.3 <= loop.time() - started_s < 0.6


# ---- ends of streams ----


async def test_a_stream_closed_early(device_kind: str, opened: Any) -> None:
    async with opened([Add(), Add()], device=device_kind) as pipe:
        for stop_after in (0, 1, 3):
            stream = pipe.stream(numbers(1000))
            for n in range(stop_after):
                assert (await anext(stream))["n"] == n + 2
            await stream.aclose()
            assert (await pipe.submit({"n": 5}))["n"] == 7


async def test_a_stream_whose_consumer_is_cancelled(opened: Any) -> None:
    async with opened([Add(), Add(seconds=0.005)]) as pipe:
        for after in range(0, 30, 3):

            async def consume() -> None:
                async for _ in pipe.stream(numbers(1000)):
                    pass

            task = asyncio.create_task(consume())
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await pipe.submit({"n": 5}))["n"] == 7


async def test_inputs_that_raise(opened: Any) -> None:
    def inputs() -> Iterator[dict[str, Any]]:
        yield from numbers(5)
        raise LookupError("no more pages in the book")

    async with opened([Add(), Add()]) as pipe:
        got = []
        with pytest.raises(LookupError, match="no more pages"):
            async for y in pipe.stream(inputs()):
                got.append(y["n"])
        assert got == [2, 3, 4, 5, 6]
        assert (await pipe.submit({"n": 5}))["n"] == 7


async def test_return_exceptions(device_kind: str, opened: Any) -> None:
    """Errors in their places: of stages, and of inputs that cannot travel."""
    xs: list[dict[str, Any]] = [{"n": n} for n in range(10)]
    xs[7] = {"n": object()}
    async with opened([Pass(), RaisesOn(3, 4), Pass()], device=device_kind) as pipe:
        outputs = [y async for y in pipe.stream(xs, return_exceptions=True)]
        assert [y["n"] for y in outputs if isinstance(y, dict)] == [0, 1, 2, 5, 6, 8, 9]
        assert [type(y) for y in outputs if not isinstance(y, dict)] == [StageError, StageError, ConfigError]
        assert isinstance(outputs[7], ConfigError)
        got = []
        with pytest.raises(StageError):
            async for y in pipe.stream(xs):
                got.append(y["n"])
        assert got == [0, 1, 2]


# ---- failures ----


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_an_exception_fails_that_input_alone(rank: int, device_kind: str, opened: Any) -> None:
    stages: list[Any] = [Pass(), Pass(), Pass()]
    stages[rank] = RaisesOn(2, 5)
    async with opened(stages, device=device_kind) as pipe:
        jobs = (pipe.submit({"n": n, "t": torch.ones(2)}) for n in range(8))
        outputs = await asyncio.gather(*jobs, return_exceptions=True)
        for n, y in enumerate(outputs):
            if n not in (2, 5):
                assert y["n"] == n
                continue
            assert isinstance(y, StageError)
            assert (y.rank, y.stage, y.step) == (rank, "picky", n)
            assert f"I do not like {n}" in str(y)
            assert f"rank {rank}, stage picky, step {n}" in str(y)
            assert "pipeline_stages.py" in y.remote_traceback
            assert "ValueError: I do not like" in y.remote_traceback
        stats = await pipe.stats()
        assert [of_rank["steps_void"] for of_rank in stats.values()] == [0] * rank + [2] * (3 - rank)


async def test_a_stage_that_fails_is_not_called_again_for_void_steps(opened: Any) -> None:
    after = RaisesOn()
    async with opened([RaisesOn(1), after]) as pipe:
        await asyncio.gather(*(pipe.submit({"n": n}) for n in range(3)), return_exceptions=True)
        assert after.seen == [0, 2]


async def test_a_cost_that_raises_or_makes_no_sense(opened: Any) -> None:
    class Costly(Pass):
        def cost(self, input_id: int) -> Any:
            return {0: 1e-4, 1: "much", 2: -1.0, 3: float("nan"), 4: None}.get(input_id, 1e-4)

    async with opened([Pass(), Costly()], device="emulated") as pipe:
        outputs = await asyncio.gather(*(pipe.submit({"n": n}) for n in range(6)), return_exceptions=True)
        assert [y["n"] for y in outputs if isinstance(y, dict)] == [0, 4, 5]
        assert all("rank 1" in str(y) for y in outputs[1:4]), outputs


# ---- cancelling ----


async def test_a_cancelled_input_is_skipped(opened: Any) -> None:
    """Only by stages that have not seen it; here the first one is busy with another input."""
    slow, last = Add(0, seconds=0.03), RaisesOn()
    async with opened([slow, last]) as pipe:
        tasks = [asyncio.create_task(pipe.submit({"n": n})) for n in range(12)]
        await asyncio.sleep(0.01)
        for task in tasks[6:]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [y["n"] for y in done[:6]] == list(range(6))
        assert all(isinstance(y, asyncio.CancelledError) for y in done[6:])
        assert (await pipe.submit({"n": 99}))["n"] == 99
        assert last.seen == [0, 1, 2, 3, 4, 5, 99]


@pytest.mark.parametrize("seed", range(6))
async def test_random_cancels(seed: int, device_kind: str, opened: Any) -> None:
    import random

    dice = random.Random(seed)
    async with opened([Add(), Pass(), Add()], device=device_kind) as pipe:
        tasks = {}
        for n in range(60):
            # Some of many tensors, so that posting has to wait for credits.
            x = {"n": n} | {f"t{i}": torch.full((2,), n) for i in range(dice.choice([0, 1, 60]))}
            tasks[n] = asyncio.create_task(pipe.submit(x))
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            if dice.random() < 0.4:
                tasks[dice.randrange(n + 1)].cancel()
        for n, task in tasks.items():
            try:
                y = await task
            except asyncio.CancelledError:
                continue
            assert y["n"] == n + 2
            assert all(value.tolist() == [n + 2] * 2 for key, value in y.items() if key != "n")


# ---- life ----


async def test_the_life_of_a_stage(opened: Any) -> None:
    stages = [Lives(), Lives()]
    async with opened(stages) as pipe:
        await pipe.submit({})
    assert [stage.log for stage in stages] == [[f"setup {rank}/2", "forward", "teardown"] for rank in range(2)]


async def test_opened_again(opened: Any) -> None:
    stages = [Lives(), Add()]
    pipe = Pipeline(stages)
    for _ in range(3):
        async with pipe:
            assert (await pipe.submit({"n": 1}))["n"] == 2
    assert "closed" in repr(pipe)


async def test_functions_are_stages_too(opened: Any) -> None:
    async with opened([lambda x: {"y": x["x"] * 2}, Add()]) as pipe:
        assert (await pipe.submit({"x": 20})) == {"y": 41}


@pytest.mark.parametrize(
    ("stages", "settings", "match"),
    [
        ([], {}, "at least one stage"),
        ([Add], {}, "is a class"),
        ([3], {}, "is no stage"),
        ([Add()], {"workers": "thread"}, "workers='thread'"),
        ([Add()], {"depth": 0}, "depth=0"),
        ([Add()], {"transport": "carrier-pigeon://"}, "carrier-pigeon"),
        ([Add()], {"workers": "process", "transport": "memory://"}, "does not reach other processes"),
    ],
)
def test_what_cannot_be_is_said_at_once(stages: list[Any], settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Pipeline(stages, **settings)


async def test_an_unknown_device_is_an_error(opened: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean 'cpu'"):
        async with opened([Add()], device="cpuu"):
            pass


async def test_use_outside() -> None:
    pipe = Pipeline([Add()])
    with pytest.raises(ConfigError, match="not open"):
        await pipe.submit({})
    async with pipe:
        pass
    with pytest.raises(ConfigError, match="not open"):
        await pipe.submit({})
    with pytest.raises(ConfigError, match="not open"):
        async for _ in pipe.stream([{}]):
            pass


async def test_closing_with_work_in_flight(opened: Any) -> None:
    """Whoever still waits, whatever for, gets an error that says so; nobody waits for ever."""
    async with opened([Add(seconds=0.02), Add(seconds=0.02)], healthy=False) as pipe:
        many = {f"t{i}": torch.zeros(2) for i in range(60)}

        async def consume() -> None:
            async for _ in pipe.stream(numbers(1000)):
                pass

        waits = [asyncio.create_task(pipe.submit(many)) for _ in range(30)]
        waits.append(asyncio.create_task(consume()))
        await asyncio.sleep(0.03)
    async with asyncio.timeout(5):
        ends = await asyncio.gather(*waits, return_exceptions=True)
    assert any(isinstance(end, EngineClosedError) for end in ends)
    assert all(isinstance(end, EngineClosedError | dict) for end in ends), ends


async def test_the_trace_tells_what_was_done(opened: Any) -> None:
    async with opened([Add(), Add()]) as pipe:
        await pipe.submit({"n": 1})
        spans = await pipe.trace()
        assert sorted(spans) == [0, 1]
        for of_rank in spans.values():
            assert {("device", "forward"), ("schedule", "prepare")} <= {(span.track, span.name) for span in of_rank}
        assert all(not any(span.name == "forward" for span in of_rank) for of_rank in (await pipe.trace()).values())


def test_on_either_loop(run: Callable[[Any], Any]) -> None:
    async def main() -> list[int]:
        async with Pipeline([Add(), Add()]) as pipe:
            return [y["n"] async for y in pipe.stream(numbers(10))]

    assert run(main()) == [n + 2 for n in range(10)]
