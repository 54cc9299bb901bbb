"""The fuzzer: the same each time, it bites, it shrinks, and what it once found stays mended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from typing import Any

import pytest
from fuzz_cases import asked, case, errors, held, prompt

from pipelined.cli.main import main
from pipelined.errors import ConfigError
from pipelined.models.toy import ToyStage
from pipelined.rank.flight import Flight
from pipelined.scheduler.pool import Pool
from pipelined.testing.fuzz import FAULTS, Summary, draw, fuzz, parse_faults, parse_seeds, play
from pipelined.testing.fuzz.case import Cancellation, Kill
from pipelined.testing.fuzz.runner import MINIMA


@pytest.mark.parametrize("first", [0, 8, 16, 24])
def test_seeds_hold(first: int) -> None:
    summary = fuzz(range(first, first + 6))
    assert [(one.seed, one.failures) for one in summary.found] == []
    assert summary.seeds == 6


def test_the_same_seed_gives_the_same_log_byte_for_byte() -> None:
    for seed in (3, 10, 16):
        first = play(draw(seed)).events
        assert first
        assert play(draw(seed)).events == first


@pytest.mark.slow
def test_it_is_the_same_in_any_process() -> None:
    script = (
        "import zlib; from pipelined.testing.fuzz import draw, play;"
        "print([zlib.crc32(play(draw(seed)).events) for seed in (3, 16)])"
    )
    here = str([zlib.crc32(play(draw(seed)).events) for seed in (3, 16)])
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here


def test_kinds_of_faults_are_drawn_apart() -> None:
    for seed in range(50):
        whole, none = draw(seed), draw(seed, ())
        assert not (none.lossy)
        assert not (none.delayed)
        assert not (none.kills)
        assert not (none.cancels)
        assert not (none.skews_s)
        assert not (none.stages_fail)
        assert draw(seed, ("skew",)).skews_s == whole.skews_s
        assert draw(seed, ("kill",)).kills == whole.kills
        assert [one.at_s for one in whole.requests] == [one.at_s for one in none.requests]


# ---- it bites ----


def broken(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "stale page":
        right = ToyStage._layer

        def _layer(self: Any, index: int, hidden: Any, segments: Any) -> Any:
            out = right(self, index, hidden, segments)
            if any(segment.start for segment in segments):
                self._kv[index][0] = -7
            return out

        monkeypatch.setattr(ToyStage, "_layer", _layer)
    elif what == "a rank forgets a release":
        done = ToyStage.prepare

        def prepare(self: Any, step: Any) -> Any:
            if self._first and step.number == 20:
                step = type(step)(step.epoch, step.number, 0, ())
            return done(self, step)

        monkeypatch.setattr(ToyStage, "prepare", prepare)
    elif what == "pages leak":
        monkeypatch.setattr(Pool, "_leave", _leaking(Pool._leave))
    elif what == "buffers leak":
        monkeypatch.setattr(Flight, "let_go", lambda self, device: None)


def _leaking(leave: Any) -> Any:
    def leaking(self: Any, state: Any) -> None:
        leave(self, state)
        seq, pages, lock = self.leaving[-1]
        self.leaving[-1] = (seq, pages[:-1], lock)

    return leaking


@pytest.mark.parametrize("what", ["stale page", "a rank forgets a release", "pages leak", "buffers leak"])
def test_a_broken_runtime_is_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    broken(monkeypatch, what)
    changes = {"requests": asked(8, every_s=0.05), "ranks": 3}
    assert play(case(**changes)).failures
    monkeypatch.undo()
    held(**changes)


def test_a_failing_seed_is_shrunk_and_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "stale page")
    summary = fuzz(range(10), ("cancel", "delay"), most_failures=1)
    (found,) = summary.found
    seed = found.seed
    assert found.command == f"pipelined fuzz --seeds {seed}:{seed + 1} --faults cancel,delay"
    assert sum(line.startswith("request ") for line in found.shrunk) < len(draw(seed).requests)
    assert "FAILED" in found.timeline[-1]


# ---- the command ----


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--seeds", "0:2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] == []
    assert data["seeds"] == [0, 2]
    assert data["coverage"]["requests"] > 0
    assert main(["fuzz", "--seeds", "1", "--faults", "none"]) == 0
    assert "seeds 1:2, faults: none" in capsys.readouterr().out


def test_the_command_fails_with_a_seed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken(monkeypatch, "stale page")
    assert main(["fuzz", "--seeds", "0:10", "--faults", "none"]) == 1
    assert "again: pipelined fuzz --seeds " in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "1:1", "2:1", "a:b", "1:2:3"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="FIRST:END"):
        parse_seeds(text)


def test_faults_that_are_none() -> None:
    assert parse_faults("all") == FAULTS
    assert parse_faults("none") == ()
    assert parse_faults("drop,skew") == ("drop", "skew")
    with pytest.raises(ConfigError, match="did you mean 'kill'"):
        parse_faults("kil")


def test_coverage_is_asked_of_many_seeds_alone() -> None:
    assert Summary(0, 10, FAULTS, seeds=10).missed == []
    assert len(Summary(0, 1000, FAULTS, seeds=1000).missed) == len(MINIMA)
    assert Summary(0, 1000, ("drop",), seeds=1000).missed == []


# ---- what it found ----


def test_prompt_logprobs_come_once_with_several_continuations() -> None:
    held(requests=asked(3, n=2, prompt_logprobs=1))
    held(requests=asked(2, tokens=1, prompt_logprobs=0))


def test_timers_of_a_clock_that_passes_zero_are_never_early() -> None:
    """They were set again and again for ever: near 0 the reading is finer than what was added to it."""
    for skew_s in (-0.0123, -0.3, -1e6, 583754.264):
        held(skews_s=(skew_s,) * 5, delayed="delay=0.5&delay_ms=20")


def test_a_message_to_the_driver_that_is_lost_and_noticed_by_it_alone() -> None:
    """Rank 0 lives on and knows nothing; the driver waited for ever."""
    journal = held(lossy="drop=0.05&lanes=RESULTS&ranks=0", requests=asked(6, every_s=0.02))
    assert journal.counts["link.drop"]
    assert errors(journal) == {"RankLostError"}


def test_a_last_message_that_is_lost_with_nothing_behind_it() -> None:
    """Of rank 0, and of the driver."""
    journal = held(lossy="drop=1&lanes=SCHEDULE&ranks=driver", requests=asked(1))
    assert errors(journal) == {"DeadlineError"}
    found = set()
    for seed in range(12):
        found |= errors(held(seed=seed, lossy="drop=0.4&lanes=RESULTS&ranks=0", requests=asked(1, max_tokens=2)))
    assert found == {"DeadlineError", "RankLostError"}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_device_that_hangs_leaves_nothing_behind(phase: str) -> None:
    for device in ("emulated", "stream"):
        journal = held(kills=(Kill(2, phase, "hang", 1),), device=device, step_timeout_s=10.0)
        assert errors(journal) == {"DeadlineError"}


def test_closed_while_a_rank_hangs() -> None:
    """Whoever closes hears that it was closed, not that ranks had to be ended."""
    journal = held(kills=(Kill(1, "decode", "hang", 2),), close_at_s=0.5, step_timeout_s=60.0)
    assert errors(journal) == {"EngineClosedError"}


def test_a_step_without_rows_that_cannot_be_prepared_ends_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing carried the error: the rank went on without having released anything."""
    right = ToyStage.prepare

    def prepare(self: Any, step: Any) -> Any:
        if self._first == 1 and not step.rows:
            raise RuntimeError("parted from the plan")
        return right(self, step)

    monkeypatch.setattr(ToyStage, "prepare", prepare)
    journal = play(case(requests=asked(4, every_s=0.5)))
    assert errors(journal) == {"StageError"}


