"""`pipelined plan`: the command first, a table, JSON, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelined.cli.main import _parser, main

SCENARIO = """
name = "[bold] machine"
pp_size = 2
stage = {b = 1e-6, c = 1e-3}
arrivals = [{prompt_tokens = 9}]
"""
TOY = "toy://?layers=4&context=4096"
HARDWARE = ["--hardware", "1TFLOPS,100GB/s,1GB"]


def test_the_command_comes_first_and_is_one_that_the_parser_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TOY, "--lengths", "1K,4K", "--devices", "2", "--json", *HARDWARE]) == 0
    found = json.loads(capsys.readouterr().out)
    arguments = _parser().parse_args(found["command"])
    assert arguments.model == TOY
    assert arguments.pp_size == int(found["recommended"].removeprefix("PP")) if "PP" in found["recommended"] else 1
    assert arguments.chunking == "balanced"
    assert found["lengths"] == [1024, 4096]
    assert found["link"] == {"bandwidth_bytes_per_s": 25e9, "latency_s": pytest.approx(5e-6)}
    assert found["memory_bytes"] == 1e9
    rows = {row["name"]: row for row in found["layouts"]}
    assert rows["TP2"]["problem"] == "how many heads the model has is not known"
    (first, second) = rows["PP2"]["estimates"]
    assert (first["tokens"], second["tokens"]) == (1024, 4096)
    assert second["moved"]["total"] == second["moved"]["pp"] > 0
    assert rows["PP2"]["kv_tokens"] > 4096
    assert rows["CP2"]["runnable"] is False
    assert main(["plan", TOY, "--lengths", "1K", "--devices", "1", *HARDWARE]) == 0
    out = capsys.readouterr().out
    assert out.startswith("pipelined serve 'toy://?layers=4&context=4096' --pp-size 1 --chunking balanced\n")
    assert "an estimate from the model's sizes and a device" in out


def test_a_scenario_has_no_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    assert main(["plan", str(path), "--lengths", "4K", "--devices", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("best that can be run: PP2 (no command: [bold] machine is no model to run)")
    assert "recommended" in out
    assert "1 of 2 devices" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--lengths", "1M"], "beyond the context of toy://?layers=4&context=4096, 4096 tokens: 1M (1048576 tokens)"),
        (["--lengths", "1X"], "'1X' is no prompt length"),
        (["--devices", "0"], "--devices 0 is out of range"),
        (["--link", "fast"], "'fast' is no latency"),
        (["--memory", "96"], "'96' is no size"),
        (["--hardware", "h1000"], "unknown hardware 'h1000'"),
        (["--efficiency", "2"], "--efficiency 2.0 is out of range"),
        (["--model", "x"], "--model goes with a profile"),
    ],
)
def test_one_line_for_what_cannot_be(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TOY, "--lengths", "1K", "--devices", "2", *HARDWARE, *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(("name", "content"), [("p.json", "{}"), ("s.toml", "x ="), ("s.toml", "")])
def test_one_line_for_a_bad_file(name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert main(["plan", str(path), "--lengths", "1K", "--devices", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


def test_sizes_come_from_a_configuration_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--lengths", "1K", "--devices", "2", "--json", *HARDWARE]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["layouts"]}
    assert rows["TP2"]["problem"] is None
    assert rows["TP2"]["estimates"][0]["moved"]["tp"] == pytest.approx(4 * 1024 * 4 / 2 * 64 * 4)
    assert rows["PP2"]["partition"] == [2, 2]
