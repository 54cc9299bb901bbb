"""Which rank is where: pipeline, tensor and context coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from pipelined.errors import ConfigError

__all__ = ["Coordinates", "Topology"]


@dataclass(frozen=True)
class Coordinates:
    """Place of a rank: stage, then tensor-parallel and context-parallel index within the stage."""

    pp: int
    tp: int = 0
    cp: int = 0


@dataclass(frozen=True)
class Topology:
    """Maps ranks to coordinates; tensor-parallel ranks of a stage are neighbours, then context, then pipeline."""

    pp: int
    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "tp", "cp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` is.

        Raises:
            ConfigError: There is no such rank.
        """
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank {rank} is not in 0..{self.size - 1}")
        stage, within = divmod(rank, self.tp * self.cp)
        cp, tp = divmod(within, self.tp)
        return Coordinates(pp=stage, tp=tp, cp=cp)

    def rank(self, where: Coordinates) -> int:
        """Inverse of `coordinates`."""
        return (where.pp * self.cp + where.cp) * self.tp + where.tp
