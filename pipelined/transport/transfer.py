"""The handle of a posted send or receive, shared by all transports."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from pipelined.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["Transfer"]

T = TypeVar("T")

_PENDING = object()


class Transfer(Generic[T]):
    """Something posted. Awaitable by any number of tasks; cancelling a waiter leaves it as it is (R8).

    Touched from the owner's loop only. The transport calls `finish` or `fail` exactly once.
    """

    __slots__ = ("_callbacks", "_error", "_keep", "_result", "_withdraw", "label")

    def __init__(
        self, label: str, *, keep: object = None, withdraw: Callable[[Transfer[T]], bool] | None = None
    ) -> None:
        """Args: label: for `repr`. keep: buffer kept alive until done. withdraw: tries to take back the posting."""
        self.label = label
        self._keep = keep
        self._withdraw = withdraw
        self._result: object = _PENDING
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Transfer[T]], None]] = []

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._error else "done"
        return f"<Transfer {self.label} {state}>"

    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._result is not _PENDING or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while pending and after success."""
        return self._error

    def result(self) -> T:
        """What it brought.

        Raises:
            RuntimeError: It is still pending.
            TransportError: It failed.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)  # else it would grow with each waiter
        if self._result is _PENDING:
            raise RuntimeError(f"{self!r} is not done")
        return cast("T", self._result)

    def cancel(self) -> bool:
        """Withdraw it if it has not begun; what it would have received goes to the next receive.

        Returns:
            Whether it was withdrawn. It then fails with `ClosedError`. A send is never withdrawn once posted.
        """
        if self.done() or self._withdraw is None or not self._withdraw(self):
            return False
        self.fail(ClosedError(f"{self.label} was withdrawn"))
        return True

    def add_done_callback(self, callback: Callable[[Transfer[T]], None]) -> None:
        """Call back when it ends; at once if it has."""
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def wait_on(self, stream: object) -> None:
        """Order a device stream after this transfer, without blocking the loop.

        Transfers that complete on the host are awaited before anything is launched, so there is nothing to order.
        Device transports override it.
        """
        if not self.done():
            raise RuntimeError(f"{self!r} completes on the host: await it before launching what reads it")

    def finish(self, result: T) -> None:
        """For transports: it is done."""
        self._result = result
        self._end()

    def fail(self, error: BaseException) -> None:
        """For transports: it failed."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._keep = self._withdraw = None
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Transfer[T]], None]) -> None:
        """What a callback raises is its owner's fault: it is reported, and stops neither the others nor the link."""
        try:
            callback(self)
        except Exception as error:  # noqa: BLE001
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"a callback of {self!r} failed", "exception": error}
            )

    def __await__(self) -> Generator[object, None, T]:
        if not self.done():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake(_: Transfer[T]) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            self._callbacks.append(wake)
            try:
                yield from waiter
            finally:
                if not self.done():
                    self._callbacks.remove(wake)
        return self.result()
