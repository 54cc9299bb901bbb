"""The GPU device's own logic, with streams and events that stand in for torch's. Nothing here ran on a GPU."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch

from pipelined.clock import MonotonicClock
from pipelined.errors import ConfigError
from pipelined.stage.completion import Completion
from pipelined.stage.cuda import CudaDevice

BUSY_S = 0.004


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.free_s = 0.0


class FakeEvent:
    """Reached when the work recorded before it on its stream has taken its time."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: FakeStream) -> None:
        self.at_s = stream.free_s = max(stream.free_s, time.monotonic())

    def query(self) -> bool:
        return time.monotonic() >= self.at_s

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at_s - self.at_s) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    for name, fake in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return CudaDevice(MonotonicClock())


def kernel(device: Any, value: Any) -> Any:
    """Enqueue some work: returns at once, keeps the stream busy."""
    device.stream.free_s += BUSY_S
    return value


async def test_events_fire_in_order_when_the_stream_gets_there(device: CudaDevice, fired: Any) -> None:
    began_s = time.monotonic()
    launches = [device.launch(lambda n=n: kernel(device, {"n": n})) for n in range(5)]
    assert [launch.outputs()["n"] for launch in launches] == list(range(5))  # known at once
    assert not launches[0].event.done()
    copy = device.to_host(launches[4].outputs(), launches[4].event)
    for launch in launches:
        await fired(launch.event)
        assert launch.ended_s - launch.started_s == pytest.approx(BUSY_S, abs=1e-3)
        assert launch.ended_s <= time.monotonic()
    assert launches[-1].ended_s - began_s == pytest.approx(5 * BUSY_S, abs=3e-3)
    await fired(copy.event)
    assert copy.outputs() == {"n": 4}
    await device.aclose()


async def test_a_launch_waits_for_its_events(device: CudaDevice) -> None:
    gate, ran = Completion(), []
    launch = device.launch(lambda: ran.append(1), after=[gate])
    assert not launch.known()
    gate.fire()
    assert ran == [1]
    await device.aclose()
    assert launch.event.done()


async def test_closing_waits_for_copies_and_errors_pass(device: CudaDevice) -> None:
    bad = device.launch(lambda: 1 // 0)
    launch = device.launch(lambda: kernel(device, {"n": 1}))
    copy = device.to_host(launch.outputs(), launch.event)
    await device.aclose()
    assert copy.event.done()
    with pytest.raises(ZeroDivisionError):
        bad.outputs()


def test_only_gpus_that_exist(device: CudaDevice) -> None:
    with pytest.raises(ConfigError, match="there is no GPU 3"):
        CudaDevice(MonotonicClock(), 3)
