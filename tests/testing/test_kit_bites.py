"""For each rule a transport that breaks it, and the check that says so."""

from __future__ import annotations

import pytest

from pipelined.testing import CHECKS, run_checks

BROKEN = [
    ("broken_tensors:Blocks", "R1", "posting_returns_with_a_silent_peer"),
    ("broken_tensors:Forgets", "R2", "a_dropped_buffer_is_kept"),
    ("broken_tensors:DoneTooEarly", "R3", "done_means_reusable"),
    ("broken_tensors:LeasesFloats", "R3", "a_lease_is_written_in_place"),
    ("broken_tensors:KeepsLeases", "R3", "leases_never_sent_come_back"),
    ("broken_tensors:OneView", "R3", "done_means_readable"),
    ("broken_tensors:SendIgnoresEvent", "R3", "a_send_waits_for_its_event"),
    ("broken_tensors:ReceiveIgnoresEvent", "R3", "a_landing_waits_for_its_event"),
    ("broken_tensors:Swaps", "R4", "tensors_in_order_under_random_sizes"),
    ("broken_links:SwapsFrames", "R4", "messages_in_order_under_random_sizes"),
    ("broken_tensors:OneQueue", "R4", "a_stuck_lane_holds_up_no_other"),
    ("broken_links:OneMessageQueue", "R4", "a_stuck_message_lane_holds_up_no_other"),
    ("broken_tensors:FreesViews", "R4", "random_operations_follow_the_model"),
    ("broken_tensors:AnySeq", "R5", "a_wrong_seq_is_a_lane_mismatch"),
    ("broken_tensors:DropsMismatched", "R5", "a_wrong_seq_is_a_lane_mismatch"),
    ("broken_tensors:Clips", "R6", "too_long_is_truncated"),
    ("broken_tensors:RefusesEmpty", "R6", "short_and_empty_are_legal"),
    ("broken_tensors:Widens", "R6", "all_dtypes_arrive"),
    ("broken_tensors:IgnoresStrides", "R6", "non_contiguous_arrive"),
    ("broken_tensors:Cuts", "R6", "a_big_tensor_arrives"),
    ("broken_links:TooWide", "R7", "beyond_the_window_would_block"),
    ("broken_links:TooWide", "R7", "beyond_the_message_window_would_block"),
    ("broken_tensors:ReadyAtOnce", "R7", "beyond_the_window_would_block"),
    ("broken_tensors:FreesViews", "R7", "views_released_late_bound_the_sender"),
    ("broken_tensors:CountsTwice", "R7", "views_released_twice_count_once"),
    ("broken_links:LosesWhenCancelled", "R8", "a_cancelled_message_receive_loses_nothing"),
    ("broken_links:SendsThenSuspends", "R8", "a_cancelled_message_send_is_whole_or_not_at_all"),
    ("broken_tensors:CancelsWithItsWaiter", "R8", "a_cancelled_transfer_waiter_changes_nothing"),
    ("broken_tensors:WithdrawnTakes", "R8", "a_withdrawn_receive_takes_nothing"),
    ("broken_tensors:BusyForEver", "R8", "a_cancelled_ready_frees_the_place"),
    ("broken_links:ClosesWithoutFlush", "R9", "aclose_flushes"),
    ("broken_links:ClosesOnce", "R9", "aclose_is_idempotent"),
    ("broken_links:AbortsLate", "R9", "abort_is_immediate"),
    ("broken_links:LocalCloseEnds", "R10", "local_close"),
    ("broken_links:Foreign", "R10", "peer_close"),
    ("broken_tensors:DeadIsEnded", "R10", "peer_abort"),
    ("broken_tensors:DeafToDeath", "R10", "peer_abort"),
    ("broken_tensors:OnceOnly", "R10", "peer_abort"),
    ("broken_links:AbortsLate", "R10", "aborts_of_both"),
    ("broken_links:TellsNobody", "R10", "lost_names_the_peer"),
    ("broken_links:LeavesTask", "R10", "nothing_leaks"),
    ("broken_links:LeavesDescriptor", "R10", "nothing_leaks"),
    ("broken_links:LeavesMemory", "R10", "nothing_leaks"),
    ("broken_links:Throws", "R10", "lost_names_the_peer"),
    ("broken_tensors:Polls", "R11", "a_second_ready_is_busy"),
    ("broken_links:PollsMessages", "R11", "a_second_message_waiter_is_busy"),
    ("broken_tensors:WakesElsewhere", "R12", "wake_ups_on_the_owners_loop"),
    ("broken_tensors:Computes", "R12", "the_loop_is_not_held"),
    ("broken_links:OwnClock", "R13", "a_fast_clock_times_out_soon"),
    ("broken_links:OwnClock", "R13", "a_slow_clock_times_out_late"),
    ("broken_links:ComparesClocks", "R13", "skewed_clocks_do_not_matter"),
    ("broken_links:AnySecret", "R14", "hello_mismatches_are_refused"),
    ("broken_links:AnyEpoch", "R14", "hello_mismatches_are_refused"),
    ("broken_links:AnyDtype", "R14", "hello_mismatches_are_refused"),
    ("broken_links:NamesNobody", "R14", "absent_peers_are_named"),
    ("broken_links:NewLinks", "R14", "connect_after_opening"),
    pytest.param("broken_links:NeedsUnnamed", "R15", "a_missing_library_is_named", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("source", "rule", "check"), BROKEN)
def test_the_kit_fails_it_on_that_rule(source: str, rule: str, check: str) -> None:
    (result,) = run_checks(source, quick=True, only=[check], patience_s=1.5)
    assert (result.rule, result.outcome) == (rule, "fail"), result
    assert result.reason.startswith(f"{rule}: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "check"),
    [
        ("broken_links:NeverCloses", "closes_of_both"),
        ("broken_tensors:DeafProcess", "a_peer_killed_while_idle_is_lost"),
        ("broken_tensors:DeafProcess", "a_peer_killed_in_mid_transfer_is_lost"),
    ],
)
def test_the_kit_does_not_hang_where_the_transport_does(source: str, check: str) -> None:
    (result,) = run_checks(source, quick=True, only=[check])
    assert result.outcome == "fail"
    assert "hung" in result.reason


@pytest.mark.slow
def test_a_library_that_is_named_when_missing_passes() -> None:
    (result,) = run_checks("broken_links:NeedsNamed", quick=True, only=["R15"])
    assert result.outcome == "pass", result


def test_every_rule_has_a_broken_transport() -> None:
    shown = {getattr(entry, "values", entry)[1] for entry in BROKEN}
    assert shown == {check.rule for check in CHECKS} == {f"R{number}" for number in range(1, 16)}


def test_every_check_in_one_process_has_a_broken_transport() -> None:
    shown = {getattr(entry, "values", entry)[2] for entry in BROKEN}
    alone = {check.name for check in CHECKS if "processes" not in check.needs}
    # A ring can't be blocked without blocking the loop; closes of both are among the slow ones.
    assert alone - shown == {"ring_where_all_send_first", "closes_of_both"}
