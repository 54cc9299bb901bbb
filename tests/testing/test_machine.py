"""The state machine of the kit: our transports follow the model, and broken ones do not."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pipelined.testing import CheckFailed, link_machine


@pytest.mark.parametrize("source", ["memory://", "shm://", "tcp://", "zmq://"])
def test_it_follows_the_model(source: str) -> None:
    few = settings(max_examples=8, stateful_step_count=40)
    run_state_machine_as_test(link_machine(source), settings=few)


@pytest.mark.parametrize("source", ["broken_tensors:FreesViews", "broken_links:SwapsFrames"])
def test_it_finds_what_is_broken(source: str) -> None:
    many = settings(max_examples=200, stateful_step_count=40, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises(CheckFailed):
        run_state_machine_as_test(link_machine(source, patience_s=1.5), settings=many)
