from __future__ import annotations

import msgspec
import pytest

from pipelined.errors import ConfigError
from pipelined.scheduler import Scheduler, SchedulerConfig, from_json


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunked_prefill_size": 0}, "chunked_prefill_size=0 .* multiple of page_size=64"),
        ({"chunked_prefill_size": -1}, "chunked_prefill_size=-1 .* multiple of page_size=64"),
        ({"chunked_prefill_size": 100}, "not a multiple of page_size=64; take 64 or 128"),
        ({"chunked_prefill_size": 10}, "take 64 or 128"),
        ({"page_size": 0}, "page_size=0 is out of range; expected 1 or more"),
        ({"pp_size": 0}, "pp_size=0"),
        ({"max_running_requests": 0}, "max_running_requests=0"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"context_length": 0}, "context_length=0"),
        ({"context_length": 1}, "expected 2 or more"),
    ],
)
def test_wrong_settings_say_what_would_be_right(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**{"context_length": 100, "vocab_size": 10, **wrong})  # type: ignore[arg-type]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown chunk policy 'fluid'"):
        Scheduler(SchedulerConfig(context_length=100, vocab_size=10, chunk_policy="fluid"))


def test_a_scheduler_from_json() -> None:
    config = SchedulerConfig(context_length=100, vocab_size=10, pp_size=3)
    assert from_json(msgspec.json.encode(config).decode()).config == config
    with pytest.raises(ConfigError, match="unknown scheduler setting 'page_sise'; did you mean 'page_size'"):
        from_json('{"context_length": 100, "vocab_size": 10, "page_sise": 4}')
    with pytest.raises(ConfigError, match="vocab_size=0"):
        from_json('{"context_length": 100, "vocab_size": 0}')
