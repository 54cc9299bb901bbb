"""All links of an endpoint to one peer, and what must be true of them once they are over."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pipelined.testing.tools import header
from pipelined.testing.world import MESSAGE_LANES, TENSOR_LANES, World

if TYPE_CHECKING:
    from pipelined.errors import PipelinedError
    from pipelined.messages import Peer
    from pipelined.transport import Endpoint, Received, Transfer

__all__ = ["Links"]

Kinds = tuple[type["PipelinedError"], ...]


class Links:
    """The message and tensor links that `endpoint` has with `other`, taken while it is open."""

    def __init__(self, endpoint: Endpoint, other: Peer) -> None:
        offers = endpoint.capabilities
        self.tensors = {lane: endpoint.tensors(other, lane) for lane in TENSOR_LANES if offers.tensors}
        self.messages = {lane: endpoint.messages(other, lane) for lane in MESSAGE_LANES if offers.messages}

    def post_receives(self, step: int = 0) -> dict[str, Transfer[Received]]:
        """A receive on every tensor lane."""
        return {f"receive on {lane.name}": link.post_recv((step, 0)) for lane, link in self.tensors.items()}

    async def lead_to(self, world: World, kinds: Kinds, when: str, limit_s: float) -> None:
        """Waits on every lane must end with one of `kinds` within `limit_s`, all counted together."""
        loop_now = world.now
        until_s = loop_now() + limit_s
        waits = [(f"receive on {lane.name}", link.post_recv((0, 0))) for lane, link in self.tensors.items()]
        for what, transfer in waits:
            await world.raises(kinds, transfer, f"{what} {when}", max(0.05, until_s - loop_now()))
        for lane, messages in self.messages.items():
            left_s = max(0.05, until_s - loop_now())
            await world.raises(kinds, messages.receive(), f"receive on {lane.name} {when}", left_s)

    async def stay_over(self, world: World, kinds: Kinds, when: str) -> None:
        """Every operation of every lane must fail with one of `kinds`, asked now and asked again."""
        for again in ("", ", asked again"):
            for lane, link in self.tensors.items():
                where = f"on {lane.name} {when}{again}"
                world.raises_now(kinds, partial(link.post_send, torch.zeros(4), header(0)), f"post_send {where}")
                await world.raises(kinds, link.post_recv((0, 0)), f"post_recv {where}")
                await world.raises(kinds, link.ready(), f"ready() {where}")
                world.expect(link.credits() == 0, f"credits() {where} is {link.credits()}", "0")
            for lane, messages in self.messages.items():
                where = f"on {lane.name} {when}{again}"
                world.raises_now(kinds, partial(messages.send_nowait, b"x"), f"send_nowait {where}")
                world.raises_now(kinds, messages.receive_nowait, f"receive_nowait {where}")
                await world.raises(kinds, messages.send(b"x"), f"send {where}")
                await world.raises(kinds, messages.receive(), f"receive {where}")
            await world.settle(pause_s=0.02)
