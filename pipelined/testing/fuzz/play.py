"""Plays one case on the real runtime, in virtual time, and says what was wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from pipelined.clock.virtual import place, run
from pipelined.errors import PipelinedError, VirtualTimeError
from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.testing.fuzz.checks import check_alive, check_left, check_run
from pipelined.testing.fuzz.journal import Journal, Outcome
from pipelined.testing.fuzz.world import FuzzWorld

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipelined.testing.fuzz.case import Cancellation, Case, Prompted

__all__ = ["play"]

_SETTLE_S = 1.0
"""After the last request: credits travel back, cancelled requests are released."""

_LATE_S = 1.0
"""Once the engine is closed, what waited for it must be over within this time."""


def play(case: Case) -> Journal:
    """Run a case. Its `failures` are empty if every invariant held."""
    journal = Journal(case.ranks)
    player = _Player(case, journal)
    try:
        run(player.run(), seed=case.seed)
    except VirtualTimeError as error:
        journal.failures.append(f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever comes out is a finding, and the next seed's turn
        journal.failures.append(f"{type(error).__name__} came out of the engine: {error!r}")
    check_run(case, journal, player.world)
    return journal


class _Player:
    def __init__(self, case: Case, journal: Journal) -> None:
        self.case = case
        self.journal = journal
        self.cancels = {cancel.number: cancel for cancel in case.cancels}
        self.world: FuzzWorld | None = None
        self._aborts: list[asyncio.Task[None]] = []
        self.llm: AsyncLLM

    async def run(self) -> None:
        case, journal = self.case, self.journal
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _loop, context: journal.fail(f"{context['message']}: {context.get('exception')!r}")
        )
        self.world = world = FuzzWorld(case, journal)
        self.llm = AsyncLLM(
            case.model,
            world=world,
            pp_size=case.ranks,
            page_size=case.page_size,
            chunked_prefill_size=case.chunk,
            max_running_requests=case.running,
            disable_radix_cache=not case.radix,
            transport=case.transport,
            depth=case.depth,
            step_timeout_s=case.step_timeout_s,
            setup_timeout_s=30.0,
            recover=case.recover,
        )
        self.llm.on_state = lambda state: journal.note(f"engine is {state.name} {state.reason}")
        try:
            await asyncio.wait_for(self.llm.__aenter__(), 120.0)
        except PipelinedError as error:
            journal.note(f"not started: {type(error).__name__}: {error}")
            journal.counts["start_failed"] += 1
            journal.outcomes[-1] = Outcome(error=error, asked=True, ended_s=loop.time())
        except TimeoutError:
            journal.fail("starting took more than 120 s")
        else:
            journal.note("started")
            await self._session()
        await self._settle()

    async def _session(self) -> None:
        case, journal = self.case, self.journal
        loop = asyncio.get_running_loop()
        asks = [loop.create_task(self._ask(one), name=f"request {one.number}") for one in case.requests]
        early = case.close_at_s is not None
        _, pending = await asyncio.wait(asks, timeout=case.close_at_s if early else case.bound_s)
        if early:
            journal.counts["closed_early"] += bool(pending)
        elif pending:
            journal.fail(f"after {case.bound_s:g} s these still wait: {_places(pending)}")
        else:
            await self._idle()
        await self._close()
        last_s = max((one.at_s for one in case.requests), default=0.0)
        _, pending = await asyncio.wait(asks, timeout=_LATE_S + max(0.0, last_s - loop.time()))
        if pending:
            journal.fail(f"{_LATE_S:g} s after the engine was closed these still wait: {_places(pending)}")
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)
        for task in asks:
            if not task.cancelled() and (error := task.exception()) is not None:
                journal.fail(f"{task.get_name()} raised {error!r}")

    # ---- requests ----

    async def _ask(self, request: Prompted) -> None:
        journal, loop = self.journal, asyncio.get_running_loop()
        await asyncio.sleep(request.at_s)
        outcome = journal.outcomes[request.number] = Outcome(asked=True)
        task = asyncio.current_task()
        assert task is not None
        cancel = self.cancels.get(request.number)
        if cancel is not None:
            self._plan_cancel(cancel, task)
        params = SamplingParams(
            n=request.n,
            temperature=0.0,
            seed=1,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )
        stream = self.llm.generate(request.prompt, params, request_id=str(request.number))
        try:
            async for output in stream:
                outcome.output = output
                if cancel is not None and cancel.when == "tokens":
                    count = sum(len(choice.token_ids) for choice in output.outputs)
                    if count >= cancel.count and not output.finished:
                        if cancel.how == "close":
                            self._cancelling(cancel)
                            outcome.given_up = True
                            break
                        self._cancel(cancel, task)
        except PipelinedError as error:
            outcome.error = error
        except asyncio.CancelledError:
            outcome.given_up = True
        finally:
            await stream.aclose()
            outcome.ended_s = loop.time()
            journal.note(f"request {request.number} is over: {_told(outcome)}")
            if outcome.error is not None:
                journal.counts[f"failed.{type(outcome.error).__name__}"] += 1

    def _plan_cancel(self, cancel: Cancellation, task: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        if cancel.when == "submitted":
            loop.call_soon(self._cancel, cancel, task)
        elif cancel.when == "later":
            loop.call_later(cancel.delay_s, self._cancel, cancel, task)
        elif cancel.when == "applying":
            assert self.world is not None
            hooks, left = self.world.on_applied, [cancel.count]

            def applied(rank: int) -> None:
                if rank == cancel.rank:
                    left[0] -= 1
                    if left[0] < 0:
                        hooks.remove(applied)
                        self._cancel(cancel, task)

            hooks.append(applied)

    def _cancelling(self, cancel: Cancellation) -> None:
        self.journal.cancelled.add(cancel.number)
        self.journal.counts[f"cancel.by_{cancel.how}"] += 1
        self.journal.counts[f"cancel.when_{cancel.when}"] += 1
        self.journal.note(f"cancel request {cancel.number} by {cancel.how}")

    def _cancel(self, cancel: Cancellation, task: asyncio.Task[None]) -> None:
        if task.done() or cancel.number in self.journal.cancelled:
            return
        self._cancelling(cancel)
        if cancel.how == "task":
            task.cancel()
            return
        aborting = asyncio.get_running_loop().create_task(self.llm.abort(str(cancel.number)), name="abort")
        self._aborts.append(aborting)

    # ---- the end ----

    async def _idle(self) -> None:
        """All requests are over: nothing may be held; then come the kills of an idle pipeline."""
        case, journal, world = self.case, self.journal, self.world
        assert world is not None
        journal.doing = "idle"
        await asyncio.sleep(_SETTLE_S)
        while self.llm.state.name == "recovering" and journal.now() < case.bound_s:  # noqa: ASYNC110
            await asyncio.sleep(_SETTLE_S)
        await check_alive(case, journal, world, self.llm)
        kills = [kill for kill in case.kills if kill.phase == "idle"]
        for kill in kills:
            world.end_later(kill)
        if kills:
            await asyncio.sleep(0.1)
            extra = case.requests[0]
            await self._ask(_again(extra, 1000 + extra.number))

    async def _close(self) -> None:
        case, journal, world = self.case, self.journal, self.world
        assert world is not None
        journal.doing = "closing"
        journal.counts["restarts"] += self.llm.state.restarts
        journal.counts["gave_up"] += self.llm.state.name == "dead" and case.recover
        for kill in case.kills:
            if kill.phase == "closing":
                world.end_later(kill)
        try:
            await asyncio.wait_for(self.llm.__aexit__(None, None, None), 120.0)
        except TimeoutError:
            journal.fail("closing took more than 120 s")
        journal.note("closed")

    async def _settle(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_LATE_S)
        await asyncio.sleep(_SETTLE_S)
        assert self.world is not None
        check_left(self.journal, self.world)


def _again(request: Prompted, number: int) -> Prompted:
    return msgspec.structs.replace(request, number=number, at_s=0.0)


def _places(tasks: Iterable[asyncio.Task[None]]) -> str:
    return "; ".join(sorted(f"{task.get_name()} at {place(task)}" for task in tasks))


def _told(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {outcome.error}"
    if outcome.given_up:
        return "given up"
    assert outcome.output is not None
    return ", ".join(f"{choice.token_ids} {choice.finish_reason}" for choice in outcome.output.outputs)
