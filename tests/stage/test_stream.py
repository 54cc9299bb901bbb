"""The stream device gives right results to a careful runtime, and garbage to a careless one.

The careless ones below are mutations of the careful one: each leaves out one synchronisation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.clock import LoopClock, MonotonicClock, virtual
from pipelined.errors import ConfigError
from pipelined.stage.completion import Completion
from pipelined.stage.stream import StreamDevice

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def device() -> StreamDevice:
    return StreamDevice(MonotonicClock(), delay_s=0.002)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_is_garbage_until_its_event(run: Any, fired: Any, dtype: torch.dtype) -> None:
    async def main() -> None:
        stream, x = device(), torch.tensor([[1, 0], [0, 1]]).to(dtype)
        launch = stream.launch(lambda: {"x": x.clone(), "n": 5}, reads=[x])
        out = launch.outputs()
        assert out["n"] == 5
        assert not launch.event.done()
        assert all(a != b for a, b in zip(out["x"].flatten().tolist(), x.flatten().tolist(), strict=True))
        await fired(launch.event)
        assert bits(out["x"]) == bits(x)
        assert stream.faults == []
        await stream.aclose()

    run(main())


# ---- a small runtime, with its synchronisations one by one ----


class Hop:
    """Receive into a buffer, compute, send, copy to the host, give the buffer back."""

    def __init__(self, *, without: str = "") -> None:
        self.without = without

    async def after(self, event: Any, why: str) -> None:
        if why == self.without:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        event.add_done_callback(lambda: future.set_result(None))
        await future

    async def __call__(self, stream: StreamDevice, work: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
        received = torch.arange(1.0, 9.0)
        launch = stream.launch(lambda: {"x": work(received)}, reads=[received])
        early = Completion(done=True)
        copy = stream.to_host(launch.outputs(), early if self.without == "copy after" else launch.event)
        await self.after(launch.event, "send after")
        sent = launch.outputs()["x"].clone()  # what a link that copies would put on the wire
        await self.after(launch.event, "release after")
        stream.retire([received])
        await self.after(copy.event, "read after")
        host = copy.outputs()["x"].clone()
        await Hop().after(copy.event, "")
        return sent, host


WORKS = {
    "fresh": lambda x: x * 2,
    "pass-through": lambda x: x,
    "view": lambda x: x[2:],
    "expanded": lambda x: x[:1].expand(4),
    "expanded, fresh": lambda x: (x[:1] + 1).expand(4),
    "reversed": lambda x: x.flip(0).view(2, 4).t(),
}


@pytest.mark.parametrize("work", WORKS)
def test_a_careful_runtime_gets_right_results(run: Any, work: str) -> None:
    async def main() -> None:
        stream = device()
        expected = WORKS[work](torch.arange(1.0, 9.0))
        for _ in range(3):
            sent, host = await Hop()(stream, WORKS[work])
            assert torch.equal(sent, expected)
            assert torch.equal(host, expected)
        assert stream.faults == []
        await stream.aclose()

    run(main())


@pytest.mark.parametrize("work", ["fresh", "pass-through", "view"])
@pytest.mark.parametrize("without", ["send after", "copy after", "read after"])
def test_leaving_out_a_synchronisation_reads_garbage(run: Any, without: str, work: str) -> None:
    async def main() -> None:
        stream = device()
        sent, host = await Hop(without=without)(stream, WORKS[work])
        bad = sent if without == "send after" else host
        assert bad.isnan().all()
        await stream.aclose()

    run(main())


def test_releasing_an_input_early_spoils_the_outputs(run: Any, fired: Any) -> None:
    async def main() -> None:
        stream, received = device(), torch.ones(4)
        launch = stream.launch(lambda: received + 1, reads=[received])
        stream.retire([received])
        copy = stream.to_host({"x": launch.outputs()}, launch.event)
        await fired(copy.event)
        assert launch.outputs().isnan().all()
        assert copy.outputs()["x"].isnan().all()
        assert stream.faults == ["an input of stream#1 changed before its event"]
        await stream.aclose()

    run(main())


def test_the_next_receive_into_the_same_buffer_too_early_is_seen(run: Any, fired: Any) -> None:
    async def main() -> None:
        stream, buffer = device(), torch.ones(4)
        launch = stream.launch(lambda: buffer + 1, reads=[buffer])
        buffer.copy_(torch.full((4,), 9.0))
        await fired(launch.event)
        assert launch.outputs().isnan().all()
        await stream.aclose()

    run(main())


def test_reusing_an_output_before_its_copy_is_through_is_seen(run: Any, fired: Any) -> None:
    async def main() -> None:
        stream = device()
        launch = stream.launch(lambda: {"x": torch.ones(4)})
        copy = stream.to_host(launch.outputs(), launch.event)
        launch.event.add_done_callback(lambda: launch.outputs()["x"].zero_())
        await fired(copy.event)
        assert copy.outputs()["x"].isnan().all()
        assert len(stream.faults) == 1
        await stream.aclose()

    run(main())


def test_writing_into_an_output_early_is_overwritten_by_the_device(run: Any, fired: Any) -> None:
    async def main() -> None:
        stream = device()
        launch = stream.launch(lambda: torch.ones(4))
        launch.outputs().zero_()
        await fired(launch.event)
        assert launch.outputs().tolist() == [1, 1, 1, 1]
        assert stream.faults == ["an output of stream#1 was written to before its event"]
        await stream.aclose()

    run(main())


def test_a_retired_buffer_reads_as_garbage() -> None:
    async def main() -> None:
        stream, tensor = device(), torch.ones(3)
        stream.retire([tensor])
        assert tensor.isnan().all()
        await stream.aclose()

    asyncio.run(main())


def test_work_sees_what_earlier_work_on_the_stream_left(run: Any, fired: Any) -> None:
    """A kernel may read what the kernel before it wrote, without any event."""

    async def main() -> None:
        stream = device()
        first = stream.launch(lambda: torch.ones(3))
        second = stream.launch(lambda: first.outputs() + 1)
        assert first.outputs().isnan().all()
        await fired(second.event)
        assert first.outputs().tolist() == [1, 1, 1]
        assert second.outputs().tolist() == [2, 2, 2]
        assert stream.faults == []
        await stream.aclose()

    run(main())


def test_a_stage_that_overwrites_what_it_gave_away_is_named(run: Any, fired: Any) -> None:
    async def main() -> None:
        stream, kept = device(), torch.zeros(2)
        launches = [stream.launch(lambda: kept.add_(1)) for _ in range(2)]
        seen: list[bool] = []
        launches[0].event.add_done_callback(lambda: seen.append(bool(kept.isnan().all())))
        await fired(launches[1].event)
        assert seen == [True]  # whoever read the first output got what the second had left there
        assert kept.tolist() == [2, 2]
        assert stream.faults == ["stream#2 wrote into an output of stream#1 before its event"]
        await stream.aclose()

    run(main())


def test_outputs_that_share_memory_come_out_right(run: Any, fired: Any) -> None:
    async def main() -> None:
        stream, whole = device(), torch.arange(6.0)
        launch = stream.launch(lambda: {"whole": whole, "part": whole[2:4], "again": [whole]})
        await fired(launch.event)
        assert launch.outputs()["whole"].tolist() == [0, 1, 2, 3, 4, 5]
        assert launch.outputs()["part"].tolist() == [2, 3]
        assert launch.outputs()["again"][0] is whole
        assert stream.faults == []
        await stream.aclose()

    run(main())


def test_an_output_keeps_its_memory_unless_it_is_an_inputs(run: Any) -> None:
    """So that a lease, computed into, is what is sent."""

    async def main() -> None:
        stream, arena = device(), torch.zeros(8)
        received, lease = arena[:4], arena[4:]
        launch = stream.launch(lambda: lease.copy_(received + 1), reads=[received])
        assert launch.outputs().data_ptr() == lease.data_ptr()
        alias = stream.launch(lambda: received.view(2, 2), reads=[received])
        assert alias.outputs().data_ptr() != received.data_ptr()
        await stream.aclose()
        assert lease.tolist() == [1, 1, 1, 1]
        assert stream.faults == []

    run(main())


def test_errors_pass_through(run: Any, fired: Any) -> None:
    async def main() -> None:
        stream = device()
        bad, good = stream.launch(lambda: 1 // 0), stream.launch(lambda: torch.ones(1))
        await fired(good.event)
        with pytest.raises(ZeroDivisionError):
            bad.outputs()
        assert good.outputs().item() == 1
        await stream.aclose()

    run(main())


def test_inference_tensors_and_empty_ones_work(run: Any, fired: Any) -> None:
    async def main() -> None:
        stream = device()

        def work() -> dict[str, torch.Tensor]:
            with torch.inference_mode():
                return {"x": torch.ones(2), "empty": torch.empty(0, 3), "scalar": torch.tensor(4)}

        launch = stream.launch(work)
        copy = stream.to_host(launch.outputs(), launch.event)
        await fired(copy.event)
        assert copy.outputs()["x"].tolist() == [1, 1]
        assert copy.outputs()["empty"].shape == (0, 3)
        assert copy.outputs()["scalar"].item() == 4
        await stream.aclose()

    run(main())


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_any_chain_of_launches_equals_running_it_in_order(plan: list[tuple[int, bool]]) -> None:
    """Launches read any earlier output, wait for its event or not, as kernels of one stream may."""

    async def main() -> None:
        stream = StreamDevice(MonotonicClock(), delay_s=1e-5)
        launches: list[Any] = []
        values: list[float] = []
        for n, (back, pause) in enumerate(plan):
            source = n - 1 - back
            values.append((values[source] if source >= 0 else 0.0) + n)
            read = launches[source] if source >= 0 else None
            launches.append(stream.launch(lambda read=read, n=n: (read.outputs() if read else torch.zeros(2)) + n))
            if pause:
                await asyncio.sleep(0)
        await stream.aclose()
        assert [launch.outputs().tolist() for launch in launches] == [[value] * 2 for value in values]
        assert stream.faults == []

    asyncio.run(main())


@pytest.mark.parametrize("seed", [0, 1])
def test_in_virtual_time_it_takes_the_time_of_its_model(fired: Any, seed: int) -> None:
    async def main() -> None:
        stream = StreamDevice(LoopClock(), delay_s=0.0, time_of=lambda cost: cost)
        launches = [stream.launch(lambda n=n: torch.full((2,), n), cost=0.5) for n in range(4)]
        at_once = stream.launch(lambda: torch.ones(1))  # no cost: the delay, here none
        copy = stream.to_host({"x": launches[3].outputs()}, launches[3].event)
        await fired(copy.event)
        assert asyncio.get_running_loop().time() == 2.0
        assert [launch.ended_s for launch in launches] == [0.5, 1.0, 1.5, 2.0]
        assert [launch.outputs().tolist() for launch in launches] == [[n, n] for n in range(4)]
        assert copy.outputs()["x"].tolist() == [3, 3]
        assert at_once.event.done()
        await stream.aclose()

    virtual.run(main(), seed=seed)


def test_even_without_delay_no_event_fires_within_the_launch(run: Any, fired: Any) -> None:
    async def main() -> None:
        stream = StreamDevice(MonotonicClock(), delay_s=0.0)
        launch = stream.launch(lambda: torch.ones(1))
        assert not launch.event.done()
        assert launch.outputs().isnan().all()
        await fired(launch.event)
        assert launch.outputs().item() == 1
        await stream.aclose()

    run(main())


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(ConfigError, match="delay_s"):
        StreamDevice(MonotonicClock(), delay_s=-1)
