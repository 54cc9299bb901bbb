"""R13, R14, R15: times by the injected clock, a hello that is checked, missing libraries and peers that are named."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from pipelined.errors import HandshakeError
from pipelined.testing.check import SkipCheck
from pipelined.testing.child import Child, run_peer
from pipelined.testing.links import Links
from pipelined.testing.tools import ScaledClock, pattern
from pipelined.testing.world import World, peer, transport_from

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from pipelined.transport import Endpoint

__all__ = [
    "check_a_fast_clock_times_out_soon",
    "check_a_hello_of_another_version",
    "check_a_missing_library_is_named",
    "check_a_slow_clock_times_out_late",
    "check_absent_peers_are_named",
    "check_connect_after_opening",
    "check_hello_mismatches_are_refused",
    "check_skewed_clocks_do_not_matter",
]


async def check_a_fast_clock_times_out_soon(world: World) -> None:
    """A timeout of 60 s on a clock 200 times as fast ends within real seconds."""
    spec = world.spec(0, 2, world.rendezvous(), clock=ScaledClock(200.0), open_timeout_s=60.0)
    what = "open, with its peer absent and 60 s over on a clock 200 times as fast,"
    await world.raises(HandshakeError, world.open_one(spec), what, 5.0)


async def check_a_slow_clock_times_out_late(world: World) -> None:
    """A timeout of 0.2 s on a clock 100 times as slow has not passed after a real second."""
    spec = world.spec(0, 2, world.rendezvous(), clock=ScaledClock(0.01), open_timeout_s=0.2)
    try:
        async with asyncio.timeout(1.0) as bound:
            await world.open_one(spec)
    except TimeoutError:
        if bound.expired():
            return
        raise
    except HandshakeError as error:
        world.fail(f"open gave up after 0.01 s of its clock: {error}", "it to wait for 0.2 s of its clock")
    world.fail("open returned with its peer absent", "it to wait for the peer")


async def check_skewed_clocks_do_not_matter(world: World) -> None:
    """Two peers whose clocks differ by a year connect, pass tensors and close."""
    board = world.rendezvous()
    clocks = (ScaledClock(1.0), ScaledClock(1.0, skew_s=3.2e7))
    left, right = await _both(world, *(world.spec(r, 2, board, clock=clock) for r, clock in enumerate(clocks)))
    near, far = Links(left, peer(1)), Links(right, peer(0))
    for lane, link in near.tensors.items():
        await world.post(link, pattern(1, 1_000), 0)
        (await world.receive(far.tensors[lane], 0)).release()
    for lane, messages in near.messages.items():
        messages.send_nowait(b"x")
        await world.within(far.messages[lane].receive(), "a message between peers of skewed clocks")
    await world.settle(20, 0.2)
    await world.within(left.aclose(), "aclose with skewed clocks")


async def _both(world: World, *specs: Any) -> list[Endpoint]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(world.open_one(spec)) for spec in specs]
    return [task.result() for task in tasks]


async def _error_of(opening: Awaitable[Endpoint]) -> Exception | None:
    try:
        endpoint = await opening
    except HandshakeError as error:
        return error
    endpoint.abort()
    return None


async def check_hello_mismatches_are_refused(world: World) -> None:
    """Another epoch, world, secret or dtype: both sides raise HandshakeError, naming the other peer."""
    other_world = (peer(0), peer(1), peer(2))
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "epoch": ({"epoch": 3}, {"epoch": 4}),
        "world": ({}, {"world": other_world}),
        "secret": ({"secret": "one"}, {"secret": "two"}),
        "dtype": ({"dtype": "bfloat16"}, {"dtype": "float16"}),
    }
    for field, changes in cases.items():
        board = world.rendezvous()
        specs = [world.spec(rank, 2, board, open_timeout_s=1.5, **changes[rank]) for rank in (0, 1)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_error_of(world.open_one(spec))) for spec in specs]
        errors = [await world.within(task, f"open with another {field}") for task in tasks]
        for rank, error in enumerate(errors):
            world.expect(error is not None, f"rank {rank} opened though the peer has another {field}", "HandshakeError")
            world.expect(
                str(peer(1 - rank)) in str(error),
                f"another {field} gave rank {rank} {str(error)!r}",
                f"{peer(1 - rank)} named",
            )
        named = any(field in str(error).lower() for error in errors)
        world.expect(named, f"another {field} gave {[str(error) for error in errors]}", f"the word {field!r} in one")


async def check_a_hello_of_another_version(world: World) -> None:
    """A child process that speaks another protocol version is refused, and refuses."""
    board = world.rendezvous()
    spec = world.spec(0, 2, board, open_timeout_s=20.0)
    async with Child(world, board, "idle", version=99) as child:
        error = await world.raises(HandshakeError, world.open_one(spec), "open with a peer of version 99", 30.0)
        words = str(error)
        world.expect(
            "version" in words and str(peer(1)) in words, f"the error says {words!r}", "version and peer named"
        )
        said = await child.line("the refusal", 25.0)
        world.expect("HandshakeError" in said, f"the peer of version 99 said {said!r}", "HandshakeError")


async def check_absent_peers_are_named(world: World) -> None:
    """Of four peers one opens; the error names the three absent ones, and no other."""
    spec = world.spec(0, 4, world.rendezvous(), open_timeout_s=0.3)
    words = str(await world.raises(HandshakeError, world.open_one(spec), "open with all peers absent"))
    named = [rank for rank in range(1, 4) if re.search(rf"{peer(rank)}(?!\d)", words)]
    world.expect(bool(named), f"open with absent peers said {words!r}", "the absent peers named")
    board = world.rendezvous()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_error_of(world.open_one(world.spec(rank, 3, board, open_timeout_s=1.0))))
            for rank in (0, 1)
        ]
    for task in tasks:
        words = str(task.result())
        world.expect(str(peer(2)) in words, f"open with {peer(2)} absent said {words!r}", f"{peer(2)} named")


async def check_connect_after_opening(world: World) -> None:
    """`connect` from both sides after opening, twice: one link that works."""
    board = world.rendezvous()
    left, right = await _both(world, *(world.spec(rank, 2, board, connect=()) for rank in (0, 1)))
    async with asyncio.TaskGroup() as group:
        group.create_task(world.within(left.connect(peer(1)), "connect"))
        group.create_task(world.within(right.connect(peer(0)), "connect"))
    await world.within(left.connect(peer(1)), "connect to a connected peer")
    near, far = Links(left, peer(1)), Links(right, peer(0))
    for lane, link in near.tensors.items():
        world.expect(link is left.tensors(peer(1), lane), "tensors() gave another object", "the same each time")
        await world.post(link, pattern(1, 1_000), 0)
        (await world.receive(far.tensors[lane], 0)).release()
    for lane, messages in near.messages.items():
        world.expect(messages is left.messages(peer(1), lane), "messages() gave another object", "the same each time")
        messages.send_nowait(b"x")
        await world.within(far.messages[lane].receive(), "a message after a late connect")


async def check_a_missing_library_is_named(world: World) -> None:
    """Without a library that it declares in `requires`, the transport says which line installs it."""
    required = tuple(getattr(transport_from(world.source), "requires", ()))
    if not required:
        raise SkipCheck("the transport declares no optional library (`requires`)")
    for module in required:
        said = await run_peer(world, "--without", module)
        right = "MissingDependencyError" in said and "install" in said
        world.expect(
            right, f"without {module}, resolving {world.source} said {said!r}", "MissingDependencyError, install line"
        )
