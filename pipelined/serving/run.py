"""Runs the server: loads the engine, opens the port once the model can answer, ends gracefully."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipelined.clock import off_loop
from pipelined.errors import ConfigError, MissingDependencyError
from pipelined.serving.watchdog import Watchdog

try:
    import uvicorn
except ImportError as error:
    raise MissingDependencyError("the HTTP server", "pip install 'pipelined[serve]'") from error

from pipelined.serving.app import create_app
from pipelined.serving.exit_codes import EXIT_DEAD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from fastapi import FastAPI

    from pipelined.llm import AsyncLLM
    from pipelined.llm.epochs import EngineState
    from pipelined.serving.settings import ServerSettings

__all__ = ["listen", "serve"]

logger = logging.getLogger("pipelined.serving")

_BACKLOG = 2048


def listen(settings: ServerSettings) -> socket.socket:
    """A socket bound to the port; connections are refused until the server listens on it.

    Raises:
        ConfigError: The address cannot be had; says why.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{settings.host}:{settings.port} cannot be listened on: {error.strerror or error}"
        ) from error
    return bound


class _Server(uvicorn.Server):
    """Signals are the caller's."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As there, and says where it is to be found."""
        await super().startup(sockets)
        for each in sockets or ():
            host, port = each.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            logger.info("listening on %s://%s:%d", "https" if self.config.is_ssl else "http", shown, port)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn(app: FastAPI, settings: ServerSettings) -> _Server:
    try:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=max(1, math.ceil(settings.drain_timeout_s)),
            ssl_certfile=settings.tls_certfile,
            ssl_keyfile=settings.tls_keyfile,
        )
        config.load()
    except OSError as error:
        raise ConfigError(f"the TLS files cannot be used: {error}") from error
    return _Server(config)


async def serve(engine: AsyncLLM, settings: ServerSettings, bound: socket.socket | None = None) -> int:
    """Open the engine, serve it until a signal or its end.

    SIGTERM and SIGINT end it gracefully: no new requests, those under way may finish. A second signal ends it at once.

    Args:
        engine: Not open yet.
        settings: How to serve it.
        bound: The port, where another process has bound it (`listen`).

    Returns:
        The process's exit code: 0, or `EXIT_DEAD`.

    Raises:
        PipelinedError: The engine could not start, or the port is taken.
    """
    if bound is None:
        bound = await off_loop(lambda: listen(settings))
    with bound:
        ending = _Ending(settings)
        with ending.signals():
            _tell_progress(engine)
            logger.info("loading %s on %d ranks", engine.info.ref, len(engine.layers))
            await off_loop(lambda: engine.tokenizer)
            async with engine:
                app = create_app(engine, settings)
                server = await off_loop(lambda: _uvicorn(app, settings))
                ending.watch(engine, server, app)
                logger.info("ready: %s, %d tokens of KV cache", engine.info.ref, engine.kv_tokens)
                await _until_over(engine, settings, server, app, bound)
    return ending.code


async def _until_over(
    engine: AsyncLLM, settings: ServerSettings, server: _Server, app: FastAPI, bound: socket.socket
) -> None:
    gate = app.state.server.gate
    async with asyncio.TaskGroup() as group:
        dog = None
        if settings.watchdog_timeout_s is not None:
            watchdog = Watchdog(engine, lambda: bool(gate.inside), settings.watchdog_timeout_s)
            dog = group.create_task(watchdog.run(), name="watchdog")
        feed = group.create_task(app.state.server.feed.run(), name="feed of the ranks")
        await server.serve([bound])
        feed.cancel()
        if dog is not None:
            dog.cancel()


def _tell_progress(engine: AsyncLLM) -> None:
    def progress(rank: int, what: str) -> None:
        first, end = engine.layers[rank]
        logger.info("rank %d (layers %d-%d): %s", rank, first, end - 1, what)

    engine.on_progress = progress


class _Ending:
    """Why and how the server ends.

    Attributes:
        code: The process's exit code.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.code = 0
        self._settings = settings
        self._server: _Server | None = None
        self._app: FastAPI | None = None
        self._task = asyncio.current_task()
        self._asked = False

    def watch(self, engine: AsyncLLM, server: _Server, app: FastAPI) -> None:
        """From now on there is something to end gracefully; the engine's own end counts, too."""
        self._server, self._app = server, app
        before = engine.on_state

        def changed(state: EngineState) -> None:
            before(state)
            logger.log(
                logging.INFO if state.name in ("ready", "stopped", "draining") else logging.ERROR,
                "engine: %s%s",
                state.name,
                f": {state.reason}" if state.reason else "",
            )
            if state.name == "dead":
                self.code = EXIT_DEAD
                server.should_exit = True

        engine.on_state = changed

    def signals(self) -> AbstractContextManager[None]:
        """Hears SIGTERM and SIGINT inside."""
        return _Signals(self._hear)

    def _hear(self, name: str) -> None:
        server = self._server
        if server is None or self._asked:
            logger.warning("%s: ending at once", name)
            if server is not None:
                server.should_exit = server.force_exit = True
            if self._task is not None and server is None:
                self._task.cancel()
            return
        self._asked = True
        assert self._app is not None
        gate = self._app.state.server.gate
        gate.closed = True
        server.should_exit = True
        logger.info(
            "%s: no new requests; %d sequences under way may take %g s more",
            name,
            gate.inside,
            self._settings.drain_timeout_s,
        )


class _Signals:
    """Calls back, on the loop, for SIGTERM and SIGINT."""

    def __init__(self, hear: Any) -> None:
        self._hear = hear

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear, number.name)

    def __exit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
