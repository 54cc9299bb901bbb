"""Every error that pipelined raises, in one tree.

::

    PipelinedError
    ├── ConfigError (ValueError)        what the user asked for cannot be; said before anything is spawned if it can be
    │   ├── UnknownSchemeError          no transport, model family or device of that name
    │   ├── MissingDependencyError      an optional library is absent; carries the line that installs it
    │   ├── ModelError                  unknown or unsupported model, missing or truncated weights
    │   ├── PartitionError              layers cannot be divided over the stages as asked
    │   └── CapacityError               weights or cache do not fit
    ├── InvalidRequestError (ValueError) one request is bad; nothing else is touched
    ├── TransportError                  a link between two peers
    │   ├── ClosedError                 this side closed it
    │   ├── EndOfLane                   the peer closed it cleanly and everything sent was received
    │   ├── PeerLost                    the peer is gone
    │   ├── BusyError                   a second waiter on one lane end
    │   ├── WouldBlock                  beyond the window; wait with `ready()`
    │   ├── LaneMismatch                a frame of another step, index or epoch than expected
    │   ├── Truncated                   the frame is larger than the buffer it should land in
    │   ├── FrameTooLarge               a frame above the agreed limit
    │   └── HandshakeError              versions, epoch, world or secret disagree, or a peer is absent
    ├── DeadlineError (TimeoutError)    a wait on a peer took longer than the work it waited for may take
    ├── RankError                       something happened on a rank: names rank, stage, step and lane
    │   ├── StageError                  the stage's own code raised; carries the remote traceback
    │   ├── NonFiniteError              NaN or infinity in a stage's output
    │   └── RankLostError               the process or task of a rank ended
    ├── RequestCancelled                the request was cancelled by its owner
    ├── ProtocolError                   a peer sent what the protocol does not allow
    ├── EngineClosedError               the pipeline or engine was closed while work was owed
    └── VirtualTimeError                what was tried cannot be had in virtual time (threads, sockets)
        └── DeadlockError               in virtual time every task waits, and nothing will ever wake one
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "BusyError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DeadlineError",
    "DeadlockError",
    "EndOfLane",
    "EngineClosedError",
    "FrameTooLarge",
    "HandshakeError",
    "InvalidRequestError",
    "LaneMismatch",
    "MissingDependencyError",
    "ModelError",
    "NonFiniteError",
    "PartitionError",
    "PeerLost",
    "PipelinedError",
    "ProtocolError",
    "RankError",
    "RankLostError",
    "RequestCancelled",
    "StageError",
    "TransportError",
    "Truncated",
    "UnknownSchemeError",
    "VirtualTimeError",
    "WouldBlock",
    "nearest",
]


class PipelinedError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(PipelinedError, ValueError):
    """What was asked for cannot be done: says what was wrong, what was expected and what to do."""


class UnknownSchemeError(ConfigError):
    """No plug-in of that name is installed."""


class MissingDependencyError(ConfigError):
    """An optional library is absent."""

    def __init__(self, feature: str, install: str) -> None:
        super().__init__(f"{feature} needs a library that is not installed; install it with: {install}")
        self.feature = feature
        self.install = install


class ModelError(ConfigError):
    """The model is unknown, unsupported, or its files are missing or damaged."""


class PartitionError(ConfigError):
    """The layers cannot be divided over the stages as asked."""


class CapacityError(ConfigError):
    """Weights, cache or buffers do not fit into what there is."""


class InvalidRequestError(PipelinedError, ValueError):
    """One request is bad. No other request is touched.

    Attributes:
        param: The field that is wrong, where it is one.
        code: What is wrong, for a program ("context_length_exceeded"); None where the message alone says it.
    """

    param: str | None = None
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class TransportError(PipelinedError):
    """Something about a link between two peers."""


class ClosedError(TransportError):
    """This side has closed the endpoint."""


class EndOfLane(TransportError):
    """The peer closed cleanly, and everything that it sent before has been received."""


class PeerLost(TransportError):
    """The peer ended without closing; true on every lane, for ever."""


class BusyError(TransportError):
    """A second task waits on an end of a lane that one task owns."""


class WouldBlock(TransportError):
    """The window of the lane is full. Waiting is `ready()` alone."""


class LaneMismatch(TransportError):
    """The frame that arrived is not the one expected here (epoch, step or index)."""


class Truncated(TransportError):
    """The frame that arrived is larger than the buffer given for it."""


class FrameTooLarge(TransportError):
    """A frame is above the limit agreed on the link."""


class HandshakeError(TransportError):
    """The hello of a peer does not fit, or none came in time."""


class DeadlineError(PipelinedError, TimeoutError):
    """A wait on a peer that owes work took too long."""


class RankError(PipelinedError):
    """Something went wrong on a rank.

    Attributes:
        reason: What happened, without the place.
        rank: Which rank, or None where it is not known.
        stage: Name of its stage.
        step: Number of the step that it worked on.
        lane: Name of the lane, where a link was involved.
        remote_traceback: Text of the traceback on that rank, or "".
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: str | None = None,
        step: int | None = None,
        lane: str | None = None,
        remote_traceback: str = "",
    ) -> None:
        where = ", ".join(
            f"{name} {value}"
            for name, value in (("rank", rank), ("stage", stage), ("step", step), ("lane", lane))
            if value is not None
        )
        super().__init__(f"{message} [{where}]" if where else message)
        self.reason = message
        self.rank = rank
        self.stage = stage
        self.step = step
        self.lane = lane
        self.remote_traceback = remote_traceback


class StageError(RankError):
    """The stage's own code raised. `remote_traceback` holds where."""


class NonFiniteError(RankError):
    """A stage produced NaN or infinity."""


class RankLostError(RankError):
    """A rank ended while it was still needed."""


class RequestCancelled(PipelinedError):
    """The request was cancelled by its owner."""


class ProtocolError(PipelinedError):
    """A peer sent a message that the protocol does not allow here."""


class EngineClosedError(PipelinedError):
    """The pipeline or engine was closed while something was still owed."""


class VirtualTimeError(PipelinedError):
    """Virtual time has no threads and no real descriptors: something tried to use one, or time stood still."""


class DeadlockError(VirtualTimeError):
    """Every task waits and no timer is set. Lists the tasks and where each of them waits."""


def nearest(word: str, known: Iterable[str]) -> str:
    """End of a sentence that names what is known, the closest first: `; did you mean 'shm'? Known: ...`."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(names) or 'none'}"
