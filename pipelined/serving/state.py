"""What the handlers of one application share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends
from starlette.requests import Request

from pipelined.serving.problems import Problem

if TYPE_CHECKING:
    from pipelined.llm import AsyncLLM
    from pipelined.serving.settings import ServerSettings

__all__ = ["Server", "ServerState"]


class ServerState:
    """The engine, the settings, and what is under way.

    Attributes:
        engine: Open while requests come.
        settings: As given.
        created: When the application was made, in seconds of the calendar.
        draining: No new work is taken any more.
    """

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.created = calendar_s()
        self.draining = False
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


def calendar_s() -> int:
    """Seconds of the calendar, as API objects carry them."""
    return int(datetime.now(UTC).timestamp())


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


Server = Annotated[ServerState, Depends(_state)]
"""A handler's parameter of that type is the application's state."""
