"""Keeps a pipeline going: when an epoch is lost, the next begins. Knows nothing of requests."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipelined.errors import EngineClosedError, PipelinedError, RankLostError
from pipelined.pipeline import Driver

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pipelined.messages import Outputs
    from pipelined.pipeline import World
    from pipelined.rank.description import RankDescription

__all__ = ["EngineState", "Epochs", "Restarts"]

_BACKOFF_S = 0.25
"""Before a start that follows one that failed; doubled each time, up to `_MOST_BACKOFF_S`."""

_MOST_BACKOFF_S = 5.0
_HISTORY = 32


@dataclass(frozen=True)
class EngineState:
    """How an engine is doing.

    Attributes:
        name: "stopped", "starting", "ready", "recovering" (a rank was lost, requests wait), "draining" (what runs is
            finished, nothing new is taken) or "dead" (it gave up).
        reason: Why it is not ready; "" if it is.
        since_s: Since when, by the engine's clock.
        epoch: Of the pipeline; None before the first.
        restarts: Epochs begun after the first.
        peers_lost: How often the pipeline was lost.
        history: The latest losses, the oldest first.
    """

    name: str = "stopped"
    reason: str = ""
    since_s: float = 0.0
    epoch: int | None = None
    restarts: int = 0
    peers_lost: int = 0
    history: tuple[str, ...] = ()

    @property
    def serves(self) -> bool:
        """Whether requests are taken; they may have to wait."""
        return self.name in ("ready", "recovering")


@dataclass(frozen=True)
class Restarts:
    """How often to begin anew; as in `EngineConfig`."""

    most: int
    window_s: float


class _Loss(NamedTuple):
    at_s: float
    error: PipelinedError


class Epochs:
    """One pipeline, through all its epochs.

    Attributes:
        driver: Of the current epoch, or of the one that was lost; None before the first and after the end.
        capacity: What the ranks agreed on; known once started.
        draining: Nothing new is taken.
        patience: How many more losses are borne than usual, while their cause is looked for.
        end: Why it gave up, once it has.
        on_state: Called whenever the state has changed.
    """

    def __init__(
        self,
        world: World,
        describe: Callable[[int, int | None], list[RankDescription]],
        restarts: Restarts | None,
        *,
        on_outputs: Callable[[Outputs], None],
        on_ready: Callable[[], None],
        on_end: Callable[[PipelinedError], None],
    ) -> None:
        """Describe.

        Args:
            world: Where the ranks live.
            describe: Makes the descriptions of an epoch, given its number and the capacity agreed on before.
            restarts: None: the first loss is the end.
            on_outputs: Called with news of rank 0.
            on_ready: Called when an epoch after the first has begun: what was asked of the one before is lost.
            on_end: Called once nothing more will come, with the reason.
        """
        self.world = world
        self.driver: Driver | None = None
        self.capacity: int | None = None
        self.on_state: Callable[[EngineState], None] = lambda _: None
        self._describe = describe
        self._restarts = restarts
        self._on_outputs, self._on_ready, self._on_end = on_outputs, on_ready, on_end
        self._state = EngineState()
        self.draining = False
        self.patience = 0
        self.end: PipelinedError | None = None
        self._begun_s = 0.0
        self._losses: deque[_Loss] = deque()
        self._history: deque[str] = deque(maxlen=_HISTORY)
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Epochs {self._state.epoch} {self._state.name}>"

    @property
    def state(self) -> EngineState:
        """How it is doing."""
        return self._state

    @property
    def recovers(self) -> bool:
        """Whether a loss is followed by another epoch."""
        return self._restarts is not None

    @property
    def live(self) -> Driver | None:
        """The driver, if it can be talked to now."""
        driver = self.driver
        return driver if driver is not None and not driver.failure.done() else None

    def _become(self, name: str, reason: str = "", *, restarts: int = 0, peers_lost: int = 0) -> None:
        """Args: restarts, peers_lost: how many more."""
        old = self._state
        self._state = EngineState(
            name,
            reason,
            self.world.clock.now(),
            epoch=old.epoch,
            restarts=old.restarts + restarts,
            peers_lost=old.peers_lost + peers_lost,
            history=tuple(self._history),
        )
        self.on_state(self._state)

    # ---- life ----

    async def start(self) -> None:
        """Begin the first epoch.

        Raises:
            PipelinedError: A rank could not; names it. Nothing is left then.
        """
        self._closing = self.draining = False
        self._begun_s = self.world.clock.now()
        self._become("starting", "the ranks load")
        attached = () if self.world.next_epoch else None
        try:
            await self._begin(attached)
        except BaseException as error:
            self._become("dead", str(error))
            self.world.kill()
            await self.world.stop(0.0)
            raise
        self._become("ready")

    async def _begin(self, lost: Collection[int] | None) -> None:
        epoch = self.world.next_epoch
        driver = Driver(self._describe(epoch, self.capacity), self.world, on_outputs=self._on_outputs, lost=lost)
        await driver.__aenter__()
        self.driver, self.capacity = driver, driver.capacity
        self._state = dataclasses.replace(self._state, epoch=epoch)
        driver.failure.add_done_callback(lambda failure: self._failed(driver, failure.result()))

    async def close(self) -> None:
        """Stop the ranks. `on_end` is called with `EngineClosedError` if nothing else ended it before."""
        self._closing = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        driver, self.driver = self.driver, None
        if driver is not None:
            await driver.__aexit__(None, None, None)
        if self._state.name != "dead":
            self._become("stopped")
        self._on_end(EngineClosedError("the pipeline was closed"))

    def drain(self) -> None:
        """Take nothing new; what runs goes on."""
        self.draining = True
        if self._state.serves:
            self._become("draining", "it is about to stop")

    # ---- losses ----

    def progressed(self) -> None:
        """A token came: the losses before it were not in vain."""
        self._losses.clear()

    def _failed(self, driver: Driver, error: PipelinedError) -> None:
        if self._closing or driver is not self.driver:
            return
        if self._task is not None and not self._task.done():
            return
        if self._restarts is None:
            self._die(error)
        else:
            # Held here and awaited in `close`: whoever opened the engine must not be cancelled by what it does.
            self._task = asyncio.get_running_loop().create_task(self._recover(error), name="recovery")

    def _die(self, error: PipelinedError) -> None:
        self.end = error
        self._become("dead", str(error), peers_lost=1)
        self._on_end(error)

    async def _recover(self, error: PipelinedError) -> None:
        try:
            await self._begin_anew(error)
        except Exception as wrong:  # noqa: BLE001 - the supervisor: whoever waits must hear of it
            self.world.kill()
            self._die(RankLostError(f"beginning anew went wrong: {type(wrong).__name__}: {wrong} (after: {error})"))

    async def _begin_anew(self, error: PipelinedError) -> None:
        """Begin epochs until one stands, or give up."""
        assert self.driver is not None
        for failed_starts in itertools.count():
            if (last := self._count(error)) is not None:
                self.world.kill()
                self._die(last)
                return
            lost = self._lost(error)
            self._become("recovering", str(error), peers_lost=1)
            try:
                await self.driver.part()
                if failed_starts:
                    await self.world.clock.sleep(min(_MOST_BACKOFF_S, _BACKOFF_S * 2.0 ** (failed_starts - 1)))
                await self._begin(lost)
            except PipelinedError as again:
                error = again
                continue
            break
        self._become("draining" if self.draining else "ready", restarts=1)
        self._on_ready()

    def _lost(self, error: PipelinedError) -> Collection[int]:
        """Ranks that must begin anew though they may live: silent ones, or all where beginning anew did not help."""
        if isinstance(error, RankLostError):
            return () if error.rank is None else (error.rank,)
        descriptions = self._describe(0, None)
        return range(len(descriptions)) if len(self._losses) > 1 else ()

    def _count(self, error: PipelinedError) -> PipelinedError | None:
        """Note a loss. Returns the error to end with, if it was one too many."""
        assert self._restarts is not None
        now_s = self.world.clock.now()
        self._history.append(f"after {now_s - self._begun_s:.1f} s: {error}")
        self._losses.append(_Loss(now_s, error))
        while self._losses[0].at_s < now_s - self._restarts.window_s:
            self._losses.popleft()
        if len(self._losses) <= self._restarts.most + self.patience:
            return None
        told = "; ".join(f"{now_s - loss.at_s:.1f} s ago: {loss.error}" for loss in self._losses)
        return RankLostError(
            f"the pipeline was lost {len(self._losses)} times within {self._restarts.window_s:g} s without a token "
            f"between; it is given up ({told})",
            rank=getattr(error, "rank", None),
            stage=getattr(error, "stage", None),
        )
