"""`serve`'s main process: keeps the ranks and the HTTP process, and starts anew whichever of them is lost.

The ranks are children of this process, so that they outlive the HTTP process; that one decides what they do, and asks
for it over a socket (`world_wire`). Whoever ends this process ends them all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING

from pipelined.errors import PipelinedError, ProtocolError
from pipelined.messages import ErrorInfo
from pipelined.pipeline import ProcessWorld
from pipelined.serving.exit_codes import EXIT_DEAD, EXIT_ERROR, EXIT_GIVEN_UP, EXIT_TERMINATED
from pipelined.serving.world_wire import (
    BeginEpoch,
    Done,
    KillRanks,
    RankEnded,
    RankSaid,
    StopRanks,
    Welcome,
    Wire,
    from_front,
)

if TYPE_CHECKING:
    from pipelined.llm import EngineConfig
    from pipelined.serving.settings import ServerSettings

__all__ = ["Supervisor"]

logger = logging.getLogger("pipelined.serving")

_FINAL = (0, EXIT_ERROR, EXIT_DEAD, EXIT_TERMINATED)
"""Exit codes of an HTTP process that meant to end."""

_CLOSE_S = 20.0
"""Beyond the time for draining, everything is closed within this time."""


class Supervisor:
    """Serves a model until it is told to stop, or cannot go on.

    Attributes:
        world: The ranks.
        front_pid: Of the HTTP process; None between two.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings,
        bound: socket.socket,
        *,
        application: str = "pipelined.serving.run:serve",
        log_format: str = "text",
    ) -> None:
        """Describe.

        Args:
            config: Of the engine.
            settings: Of the HTTP server.
            bound: The port: it stays open while an HTTP process is started anew, so that clients wait meanwhile.
            application: `module:function` that serves an engine: `await function(engine, settings, socket)` returns the
                exit code.
            log_format: "text" or "json".
        """
        self.world = ProcessWorld()
        self.front_pid: int | None = None
        self._config = config
        self._settings = settings
        self._bound = bound
        self._application, self._log_format = application, log_format
        self._signals = 0
        self._crashes: deque[float] = deque()
        self._number = 0

    def __repr__(self) -> str:
        return f"<Supervisor front {self.front_pid} {self.world!r}>"

    async def run(self) -> int:
        """Until SIGTERM or SIGINT, or until it has to be given up. Returns the exit code; leaves nothing behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear, number)
        try:
            while True:
                code = await self._front()
                if code in _FINAL or self._signals:
                    return code if code >= 0 else EXIT_TERMINATED
                if not self._may_crash(code):
                    return EXIT_GIVEN_UP
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            self.world.kill()
            await self.world.stop(0.0)

    def _may_crash(self, code: int) -> bool:
        """Whether the HTTP process may be started anew after it ended with `code`."""
        now_s, config = self.world.clock.now(), self._config
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._crashes.append(now_s)
        while self._crashes[0] < now_s - config.restart_window_s:
            self._crashes.popleft()
        if len(self._crashes) > config.max_restarts:
            logger.error(
                "the HTTP process %s; that was the %d. time within %g s: given up",
                how,
                len(self._crashes),
                config.restart_window_s,
            )
            return False
        logger.error("the HTTP process %s; it begins anew, the ranks keep their weights", how)
        return True

    # ---- the HTTP process ----

    async def _front(self) -> int:
        """Run one HTTP process to its end; returns its exit code, negative for a signal."""
        ours, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self._bound.fileno())
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pipelined.serving",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C reaches this process alone, which decides
            )
        self.front_pid = process.pid
        if self._signals:
            process.terminate()
        wire = await Wire.over(ours)
        self.world.on_end(lambda rank, error: self._ended(wire, rank, error))
        self.world.on_progress(lambda rank, what: wire.send(RankSaid(rank, what)))
        wire.send(
            Welcome(
                config=self._config,
                settings=self._settings,
                application=self._application,
                log_format=self._log_format,
                next_epoch=self.world.next_epoch,
                listener=self._bound.fileno(),
            )
        )
        try:
            await self._obey(wire)
            async with self.world.clock.timeout(_CLOSE_S):
                return await process.wait()
        except (TimeoutError, ProtocolError) as error:
            logger.error("the HTTP process has let go of the ranks and does not end: %s", error)
            process.kill()
            return await process.wait()
        finally:
            self.front_pid = None
            wire.close()
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _obey(self, wire: Wire) -> None:
        """Do what the HTTP process asks for, until it is gone."""
        async with asyncio.TaskGroup() as group:
            while (message := await wire.receive(from_front)) is not None:
                if isinstance(message, KillRanks):
                    self.world.kill()
                elif isinstance(message, BeginEpoch | StopRanks):
                    group.create_task(self._do(wire, message), name=type(message).__name__)

    async def _do(self, wire: Wire, message: BeginEpoch | StopRanks) -> None:
        try:
            if isinstance(message, StopRanks):
                await self.world.stop(message.timeout_s)
                wire.send(Done(message.number))
                return
            stages = [None] * len(message.descriptions)
            await self.world.start(message.descriptions, stages, None, lost=message.lost)
        except (PipelinedError, OSError) as error:
            wire.send(Done(message.number, error=ErrorInfo.of(error)))
        else:
            wire.send(Done(message.number, self.world.directory))

    def _ended(self, wire: Wire, rank: int, error: BaseException | None) -> None:
        info = None if error is None else ErrorInfo.of(error)
        wire.send(RankEnded(self.world.next_epoch - 1, rank, info))

    # ---- signals ----

    def _hear(self, number: signal.Signals) -> None:
        """The first is passed on: requests may finish. The second ends it without them, the third kills."""
        self._signals += 1
        pid = self.front_pid
        if pid is None:
            return
        if self._signals > 2:
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGTERM)
        if self._signals == 1:
            asyncio.get_running_loop().call_later(self._settings.drain_timeout_s + _CLOSE_S, self._end, pid)

    def _end(self, pid: int) -> None:
        if self.front_pid == pid:
            os.kill(pid, signal.SIGKILL)
