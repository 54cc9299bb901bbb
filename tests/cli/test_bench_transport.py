"""`pipelined bench transport`, between real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pipelined.cli.main import main
from pipelined.cli.transport_rounds import memcpy_s, rotating
from pipelined.errors import ConfigError


def test_memcpy_copies_what_was_written() -> None:
    sources, targets = rotating(64), rotating(64)
    assert memcpy_s(sources, targets, 6, touched=True) > 0
    assert [int(target[-1]) for target in targets] == [4, 5, 2, 3]
    with pytest.raises(ConfigError, match="multiple of 8"):
        rotating(65)


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--transport", ","]])
def test_what_is_out_of_range_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transport", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_be_measured_is_told_beside_what_can() -> None:
    command = [sys.executable, "-m", "pipelined", "bench", "transport", "--rounds", "1", "--json"]
    done = subprocess.run(
        [*command, "--transport", "shm,memory,no-such"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = result["transports"]
    assert set(rows["shm"]["gb_per_s"]) == set(result["memcpy_gb_per_s"]) == {"64 KB", "1 MB", "4.7 MB", "64 MB"}
    assert all(rate > 0 for rate in [*rows["shm"]["gb_per_s"].values(), *rows["shm"]["leased_gb_per_s"].values()])
    assert rows["shm"]["rtt_us"] > 0
    assert result["plain_socket_rtt_us"] > 0
    assert result["plain_zmq_rtt_us"] > 0
    assert rows["shm"]["rtt_of_plain_zmq"] == pytest.approx(rows["shm"]["rtt_us"] / result["plain_zmq_rtt_us"])
    assert 0 <= rows["shm"]["idle_share"] < 0.2
    assert "processes" in rows["memory"]["error"]
    assert "no-such" in rows["no-such"]["error"]
