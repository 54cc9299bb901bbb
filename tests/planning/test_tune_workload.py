"""Workload files: what they mean, and one line with the place for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.errors import ConfigError
from pipelined.planning import Arrival
from pipelined.planning.tune_workload import read_workload

GOOD = b"""{"at_s": 0, "prompt_tokens": 3000, "output_tokens": 4}

{"at_s": 1.5, "prompt_tokens": 1000, "count": 2}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.jsonl"
    path.write_bytes(GOOD)
    return path


def test_a_request_a_line(file: Path) -> None:
    workload = read_workload(file)
    assert workload.arrivals == (
        Arrival(prompt_tokens=3000, output_tokens=4),
        Arrival(at_s=1.5, prompt_tokens=1000, count=2),
    )
    assert workload.places == (f"{file}: line 1", f"{file}: line 3")
    assert (workload.requests, workload.prompt_tokens, workload.longest_prompt) == (3, 5000, 3000)
    file.with_suffix(".json").write_bytes(GOOD)
    assert read_workload(file.with_suffix(".json")).arrivals == workload.arrivals


def test_the_arrivals_of_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("stage = {b = 1e-6}\narrivals = [{prompt_tokens = 9}, {prompt_tokens = 10, at_s = 1}]")
    workload = read_workload(path)
    assert [arrival.prompt_tokens for arrival in workload.arrivals] == [9, 10]
    assert workload.places[1] == f"{path}: $.arrivals[1]"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; expected a request a line"),
        (b"\n \n", "is empty"),
        (b"{}", "line 1 is no request: Object missing required field `prompt_tokens`"),
        (GOOD + b'{"prompt_tokens": 1}', "line 4: at_s is 0.0, before the 1.5 ahead of it; expected time order"),
        (GOOD + b'{"prompt_tokens": 0}', "line 4 is no request: Expected `int` >= 1 - at `$.prompt_tokens`"),
        (GOOD + b'{"prompt_tokens": 1, "at_s": -1}', "line 4 is no request"),
        (GOOD + b'{"prompt_tokens": 1, "at_s": 1e400}', "line 4 is no request"),
        (GOOD + b'{"prompt_tokens": 1, "tokens": 1}', "unknown field `tokens`"),
        (GOOD + b'{"prompt_tokens": 100000000000}', "$.prompt_tokens"),
        (
            GOOD + b'{"prompt_tokens": 1, "at_s": 2, "count": 100000}',
            "has 100003 requests; a workload has at most 100000",
        ),
        (b"[" * 100_000, "line 1 is no request"),
        (b"\xff\xfe\n", "line 1 is no request"),
        (b"[{}]", "line 1 is no request"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(content: bytes, said: str, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_workload(file)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@given(data=st.data())
def test_a_damaged_file_is_a_workload_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("w") / "w.jsonl"
    path.write_bytes(bytes(content))
    said = ""
    try:
        read_workload(path)
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


def test_requests_that_cannot_be_served_are_named(file: Path) -> None:
    workload = read_workload(file)
    workload.check(None, None, 64)
    workload.check(3004, 3008, 64)
    with pytest.raises(ConfigError, match=r"line 1: 3000 prompt tokens and 4 of output are beyond the context of 3003"):
        workload.check(3003, None, 64)
    with pytest.raises(ConfigError, match=r"line 1: .* are more than a KV cache of 3007 tokens holds"):
        workload.check(None, 3007, 64)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_workload(tmp_path / "none.jsonl")
