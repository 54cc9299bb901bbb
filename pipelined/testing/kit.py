"""The transport conformance kit: every check, and how they are run."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.errors import PipelinedError
from pipelined.testing import closing, deaths, model, opening, order, posting, resources, threads, waiting
from pipelined.testing.check import FAIL, PASS, SKIP, Check, CheckFailed, CheckResult, SkipCheck
from pipelined.testing.world import PATIENCE_S, World, transport_from, without_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pipelined.transport import Capabilities

__all__ = ["CHECKS", "run_check", "run_checks"]

_BOTH = ("tensors", "messages")
_CHILD = ("tensors", "processes")
_STUCK_S = 5.0  # beyond a check's deadline: then the loop itself is blocked

CHECKS: tuple[Check, ...] = (
    Check("R1", posting.check_ring_where_all_send_first),
    Check("R1", posting.check_posting_returns_with_a_silent_peer),
    Check("R2", posting.check_a_dropped_buffer_is_kept),
    Check("R3", posting.check_done_means_reusable),
    Check("R3", posting.check_done_means_readable),
    Check("R3", posting.check_a_send_waits_for_its_event),
    Check("R3", posting.check_a_landing_waits_for_its_event),
    Check("R3", resources.check_a_lease_is_written_in_place, ("tensors", "leases")),
    Check("R3", resources.check_leases_never_sent_come_back, ("tensors", "leases")),
    Check("R3", deaths.check_between_processes_all_arrives, _CHILD, 90.0, 90.0),
    Check("R4", order.check_tensors_in_order_under_random_sizes, deadline_s=60.0, full_deadline_s=240.0),
    Check("R4", order.check_messages_in_order_under_random_sizes, ("messages",), 60.0, 240.0),
    Check("R4", order.check_a_stuck_lane_holds_up_no_other, ("tensors", "buffered")),
    Check("R4", order.check_a_stuck_message_lane_holds_up_no_other, ("messages", "buffered")),
    Check("R4", model.check_random_operations_follow_the_model, deadline_s=60.0, full_deadline_s=240.0),
    Check("R5", order.check_a_wrong_seq_is_a_lane_mismatch),
    Check("R6", order.check_short_and_empty_are_legal),
    Check("R6", order.check_too_long_is_truncated),
    Check("R6", order.check_all_dtypes_arrive),
    Check("R6", order.check_non_contiguous_arrive),
    Check("R6", order.check_a_big_tensor_arrives),
    Check("R7", waiting.check_beyond_the_window_would_block),
    Check("R7", waiting.check_beyond_the_message_window_would_block, ("messages",)),
    Check("R7", resources.check_views_released_late_bound_the_sender),
    Check("R7", resources.check_views_released_twice_count_once),
    Check("R8", waiting.check_a_cancelled_message_receive_loses_nothing, ("messages",)),
    Check("R8", waiting.check_a_cancelled_message_send_is_whole_or_not_at_all, ("messages", "buffered")),
    Check("R8", waiting.check_a_cancelled_transfer_waiter_changes_nothing),
    Check("R8", waiting.check_a_withdrawn_receive_takes_nothing),
    Check("R8", waiting.check_a_cancelled_ready_frees_the_place),
    Check("R9", closing.check_aclose_flushes),
    Check("R9", closing.check_aclose_is_idempotent, ()),
    Check("R9", closing.check_abort_is_immediate),
    Check("R10", closing.check_local_close, ("tensors", "buffered")),
    Check("R10", closing.check_peer_close),
    Check("R10", closing.check_peer_abort),
    Check("R10", closing.check_closes_of_both),
    Check("R10", closing.check_aborts_of_both),
    Check("R10", closing.check_lost_names_the_peer, ()),
    Check("R10", deaths.check_a_peer_killed_while_idle_is_lost, ("processes",), 90.0, 90.0),
    Check("R10", deaths.check_a_peer_killed_in_mid_transfer_is_lost, _CHILD, 90.0, 90.0),
    Check("R10", deaths.check_a_peer_killed_with_unread_data_is_lost, ("processes",), 90.0, 90.0),
    Check("R10", deaths.check_a_frozen_peer_holds_up_nobody, _CHILD, 120.0, 120.0),
    Check("R10", resources.check_nothing_leaks, ("buffered",), 60.0, 120.0),
    Check("R11", waiting.check_a_second_ready_is_busy),
    Check("R11", waiting.check_a_second_message_waiter_is_busy, ("messages", "buffered")),
    Check("R12", threads.check_wake_ups_on_the_owners_loop),
    Check("R12", threads.check_the_loop_is_not_held),
    Check("R13", opening.check_a_fast_clock_times_out_soon, ()),
    Check("R13", opening.check_a_slow_clock_times_out_late, ()),
    Check("R13", opening.check_skewed_clocks_do_not_matter, ()),
    Check("R14", opening.check_hello_mismatches_are_refused, ()),
    Check("R14", opening.check_a_hello_of_another_version, ("processes",), 90.0, 90.0),
    Check("R14", opening.check_absent_peers_are_named, ()),
    Check("R14", opening.check_connect_after_opening, ()),
    Check("R15", opening.check_a_missing_library_is_named, (), 60.0, 60.0),
)
"""Every check, by rule."""


def run_checks(
    source: str,
    *,
    world: int = 4,
    quick: bool = False,
    only: Iterable[str] = (),
    patience_s: float = PATIENCE_S,
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Hold a transport against the contract.

    Each check runs in a loop and a thread of its own (uvloop where the transport spans processes, as in a pipeline).

    Args:
        source: URI of the transport, or `package.module:Class` of one that is not registered.
        world: How many peers the checks of many peers use, 2 or more.
        quick: Fewer and smaller: under a minute for most transports.
        only: Names of checks or rules; all without any.
        patience_s: Real time after which something that should happen at once counts as hung.
        on_result: Called with each result as it comes.

    Raises:
        ConfigError: There is no such transport. MissingDependencyError: Its library is not installed.
    """
    if world < 2:
        raise ValueError(f"world={world}: expected 2 or more peers")
    source = without_window(source)
    capabilities = transport_from(source).capabilities
    wanted = set(only)
    results = []
    for check in CHECKS:
        if not wanted or {check.name, check.rule} & wanted:
            results.append(
                run_check(check, source, capabilities=capabilities, world=world, quick=quick, patience_s=patience_s)
            )
            if on_result is not None:
                on_result(results[-1])
    return results


