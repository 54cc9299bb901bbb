from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from pipelined.errors import ConfigError
from pipelined.serving.logs import JsonFormatter, RequestLog, TextFormatter, set_up_logs
from pipelined.serving.metrics_requests import Watched

BODY = {"prompt": list(range(1, 200)), "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, message, args, None, extra=extra)


def test_json_is_one_object_a_line() -> None:
    line = JsonFormatter().format(record("two\nlines of %s", "it", request_id="cmpl-1", odd={1, 2}))
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == "two\nlines of it"
    assert found["request_id"] == "cmpl-1"
    assert found["level"] == "INFO"
    assert found["time"].endswith("+00:00")


def test_json_holds_tracebacks() -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        one = record("failed")
        one.exc_info = sys.exc_info()
    found = json.loads(JsonFormatter().format(one))
    assert "boom" in found["traceback"]


def test_text_is_one_line() -> None:
    line = TextFormatter().format(record("a forged\nline of %s", "it"))
    assert line.endswith("INFO a forged line of it")
    assert "\n" not in line


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="json"):
        set_up_logs("jsn")


async def test_requests_are_named_from_end_to_end(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipelined.requests")
    async with serve() as served:
        await served.post("/v1/completions", BODY, headers={"X-Request-Id": "mine-7"})
    (ended,) = [each for each in caplog.records if each.name == "pipelined.requests"]
    assert ended.request_id == "cmpl-mine-7"
    assert (ended.finish_reason, ended.prompt_tokens, ended.completion_tokens) == ("length", 199, 3)


async def test_a_long_prefill_is_told_of_now_and_then(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipelined.requests")
    async with serve() as served:
        log = RequestLog(served.engine, served.state.tally)
        long_ago = Watched("cmpl-long", 1000, 1, served.engine.now() - 60, 1000, prefill_done=320)
        for _ in range(5):
            log.progressed(long_ago)
        assert [each.getMessage() for each in caplog.records] == [
            "request cmpl-long: prefill 320 of 1000 tokens (32 %)"
        ]
