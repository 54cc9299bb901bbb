"""Frames that are lost without another behind them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipelined.pipeline.receipts import Receipts


def test_a_frame_that_never_comes_is_overdue_after_the_bound() -> None:
    receipts = Receipts(10.0)
    assert not receipts.overdue(3, 3, 0.0)
    assert not receipts.overdue(4, 3, 1.0)
    assert not receipts.overdue(9, 3, 11.0)
    assert receipts.overdue(9, 3, 11.1)


def test_progress_past_what_was_owed_starts_anew() -> None:
    receipts = Receipts(10.0)
    assert not receipts.overdue(2, 1, 0.0)
    assert not receipts.overdue(5, 2, 9.0)
    assert not receipts.overdue(5, 4, 18.0)
    assert receipts.overdue(5, 4, 20.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 2.0)), max_size=50), st.integers(0, 4))
def test_a_lane_that_is_always_a_little_behind_is_never_overdue(steps: list[tuple[int, float]], lag: int) -> None:
    receipts, sent, now_s, history = Receipts((lag + 1) * 2.0), 0, 0.0, [0]
    for more, wait_s in steps:
        sent, now_s = sent + more, now_s + wait_s
        history.append(sent)
        assert not receipts.overdue(sent, history[max(0, len(history) - 1 - lag)], now_s)
