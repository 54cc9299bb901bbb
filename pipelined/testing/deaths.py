"""R10 and R3 between processes: a peer that is killed, a peer that is frozen, and what passes is whole."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from pipelined.errors import PeerLost
from pipelined.testing.child import START_S, Child
from pipelined.testing.closing import GRACE_S
from pipelined.testing.links import Links
from pipelined.testing.tools import header, pattern, same
from pipelined.testing.world import World, peer
from pipelined.transport import Lane

if TYPE_CHECKING:
    from pipelined.transport import Endpoint

__all__ = [
    "check_a_frozen_peer_holds_up_nobody",
    "check_a_peer_killed_in_mid_transfer_is_lost",
    "check_a_peer_killed_while_idle_is_lost",
    "check_a_peer_killed_with_unread_data_is_lost",
    "check_between_processes_all_arrives",
]


async def _with_child(world: World, does: str) -> tuple[Child, Endpoint]:
    board = world.rendezvous()
    child = Child(world, board, does)
    await child.__aenter__()
    try:
        endpoint = await world.within(
            world.open_one(world.spec(0, 2, board, open_timeout_s=START_S)), "open with a child process", START_S
        )
        said = await child.line("the word that it is open")
        world.expect(said == "open", f"the child said {said!r}", "'open'")
    except BaseException:
        await child.__aexit__()
        raise
    return child, endpoint


async def _lost(world: World, child: Child, endpoint: Endpoint, when: str) -> None:
    links, bound_s = Links(endpoint, peer(1)), world.capabilities.peer_lost_bound_s
    child.kill()
    await links.lead_to(world, (PeerLost,), when, bound_s + GRACE_S)
    await links.stay_over(world, (PeerLost,), when)
    await world.within(endpoint.aclose(), f"aclose {when}")


async def check_a_peer_killed_while_idle_is_lost(world: World) -> None:
    """An idle peer process is killed (-9): PeerLost on every lane, for ever, within the declared bound."""
    child, endpoint = await _with_child(world, "idle")
    async with _Started(child):
        await _lost(world, child, endpoint, "after kill -9 of an idle peer")


async def check_a_peer_killed_in_mid_transfer_is_lost(world: World) -> None:
    """A peer that sends and is sent to is killed (-9): what is pending ends, then PeerLost within the bound."""
    child, endpoint = await _with_child(world, "send")
    async with _Started(child):
        hidden = endpoint.tensors(peer(1), Lane.HIDDEN)
        for step in range(2):
            (await world.within(hidden.post_recv((step, 0)), "a receive of 32 MiB from a process", 20.0)).release()
        pending = [hidden.post_send(pattern(1, 32 << 20), header(step)) for step in range(4)]
        await world.settle(3)
        child.kill()
        when, until_s = "after kill -9 in mid-transfer", world.now() + world.capabilities.peer_lost_bound_s + GRACE_S
        step, lost = 2, False
        while not lost:
            # Whole tensors that came before the death may still be received, until the loss is noticed.
            try:
                left_s = max(0.05, until_s - world.now())
                (await world.within(hidden.post_recv((step, 0)), f"a receive {when}", left_s)).release()
            except PeerLost:
                lost = True
            step += 1
        for transfer in pending:
            await world.settle()
            ended = transfer.done()
            world.expect(ended, f"{transfer!r} {when}", "it to have ended")
        links = Links(endpoint, peer(1))
        await links.lead_to(world, (PeerLost,), when, max(0.2, until_s - world.now()))
        await links.stay_over(world, (PeerLost,), when)
        await world.within(endpoint.aclose(), f"aclose {when}")


async def check_a_peer_killed_with_unread_data_is_lost(world: World) -> None:
    """A peer is frozen, sent to, then killed (-9) without having read it: PeerLost within the bound."""
    child, endpoint = await _with_child(world, "idle")
    async with _Started(child):
        child.stop()
        links = Links(endpoint, peer(1))
        for link in links.tensors.values():
            link.post_send(pattern(1, 1 << 20), header(0))
        for messages in links.messages.values():
            messages.send_nowait(bytes(10_000))
        await world.settle(20, 0.2)
        await _lost(world, child, endpoint, "after kill -9 of a peer that had not read")


async def check_a_frozen_peer_holds_up_nobody(world: World) -> None:
    """SIGSTOP of a peer: PeerLost within the bound; or, all posted at once, it arrives after SIGCONT."""
    child, endpoint = await _with_child(world, "echo")
    async with _Started(child):
        links = Links(endpoint, peer(1))
        child.stop()
        bound_s = world.capabilities.peer_lost_bound_s
        hidden, kv = links.tensors[Lane.HIDDEN], links.tensors[Lane.KV]
        receives = [kv.post_recv((step, 0)) for step in range(8)]
        patterns, start_s = [pattern(step, 1 << 20) for step in range(8)], world.now()
        for step, tensor in enumerate(patterns):
            hidden.post_send(tensor, header(step))
        posted_s = world.now() - start_s
        world.expect(posted_s < 0.5, f"posting to a frozen peer took {posted_s:.1f} s", "it to return at once")
        await asyncio.sleep(bound_s + GRACE_S)
        if receives[0].done():
            await links.lead_to(world, (PeerLost,), "after SIGSTOP", 0.2)
            child.go_on()
            await world.settle(20, 0.2)
            await links.stay_over(world, (PeerLost,), "after SIGSTOP and SIGCONT")
            return
        child.go_on()
        for step, transfer in enumerate(receives):
            received = await world.within(transfer, f"the echo of {step} after SIGCONT")
            world.expect(same(received.tensor, pattern(step, 1 << 20)), f"echo {step} came changed", "as sent")
            received.release()
    await _frozen_at_close(world)


async def _frozen_at_close(world: World) -> None:
    """Closing does not wait for ever for a peer that is frozen, and its death is still noticed."""
    child, endpoint = await _with_child(world, "idle")
    async with _Started(child):
        child.stop()
        await world.within(endpoint.aclose(), "aclose with a frozen peer", world.capabilities.peer_lost_bound_s + 10.0)


async def check_between_processes_all_arrives(world: World) -> None:
    """A child process echoes tensors of many sizes and dtypes, through leases, and messages."""
    child, endpoint = await _with_child(world, "echo")
    async with _Started(child):
        links = Links(endpoint, peer(1))
        sizes = [0, 2, 4096, 1 << 20, 9 << 20] if world.quick else [0, 2, 4096, 1 << 20, 9 << 20, 64 << 20]
        tensors = [pattern(n, size).view(torch.bfloat16) for n, size in enumerate(sizes)]
        for step, tensor in enumerate(tensors):
            await world.post(links.tensors[Lane.HIDDEN], tensor, step)
            received = await world.receive(links.tensors[Lane.KV], step)
            world.expect(same(received.tensor, tensor), f"{tensor.numel() * 2} bytes came back changed", "every byte")
            received.release()
        if not links.messages:
            return
        for number in range(200):
            frame = b"%d" % number * (number + 1)
            await world.within(links.messages[Lane.SCHEDULE].send(frame), "a send to a process that receives")
            got = bytes(await world.within(links.messages[Lane.RESULTS].receive(), "the echo of a message"))
            world.expect(got == frame, f"message {number} came back as {got[:20]!r}", f"{frame[:20]!r}")


class _Started:
    """Ends a child that was entered before."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def __aenter__(self) -> None:
        """Nothing to do."""

    async def __aexit__(self, *exc: object) -> None:
        """Kill it."""
        await self._child.__aexit__(*exc)
