"""Opens the endpoints of one peer for one epoch, and names the links that it uses.

Messages go over the tensor transport where it carries them, over another one (ZMQ) where it does not; the HEALTH lane
may have a transport of its own, so that liveness does not depend on the one that moves tensors.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelined.errors import ConfigError
from pipelined.messages import DRIVER, Peer
from pipelined.transport import EndpointSpec, Lane, resolve
from pipelined.transport.registry import split_uri
from pipelined.transport.rendezvous import part_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pipelined.clock import Clock
    from pipelined.rank.config import RankConfig
    from pipelined.transport import Endpoint, MessageLink, Rendezvous, TensorLink

__all__ = ["LinkPlan", "Links", "open_links"]

LANE_WINDOW = 128
"""Most tensors, and messages, in flight on a lane; also the most tensors of one payload."""


@dataclass(frozen=True)
class LinkPlan:
    """Which transport carries what, as URIs.

    Attributes:
        tensors: For the HIDDEN and KV lanes.
        messages: For SCHEDULE and RESULTS; equal to `tensors` where that one carries messages.
        health: For HEALTH.
    """

    tensors: str
    messages: str
    health: str

    @classmethod
    def choose(cls, tensors: str, *, processes: bool, messages: str | None = None) -> LinkPlan:
        """The plan for a tensor transport.

        Raises:
            ConfigError: The transport does not do what is asked of it.
        """
        capabilities = resolve(tensors).capabilities
        if not capabilities.tensors:
            raise ConfigError(f"transport {tensors!r} carries no tensors; choose one that does, for example 'shm://'")
        if processes and not capabilities.processes:
            raise ConfigError(
                f"transport {tensors!r} does not reach other processes; use workers='task' or, for example, 'shm://'"
            )
        own = tensors if capabilities.messages else "zmq://"
        messages = messages or own
        # One endpoint where one will do: what speaks ZMQ already carries HEALTH as well.
        zmq = next((uri for uri in (messages, tensors) if split_uri(uri)[0][-1] == "zmq"), "zmq://")
        return cls(tensors=tensors, messages=messages, health=zmq if processes else messages)


@dataclass(frozen=True)
class Links:
    """The links of one peer. Those that it does not have are None or empty.

    Attributes:
        requests: Driver to rank 0. news: rank 0 to driver.
        steps: Rank 0's to every other rank, or this rank's from rank 0.
        results: Rank 0's from every other rank, or this rank's to rank 0.
        upstream, downstream: HIDDEN links.
        health: By peer.
    """

    requests: MessageLink | None
    news: MessageLink | None
    steps: dict[int, MessageLink]
    results: dict[int, MessageLink]
    upstream: TensorLink | None
    downstream: TensorLink | None
    health: dict[int, MessageLink]


@asynccontextmanager
async def open_links(
    config: RankConfig,
    plan: LinkPlan,
    *,
    epoch: int,
    rendezvous: Rendezvous,
    clock: Clock,
    secret: str = "",
    dtype: str = "",
) -> AsyncGenerator[Links]:
    """Open this peer's endpoints, one for each distinct transport; close them all on leaving.

    Transports of one scheme under different URIs get a part of the rendezvous each, so that none finds another's peers.

    Raises:
        HandshakeError: A peer is absent or does not fit.
    """
    peers = config.peers()
    wanted: dict[str, set[int]] = {}
    for uri, group in ((plan.tensors, peers.tensors), (plan.messages, peers.messages), (plan.health, peers.health)):
        wanted.setdefault(uri, set()).update(group)
    endpoints: dict[str, Endpoint] = {}
    boards = _boards(plan, rendezvous)

    async with AsyncExitStack() as stack:
        for uri, ranks in wanted.items():
            if not ranks:
                continue
            spec = EndpointSpec(
                me=config.peer(config.rank),
                world=config.world,
                rendezvous=boards[uri],
                connect=tuple(config.peer(rank) for rank in sorted(ranks)),
                epoch=epoch,
                clock=clock,
                window=LANE_WINDOW,
                open_timeout_s=config.setup_timeout_s,
                secret=secret,
                dtype=dtype,
            )
            endpoints[uri] = await stack.enter_async_context(await resolve(uri).open(spec))
        try:
            yield _name_links(config, plan, endpoints)
        except BaseException:  # what was posted may wait for something that will never be
            for endpoint in endpoints.values():
                endpoint.abort()
            raise


def _boards(plan: LinkPlan, rendezvous: Rendezvous) -> dict[str, Rendezvous]:
    """Where the endpoints of each URI meet. All peers have the same plan, so they agree."""
    boards: dict[str, Rendezvous] = {}
    schemes: set[str] = set()
    for role, uri in (("tensors", plan.tensors), ("messages", plan.messages), ("health", plan.health)):
        if uri not in boards:
            scheme = split_uri(uri)[0][-1]
            boards[uri] = part_of(rendezvous, role) if scheme in schemes else rendezvous
            schemes.add(scheme)
    return boards


def _name_links(config: RankConfig, plan: LinkPlan, endpoints: dict[str, Endpoint]) -> Links:
    def message(rank: int, lane: Lane) -> MessageLink:
        return endpoints[plan.messages].messages(config.peer(rank), lane)

    def tensor(rank: int | None) -> TensorLink | None:
        return None if rank is None else endpoints[plan.tensors].tensors(config.peer(rank), Lane.HIDDEN)

    driver, first = config.rank == DRIVER, config.first
    others = range(1, config.size) if first else () if driver else (0,)
    if driver:
        upstream = config.size - 1 if config.drained else None
        downstream = 0 if config.fed else None
    else:
        upstream, downstream = config.upstream, config.downstream
    return Links(
        requests=message(0, Lane.SCHEDULE) if driver else message(DRIVER, Lane.SCHEDULE) if first else None,
        news=message(0, Lane.RESULTS) if driver else message(DRIVER, Lane.RESULTS) if first else None,
        steps={rank: message(rank, Lane.SCHEDULE) for rank in others},
        results={rank: message(rank, Lane.RESULTS) for rank in others},
        upstream=tensor(upstream),
        downstream=tensor(downstream),
        health={
            rank: endpoints[plan.health].messages(Peer(config.pipeline, rank), Lane.HEALTH)
            for rank in config.peers().health
        },
    )
