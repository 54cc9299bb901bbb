"""Removing any one synchronisation of a rank makes a pipeline wrong on the device that completes later.

Each mutation is shown to be harmless where everything is done at once, so that it is the order that the stream device
finds missing, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_stages import Add, Pass

from pipelined.errors import PipelinedError
from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.models.toy import reference_tokens
from pipelined.pipeline import Pipeline, TaskWorld
from pipelined.rank import commit, flight, launch, results
from pipelined.stage.cpu import CpuDevice
from pipelined.stage.poison import poison
from pipelined.stage.stream import StreamDevice
from pipelined.transport import tensor_lane

TOY = "toy://?layers=4&vocab=997&hidden=4"

Mutate = Callable[[pytest.MonkeyPatch], None]


class Watched(TaskWorld):
    """A world whose stream devices can be asked what they had to complain about."""

    def __init__(self) -> None:
        self.devices: list[StreamDevice] = []
        super().__init__(device=self._make)

    def _make(self, rank: int, clock: Any) -> StreamDevice:
        self.devices.append(StreamDevice(clock, 1e-3))
        return self.devices[-1]

    @property
    def faults(self) -> list[str]:
        return [fault for device in self.devices for fault in device.faults]


async def right_results() -> bool:
    """Whether a custom pipeline and the engine, on stream devices, give what they should."""
    world = Watched()
    async with Pipeline([Add(), Pass(), Add(), Pass()], world=world, step_timeout_s=1) as pipe:
        xs = [{"a": torch.full((40,), float(n)), "b": torch.full((3,), n)} for n in range(1, 25)]
        outputs = [y async for y in pipe.stream(xs)]
        good = all(
            torch.equal(y["a"], x["a"] + 2) and torch.equal(y["b"], x["b"] + 2)
            for x, y in zip(xs, outputs, strict=True)
        )
    engine_world = Watched()
    settings: dict[str, Any] = {"pp_size": 2, "page_size": 4, "chunked_prefill_size": 16, "step_timeout_s": 1}
    async with AsyncLLM(TOY, world=engine_world, **settings) as llm:
        prompts = [[n] * 40 for n in range(1, 6)]
        params = SamplingParams(temperature=0, max_tokens=6)
        answers = await asyncio.gather(*(llm.complete(prompt, params) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            good = good and answer.outputs[0].token_ids == reference_tokens(TOY, prompt, 6)
    return good and not world.faults and not engine_world.faults


def sends_without_waiting_for_the_launch(patch: pytest.MonkeyPatch) -> None:
    """`post_send` without `after`."""
    post_send = tensor_lane.TensorLane.post_send
    patch.setattr(
        tensor_lane.TensorLane, "post_send", lambda self, tensor, header, *, after=None: post_send(self, tensor, header)
    )


def releases_inputs_before_the_launch_has_read_them(patch: pytest.MonkeyPatch) -> None:
    """The hold of the launch is let go when it is launched, and nothing else holds the buffers."""
    launched = launch.Launcher._launch

    def early(self: Any, of: flight.Flight) -> None:
        launched(self, of)
        received, of.received = of.received, []
        self._core.device.retire([frame.tensor for frame in received])
        for frame in received:
            frame.release()

    patch.setattr(launch.Launcher, "_launch", early)


def reports_before_the_launch_has_completed(patch: pytest.MonkeyPatch) -> None:
    """The results coroutine does not wait for the event, and so reads the host copy early as well."""

    async def at_once(event: Any) -> None:
        return None

    patch.setattr(results, "fired", at_once)


def collects_before_the_host_copy_is_there(patch: pytest.MonkeyPatch) -> None:
    """Only the wait for the copy is gone."""
    fired, waits = results.fired, {"n": 0}
    collect = results.Results._collect

    async def collecting(self: Any, of: Any) -> Any:
        async def at_once(event: Any) -> None:
            waits["n"] += 1

        results.fired = at_once  # type: ignore[assignment]
        try:
            return await collect(self, of)
        finally:
            results.fired = fired

    patch.setattr(results.Results, "_collect", collecting)


def copies_to_the_host_before_the_launch_has_completed(patch: pytest.MonkeyPatch) -> None:
    """`to_host` ordered after nothing."""

    class Done:
        def done(self) -> bool:
            return True

        def add_done_callback(self, callback: Callable[[], None]) -> None:
            callback()

    to_host = StreamDevice.to_host
    patch.setattr(StreamDevice, "to_host", lambda self, outputs, after: to_host(self, outputs, Done()))
    wait = results.fired

    async def only_copies(event: Any) -> None:
        # The results coroutine waits for the launch first, which would order them as well.
        if only_copies.skip:
            only_copies.skip = False
            return
        only_copies.skip = True
        await wait(event)

    only_copies.skip = True
    patch.setattr(results, "fired", only_copies)


def launches_without_its_inputs(patch: pytest.MonkeyPatch) -> None:
    """The launch coroutine takes what has arrived so far."""
    inputs = launch.Launcher._inputs

    async def hasty(self: Any, of: flight.Flight) -> None:
        if not of.transfers or any(not transfer.done() for transfer in of.transfers):
            return
        await inputs(self, of)

    patch.setattr(launch.Launcher, "_inputs", hasty)


MUTATIONS: list[Mutate] = [
    sends_without_waiting_for_the_launch,
    releases_inputs_before_the_launch_has_read_them,
    reports_before_the_launch_has_completed,
    collects_before_the_host_copy_is_there,
    copies_to_the_host_before_the_launch_has_completed,
    launches_without_its_inputs,
]


async def test_as_it_is_everything_is_right() -> None:
    assert await right_results()


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
async def test_without_one_synchronisation_something_is_wrong(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        mutate(patch)
        try:
            async with asyncio.timeout(20):
                good = await right_results()
        except (PipelinedError, BaseExceptionGroup, TimeoutError, KeyError, RuntimeError):
            good = False
    assert not good
    assert await right_results()


# ---- a stream clones what it passes through, so that this one needs another device ----


class PoisonsWhatIsRetired(CpuDevice):
    """A CPU on which memory that was given back reads as garbage."""

    def retire(self, tensors: Any) -> None:
        for tensor in tensors:
            poison(tensor)


async def large_tensors_pass_through() -> bool:
    """Sends that take several slices, of memory that belongs to the link before."""
    world = TaskWorld(device=lambda rank, clock: PoisonsWhatIsRetired(clock, 1))
    async with Pipeline([Pass(), Pass(), Pass()], world=world) as pipe:
        xs = [torch.full((3 << 20,), float(n)) for n in range(1, 6)]
        outputs = [y["x"] async for y in pipe.stream({"x": x} for x in xs)]
        return all(torch.equal(x, y) for x, y in zip(xs, outputs, strict=True))


async def test_a_passed_through_input_is_held_until_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await large_tensors_pass_through()
    post, sent = commit.Committer._post, commit.Committer._sent

    async def post_and_let_go(self: Any, of: flight.Flight, header: Any, tensor: Any) -> None:
        await post(self, of, header, tensor)
        of.let_go(self._core.device)

    def sent_without_a_hold(self: Any, of: flight.Flight, *args: Any) -> None:
        of.hold()
        sent(self, of, *args)

    with monkeypatch.context() as patch:
        patch.setattr(commit.Committer, "_post", post_and_let_go)
        patch.setattr(commit.Committer, "_sent", sent_without_a_hold)
        assert not await large_tensors_pass_through()
