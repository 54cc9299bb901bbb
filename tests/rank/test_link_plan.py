"""Which transport carries what."""

from __future__ import annotations

import pytest

from pipelined.errors import ConfigError
from pipelined.rank.links import LinkPlan


@pytest.mark.parametrize("uri", ["zmq://", "zmq", "zmq://127.0.0.1", "zmq://127.0.0.1?heartbeat_ms=200"])
def test_zmq_carries_health_too(uri: str) -> None:
    assert LinkPlan.choose(uri, processes=True) == LinkPlan(uri, uri, uri)


def test_health_is_apart_from_what_moves_tensors() -> None:
    assert LinkPlan.choose("shm://", processes=True) == LinkPlan("shm://", "shm://", "zmq://")
    assert LinkPlan.choose("shm://", processes=True, messages="zmq://127.0.0.1").health == "zmq://127.0.0.1"
    assert LinkPlan.choose("memory://", processes=False) == LinkPlan("memory://", "memory://", "memory://")


def test_what_does_not_reach_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="other processes"):
        LinkPlan.choose("memory://", processes=True)
