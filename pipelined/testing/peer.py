"""The program of a peer in a process of its own: `python -m pipelined.testing.peer URI --board DIR --does WHAT`.

It is rank 1 of a world of two, prints one line once it is open (or why it isn't), and ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.abc
import sys
from typing import TYPE_CHECKING

from pipelined.errors import PipelinedError
from pipelined.transport import EndpointSpec, FileRendezvous, Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.transport import Endpoint

__all__ = ["main"]

BIG_BYTES = 32 << 20


class _Without(importlib.abc.MetaPathFinder):
    """Makes a module look as if it were not installed."""

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        """Refuse the module and what is inside it."""
        if fullname == self._module or fullname.startswith(f"{self._module}."):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


async def _idle(endpoint: Endpoint) -> None:
    """Neither sends nor receives."""
    await asyncio.Event().wait()


async def _send(endpoint: Endpoint) -> None:
    """Sends big tensors on HIDDEN, one behind the other, for ever."""
    from pipelined.testing.tools import header, pattern
    from pipelined.testing.world import peer

    link, tensor, step = endpoint.tensors(peer(0), Lane.HIDDEN), pattern(1, BIG_BYTES), 0
    while True:
        await link.ready()
        await link.post_send(tensor, header(step))
        step += 1


async def _echo(endpoint: Endpoint) -> None:
    """Sends back on KV each tensor that arrives on HIDDEN, and each message of SCHEDULE on RESULTS."""
    async with asyncio.TaskGroup() as group:
        if endpoint.capabilities.tensors:
            group.create_task(_echo_tensors(endpoint))
        if endpoint.capabilities.messages:
            group.create_task(_echo_messages(endpoint))


async def _echo_tensors(endpoint: Endpoint) -> None:
    from pipelined.testing.tools import header
    from pipelined.testing.world import peer

    arriving, leaving, step = endpoint.tensors(peer(0), Lane.HIDDEN), endpoint.tensors(peer(0), Lane.KV), 0
    while True:
        received = await arriving.post_recv((step, 0))
        lease = leaving.lease(tuple(received.tensor.shape), received.tensor.dtype)
        lease.copy_(received.tensor)
        received.release()
        await leaving.ready()
        leaving.post_send(lease, header(step))
        step += 1


async def _echo_messages(endpoint: Endpoint) -> None:
    from pipelined.testing.world import peer

    while True:
        await endpoint.messages(peer(0), Lane.RESULTS).send(await endpoint.messages(peer(0), Lane.SCHEDULE).receive())


async def _main(arguments: argparse.Namespace) -> None:
    from pipelined.testing.world import peer, transport_from
    from pipelined.transport.registry import split_uri

    options = split_uri(arguments.source)[1] if "://" in arguments.source else {}
    spec = EndpointSpec(
        me=peer(1),
        world=(peer(0), peer(1)),
        rendezvous=FileRendezvous(arguments.board),
        connect=(peer(0),),
        options=options,
    )
    endpoint = await transport_from(arguments.source).open(spec)
    print("open", flush=True)  # noqa: T201  (what the check waits for)
    await {"idle": _idle, "send": _send, "echo": _echo}[arguments.does](endpoint)


async def _until_end_of_input(arguments: argparse.Namespace) -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as group:
        work = group.create_task(_main(arguments))
        work.add_done_callback(lambda _: reader.feed_eof())
        await reader.read()
        work.cancel()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _speak(version: int) -> None:
    """Pretend to be of another protocol version, in every module of ours that holds a copy of the number."""
    for name, module in list(sys.modules.items()):
        if name.startswith("pipelined") and hasattr(module, "PROTOCOL_VERSION"):
            setattr(module, "PROTOCOL_VERSION", version)  # noqa: B010


def main(argv: Sequence[str] | None = None) -> int:
    """Run a peer; 0 unless it could not open."""
    parser = argparse.ArgumentParser(prog="python -m pipelined.testing.peer")
    parser.add_argument("source")
    parser.add_argument("--board", default="")
    parser.add_argument("--does", choices=("idle", "send", "echo"), default="idle")
    parser.add_argument("--version", type=int)
    parser.add_argument("--without", help="only load the transport, as if this module were not installed")
    arguments = parser.parse_args(argv)
    try:
        if arguments.without:
            sys.meta_path.insert(0, _Without(arguments.without))
            for name in [name for name in sys.modules if name.partition(".")[0] == arguments.without]:
                del sys.modules[name]
            from pipelined.testing.world import transport_from

            transport_from(arguments.source)
            print("loaded", flush=True)  # noqa: T201
            return 0
        if arguments.version is not None:
            _speak(arguments.version)
        asyncio.run(_until_end_of_input(arguments))
    except (PipelinedError, BaseExceptionGroup) as error:
        first = _first(error)
        if not isinstance(first, PipelinedError):
            raise
        print(f"{type(first).__name__}: {first}", flush=True)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
