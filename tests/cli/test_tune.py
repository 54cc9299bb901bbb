"""`pipelined tune`: a command that the parser takes, the table, the proof, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelined.cli.main import _parser, main
from pipelined.costs import Profile, Sample, StageCost, StageProfile, encode_profile, fit
from pipelined.llm import EngineConfig, inspect_model
from pipelined.llm.profiles import fingerprint

EMULATED = "emulated://?layers=4&context=8192&a=0&b=1e-5&c=0.01"
HARDWARE = ["--hardware", "1TFLOPS,100GB/s,1GB"]


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt_tokens": 2000, "output_tokens": 2}\n{"at_s": 0.05, "prompt_tokens": 700}\n')
    return str(path)


def profile(path: Path, **changes: Any) -> str:
    """Of the emulated model, as it would be measured."""
    config = EngineConfig(model=EMULATED, pp_size=2, device="emulated")
    info = inspect_model(config)
    cost = StageCost(0.0, 1e-5, 0.01)
    points = [Sample.of(at, n, cost.c + cost.chunk_s(at, n)) for at in (0, 500) for n in (64, 256, 1024)]
    stage = StageProfile.of(points, fit(points))
    from msgspec import structs

    found = structs.replace(fingerprint(config, info, [(0, 2), (2, 4)]), **changes)
    path.write_bytes(encode_profile(Profile.of(found, [stage, stage])))
    return str(path)


def test_a_command_and_a_table(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "tune",
        "toy://?layers=4&context=4096",
        "--pp-size",
        "2",
        "--workload",
        workload,
        "--no-measure",
        *HARDWARE,
    ]
    assert main(words) == 0
    first, second, third, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("pipelined serve 'toy://?layers=4&context=4096' --pp-size 2")
    assert second.startswith("predicted time to first token: ")
    assert third == "not measured: --no-measure"
    assert any("the default" in line for line in rest)
    assert any(line.startswith("balanced") for line in rest)


@pytest.mark.parametrize("workers", ["task"])
def test_the_winner_is_measured_against_the_default(
    workers: str, workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = profile(tmp_path / "p.json")
    assert main(["tune", source, "--device", "emulated", "--workers", workers, "--workload", workload, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pp_size"] == 2
    assert found["gain"] > 0.1
    assert found["not_measured"] is None
    measured = found["measured"]
    gain = 1 - measured["winner"]["ttft_s"] / measured["default"]["ttft_s"]
    assert measured["gain"] == pytest.approx(gain)
    assert measured["proven"] == (gain > 0)
    arguments = _parser().parse_args(found["command"])
    assert (arguments.model, arguments.pp_size, arguments.device) == (EMULATED, 2, "emulated")
    if measured["proven"]:
        assert arguments.chunking == found["winner"]["setting"]["chunking"]
    assert (arguments.profile if "--profile" in found["command"] else source) == source
    assert found["trials"][0]["score"] <= found["winner"]["score"] <= found["default"]["score"]
    assert found["workload"] == {"requests": 2, "prompt_tokens": 2700}


def test_a_profile_of_another_machine_is_not_measured(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = profile(tmp_path / "p.json", machine="a far one")
    words = ["tune", source, "--device", "emulated", "--workload", workload, "--budget-s", "0.001", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert "machine 'a far one', not 'emulated'" in found["not_measured"]
    assert found["measured"] is None
    assert found["cut_short"]
    assert "--profile" not in found["command"]
    assert main([*words, "--measure"]) == 2
    assert "this machine cannot run it" in capsys.readouterr().err


def test_a_scenario_has_no_command(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.toml"
    path.write_text("pp_size = 2\nstage = {b = 1e-5, c = 1e-2}\narrivals = [{prompt_tokens = 9}]")
    assert main(["tune", str(path), "--workload", workload, "--budget-s", "0.001"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("best: fixed 256, window P+2 (no command: no model to run)")
    assert "not measured: a scenario is no model to run" in out
    assert "the search was cut short" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--goal", "tfft"], "unknown goal 'tfft'"),
        (["--budget-s", "0"], "--budget-s 0.0 is out of range"),
        (["--rounds", "0"], "--rounds 0 is out of range"),
        (["--link", "fast"], "'fast' is no latency"),
        (["--context-length", "1000"], "line 1: 2000 prompt tokens and 2 of output are beyond the context of 1000"),
        (["--kv-cache-tokens", "1024"], "are more than a KV cache of 1024 tokens holds"),
        (["--workload", "none.jsonl"], "the workload 'none.jsonl' cannot be read"),
        (["--measure"], "1TFLOPS,100GB/s,1GB is not this machine"),
        (["--pp-size", "9"], "9 stages for 4 layers"),
        (["--model", "x"], "--model goes with a profile"),
    ],
)
def test_one_line_for_what_cannot_be(
    more: list[str], said: str, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", "toy://?layers=4&context=4096", "--workload", workload, "--budget-s", "0.001", *HARDWARE, *more]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