def test_aborts_while_steps_are_applied() -> None:
    cancels = tuple(Cancellation(n, "applying", "abort", count=3 + n, rank=n % 4) for n in range(8))
    journal = held(cancels=cancels)
    assert journal.counts["cancel.by_abort"] == 8
    assert prompt(1, 3) == (136, 143, 150)


# ---- recovery ----


@pytest.mark.parametrize("how", ["task", "abort", "hang"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_whatever_is_lost_everything_goes_on(rank: int, how: str) -> None:
    """Requests that were in flight have all their tokens, right ones, and none of them an error."""
    for device in ("emulated", "stream"):
        kills = (Kill(rank, "prefill", how, 1), Kill((rank + 1) % 3, "decode", how, 9))
        journal = held(kills=kills, recover=True, device=device, step_timeout_s=10.0, requests=asked(6, every_s=0.02))
        assert errors(journal) == set()
        assert journal.counts["restarts"] == 2
        assert journal.counts["resumed"] > 0


def test_a_rank_that_is_lost_while_the_next_epoch_begins() -> None:
    """The driver's links were closed before they had been opened: nothing ever began anew."""
    for rank in range(3):
        for again in range(3):
            kills = (Kill(rank, "decode", "abort", 3), Kill(again, "restart", "abort"))
            journal = held(kills=kills, recover=True, requests=asked(4, every_s=0.02))
            assert errors(journal) == set()
            assert journal.counts["kill.restart"] == 1


def test_frames_that_are_lost_end_an_epoch_and_no_request() -> None:
    restarts = 0
    for seed in range(4):
        lossy = "drop=0.002&lanes=HIDDEN"
        journal = held(lossy=lossy, recover=True, requests=asked(8, every_s=0.1), seed=seed, step_timeout_s=5.0)
        restarts += journal.counts["restarts"]
        assert errors(journal) == set()
    assert restarts
