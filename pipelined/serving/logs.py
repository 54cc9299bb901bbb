"""Logs: one line an event, as text or as JSON, on standard error; and what becomes of each request, as such lines.

What an event is about stands beside its message (`extra={"request_id": ...}`) and becomes a field of the JSON.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipelined.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pipelined.llm import AsyncLLM
    from pipelined.serving.metrics_requests import RequestTally, Watched

__all__ = ["LOG_FORMATS", "JsonFormatter", "RequestLog", "TextFormatter", "set_up_logs"]

LOG_FORMATS: Final = ("text", "json")

_PLAIN: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_EVERY_S: Final = 2.0

logger = logging.getLogger("pipelined.requests")


class TextFormatter(logging.Formatter):
    """For people: a line an event, whatever its message contains; a traceback follows in lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        record.message = " ".join(record.message.splitlines())
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """For machines: one JSON object a line, tracebacks inside it."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **{name: value for name, value in record.__dict__.items() if name not in _PLAIN},
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(found, enc_hook=repr).decode()


def set_up_logs(log_format: str = "text") -> None:
    """Log to standard error, in one of `LOG_FORMATS`. Called by a process's main function, never by an import.

    Raises:
        ConfigError: There is no such format.
    """
    if log_format not in LOG_FORMATS:
        raise ConfigError(f"unknown log format {log_format!r}{nearest(log_format, LOG_FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


class RequestLog:
    """Says how far long prompts are, every other second, and how each request ended."""

    def __init__(self, engine: AsyncLLM, tally: RequestTally) -> None:
        self._engine = engine
        self._told_s: dict[str, float] = {}
        tally.on_progress, tally.on_end = self.progressed, self.ended

    def progressed(self, watched: Watched) -> None:
        """A part of its prompt has been computed."""
        now_s = self._engine.now()
        done, total = watched.prefill_done, watched.prefill_total
        if done >= total or now_s - self._told_s.get(watched.id, watched.arrived_s) < _EVERY_S:
            return
        self._told_s[watched.id] = now_s
        logger.info(
            "request %s: prefill %d of %d tokens (%d %%)",
            watched.id,
            done,
            total,
            100 * done // total,
            extra={"request_id": watched.id, "prefill_done": done, "prefill_total": total},
        )

    def ended(self, watched: Watched, reason: str) -> None:
        """It is over."""
        self._told_s.pop(watched.id, None)
        took_s = self._engine.now() - watched.arrived_s
        ttft_s = None if watched.first_s is None else watched.first_s - watched.arrived_s
        logger.info(
            "request %s: %s after %.3f s; %d tokens in (%d cached), %d out, the first after %s",
            watched.id,
            reason,
            took_s,
            watched.prompt_tokens,
            watched.cached_tokens,
            watched.tokens,
            "–" if ttft_s is None else f"{ttft_s:.3f} s",
            extra={
                "request_id": watched.id,
                "finish_reason": reason,
                "prompt_tokens": watched.prompt_tokens,
                "cached_tokens": watched.cached_tokens,
                "completion_tokens": watched.tokens,
                "ttft_s": ttft_s,
                "e2e_s": took_s,
            },
        )
