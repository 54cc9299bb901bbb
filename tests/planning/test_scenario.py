"""Scenario files: what they mean, and one line with the place for whatever is wrong."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.costs import StageCost, Window
from pipelined.errors import ConfigError
from pipelined.planning import decode_scenario, read_scenario

GOOD = """
name = "two"
pp_size = 3
stage = {a = 1e-10, b = 1e-6, c = 1e-3, windows = [{tokens = 512, a = 1e-11}]}
link = {latency_us = 5, bandwidth_gbytes_per_s = 25}
chunking = {policy = "dynamic", chunked_prefill_size = 4096}
[[arrivals]]
prompt_tokens = 1000
[[arrivals]]
at_s = 2
prompt_tokens = 500
output_tokens = 7
count = 2
"""


def test_toml_and_json_mean_the_same() -> None:
    scenario = decode_scenario(GOOD.encode())
    as_json = json.dumps(tomllib.loads(GOOD)).encode()
    assert decode_scenario(as_json, "scenario.json") == scenario
    assert scenario.cost.stages == (StageCost(1e-10, 1e-6, 1e-3, windows=(Window(512, 1e-11),)),) * 3
    assert [(one.at_s, one.prompt_tokens) for one in scenario.requests()] == [(0, 1000), (2, 500), (2, 500)]
    assert scenario.link.uri == "sim://?latency_us=5.0&bandwidth_gbytes_per_s=25.0"


def test_stages_one_by_one() -> None:
    scenario = decode_scenario(b"stages = [{b = 1e-6}, {b = 2e-6}]\narrivals = [{prompt_tokens = 9}]")
    assert [stage.b for stage in scenario.cost.stages] == [1e-6, 2e-6]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("a = 1e-10, b", "b", ""),
        ("a = 1e-10", "a = -1", "$.stage.a"),
        ("a = 1e-10", "a = nan", "$.stage.a"),
        ("a = 1e-10", "a = 'x'", "$.stage.a"),
        (
            "{a = 1e-10, b = 1e-6, c = 1e-3, windows = [{tokens = 512, a = 1e-11}]}",
            "{c = 1}",
            "$.stage: time does not grow",
        ),
        ("a = 1e-10", "aa = 1e-10", "unknown field `aa` - at `$.stage`"),
        ("stage =", "stages = [{b = 1.0}]\nstage =", "has both of `stage` and `stages`"),
        ("stage = {", "other = {", "unknown field `other`"),
        ("tokens = 512", "tokens = 0", "$.stage.windows[0].tokens"),
        ("pp_size = 3", "pp_size = 0", "$.pp_size"),
        ("pp_size = 3", "pp_size = 10000000", "$.pp_size"),
        ("pp_size = 3", "pp_size =", "line 3"),
        ('"dynamic"', '"dinamic"', "did you mean 'dynamic'"),
        ("4096", "4000", "$.chunking.chunked_prefill_size is 4000; expected a multiple of $.page_size=64"),
        ("4096}", "4096, target_itl_s = 1}", "$.chunking.target_itl_s is of policy 'balanced' alone"),
        ("prompt_tokens = 1000", "at_s = 3\nprompt_tokens = 1000", "$.arrivals[1].at_s is 2.0, before the 3.0"),
        ("prompt_tokens = 1000", "at_s = inf\nprompt_tokens = 1000", "$.arrivals[0].at_s"),
        ("prompt_tokens = 500", "", "missing required field `prompt_tokens` - at `$.arrivals[1]`"),
        ("prompt_tokens = 500", "prompt_tokens = 1_000_000_000", "$.arrivals[1].prompt_tokens"),
        ("pp_size = 3", "pp_size = 3\nkv_cache_tokens = 900", "$.arrivals[0] has 1001 tokens; $.kv_cache_tokens=900"),
        ("bandwidth_gbytes_per_s = 25", "bandwidth_gbytes_per_s = 0", "$.link.bandwidth_gbytes_per_s"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(before: str, after: str, said: str) -> None:
    assert before in GOOD
    content = GOOD.replace(before, after).encode()
    if not said:
        decode_scenario(content)
        return
    with pytest.raises(ConfigError) as caught:
        decode_scenario(content, "mine.toml")
    assert said in str(caught.value)
    assert str(caught.value).startswith("mine.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"", "a.toml"),
        (b"\xff\xfe", "a.toml"),
        (b"\xff\xfe", "a.json"),
        (b"[" * 100_000, "a.json"),
        (b"a = " + b"[" * 100_000, "a.toml"),
        (b"[]", "a.json"),
        (b"null", "a.json"),
        (b'{"arrivals": [], "stage": {"b": 1}}', "a.json"),
        (b'{"arrivals": [{"prompt_tokens": 1e400}], "stage": {"b": 1}}', "a.json"),
        (b'{"arrivals": [{"prompt_tokens": 1}]}', "a.json"),
    ],
)
def test_hostile_files_get_one_line(content: bytes, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_scenario(content, name)
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_file_is_a_scenario_or_one_line(data: st.DataObject) -> None:
    content = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    said = ""
    try:
        decode_scenario(bytes(content), "it.toml")
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml.* cannot be read: No such file"):
        read_scenario(tmp_path / "nothing.toml")
