"""What joins a rank to its supervisor: what it says of itself, and how it hears of the epoch after the one it lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from pipelined.messages import ErrorInfo

if TYPE_CHECKING:
    from pipelined.errors import PipelinedError
    from pipelined.rank.description import RankDescription

__all__ = ["EpochOver", "FromChild", "Lifeline", "Progress", "RankFailed"]


class Lifeline(Protocol):
    """The rank's end."""

    def announce(self, what: str) -> None:
        """Say in a few words how far the rank is with its set-up. Never suspends."""
        ...

    async def next(self, description: RankDescription, error: PipelinedError) -> RankDescription | None:
        """The epoch of `description` is over because of `error`, the rank is at rest and keeps its stage.

        Returns:
            What to run next; None: nothing, the rank may end.

        Raises:
            PipelinedError: `error`, if nothing came within `description.linger_s`.
        """
        ...


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A rank is that far with its set-up."""

    what: str


class EpochOver(msgspec.Struct, frozen=True, tag="over"):
    """A rank has lost its links and waits for the next epoch."""

    epoch: int
    error: ErrorInfo


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A rank is about to end."""

    error: ErrorInfo


FromChild = Progress | EpochOver | RankFailed
"""What a rank in a process of its own says through the pipe to its supervisor. JSON."""
