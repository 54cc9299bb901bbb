"""Runs one rank from its description, in whatever process or task this is called in."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from pipelined.clock import Clock, MonotonicClock
from pipelined.errors import PipelinedError, TransportError
from pipelined.rank.actor import Rank
from pipelined.rank.core import RankContext
from pipelined.rank.description import family, make_planner
from pipelined.rank.links import open_links
from pipelined.stage import make_device
from pipelined.trace import Tracer
from pipelined.transport import FileRendezvous, Rendezvous, Topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.rank.description import RankDescription
    from pipelined.rank.lifeline import Lifeline
    from pipelined.rank.planner import Planner
    from pipelined.stage import Device, Stage

__all__ = ["root_cause", "run_rank"]


_FAILED_CLOSE_S = 1.0
"""A rank that failed is reported once it is closed: a stage that hangs must not hold that up."""


async def run_rank(
    description: RankDescription,
    *,
    stage: Stage | None = None,
    planner: Planner | None = None,
    rendezvous: Rendezvous | None = None,
    clock: Clock | None = None,
    device: Callable[[Clock], Device] | None = None,
    lifeline: Lifeline | None = None,
) -> None:
    """Open the links, run the rank until it is told to stop, tear down.

    A rank whose description lets it linger outlives its epochs: it keeps its stage and runs the next.

    Args:
        description: What to run.
        stage: Used instead of what the description names; so are the others.
        planner: For rank 0.
        rendezvous: Where peers find each other.
        clock: Real time unless given.
        device: Makes the device, given the clock.
        lifeline: To the supervisor; None: the rank has one epoch.

    Raises:
        PipelinedError: The rank failed.
    """
    config = description.config
    clock = clock or MonotonicClock()
    made = device(clock) if device else _device(description, clock)
    if stage is None:
        assert description.part is not None, "a description without a model part needs a stage"
        context = RankContext(config.rank, config.size, Topology(pp=config.size), made.torch_device, links=None)
        part = description.part
        stage = family(part.info.family).build(part.info, part.layers, context)
    if planner is None and description.planner is not None:
        planner = make_planner(description.planner)
    rank = Rank(config, stage, made, clock, planner, Tracer(description.trace_spans))
    if lifeline is not None:
        rank.announce = lifeline.announce
    try:
        now: RankDescription | None = description
        while now is not None:
            now = await _epoch(rank, now, rendezvous, lifeline)
        await rank.aclose()
    except BaseException:
        await _close_failed(rank)
        raise


async def _epoch(
    rank: Rank, description: RankDescription, rendezvous: Rendezvous | None, lifeline: Lifeline | None
) -> RankDescription | None:
    """One epoch, to its end. Returns the description of the next, None if the rank was told to stop."""
    try:
        async with open_links(
            description.config,
            description.links,
            epoch=description.epoch,
            rendezvous=rendezvous or FileRendezvous(description.rendezvous),
            clock=rank.clock,
            secret=description.secret,
            dtype=description.dtype,
        ) as links:
            await rank.run(links, description.epoch)
        return None
    except Exception as error:
        cause = root_cause(error)
        if lifeline is None or not description.linger_s or not isinstance(cause, PipelinedError):
            raise
        await rank.settle()
        if not rank.sound:
            raise
    return await lifeline.next(description, cause)


async def _close_failed(rank: Rank) -> None:
    """Close whatever happens meanwhile: the time it takes is bounded. What goes wrong says less than why it failed."""
    closing = asyncio.ensure_future(rank.aclose(_FAILED_CLOSE_S))
    while not closing.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([closing])
    closing.exception()


def root_cause(error: BaseException) -> BaseException:
    """The most telling leaf of an exception group: a lost link is rarely the cause of anything but more lost links."""
    leaves: list[BaseException] = []

    def walk(node: BaseException) -> None:
        if isinstance(node, BaseExceptionGroup):
            for child in node.exceptions:
                walk(child)
        else:
            leaves.append(node)

    walk(error)
    return min(leaves, key=lambda leaf: isinstance(leaf, TransportError))


def _device(description: RankDescription, clock: Clock) -> Device:
    # An emulated device takes a stage's `cost` for its time in seconds.
    time_of = float if description.device == "emulated" else None
    return make_device(description.device, clock, threads=description.threads, time_of=time_of)
