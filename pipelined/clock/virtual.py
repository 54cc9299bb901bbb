"""An event loop whose time is virtual: when no callback is ready, it jumps to the next timer.

Whatever runs on it runs the same way each time: callbacks in the order of scheduling, timers by time, tasks of a set
(those of a TaskGroup among them) in an order that depends on their creation alone. There are no threads and no
descriptors here, and a wait that nothing can end is an error at once instead of a hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import random
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, TypeVarTuple

from pipelined.errors import DeadlockError, VirtualTimeError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
    from contextvars import Context

__all__ = ["VirtualTimeLoop", "place", "run", "virtual_loop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_TURNS_AT_ONE_INSTANT: Final = 1_000_000
_TURNS_BETWEEN_COLLECTIONS: Final = 20_000
_CANCELLED_WORTH_SWEEPING: Final = 256


def _refused(name: str, kind: str) -> Any:
    """A method that is not to be had."""

    def refuse(self: VirtualTimeLoop, *args: Any, **options: Any) -> NoReturn:
        raise VirtualTimeError(
            f"{name}: there are no {kind} in virtual time; use an emulated device and the memory or sim transport, "
            "or a real event loop"
        )

    refuse.__doc__ = f"Refused: there are no {kind} in virtual time."
    return refuse


class _NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set depends on its number, not on its address."""

    def __init__(self, number: int, coro: Any, *, loop: VirtualTimeLoop, **options: Any) -> None:
        self.number = number  # first: the base class puts the task into a set
        options["name"] = options.get("name") or f"Task-{number}"
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """See the module. `time()` begins at 0.

    Timers that are due at the same instant run in the order of setting with seed 0, and in a random order that depends
    on the seed with any other: real loops promise no order among them.
    """

    # What the base class has and does not declare.
    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.random = random.Random(seed)
        self.turns = 0
        self._now_s = 0.0
        self._turn_of_instant = 0
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._timers_set = itertools.count()
        self._cancelled_timers = 0
        self._tasks_made = itertools.count()
        self._generators: weakref.WeakValueDictionary[int, AsyncGenerator[Any, Any]] = weakref.WeakValueDictionary()
        self._generators_begun = itertools.count()
        self._owner = threading.get_ident()
        self.set_task_factory(self._make_task)

    def __repr__(self) -> str:
        return f"<VirtualTimeLoop {self._now_s:.6f} s, seed {self.seed}>"

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    # ---- timers ----

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back once `time()` has reached `when`."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        order = self.random.random() if self.seed else 0.0
        heapq.heappush(self._timers, (when, order, next(self._timers_set), timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back `delay` virtual seconds from now."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by `TimerHandle.cancel`: most deadlines are cancelled, and must not pile up."""
        self._cancelled_timers += 1
        if self._cancelled_timers > _CANCELLED_WORTH_SWEEPING and self._cancelled_timers * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[3].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _run_once(self) -> None:
        """One turn: what was ready when it began. The base class calls it until the loop is stopped."""
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            self._jump()
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[3])
        self.turns += 1
        if self.turns - self._turn_of_instant > _TURNS_AT_ONE_INSTANT:
            self._turn_of_instant = self.turns
            raise VirtualTimeError(
                f"{_TURNS_AT_ONE_INSTANT:,} turns of the loop and it is still {self._now_s:.6f} s: something polls "
                f"without waiting; these tasks are there:\n{self._waiting()}"
            )
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
        if self.turns % _TURNS_BETWEEN_COLLECTIONS == 0 and not gc.isenabled():
            gc.collect(1)

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][3].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise DeadlockError(f"at {self._now_s:.6f} s every task waits and no timer is set:\n{self._waiting()}")
        self._turn_of_instant = self.turns
        self._now_s = max(self._now_s, timers[0][0])

    def _waiting(self) -> str:
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, _NumberedTask)]
        return "\n".join(f"  {task.get_name()}: {place(task)}" for task in sorted(tasks, key=lambda t: t.number))

    # ---- tasks and generators, in one order ----

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return _NumberedTask(next(self._tasks_made), coro, loop=self, **options)

    def _asyncgen_firstiter_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        self._generators[next(self._generators_begun)] = agen

    async def shutdown_asyncgens(self) -> None:
        """Close the generators that are still open, in the order in which they began."""
        for number in list(self._generators):
            if (generator := self._generators.pop(number, None)) is not None:
                await generator.aclose()

    # ---- what there is not ----

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Like `call_soon`; on the loop's own thread only.

        Raises:
            VirtualTimeError: Called on another thread.
        """
        if threading.get_ident() != self._owner:
            self._refuse_thread()
        return self.call_soon(callback, *args, context=context)

    def close(self) -> None:
        """Drop what is left of callbacks and timers."""
        super().close()
        self._timers.clear()

    def _write_to_self(self) -> None:
        """The base class wakes a sleeping selector with it; here nothing sleeps."""

    _refuse_thread = _refused("call_soon_threadsafe from another thread", "threads")
    run_in_executor = _refused("run_in_executor", "threads")
    add_reader = _refused("add_reader", "real descriptors")
    add_writer = _refused("add_writer", "real descriptors")
    add_signal_handler = _refused("add_signal_handler", "signals")
    connect_read_pipe = _refused("connect_read_pipe", "pipes")
    connect_write_pipe = _refused("connect_write_pipe", "pipes")
    create_connection = _refused("create_connection", "sockets")
    create_datagram_endpoint = _refused("create_datagram_endpoint", "sockets")
    create_server = _refused("create_server", "sockets")
    create_unix_connection = _refused("create_unix_connection", "sockets")
    create_unix_server = _refused("create_unix_server", "sockets")
    getaddrinfo = _refused("getaddrinfo", "sockets")
    sendfile = _refused("sendfile", "sockets")
    sock_accept = _refused("sock_accept", "sockets")
    sock_connect = _refused("sock_connect", "sockets")
    sock_recv = _refused("sock_recv", "sockets")
    sock_recv_into = _refused("sock_recv_into", "sockets")
    sock_sendall = _refused("sock_sendall", "sockets")
    subprocess_exec = _refused("subprocess_exec", "processes")
    subprocess_shell = _refused("subprocess_shell", "processes")


def run(coro: Coroutine[Any, Any, T], *, seed: int = 0) -> T:
    """Run a coroutine in virtual time and return what it returns; like `asyncio.run` otherwise.

    The garbage collector runs at fixed turns of the loop meanwhile, so that finalizers too have one order.

    Raises:
        DeadlockError: Every task waits for another.
        VirtualTimeError: Threads, descriptors or endless polling.
    """
    with _collected_at_fixed_turns(), asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(coro)


def virtual_loop(seed: int = 0) -> Generator[VirtualTimeLoop, None, None]:
    """Yield a loop and close it afterwards. A pytest fixture by `pytest.fixture(virtual_loop)`."""
    with _collected_at_fixed_turns(), asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        yield loop


@contextlib.contextmanager
def _collected_at_fixed_turns() -> Iterator[None]:
    if not gc.isenabled():
        yield
        return
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: the innermost coroutine that has a frame."""
    inner: Any = task.get_coro()
    where = "not begun"
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None) or getattr(inner, "ag_frame", None)
        if frame is not None:
            code = frame.f_code
            where = f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    return where
