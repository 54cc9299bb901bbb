"""A peer in a process of its own, for test_shm.py: `python shm_child.py DIRECTORY BEHAVIOUR`."""

from __future__ import annotations

import asyncio
import sys

import torch
import uvloop

from pipelined.messages import Peer, TensorHeader
from pipelined.transport import EndpointSpec, FileRendezvous, Lane
from pipelined.transport.registry import resolve

WORLD = (Peer("c", 0), Peer("c", 1))


async def main(directory: str, behaviour: str) -> None:
    spec = EndpointSpec(me=WORLD[1], world=WORLD, rendezvous=FileRendezvous(directory), connect=WORLD[:1])
    endpoint = await resolve("shm://").open(spec)
    link = endpoint.tensors(WORLD[0], Lane.HIDDEN)
    if behaviour == "flood":  # sends without end, until it is killed in the middle of it
        tensor, step = torch.ones(1_000_000), 0
        while True:
            if not link.credits():
                await link.ready()
            await link.post_send(tensor, TensorHeader(0, step))
            step += 1
    if behaviour == "echo":
        for step in range(50):
            received = await link.post_recv((step, 0))
            if not link.credits():
                await link.ready()
            link.post_send(received.tensor + 1, received.header)
            received.release()
        await endpoint.aclose()
        return
    await endpoint.messages(WORLD[0], Lane.HEALTH).send(b"here")
    await asyncio.sleep(60)


torch.set_num_threads(1)
uvloop.run(main(*sys.argv[1:]))
