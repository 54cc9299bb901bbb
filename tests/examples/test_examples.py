"""The examples do what they say: each is run as its reader would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, folder: Path, timeout_s: float = 100) -> str:
    """What the example printed."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_hour_in_virtual_time(tmp_path):
    assert run("virtual_time.py", folder=tmp_path).startswith("3852.0 s of virtual time, ideal 3852.0 s")


@pytest.mark.slow
def test_custom_pipeline(tmp_path):
    lines = run("custom_pipeline.py", folder=tmp_path).splitlines()
    assert [line for line in lines if "found" in line] == [f"{n} Hz: found {n}" for n in (440, 1000, 5000, 7)]
    (failed,) = (line for line in lines if "failed" in line)
    assert "9999 Hz" in failed
    assert "rank 1, stage Spectrum" in failed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_offline_batch(tmp_path):
    out = run("offline_batch.py", folder=tmp_path, timeout_s=390)  # may convert the model first
    assert "The capital of France is' Paris" in out
    assert "' five, six, seven, eight" in out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo(tmp_path):
    picture = tmp_path / "picture.html"
    out = run("demo.py", "--tokens", "700", "--timeline", str(picture), folder=tmp_path, timeout_s=590)
    first, second = out.split("2. The same document without")
    assert "MAGNOLIA" in first.partition("on 2 ranks:")[2]
    assert "MAGNOLIA" not in second
    assert "times as fast" in second
    assert "layers 15-29" in second
    assert "<script" in picture.read_text()
    assert "\x1b" not in out, "no terminal, no control sequences"
