"""`pipelined profile`, what comes of its file, and `pipelined bench chunking`, on stages that are only described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelined.cli.main import main

MODEL = "emulated://?layers=8&context=3000&hidden=64&a=1e-9&b=1e-5&c=2e-3&d=3e-8"
ENGINE = ["--pp-size", "2", "--device", "emulated", "--workers", "task"]

pytestmark = pytest.mark.may_block


def test_a_profile_is_made_drawn_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = str(tmp_path / "p.json"), tmp_path / "fit.html"
    assert main(["profile", MODEL, *ENGINE, "-o", file, "--budget-s", "1.5", "--plot", str(page)]) == 0
    said = capsys.readouterr().out
    assert "stage 1, layers 4-7: good" in said
    assert "64@" in said
    assert len(said.splitlines()) < 90
    assert page.read_text().startswith("<!doctype html>")

    asked = [MODEL, *ENGINE, "--chunking", "balanced", "--prompt-tokens", "2500", "--requests", "1"]
    assert main(["bench", "prefill", *asked, "--json", "--profile", file]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction_error"] == pytest.approx(found["predicted_ttft_s"] / found["ttft_s"] - 1)
    assert 0 < found["predicted_ttft_s"] < found["ttft_s"] * 1.5, "about what was foreseen"
    assert main(["bench", "prefill", *asked, "--profile", file]) == 0
    assert "predicted " in capsys.readouterr().out

    assert (
        main(["bench", "prefill", MODEL, *ENGINE[2:], "--pp-size", "4", "--prompt-tokens", "9", "--profile", file]) == 2
    )
    assert "layers (4, 4), not (2, 2, 2, 2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--budget-s", "0"], "a budget of 0 s is too short"),
        (["--longest", "5000"], "prompts of 5000 tokens: expected 1 to 2992"),
        (["--text", "/nowhere"], "the text file '/nowhere' cannot be read"),
        (["--profile", "x.json"], "leave it out"),
        (["--layer-partition", "3,4"], "adds up to 7"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", MODEL, *ENGINE, "-o", str(tmp_path / "p.json"), *options]) == 2
    said = capsys.readouterr().err.strip()
    assert text in said.splitlines()[-1]


def test_layers_by_what_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [MODEL, *ENGINE, "--layer-partition", "auto", "--prompt-tokens", "100", "--requests", "1"]
    assert main(["bench", "prefill", *asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pp_size"] == 2


@pytest.mark.slow
def test_bench_chunking_says_who_wins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "chunking", "--quick", "--pp-sizes", "2", "--model", "", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["concurrency"], row["policy"]) for row in rows] == [
        (count, policy) for count in (1, 4, 16) for policy in ("fixed", "dynamic", "balanced")
    ]
    assert set(rows[0]) == {"where", "concurrency", "policy", "setting", "ttft_s", "tokens_per_s"}
