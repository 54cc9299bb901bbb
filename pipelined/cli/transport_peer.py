"""The other process of `pipelined bench transport`: `python -m pipelined.cli.transport_peer URI DIRECTORY`.

Reads one command a line from its standard input, answers each with a line, and ends with its input. With `-` in place
of a URI it is the baseline: a plain Unix socket, whose path stands for the directory, that sends back what it gets;
with `--` a plain ZMQ socket.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from pipelined.errors import PipelinedError
from pipelined.messages import Peer
from pipelined.transport import EndpointSpec, FileRendezvous, Lane, resolve
from pipelined.transport.registry import split_uri

if TYPE_CHECKING:
    from pipelined.transport import Endpoint, Received, Transfer

__all__ = ["IN_FLIGHT", "PEERS", "PLAIN_ZMQ", "Echo", "main", "open_end", "pattern_of"]

PEERS = (Peer("bench", 0), Peer("bench", 1))
PLAIN_ZMQ = "--"
IN_FLIGHT = 4
"""Rotating buffers, and most transfers under way."""


def pattern_of(number: int) -> int:
    """What every byte of transfer `number` is."""
    return number % 127


async def open_end(uri: str, directory: str, rank: int) -> Endpoint:
    """One of the two ends."""
    spec = EndpointSpec(
        me=PEERS[rank],
        world=PEERS,
        rendezvous=FileRendezvous(directory),
        connect=(PEERS[1 - rank],),
        open_timeout_s=60.0,
        options=split_uri(uri)[1],
    )
    return await resolve(uri).open(spec)


class Echo(asyncio.Protocol):
    """Sends back what it gets."""

    _transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Send it back."""
        self._transport.write(data)


class _Served:
    """What the parent may ask of this end."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._step = 0

    async def tensors(self, size_bytes: int, count: int) -> str:
        """Receive `count` tensors and read every byte of each."""
        import torch

        link = self._endpoint.tensors(PEERS[0], Lane.HIDDEN)
        posted: deque[Transfer[Received]] = deque()
        wrong = 0
        for number in range(count):
            while len(posted) < min(IN_FLIGHT, count - number):
                posted.append(link.post_recv((self._step, 0)))
                self._step += 1
            received = await posted.popleft()
            total = int(received.tensor.view(torch.int64).sum())
            # Eight equal bytes make 0x0101010101010101 times their value; the sum wraps as int64 does.
            expected = size_bytes // 8 * (0x0101010101010101 * pattern_of(number)) % 2**64
            wrong += total % 2**64 != expected
            received.release()
        return "done" if not wrong else f"{wrong} of {count} tensors came changed"

    async def echo(self, count: int) -> str:
        """Send `count` messages back."""
        arriving = self._endpoint.messages(PEERS[0], Lane.SCHEDULE)
        leaving = self._endpoint.messages(PEERS[0], Lane.RESULTS)
        for _ in range(count):
            await leaving.send(await arriving.receive())
        return "done"

    async def idle(self, seconds: int) -> str:
        """CPU seconds of this process while receives are pending, as a share of the time."""
        able = self._endpoint.capabilities
        posted = self._endpoint.tensors(PEERS[0], Lane.HIDDEN).post_recv((self._step, 0)) if able.tensors else None
        waiting = asyncio.timeout(seconds)
        started_s, used_s = time.monotonic(), time.process_time()
        try:
            async with waiting:
                if able.messages:
                    await self._endpoint.messages(PEERS[0], Lane.SCHEDULE).receive()
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        share = (time.process_time() - used_s) / (time.monotonic() - started_s)
        if posted is not None:
            posted.cancel()
        return f"share {share:.6f}"


def _serve_plain_zmq(path: str) -> NoReturn:
    """Send back what comes, for ever: the process ends with its standard input."""
    import zmq

    def end_with_input() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.bind(f"ipc://{path}")
        print("open", flush=True)
        while True:
            socket.send(socket.recv())


async def _serve(uri: str, directory: str) -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    if uri == "-":
        server = await loop.create_unix_server(Echo, directory)
        print("open", flush=True)
        await reader.read()
        server.close()
        return
    async with await open_end(uri, directory, 1) as endpoint:
        served = _Served(endpoint)
        kinds = {"tensors": served.tensors, "echo": served.echo, "idle": served.idle}
        print("open", flush=True)
        while command := (await reader.readline()).split():
            kind, *numbers = command
            print(await kinds[kind.decode()](*map(int, numbers)), flush=True)  # type: ignore[operator]


def main() -> int:
    """Run it; an error is said in the line that the parent waits for."""
    import torch
    import uvloop

    torch.set_num_threads(1)
    if sys.argv[1] == PLAIN_ZMQ:
        _serve_plain_zmq(sys.argv[2])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(*sys.argv[1:]))
    except PipelinedError as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
