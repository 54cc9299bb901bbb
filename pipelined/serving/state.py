"""What the handlers of one application share."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import Depends
from starlette.requests import Request

from pipelined.serving.gate import Gate
from pipelined.serving.logs import RequestLog
from pipelined.serving.metrics_ranks import RankFeed
from pipelined.serving.metrics_requests import RequestTally
from pipelined.serving.probe import Probe
from pipelined.serving.problems import Problem
from pipelined.serving.profile import Profiler

if TYPE_CHECKING:
    from pipelined.llm import AsyncLLM
    from pipelined.serving.settings import ServerSettings

__all__ = ["ERRORS", "RESPONSES", "Server", "ServerState", "calendar_s"]

_NAME: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"description": "The request is wrong.", "content": {"application/json": {"schema": _ERROR}}},
    "5XX": {"description": "The server cannot.", "content": {"application/json": {"schema": _ERROR}}},
}
"""For the OpenAPI docs."""

RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "One object, or with `stream` events that end with `[DONE]`.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
    **ERRORS,
}
"""For the OpenAPI docs of what generates."""


class ServerState:
    """The engine, the settings, and what is under way.

    Attributes:
        engine: Open while requests come.
        settings: As given.
        gate: What is under way, and how much may be.
        created: When the application was made, in seconds of the calendar.
        probe: Really runs a token.
        tally: Counts what becomes of requests.
        log: Says what becomes of them.
        feed: Asks the ranks what they do.
        profiler: Records it.
        model_names: What clients may call the model.
    """

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.created = calendar_s()
        self.gate = Gate(engine.config.max_running_requests + settings.max_queued_requests)
        self.probe = Probe(engine, settings.probe_timeout_s)
        self.tally = engine.watcher = RequestTally()
        self.log = RequestLog(engine, self.tally)
        self.feed = RankFeed(engine)
        self.profiler = Profiler(engine, self.feed, settings.profile_dir)
        self.model_names = settings.served_model_names or (engine.info.ref,)

    def check_model(self, name: str | None) -> str:
        """The name to report for a request that asked for `name`.

        Raises:
            Problem: It is another model's.
        """
        if name is None or name == "":
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise Problem(
                404, f"the model {name!r} is not served here; served: {known}", param="model", code="model_not_found"
            )
        return name

    def request_id(self, request: Request, prefix: str) -> str:
        """A name for a request: the client's own (`X-Request-Id`), or a fresh one, behind the prefix of its kind."""
        given = request.headers.get("x-request-id", "")
        name = given if _NAME.fullmatch(given) else secrets.token_hex(12)
        return name if name.startswith(prefix) else prefix + name

    def progress(self, request_id: str) -> tuple[int, int] | None:
        """Prompt tokens of a request that are computed, and how many must be; None once it has its first token."""
        mine = [one for one in self.tally.live.values() if one.id == request_id or one.id.startswith(request_id + "-")]
        if not mine or any(one.first_s is not None for one in mine) or not any(one.prefill_done for one in mine):
            return None
        return sum(one.prefill_done for one in mine), sum(one.prefill_total for one in mine)

    async def abort(self, request_id: str) -> None:
        """End everything that the engine does for a request; what it has given stays given."""
        self.gate.abort(request_id)
        for name in (request_id, *(f"{request_id}-{number}" for number in range(self.gate.sequences(request_id)))):
            await self.engine.abort(name)


def calendar_s() -> int:
    """Seconds of the calendar, as API objects carry them."""
    return int(datetime.now(UTC).timestamp())


async def _state(request: Request) -> ServerState:  # a plain function would be called in a thread
    state: ServerState = request.app.state.server
    return state


Server = Annotated[ServerState, Depends(_state)]
"""A handler's parameter of that type is the application's state."""
