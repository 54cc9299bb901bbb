"""The planner of an LLM pipeline: requests in, steps out; results in, news out. Pure and synchronous.

It is what rank 0 calls `Planner`. Knows no ranks, links or tensors: only requests, pages, and what was planned.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pipelined.chunking import make_policy
from pipelined.errors import CapacityError, InvalidRequestError, ProtocolError
from pipelined.kv import PageBooks
from pipelined.messages import (
    ErrorInfo,
    Failed,
    PrefillProgress,
    PromptLogprobs,
    RequestOutput,
    Sampled,
    Step,
    pack_tokens,
)
from pipelined.scheduler.config import SchedulerConfig
from pipelined.scheduler.draft import Draft, Work
from pipelined.scheduler.pool import Pool
from pipelined.scheduler.state import Phase, RequestState, check_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipelined.chunking import ChunkPolicy
    from pipelined.costs import LiveCosts, MicroBatch
    from pipelined.messages import Request, StageTimes, StepResult

__all__ = ["Scheduler", "from_json"]

_UNTIMED = 256
"""Steps are remembered until all ranks have reported their times: they do so in batches, long before as many pass."""


class _Flight(NamedTuple):
    """A step with rows whose result has not come."""

    number: int
    works: list[Work]
    work: MicroBatch


class Scheduler:
    """Decides what every rank does for all requests of an epoch.

    Args:
        config: Settings.
        policy: Sizes the chunks; None: the one that `config` names.
        costs: Learns from the stages' times; None: begins with what `config` knows.

    Attributes:
        costs: What is known of the stages by now.
    """

    def __init__(
        self, config: SchedulerConfig, policy: ChunkPolicy | None = None, costs: LiveCosts | None = None
    ) -> None:
        self.config = config
        self.costs = costs or config.costs()
        self._policy = policy or make_policy(
            config.chunk_policy,
            chunked_prefill_size=config.chunked_prefill_size,
            page_size=config.page_size,
            costs=self.costs,
            smoothing_factor=config.smoothing_factor,
            max_micro_batch_tokens=config.max_micro_batch_tokens,
            target_itl_s=config.target_itl_s,
        )
        self._pool: Pool | None = None
        self._epoch = 0
        self._next_number = 0
        self._arrivals = 0
        self._flying: deque[_Flight] = deque()
        self._untimed: dict[int, MicroBatch] = {}
        self._decode_flights = 0
        self._news: list[RequestOutput] = []
        self._progress: dict[str, PrefillProgress] = {}

    def __repr__(self) -> str:
        pool = self._pool
        if pool is None:
            return "<Scheduler stopped>"
        waiting = len(pool.waiting) + pool.following
        return (
            f"<Scheduler epoch={self._epoch} waiting={waiting} running={len(pool.live)} in flight={len(self._flying)}>"
        )

    def start(self, epoch: int, capacity: int | None) -> None:
        """All ranks are ready, with `capacity` pages each. Everything of the last epoch is dropped.

        Raises:
            CapacityError: The stages named no capacity, or none that holds anything.
        """
        if capacity is None:
            raise CapacityError("no stage said how many KV pages it can hold; the scheduler needs to know")
        books = PageBooks(capacity, self.config.page_size, radix_cache=self.config.radix_cache)
        self._pool = Pool(books)
        self._epoch = epoch
        self._next_number = 0
        self._flying.clear()
        self._untimed.clear()
        self._decode_flights = 0
        self._news.clear()
        self._progress.clear()

    def submit(self, request: Request) -> None:
        """Take a request. If it is bad, its error is in the `news`.

        Raises:
            ProtocolError: Before `start`, or an id that is in use: the driver's own mistake.
        """
        pool = self._running_pool()
        if request.id in pool.requests:
            raise ProtocolError(f"request {request.id!r} was submitted twice; ids are unique while a request runs")
        try:
            check_request(request, self.config, pool.capacity_tokens)
        except InvalidRequestError as error:
            self._news.append(RequestOutput(id=request.id, error=ErrorInfo.of(error)))
            return
        limit = min(self.config.context_length, pool.capacity_tokens)
        state = RequestState.of(request, self._arrivals, limit)
        self._arrivals += 1
        reason = state.ending()
        if reason is not None:  # resumed, and what was delivered before is all there is
            self._news.append(RequestOutput(id=request.id, finish_reason=reason))
            return
        pool.requests[request.id] = state
        pool.enqueue(state)

    def cancel(self, id: str) -> None:
        """The owner no longer wants it: it ends with "abort", whatever is in flight for it. Unknown ids are ignored."""
        state = self._pool.requests.get(id) if self._pool else None
        if state is not None:
            self._end(state, _closing(state, finish_reason="abort"))

    def next_step(self, now_s: float) -> Step | None:
        """The next step, or None if nothing can be done now. Steps that only release have no rows and no result."""
        pool = self._pool
        if pool is None:
            return None
        draft = Draft(pool, self.config.max_running_requests)
        draft.add_decodes(self._decode_share(pool))
        draft.add_chunks(self._policy, [flight.work for flight in self._flying])
        items = (*draft.releases(), *draft.items)
        if not items:
            return None
        pool.collect_leaving()
        step = Step(self._epoch, self._next_number, draft.rows, items)
        self._next_number += 1
        if draft.rows:
            work = draft.work
            self._flying.append(_Flight(step.number, draft.works, work))
            self._untimed[step.number] = work
            if len(self._untimed) > _UNTIMED:
                del self._untimed[next(iter(self._untimed))]
            self._decode_flights += draft.decodes > 0
        return step

    def apply(self, result: StepResult) -> None:
        """What became of the oldest step in flight. Results of another epoch are ignored.

        Raises:
            ProtocolError: It is of another step.
        """
        if self._pool is None or result.epoch != self._epoch:
            return
        if not self._flying or self._flying[0].number != result.number:
            expected = f"step {self._flying[0].number}" if self._flying else "none"
            raise ProtocolError(f"a result of step {result.number} came, expected {expected}")
        flight = self._flying.popleft()
        self._decode_flights -= flight.work.decodes > 0
        sampled, failed = dict[int, Sampled](), dict[int, ErrorInfo]()
        for outcome in result.outcomes:
            if isinstance(outcome, Sampled):
                sampled[outcome.seq] = outcome
            elif isinstance(outcome, Failed):
                failed[outcome.seq] = outcome.error
            else:
                self._note_prompt_logprobs(outcome)
        for work in flight.works:
            if work.state.seq == work.seq:  # otherwise it ended, or was preempted, after the step was planned
                error = result.error or failed.get(work.seq)
                if error is not None:
                    self._fail(work.state, error)
                else:
                    self._advance(work, sampled.get(work.seq), result.number)

    def observe(self, times: StageTimes) -> None:
        """Measured stage times: the costs learn. Those of another epoch, or of steps long past, are ignored."""
        if times.epoch != self._epoch:
            return
        for number, seconds in times.times:
            work = self._untimed.get(number)
            if work is not None:
                self.costs.observe(times.rank, work, seconds)

    def news(self) -> list[RequestOutput]:
        """What the driver must be told since the last call."""
        news, self._news = self._news, []
        return news

    def progress(self) -> list[PrefillProgress]:
        """How far prompts of several chunks have come since the last call."""
        progress = list(self._progress.values())
        self._progress.clear()
        return progress

    def abandon(self, error: ErrorInfo) -> None:
        """The epoch is over: everything unfinished ends with `error`. Nothing runs until the next `start`."""
        if self._pool is not None:
            for state in self._pool.requests.values():
                self._news.append(_closing(state, error=error))
        self._pool = None
        self._flying.clear()
        self._decode_flights = 0

    def idle(self) -> bool:
        """Nothing is owed: no request, no result, no release, no news."""
        pool = self._pool
        return not self._news and not self._flying and (pool is None or not (pool.requests or pool.leaving))

    def integrity(self) -> Mapping[str, int]:
        """What is held for requests; all zero when idle. Cached pages are not: they are owed to nobody (see `stats`).

        Raises:
            AssertionError: A page is neither free, cached nor held, or the queues disagree.
        """
        pool = self._pool
        if pool is None:
            return {"requests": 0, "running": 0, "pages": 0, "releases": 0, "steps": len(self._flying)}
        pool.check_integrity()
        held = {page for state in pool.live.values() for page in state.pages}
        held.update(page for _, pages, _ in pool.leaving for page in pages)
        return {
            "requests": len(pool.requests),
            "running": len(pool.live),
            "pages": len(held),
            "releases": len(pool.leaving),
            "steps": len(self._flying),
        }

    def stats(self) -> Mapping[str, Any]:
        """Counts since `start`, for reports: steps, preemptions, pages in all, free or unused, cached, evicted.

        And `prediction_error`: by what share the times predicted of micro-batches were wrong lately, on the stage where
        that was most; None before any was predicted.
        """
        pool = self._pool
        if pool is None:
            return {}
        return {
            "steps": self._next_number,
            "waiting": len(pool.waiting) + pool.following,
            "running": len(pool.live),
            "preemptions": pool.preemptions,
            "pages": pool.books.capacity_pages,
            "available_pages": pool.books.available_pages,
            "cached_pages": pool.books.cached_pages,
            "evicted_pages": pool.books.evicted_pages,
            "prediction_error": self.costs.error,
        }

    def _running_pool(self) -> Pool:
        if self._pool is None:
            raise ProtocolError("the scheduler has not started; submit once all ranks are ready")
        return self._pool

    def _decode_share(self, pool: Pool) -> int:
        """How many decodes the next step takes: all are spread evenly over `pp_size` steps in flight."""
        free_slots = self.config.pp_size - self._decode_flights
        if free_slots <= 0 or not pool.ready:
            return 0
        return min(-(-len(pool.ready) // free_slots), -(-pool.decoding // self.config.pp_size))

    def _advance(self, work: Work, sampled: Sampled | None, number: int) -> None:
        """The step did for the sequence what was planned."""
        state, pool = work.state, self._running_pool()
        if work.samples and sampled is None:
            error = ProtocolError(f"the result of step {number} has no token for request {state.request.id!r}")
            self._fail(state, ErrorInfo.of(error))
            return
        state.computed = work.computed
        if not work.samples and state.request.id in pool.requests:
            self._progress[state.request.id] = PrefillProgress(state.request.id, work.computed, state.total_tokens)
        if not work.samples or sampled is None:
            return
        if state.phase is Phase.PREFILL:
            pool.begin_decode(state)
        state.append(sampled.token)
        reason = state.ending()
        output = RequestOutput(
            id=state.request.id,
            tokens=pack_tokens([sampled.token]),
            logprobs=(sampled.logprobs,) if sampled.logprobs else (),
            prompt_logprobs=tuple(state.prompt_logprobs),
            finish_reason=reason,
            stop_token=sampled.token if reason == "stop" else None,
        )
        if reason is not None or not state.delivered:
            output = _with_account(state, output)
        state.delivered = True
        state.prompt_logprobs.clear()
        if reason is None:
            pool.ready[state.seq] = state
            self._news.append(output)
        else:
            self._end(state, output)

    def _note_prompt_logprobs(self, outcome: PromptLogprobs) -> None:
        """Kept until the first token, so that they are told once, whatever is preempted."""
        state = self._running_pool().live.get(outcome.seq)
        if state is not None and state.wants_prompt_logprobs:
            expected = 1 + len(state.prompt_logprobs)
            state.prompt_logprobs.extend(outcome.entries[max(0, expected - outcome.start) :])

    def _fail(self, state: RequestState, error: ErrorInfo) -> None:
        self._end(state, _closing(state, error=error), keep=False)

    def _end(self, state: RequestState, last: RequestOutput, *, keep: bool = True) -> None:
        self._news.append(last)
        self._running_pool().withdraw(state, keep=keep)


def from_json(config: str) -> Scheduler:
    """A scheduler from an encoded `SchedulerConfig`: how rank 0 makes one, knowing only this function's name.

    Raises:
        ConfigError: As `SchedulerConfig.from_json`.
    """
    return Scheduler(SchedulerConfig.from_json(config))


def _closing(state: RequestState, *, finish_reason: str | None = None, error: ErrorInfo | None = None) -> RequestOutput:
    """The last news of a request that gets no more tokens."""
    return _with_account(state, RequestOutput(id=state.request.id, finish_reason=finish_reason, error=error))


def _with_account(state: RequestState, output: RequestOutput) -> RequestOutput:
    """What the first and the last news of a request tell besides tokens."""
    return msgspec.structs.replace(
        output,
        cached_tokens=state.cached_tokens,
        prefilled_tokens=state.prefilled_tokens,
        chunks=tuple(state.chunks),
        preemptions=state.preemptions,
    )
