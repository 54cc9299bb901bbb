"""What a rank must know about itself and its pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from pipelined.errors import ConfigError
from pipelined.messages import DRIVER, Peer

__all__ = ["Peers", "RankConfig"]


@dataclass(frozen=True)
class Peers:
    """Whom a peer talks to, by kind of link."""

    messages: frozenset[int]
    tensors: frozenset[int]
    health: frozenset[int]


@dataclass(frozen=True)
class RankConfig:
    """The shape of a pipeline, and this rank's place in it.

    Attributes:
        pipeline: Its name.
        rank: This rank, or DRIVER.
        size: Number of ranks.
        window: W, the most steps in flight.
        fed: The driver sends the first stage its inputs (custom pipelines).
        drained: The last stage sends its outputs to the driver (custom pipelines).
        step_timeout_s: A wait for a step's inputs or for a credit may take this long, plus what `Deadlines` adds.
        setup_timeout_s: All ranks must be ready within this time.
        queue_depth: Most launches queued on the device: one runs, the next is ready.
        heartbeat_bound_s: A rank whose loop has not answered the driver for so long counts as lost (stopped, or its
            loop is blocked).
    """

    pipeline: str
    rank: int
    size: int
    window: int
    fed: bool = False
    drained: bool = False
    step_timeout_s: float = 300.0
    setup_timeout_s: float = 600.0
    queue_depth: int = 2
    heartbeat_bound_s: float = 15.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a pipeline of {self.size} ranks: expected at least 1")
        if self.window < 1:
            raise ConfigError(f"window={self.window}: at least one step must be allowed in flight")

    @property
    def first(self) -> bool:
        """Rank 0 plans."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """The last rank reports results."""
        return self.rank == self.size - 1

    def peer(self, rank: int) -> Peer:
        """The peer of that number."""
        return Peer(self.pipeline, rank)

    @property
    def world(self) -> tuple[Peer, ...]:
        """Every peer: the driver and all ranks."""
        return tuple(self.peer(rank) for rank in range(DRIVER, self.size))

    @property
    def upstream(self) -> int | None:
        """Who sends this rank its inputs."""
        if self.first:
            return DRIVER if self.fed else None
        return self.rank - 1

    @property
    def downstream(self) -> int | None:
        """Who gets this rank's outputs."""
        if self.last:
            return DRIVER if self.drained else None
        return self.rank + 1

    def peers(self) -> Peers:
        """Whom this peer must be connected to. Symmetric: a is in b's set exactly if b is in a's."""
        everyone = frozenset(range(DRIVER, self.size)) - {self.rank}
        if self.rank == DRIVER:
            tensors = {0} if self.fed else set()
            tensors |= {self.size - 1} if self.drained else set()
            return Peers(messages=frozenset({0}), tensors=frozenset(tensors), health=everyone)
        neighbours = {rank for rank in (self.upstream, self.downstream) if rank is not None}
        return Peers(
            messages=everyone if self.first else frozenset({0}),
            tensors=frozenset(neighbours),
            health=frozenset({DRIVER}),
        )
