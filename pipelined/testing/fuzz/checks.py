"""The invariants of a run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pipelined.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    InvalidRequestError,
    NonFiniteError,
    PipelinedError,
    RankLostError,
    StageError,
    TransportError,
)
from pipelined.testing.fuzz.case import FAIL_TOKEN, RAISE_TOKEN
from pipelined.testing.fuzz.world import reference

if TYPE_CHECKING:
    from pipelined.llm import AsyncLLM
    from pipelined.llm.outputs import CompletionOutput
    from pipelined.testing.fuzz.case import Case, Prompted
    from pipelined.testing.fuzz.journal import Journal, Outcome
    from pipelined.testing.fuzz.world import FuzzWorld

__all__ = ["check_alive", "check_left", "check_run"]

_NOTICED_S = 1.0
"""A rank that ended is known to have ended within this time."""


# ---- while the pipeline is idle ----


async def check_alive(case: Case, journal: Journal, world: FuzzWorld, llm: AsyncLLM) -> None:
    """No request is left: nothing may be held anywhere."""
    lost = lossy_events(world)
    if any(kind == "hang" for kind, _, _ in journal.struck):
        return  # a step of cancelled requests may still be owed, and its deadline ahead
    try:
        held, stats = await llm.integrity(), await llm.stats()
    except PipelinedError as error:
        if not explained(case, journal, world, error):
            journal.fail(f"asking an idle pipeline: {type(error).__name__}: {error}")
        return
    journal.counts["idle_and_alive"] += 1
    if lost and len(set(map(len, journal.chains))) > 1:
        return  # a step without rows was lost, and nothing has come after it yet
    for rank, counts in held.items():
        if any(counts.values()):
            journal.fail(f"rank {rank} holds {counts} though no request is left")
    chains = {(one["steps_applied"], one["digest"]) for one in stats.values()}
    if len(chains) != 1:
        journal.fail(f"the ranks applied different steps: {chains}")
    missing = world.held()
    for _ in range(5):  # a heartbeat may be under way each time, but not all the time
        await asyncio.sleep(0.37)
        missing &= world.held()
    if missing and not lossy_events(world):
        journal.fail(f"credits that never came back: {sorted(missing)}")


def lossy_events(world: FuzzWorld) -> int:
    """How many frames were lost or damaged on purpose."""
    return sum(event.kind in ("drop", "corrupt") for event in world.link_faults())


# ---- after closing ----


def check_left(journal: Journal, world: FuzzWorld) -> None:
    """Nothing may be left of the engine: no task, no timer, no endpoint."""
    loop: Any = asyncio.get_running_loop()
    mine = asyncio.current_task()
    tasks = sorted(task.get_name() for task in asyncio.all_tasks() if task is not mine)
    if tasks:
        journal.fail(f"tasks left: {tasks}")
    timers = [entry[3] for entry in loop._timers if not entry[3].cancelled()]
    if timers:
        journal.fail(f"timers left: {sorted(str(timer._callback) for timer in timers)}")
    board = world.board()
    if board is not None and board._endpoints:
        journal.fail(f"endpoints left: {sorted(map(str, board._endpoints))}")
    for rank, device in world.devices.items():
        if faults := getattr(device, "faults", ()):
            journal.fail(f"memory misused on rank {rank}: {faults[:3]}")


# ---- all of it ----


def check_run(case: Case, journal: Journal, world: FuzzWorld | None) -> None:
    """Logs of steps, and what each request came to. Fills in what was covered."""
    if world is None:
        return
    _check_steps(journal)
    for request in case.requests:
        outcome = journal.outcomes.get(request.number)
        if outcome is not None and outcome.asked:
            for what in _wrong(case, journal, world, request, outcome):
                journal.fail_late(f"request {request.number}: {what}")
    first = journal.outcomes.get(-1)
    if first is not None and first.error is not None and not explained(case, journal, world, first.error):
        journal.fail_late(f"it did not start: {type(first.error).__name__}: {first.error}")
    for name, count in journal.last_news.items():
        if count > 1:
            journal.fail_late(f"{name} ended {count} times")
    _check_kill(case, journal)
    _count(case, journal, world)


def _check_steps(journal: Journal) -> None:
    for epoch, chains in enumerate(journal.epochs):
        longest = max(chains, key=len)
        for rank, chain in enumerate(chains):
            if chain != longest[: len(chain)]:
                at = next(number for number, (a, b) in enumerate(zip(chain, longest, strict=False)) if a != b)
                journal.fail_late(f"the steps of rank {rank} are not a prefix of the others', from {epoch}.{at} on")


def _check_kill(case: Case, journal: Journal) -> None:
    """Whoever waits when a rank ends is told soon."""
    ends = [at_s for kind, _, at_s in journal.struck if kind != "hang"]
    if not ends or case.recover:  # then nobody is told: they wait
        return
    for number, outcome in journal.outcomes.items():
        late = outcome.ended_s is not None and outcome.ended_s > min(ends) + _NOTICED_S
        if late and isinstance(outcome.error, RankLostError) and number < 1000:
            request = next((one for one in case.requests if one.number == number), None)
            if request is None or request.at_s < min(ends):
                journal.fail_late(f"request {number} was told {outcome.ended_s} s, of an end at {min(ends)} s")


def _wrong(case: Case, journal: Journal, world: FuzzWorld, request: Prompted, outcome: Outcome) -> list[str]:
    if outcome.ended_s is None:
        return ["never ended"]
    error, output = outcome.error, outcome.output
    invalid = _must_be_refused(case, journal, request)
    if error is not None:
        if isinstance(error, InvalidRequestError):
            return [] if invalid else [f"refused: {error}"]
        if explained(case, journal, world, error, request):
            return []
        return [f"no fault explains {type(error).__name__}: {error}"]
    if outcome.given_up:
        found = [] if request.number in journal.cancelled else ["given up though nobody cancelled it"]
    elif output is None or not output.finished:
        return ["ended without a finished output"]
    else:
        found = []
    if output is None:
        return found
    if output.finished and not journal.cancelled and invalid:
        found.append("was served, though it does not fit")
    if FAIL_TOKEN in request.prompt and case.stages_fail and any(one.token_ids for one in output.outputs):
        found.append("has tokens, though its prompt makes a stage fail")
        return found
    for choice in output.outputs:
        found += _wrong_choice(case, journal, request, choice)
    if request.prompt_logprobs is not None and any(one.token_ids for one in output.outputs):
        found += _wrong_prompt_logprobs(request, output.prompt_logprobs)
    metrics = output.metrics
    if output.outputs[0].token_ids and request.n == 1:
        run = metrics.cached_tokens + sum(metrics.chunks)
        if run < len(request.prompt) or (run != len(request.prompt) and not metrics.preemptions):
            found.append(f"{metrics.cached_tokens} cached and {metrics.chunks} run of {len(request.prompt)} tokens")
    return found


def _wrong_choice(case: Case, journal: Journal, request: Prompted, choice: CompletionOutput) -> list[str]:
    limit = min(case.context, journal.capacity_tokens or case.context)
    most = min(request.max_tokens, limit - len(request.prompt))
    right = reference()(
        case.model,
        request.prompt,
        most,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.min_tokens,
    )
    found, got = [], choice.token_ids
    if got != right[: len(got)]:
        found.append(f"choice {choice.index} has the tokens {got}, right are {right}")
    if request.logprobs is not None and len(choice.logprobs or ()) != len(got):
        found.append(f"choice {choice.index} has {len(choice.logprobs or ())} log-probabilities of {len(got)} tokens")
    stops = set(request.stop_token_ids) | set(() if request.ignore_eos else case.eos)
    if choice.finish_reason in ("stop", "length"):
        reason = "stop" if right and right[-1] in stops else "length"
        if len(got) != len(right) or choice.finish_reason != reason:
            found.append(f"{choice.finish_reason} after {len(got)} tokens, right is {reason} after {len(right)}")
    elif choice.finish_reason == "abort" and request.number not in journal.cancelled:
        found.append("aborted though nobody cancelled it")
    return found


def _wrong_prompt_logprobs(request: Prompted, entries: list[Any] | None) -> list[str]:
    tokens = [next(iter(entry)) if entry else None for entry in entries or ()]
    right = [None, *request.prompt[1:]]
    return [] if tokens == right else [f"prompt log-probabilities of {tokens}, right are {right}"]


def _must_be_refused(case: Case, journal: Journal, request: Prompted) -> bool:
    capacity = journal.capacity_tokens
    return len(request.prompt) >= case.context or (capacity is not None and len(request.prompt) + 1 > capacity)


def explained(
    case: Case, journal: Journal, world: FuzzWorld, error: BaseException, request: Prompted | None = None
) -> bool:
    """Whether a fault of this run may lead to this error."""
    if isinstance(error, NonFiniteError):
        return case.stages_fail and request is not None and FAIL_TOKEN in request.prompt
    if isinstance(error, StageError):
        return case.stages_fail and any(RAISE_TOKEN in one.prompt for one in case.requests)
    if isinstance(error, EngineClosedError | ConfigError):  # those that come later find it closed
        return case.close_at_s is not None
    kinds = {kind for kind, _, _ in journal.struck}
    if case.recover and request is not None:
        kinds.clear()  # a rank that is lost is nobody's error
    if kinds & {"task", "abort"} and isinstance(error, RankLostError):
        return True
    if "hang" in kinds and isinstance(error, DeadlineError):
        return True
    return bool(lossy_events(world)) and isinstance(error, TransportError | DeadlineError | RankLostError)


def _count(case: Case, journal: Journal, world: FuzzWorld) -> None:
    counts = journal.counts
    counts["rank_steps"] = journal.rank_steps
    counts["requests"] = sum(outcome.asked for number, outcome in journal.outcomes.items() if number >= 0)
    counts[f"ranks.{case.ranks}"] += 1
    counts[f"policy.{case.policy}"] += 1
    counts[f"device.{case.device}"] += 1
    counts["skewed"] += bool(case.skews_s)
    counts["unequal_capacities"] += len(set(case.kv)) > 1
    for event in world.link_faults():
        counts[f"link.{event.kind}"] += 1
    planner = world.planner
    if planner is not None:
        stats = planner.inner.stats()
        counts["preemptions"] += stats.get("preemptions", 0)
        counts["evictions"] += stats.get("evicted_pages", 0)
    faults = bool(journal.struck or lossy_events(world) or case.stages_fail or case.cancels or case.close_at_s)
    counts["runs_without_faults"] += not faults
