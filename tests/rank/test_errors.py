"""Errors that cross from a rank to the driver."""

from __future__ import annotations

import pytest

from pipelined import errors
from pipelined.errors import PipelinedError, RankError, StageError
from pipelined.messages import ErrorInfo
from pipelined.rank.core import stage_error
from pipelined.rank.host import root_cause

KINDS = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_of_ours_comes_back_as_it_was(kind: type[PipelinedError]) -> None:
    error = (
        kind("feature", "pip install it") if kind is errors.MissingDependencyError else kind("what [1] is wrong [2]")
    )
    back = ErrorInfo.of(error).exception()
    assert type(back) is kind
    assert str(back) == str(error)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(kind, RankError)])
def test_a_place_comes_back(kind: type[RankError]) -> None:
    error = kind("shape is [2, 3]", rank=1, stage="a [b]", step=5, lane="HIDDEN", remote_traceback="there")
    back = ErrorInfo.of(ErrorInfo.of(error).exception()).exception()
    assert isinstance(back, kind)
    assert str(back) == str(error) == "shape is [2, 3] [rank 1, stage a [b], step 5, lane HIDDEN]"
    assert (back.rank, back.stage, back.step, back.lane) == (1, "a [b]", 5, "HIDDEN")
    assert back.remote_traceback == "there"


def test_an_unknown_error_is_the_stages() -> None:
    back = ErrorInfo("os._exit", "x").exception()
    assert type(back) is StageError
    assert type(ErrorInfo("nearest", "x").exception()) is StageError


def test_what_a_stage_raises_keeps_its_message() -> None:
    back = stage_error(ValueError("expected [2, 3]"), rank=4, stage="s", step=9).exception()
    assert str(back) == "ValueError: expected [2, 3] [rank 4, stage s, step 9]"
    assert "ValueError" in back.remote_traceback


def test_the_root_cause_is_no_lost_link() -> None:
    group = ExceptionGroup(
        "a", [errors.PeerLost("1"), ExceptionGroup("b", [errors.EndOfLane("2"), ValueError("3")]), errors.PeerLost("4")]
    )
    assert str(root_cause(group)) == "3"
    assert isinstance(root_cause(ExceptionGroup("a", [errors.PeerLost("1")])), errors.PeerLost)
