"""The HTTP process: an engine whose ranks live elsewhere, behind a web server. Started by the supervisor alone.

It may be killed at any time: the ranks keep their weights, and the next one goes on with them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipelined.errors import PipelinedError
from pipelined.llm import AsyncLLM
from pipelined.rank.process import EXIT_ORPHAN
from pipelined.serving.exit_codes import EXIT_ERROR, EXIT_TERMINATED
from pipelined.serving.logs import set_up_logs
from pipelined.serving.remote_world import RemoteWorld
from pipelined.serving.world_wire import Welcome, Wire, from_supervisor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pipelined.serving.settings import ServerSettings

    Application = Callable[[AsyncLLM, ServerSettings, socket.socket], Awaitable[int]]

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """`python -m pipelined.serving FD`: the connection to the supervisor is open as that file descriptor."""
    if len(argv) != 1 or not argv[0].isdecimal():
        print("pipelined.serving is started by a supervisor; use `pipelined serve`", file=sys.stderr)  # noqa: T201
        return EXIT_ERROR
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(socket.socket(fileno=int(argv[0]))))
    except PipelinedError as error:
        print(f"pipelined: error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return EXIT_ERROR
    except asyncio.CancelledError:
        return EXIT_TERMINATED


async def _serve(connection: socket.socket) -> int:
    wire = await Wire.over(connection)
    welcome = await wire.receive(from_supervisor)
    if not isinstance(welcome, Welcome):
        return EXIT_ORPHAN
    set_up_logs(welcome.log_format)
    world = RemoteWorld(wire, welcome.next_epoch)
    error: BaseException | None = None
    code = 0
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(_listen(world), name="supervisor")
        try:
            engine = AsyncLLM(welcome.config, world=world)
            application: Application = _function(welcome.application)
            code = await application(engine, welcome.settings, socket.socket(fileno=welcome.listener))
        except BaseException as raised:  # noqa: BLE001 - raised below, as it is and not in a group
            error = raised
        listening.cancel()
    wire.close()
    if error is not None:
        raise error
    return code


async def _listen(world: RemoteWorld) -> None:
    """Without a supervisor there are no ranks, and nobody who would end this process."""
    await world.listen()
    os._exit(EXIT_ORPHAN)


def _function(name: str) -> Any:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
