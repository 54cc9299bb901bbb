from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.costs import (
    Fingerprint,
    Profile,
    Sample,
    StageCost,
    StageProfile,
    Window,
    decode_costs,
    decode_profile,
    encode_costs,
    encode_profile,
    fit,
)
from pipelined.errors import ConfigError

PRINT = Fingerprint(model="tiny", layers=(3, 4), machine="two cores", dtype="float32")


def profile(cost: StageCost | None = None) -> Profile:
    cost = cost or StageCost(1e-8, 1e-5, 0.01, 1e-8, (Window(1000, 3e-8, 0.0),))
    points = [(prefix, tokens) for prefix in (0, 4096) for tokens in (64, 256, 1024)]
    samples = [Sample.of(*point, cost.c + cost.chunk_s(*point)) for point in points]
    found = fit(samples, windows=tuple(window.tokens for window in cost.windows))
    return Profile.of(PRINT, [StageProfile.of(samples, found)] * 2)


def test_there_and_back() -> None:
    made = profile()
    assert decode_profile(encode_profile(made)) == made
    assert made.cost().stages[1].chunk_s(0, 64) == pytest.approx(1e-5 * 64 + 3e-8 * 64**2 + 1e-8 * 64**2)


def test_a_foreign_profile_is_recognised() -> None:
    made = profile()
    made.check(PRINT)
    with pytest.raises(
        ConfigError, match=r"p.json is of another set-up: layers \(3, 4\), not \(7,\); profile this one"
    ):
        made.check(msgspec.structs.replace(PRINT, layers=(7,)), "p.json")


def changed(*path: Any, value: Any) -> bytes:
    tree = msgspec.json.decode(encode_profile(profile()))
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return msgspec.json.encode(tree)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "p.json is empty"),
        (b" \n", "p.json is empty"),
        (b"{", "truncated"),
        (b"\xff\xfe", "not a profile"),
        (b"[1, 2]", "Expected `object`"),
        (b"{}", "missing required field `version`"),
        (b"[" * 100_000, "not a profile"),
        (changed("version", value=9), "version 9; expected 1"),
        (changed("stages", value=[]), r"\$.stages has 0 entries"),
        (changed("stages", 0, "cost", "b", value=-1.0), r"\$.stages\[0\].cost.b"),
        (changed("stages", 0, "cost", "b", value="x"), r"got `str` - at `\$.stages\[0\].cost.b`"),
        (
            changed("stages", 1, "cost", value={"a": 0.0, "b": 0.0, "c": 1.0}),
            r"\$.stages\[1\].cost: time does not grow",
        ),
        (changed("stages", 0, "points", 2, "seconds", value=0), r"\$.stages\[0\].points\[2\].seconds"),
        (changed("stages", 0, "points", 2, "seconds", value=1e-9), r"\$.stages\[0\].points\[2\]: 1024 tokens after 0"),
        (changed("stages", 0, "points", 2, "chunks", value=[[0, 0]]), r"points\[2\].chunks\[0\]\[1\]"),
        (changed("stages", 0, "points", 2, "chunks", value=[]), r"points\[2\] has neither"),
        (
            changed("stages", 0, "points", 2, "colour", value=3),
            r"unknown field `colour` - at `\$.stages\[0\].points\[2\]`",
        ),
        (changed("stages", 0, "cost", "windows", value=[{"tokens": 0}]), r"windows\[0\].tokens"),
        (changed("stages", 0, "cost", "a", value=1).replace(b'"a":1', b'"a":1e999'), r"out of range|cost.a"),
    ],
)
def test_what_is_not_a_profile_is_refused_with_the_place(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        decode_profile(content, "p.json")
    assert "\n" not in str(caught.value)


@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
@settings(max_examples=200)
def test_damage_is_refused_or_harmless(at: int, junk: bytes) -> None:
    content = encode_profile(profile())
    at %= len(content)
    with contextlib.suppress(ConfigError):
        decode_profile(content[:at] + junk + content[at + len(junk) :])


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["version", "fingerprint", "stages", "points", "cost", "a"]), inner)
        ),
    )
)
def test_any_json_is_refused(tree: Any) -> None:
    with pytest.raises(ConfigError):
        decode_profile(msgspec.json.encode(tree))


def test_coefficients_alone_travel_as_text() -> None:
    cost = profile().cost()
    assert decode_costs(encode_costs(cost)) == cost
    for text in ("", "[]", "[{}]", '[{"a": -1, "b": 1, "c": 1}]', "[[[["):
        with pytest.raises(ConfigError):
            decode_costs(text)
