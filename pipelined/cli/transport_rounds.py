"""What `pipelined bench transport` measures: this process's side, and the baselines."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Self

from pipelined.cli.transport_peer import IN_FLIGHT, PEERS, PLAIN_ZMQ, open_end, pattern_of
from pipelined.errors import ConfigError, PeerLost, PipelinedError, TransportError
from pipelined.messages import TensorHeader
from pipelined.transport import Lane

if TYPE_CHECKING:
    import torch

    from pipelined.transport import Endpoint, Transfer

__all__ = ["MESSAGE_BYTES", "Pair", "PlainSocket", "PlainZmq", "memcpy_s", "rotating"]

MESSAGE_BYTES = 200
_START_S = 90.0
_STEP_S = 120.0


class _Child:
    """The other process: commands in, lines out. Ends with its standard input."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, uri: str, directory: str) -> Self:
        command = (sys.executable, "-m", "pipelined.cli.transport_peer", uri, directory)
        paths = os.pathsep.join(path for path in sys.path if path)  # it must find what this process finds
        return cls(
            await asyncio.create_subprocess_exec(
                *command, env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )

    def say(self, *words: object) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")

    async def line(self, timeout_s: float = _STEP_S) -> str:
        """Its next line.

        Raises:
            TransportError: It has ended, or says nothing in time.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = (await self._process.stdout.readline()).decode().strip()
        except TimeoutError:
            raise TransportError(f"the other process said nothing for {timeout_s:g} s") from None
        if not line:
            raise PeerLost("the other process has ended; see what it wrote to standard error")
        return line

    async def expect(self, right: str, timeout_s: float = _STEP_S) -> None:
        """Its next line must be `right`."""
        line = await self.line(timeout_s)
        if line != right:
            raise TransportError(f"the other process says: {line}")

    async def end(self) -> None:
        """End it."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


class Pair:
    """A transport between this process and another one."""

    def __init__(self, uri: str, child: _Child, endpoint: Endpoint) -> None:
        self.uri = uri
        self._child = child
        self._endpoint = endpoint
        self._step = 0

    def __repr__(self) -> str:
        return f"<Pair {self.uri}>"

    @classmethod
    async def open(cls, uri: str, directory: str) -> Self:
        """Start the other process and connect.

        Raises:
            PipelinedError: It can't be had; says why.
        """
        child = await _Child.start(uri, directory)
        opening: asyncio.Task[Endpoint] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                opening = group.create_task(open_end(uri, directory, 0))
                group.create_task(child.expect("open", _START_S))
            return cls(uri, child, opening.result())
        except BaseException as error:
            if opening is not None and opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().abort()
            await child.end()
            if isinstance(error, BaseExceptionGroup) and isinstance(error.exceptions[0], PipelinedError):
                raise error.exceptions[0] from None
            raise

    async def close(self) -> None:
        """End both sides."""
        self._endpoint.abort()
        await self._child.end()

    @property
    def messages(self) -> bool:
        """Whether it carries messages."""
        return self._endpoint.capabilities.messages

    @property
    def tensors(self) -> bool:
        """Whether it carries tensors."""
        return self._endpoint.capabilities.tensors

    @property
    def leases(self) -> bool:
        """Whether tensors can be written in its own memory."""
        return self._endpoint.capabilities.leases

    async def stream_s(self, buffers: list[torch.Tensor], count: int, *, leased: bool = False) -> float:
        """Seconds for `count` tensors one way, written here and read there, every byte, until all were read."""
        link = self._endpoint.tensors(PEERS[1], Lane.HIDDEN)
        posted: deque[Transfer[None]] = deque()
        self._child.say("tensors", buffers[0].numel(), count)
        started_s = time.perf_counter()
        for number in range(count):
            if len(posted) == IN_FLIGHT:
                await posted.popleft()
            while not link.credits():
                await link.ready()
            buffer = buffers[number % IN_FLIGHT]
            if leased:
                buffer = link.lease(tuple(buffer.shape), buffer.dtype)
            buffer.fill_(pattern_of(number))
            posted.append(link.post_send(buffer, TensorHeader(0, self._step)))
            del buffer
            self._step += 1
        await self._child.expect("done")
        took_s = time.perf_counter() - started_s
        for transfer in posted:
            await transfer
        return took_s

    async def round_trips_s(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips of a message."""
        leaving = self._endpoint.messages(PEERS[1], Lane.SCHEDULE)
        arriving = self._endpoint.messages(PEERS[1], Lane.RESULTS)
        self._child.say("echo", count)
        frame, found = b"x" * MESSAGE_BYTES, []
        for _ in range(count):
            started_s = time.perf_counter()
            await leaving.send(frame)
            await arriving.receive()
            found.append(time.perf_counter() - started_s)
        await self._child.expect("done")
        return found

    async def idle_share(self, seconds: int) -> float:
        """CPU of the other process with receives pending, as a share of a core."""
        self._child.say("idle", seconds)
        word, share = (await self._child.line()).split()
        if word != "share":
            raise TransportError(f"the other process says: {word} {share}")
        return float(share)


class PlainSocket:
    """The baseline of round trips: an asyncio protocol over a Unix socket, nothing else."""

    def __init__(self, child: _Child, transport: asyncio.Transport, protocol: _Counting) -> None:
        self._child = child
        self._transport = transport
        self._protocol = protocol

    @classmethod
    async def open(cls, path: str) -> Self:
        """Start the other process and connect."""
        child = await _Child.start("-", path)
        try:
            await child.expect("open", _START_S)
            loop = asyncio.get_running_loop()
            transport, protocol = await loop.create_unix_connection(_Counting, path)
        except BaseException:
            await child.end()
            raise
        return cls(child, transport, protocol)

    async def close(self) -> None:
        """End both sides."""
        self._transport.abort()
        await self._child.end()

    async def round_trips_s(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips."""
        frame, found = b"x" * MESSAGE_BYTES, []
        for _ in range(count):
            started_s = time.perf_counter()
            back = self._protocol.wait_for(MESSAGE_BYTES)
            self._transport.write(frame)
            await back
            found.append(time.perf_counter() - started_s)
        return found


class PlainZmq:
    """What ZMQ itself costs: blocking PAIR sockets over ipc, no loop on either side, nothing else."""

    def __init__(self, child: _Child, path: str) -> None:
        import zmq

        self._child = child
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(1e3 * _STEP_S))
        self._socket.connect(f"ipc://{path}")

    @classmethod
    async def open(cls, path: str) -> Self:
        """Start the other process and connect."""
        child = await _Child.start(PLAIN_ZMQ, path)
        try:
            await child.expect("open", _START_S)
            return cls(child, path)
        except BaseException:
            await child.end()
            raise

    async def close(self) -> None:
        """End both sides."""
        self._context.destroy(linger=0)
        await self._child.end()

    async def round_trips_s(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips, on a thread of their own."""
        return await asyncio.to_thread(self._round_trips_s, count)

    def _round_trips_s(self, count: int) -> list[float]:
        frame, found = b"x" * MESSAGE_BYTES, []
        for _ in range(count):
            started_s = time.perf_counter()
            self._socket.send(frame)
            self._socket.recv()
            found.append(time.perf_counter() - started_s)
        return found


class _Counting(asyncio.Protocol):
    """Wakes whoever waits once so many bytes have come."""

    def __init__(self) -> None:
        self._missing = 0
        self._whole: asyncio.Future[None] | None = None

    def wait_for(self, count: int) -> asyncio.Future[None]:
        """Done once `count` bytes have come."""
        self._missing, self._whole = count, asyncio.get_running_loop().create_future()
        return self._whole

    def data_received(self, data: bytes) -> None:
        """Count."""
        self._missing -= len(data)
        if self._whole is not None and self._missing <= 0 and not self._whole.done():
            self._whole.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody shall wait for ever."""
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(PeerLost("the plain socket was closed"))


def rotating(size_bytes: int) -> list[torch.Tensor]:
    """The buffers that are sent in turn, of `size_bytes` each, touched."""
    import torch

    if size_bytes % 8:
        raise ConfigError(f"{size_bytes} bytes: expected a multiple of 8")
    return [torch.full((size_bytes,), number, dtype=torch.uint8) for number in range(IN_FLIGHT)]


def memcpy_s(sources: list[torch.Tensor], targets: list[torch.Tensor], count: int, *, touched: bool) -> float:
    """Seconds for `count` copies from buffer to buffer in this thread; if `touched`, written before and read after."""
    import torch

    size_bytes = sources[0].numel()
    started_s = time.perf_counter()
    for number in range(count):
        source, target = sources[number % IN_FLIGHT], targets[number % IN_FLIGHT]
        if touched:
            source.fill_(pattern_of(number))
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size_bytes)
        if touched:
            int(target.view(torch.int64).sum())
    return time.perf_counter() - started_s
