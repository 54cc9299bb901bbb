"""Options of the chunk policies, their aliases, and what comes from the environment."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pipelined.cli.main import main
from pipelined.cli.options import PARTITION, SMOOTHING, add_engine_options, engine_config, output_file
from pipelined.errors import ConfigError
from pipelined.llm import EngineConfig

MODEL = "emulated://?layers=8"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SMOOTHING, raising=False)
    monkeypatch.delenv(PARTITION, raising=False)


def parsed(*options: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_config(parser.parse_args([MODEL, *options]))


def test_defaults_are_those_of_the_engine() -> None:
    assert parsed() == EngineConfig(model=MODEL)


def test_policies_and_aliases() -> None:
    assert parsed("--chunking", "balanced", "--target-itl-ms", "50").target_itl_s == pytest.approx(0.05)
    assert parsed("--chunking", "balanced", "--max-micro-batch-tokens", "4096").most_tokens == 4096
    assert parsed("--chunking", "balanced", "--chunked-prefill-size", "4096").most_tokens == 16384
    assert parsed("--enable-dynamic-chunking").chunking == "dynamic"
    assert parsed("--enable-dynamic-chunking", "--chunking", "dynamic").chunking == "dynamic"
    with pytest.raises(ConfigError, match="contradicts --chunking balanced"):
        parsed("--enable-dynamic-chunking", "--chunking", "balanced")


def test_the_environment_is_read_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SMOOTHING, "0.6")
    monkeypatch.setenv(PARTITION, "3,5")
    config = parsed("--pp-size", "2", "--enable-dynamic-chunking")
    assert (config.smoothing_factor, config.layer_partition) == (0.6, (3, 5))
    config = parsed("--pp-size", "2", "--smoothing-factor", "0", "--layer-partition", "4,4")
    assert (config.smoothing_factor, config.layer_partition) == (0.0, (4, 4))


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (SMOOTHING, "much", f"{SMOOTHING}='much' is no number; expected 0"),
        (SMOOTHING, "2", f"{SMOOTHING}=2 is out of range"),
        (SMOOTHING, "nan", f"{SMOOTHING}=nan is out of range"),
        (PARTITION, "a,b", f"{PARTITION}: 'a,b' is no list of whole numbers"),
        (PARTITION, "3,3,2", f"{PARTITION}=3,3,2 has 3 parts for 2 stages"),
    ],
)
def test_a_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, match: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=match):
        parsed("--pp-size", "2")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--chunking", "balance"), "unknown chunking 'balance'; did you mean 'balanced'?"),
        (("--chunking", "dynamic", "--smoothing-factor", "1.5"), "smoothing_factor=1.5 is out of range"),
        (("--target-itl-ms", "20"), "target_itl_s is of chunking='balanced' alone, not 'fixed'"),
        (("--chunking", "balanced", "--max-micro-batch-tokens", "63"), "less than a page of 64"),
    ],
)
def test_refused_before_anything_is_spawned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    from pipelined.llm import AsyncLLM

    monkeypatch.setattr(AsyncLLM, "__aenter__", None)
    assert main(["generate", MODEL, "--prompt-tokens", "1,2", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_milliseconds_must_be_a_time() -> None:
    with pytest.raises(SystemExit):
        parsed("--chunking", "balanced", "--target-itl-ms", "-3")


def test_where_nothing_can_be_written_is_told_first(tmp_path: Path) -> None:
    assert output_file(str(tmp_path / "new.html")) == str(tmp_path / "new.html")
    for bad in (str(tmp_path), str(tmp_path / "nowhere" / "new.html")):
        with pytest.raises(argparse.ArgumentTypeError, match="folder"):
            output_file(bad)
