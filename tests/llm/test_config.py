"""Settings of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from pipelined.errors import ConfigError
from pipelined.llm import EngineConfig


@pytest.mark.parametrize(
    "name", ["pp_size", "page_size", "max_running_requests", "depth", "context_length", "threads_per_rank"]
)
@pytest.mark.parametrize("value", [0, -3])
def test_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is out of range; expected 1 or more"):
        EngineConfig(model="m", **{name: value})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"step_timeout_s": 0.0}, "step_timeout_s"),
        ({"setup_timeout_s": float("nan")}, "setup_timeout_s"),
        ({"workers": "threads"}, "expected 'process' or 'task'"),
        ({"kv_cache_tokens": 63}, "less than a page of 64"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig(model="m", **settings)


def test_threads_are_shared_out() -> None:
    import os

    cores = len(os.sched_getaffinity(0))
    assert EngineConfig(model="m", pp_size=1).threads == cores
    assert EngineConfig(model="m", pp_size=1000).threads == 1
    assert EngineConfig(model="m", pp_size=2, threads_per_rank=7).threads == 7
