"""The event and the launch that all devices share. Knows nothing of threads, streams or time."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pipelined.transport.base import Event

__all__ = ["Completion", "DeviceLaunch"]

_UNKNOWN = object()


class Completion:
    """An `Event` that its owner fires once, on the loop."""

    __slots__ = ("_callbacks", "_done")

    def __init__(self, *, done: bool = False) -> None:
        self._done = done
        self._callbacks: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<Event {'done' if self._done else 'pending'}>"

    def done(self) -> bool:
        """See `Event`."""
        return self._done

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """See `Event`."""
        if self._done:
            callback()
        else:
            self._callbacks.append(callback)

    def fire(self) -> None:
        """It is done: call back whoever asked, in the order of asking."""
        self._done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class DeviceLaunch:
    """A `Launch`, and what its device needs to remember of it."""

    __slots__ = (
        "_error",
        "_known",
        "_value",
        "after",
        "cost_s",
        "ended_s",
        "event",
        "label",
        "reads",
        "started_s",
        "work",
    )

    def __init__(
        self,
        label: str,
        work: Callable[[], Any] | None = None,
        *,
        after: Sequence[Event] = (),
        reads: Sequence[torch.Tensor] = (),
        cost_s: float = 0.0,
    ) -> None:
        """See `Device.launch`. label: for `repr`. cost_s: how long an emulated device is busy with it."""
        self.label = label
        self.work = work
        self.after = after
        self.reads = reads
        self.cost_s = cost_s
        self.event = Completion()
        self.started_s = 0.0
        self.ended_s = 0.0
        self._value: Any = _UNKNOWN
        self._error: BaseException | None = None
        self._known: list[Callable[[DeviceLaunch], None]] = []

    def __repr__(self) -> str:
        state = "failed" if self._error else "known" if self.known() else "pending"
        return f"<Launch {self.label} {state}, {'done' if self.event.done() else 'not done'}>"

    def known(self) -> bool:
        """Whether `outputs()` may be called."""
        return self._value is not _UNKNOWN or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """What the work raised, if it is known to have raised."""
        return self._error

    def when_known(self, callback: Callable[[DeviceLaunch], None]) -> None:
        """See `Launch`."""
        if self.known():
            callback(self)
        else:
            self._known.append(callback)

    def outputs(self) -> Any:
        """See `Launch`.

        Raises:
            RuntimeError: They are not known yet.
        """
        if self._error is not None:
            raise self._error
        if self._value is _UNKNOWN:
            raise RuntimeError(f"the outputs of {self!r} are not known yet; wait for when_known or the event")
        return self._value

    # ---- for devices ----

    def run(self) -> None:
        """Run the work, on whichever thread this is, and keep what came of it. Tells nobody."""
        work, self.work = self.work, None
        assert work is not None, f"{self!r} runs twice"
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001 - the boundary between a device and a stage's own code
            self.keep_error(error)
            del work, self  # the traceback refers to this frame: a cycle would keep tensors until the next gc

    def keep_value(self, value: Any) -> None:
        """Set or replace the outputs. Tells nobody."""
        self._value = value

    def keep_error(self, error: BaseException) -> None:
        """Set the error. Tells nobody."""
        # Without its first frame (`run`), and without locals, which may be large.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.clear_frames(trace)
        self._error = error.with_traceback(trace)

    def tell_known(self) -> None:
        """On the loop: call back whoever waits for the outputs to be known."""
        if self._known:
            callbacks, self._known = self._known, []
            for callback in callbacks:
                callback(self)

    def complete(self) -> None:
        """On the loop: known and done."""
        self.reads = ()
        try:
            self.tell_known()
        finally:
            self.event.fire()
