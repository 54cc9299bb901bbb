"""`pipelined simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelined.cli.main import main

SCENARIO = """
name = "[bold] prompts"
pp_size = 2
stage = {b = 1e-6, c = 1e-3}
arrivals = [{prompt_tokens = 3000, output_tokens = 3}, {at_s = 0.5, prompt_tokens = 100}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return path


def test_table_and_picture(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(file), "--timeline", str(tmp_path / "t.html")]) == 0
    out = capsys.readouterr().out
    assert "[bold] prompts: 2 requests" in out
    assert "time to first token: mean" in out
    assert "inter-token latency: mean" in out
    assert "idle because of" in out
    assert "critical path, 0." in out
    assert "<svg" in (tmp_path / "t.html").read_text() or "<canvas" in (tmp_path / "t.html").read_text()


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["pp_size"] == len(result["stages"]) == 2
    assert [request["output_tokens"] for request in result["requests"]] == [3, 1]
    assert sum(result["requests"][0]["chunks"]) == 3000
    assert set(result["ttft_s"]) == {"mean", "p50", "p90", "p99", "max"}
    path = result["critical_path"]
    assert path["wall_ns"] == round(result["wall_s"] * 1e9) == sum(part["ns"] for part in path["parts"])
    assert sum(piece["end_ns"] - piece["start_ns"] for piece in path["pieces"]) == path["wall_ns"]
    for stage in result["stages"]:
        assert stage["busy_s"] + sum(stage["causes_s"].values()) == pytest.approx(result["wall_s"], abs=1e-8)


def test_one_line_for_a_bad_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(SCENARIO.replace("1e-6", "-1"))
    assert main(["simulate", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "$.stage.b" in line