def run_check(
    check: Check,
    source: str,
    *,
    capabilities: Capabilities,
    world: int = 4,
    quick: bool = False,
    patience_s: float = PATIENCE_S,
) -> CheckResult:
    """Run one check, or skip it for what the transport declares that it can't do."""
    lacking = [need for need in check.needs if not getattr(capabilities, need)]
    if lacking:
        return CheckResult(check.rule, check.name, SKIP, f"the transport declares no {' and no '.join(lacking)}")
    deadline_s = check.deadline_s if quick else check.full_deadline_s
    start_s, run = time.monotonic(), _Run(check, deadline_s, source, world, quick, patience_s)
    # A thread, so that a transport that blocks its loop for good fails the check instead of hanging the kit.
    thread = threading.Thread(target=run, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(deadline_s + _STUCK_S)
    outcome, reason = run.outcome, run.reason
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        where = "".join(traceback.format_stack(frame)[-2:]).strip() if frame else ""
        outcome, reason = FAIL, f"{check.rule}: hung: the loop itself was blocked after {deadline_s:g} s in {where}"
    return CheckResult(check.rule, check.name, outcome, reason, time.monotonic() - start_s)


class _Run:
    """One run of one check, in the thread that calls it."""

    def __init__(self, check: Check, deadline_s: float, source: str, size: int, quick: bool, patience_s: float) -> None:
        self.check, self.deadline_s = check, deadline_s
        self.source, self.size, self.quick, self.patience_s = source, size, quick, patience_s
        self.outcome, self.reason = FAIL, "it did not end"
        self._unhandled: list[str] = []

    def __call__(self) -> None:
        """Run it to an outcome."""
        try:
            with tempfile.TemporaryDirectory(prefix="pipelined-check-", ignore_cleanup_errors=True) as directory:
                world = World(
                    self.source,
                    rule=self.check.rule,
                    size=self.size,
                    quick=self.quick,
                    directory=Path(directory),
                    patience_s=self.patience_s,
                )
                with asyncio.Runner(loop_factory=_loop_factory(world)) as runner:
                    runner.run(self._bounded(world))
        except BaseException as error:  # noqa: BLE001  (the supervisor of foreign code: whatever it raises fails it)
            self.outcome, self.reason = self._judge(error)
        else:
            self.outcome, self.reason = (FAIL, self._broken()) if self._unhandled else (PASS, "")

    async def _bounded(self, world: World) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_unhandled)
        try:
            async with asyncio.timeout(self.deadline_s) as bound:
                await self.check.run(world)
        except TimeoutError:
            if not bound.expired():
                raise
            raise CheckFailed(self.check.rule, f"hung: not over after {self.deadline_s:g} s", "it to end") from None
        finally:
            await world.close()

    def _on_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._unhandled.append(f"{context.get('message')}: {error!r}" if error else str(context.get("message")))

    def _broken(self) -> str:
        return f"{self.check.rule}: left unhandled in the loop: {'; '.join(self._unhandled[:3])}"

    def _judge(self, error: BaseException) -> tuple[str, str]:
        first = _first(error)
        if isinstance(first, SkipCheck):
            return SKIP, str(first)
        if isinstance(first, CheckFailed):
            return FAIL, f"{first} (and {self._broken()})" if self._unhandled else str(first)
        place = traceback.extract_tb(first.__traceback__)[-1:] if first.__traceback__ else []
        where = f" at {Path(place[0].filename).name}:{place[0].lineno}" if place else ""
        ours = "" if isinstance(first, PipelinedError) else ", not an error of the contract"
        return FAIL, f"{self.check.rule}: raised {type(first).__name__}: {first}{where}{ours}"


def _first(error: BaseException) -> BaseException:
    """The error that says most: a failed check before others, whatever groups they are in."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [_first(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, (CheckFailed, SkipCheck))), leaves[0])


def _loop_factory(world: World) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not world.capabilities.processes:
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
