"""A soak is a test of its own; here a short one, and that it bites."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipelined.cli.main import main
from pipelined.errors import ConfigError
from pipelined.llm.requests import LiveRequest
from pipelined.testing.soak import Soak, SoakPlan


@pytest.mark.slow
@pytest.mark.may_block
def test_a_short_soak(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--seconds", "12", "--streams", "40", "--kill-every", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["wrong"] == []
    assert report["completed"] > 0
    assert report["restarts"] > 0


@pytest.mark.slow
@pytest.mark.may_block
def test_a_lost_token_is_seen(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LiveRequest.hear

    def hear(self: Any, choice: int, news: Any, now_s: float) -> bool:
        ended = right(self, choice, news, now_s)
        tokens = self.output.outputs[choice].token_ids
        if len(tokens) == 7 and not self.output.finished:
            del tokens[3]
        return ended

    monkeypatch.setattr(LiveRequest, "hear", hear)
    report = run(Soak(SoakPlan(seconds=1, streams=2, kill_every_s=0)).run())
    assert any("not what they should be" in what or "ended after" in what for what in report.wrong)


def test_a_plan_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="soak"):
        SoakPlan(streams=0)
