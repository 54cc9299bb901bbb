"""A peer in a process of its own, which a check may kill or stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Self

from pipelined.errors import ConfigError
from pipelined.transport import FileRendezvous

if TYPE_CHECKING:
    from pipelined.testing.world import World
    from pipelined.transport import Rendezvous

__all__ = ["Child", "run_peer"]

START_S = 40.0
"""Importing torch on a busy machine takes long."""


def _command(world: World, *arguments: str) -> tuple[list[str], dict[str, str]]:
    # The child must find what this process finds, a transport that is only on sys.path too.
    paths = os.pathsep.join(path for path in sys.path if path)
    return [sys.executable, "-m", "pipelined.testing.peer", world.source, *arguments], os.environ | {
        "PYTHONPATH": paths
    }


class Child:
    """Rank 1 of a world of two, as a child process; dies with this one (end of file on its standard input)."""

    def __init__(self, world: World, board: Rendezvous, does: str, *, version: int | None = None) -> None:
        """Args: does: what it does once it is open, see `pipelined.testing.peer`. version: that of its hello."""
        if not isinstance(board, FileRendezvous):
            raise ConfigError("a peer in another process needs a FileRendezvous")
        extra = [] if version is None else ["--version", str(version)]
        self._world = world
        self._command, self._environment = _command(world, "--board", str(board.directory), "--does", does, *extra)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        """Start it; returns before it is open."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill it and wait for its end."""
        process = self._running()
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    async def line(self, what: str, limit_s: float = START_S) -> str:
        """The next line that it prints; "" once it has ended."""
        stdout = self._running().stdout
        if stdout is None:
            return ""
        return (await self._world.within(stdout.readline(), f"{what} of a child process", limit_s)).decode().strip()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._running().send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """Freeze it, links and all."""
        self._running().send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the child was not started; use `async with`")
        return self._process


async def run_peer(world: World, *arguments: str) -> str:
    """Run the peer program to its end; what it printed."""
    command, environment = _command(world, *arguments)
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.PIPE)
    try:
        printed, _ = await world.within(process.communicate(), "a child process", START_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return printed.decode().strip()
