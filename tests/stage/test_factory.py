from __future__ import annotations

import pytest
import torch

from pipelined.clock import MonotonicClock
from pipelined.errors import ConfigError, UnknownSchemeError
from pipelined.stage import DEVICES, make_device
from pipelined.transport import Event


@pytest.mark.parametrize("kind", ["cpu", "emulated", "stream"])
async def test_each_kind_keeps_the_contract(kind: str) -> None:
    device = make_device(kind, MonotonicClock(), threads=1, time_of=lambda _: 0.001)
    launch = device.launch(lambda: {"x": torch.ones(2), "n": 1}, cost=1)
    assert isinstance(launch.event, Event)
    await device.aclose()
    assert launch.event.done()
    assert launch.outputs()["x"].tolist() == [1, 1]
    assert launch.ended_s >= launch.started_s > 0
    assert device.torch_device == torch.device("cpu")


@pytest.mark.parametrize("kind", ["gpu", "cpu:1", "cuda:x", ""])
def test_unknown_kinds_name_the_known(kind: str) -> None:
    with pytest.raises(UnknownSchemeError, match=", ".join(DEVICES)):
        make_device(kind, MonotonicClock())


def test_an_emulated_device_needs_a_time_model() -> None:
    with pytest.raises(ConfigError, match="time_of"):
        make_device("emulated", MonotonicClock())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        make_device("cuda:0", MonotonicClock())
