"""Lengths, sizes, rates and times as they are written on a command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.errors import ConfigError
from pipelined.planning.plan_units import (
    bytes_text,
    parse_bytes,
    parse_flops,
    parse_lengths,
    parse_link,
    parse_rate,
    tokens_text,
)


def test_what_is_meant() -> None:
    assert parse_lengths("1M, 128K,4096,128k") == (4096, 131072, 1 << 20)
    assert parse_bytes("96GB") == 96e9
    assert parse_bytes("90GiB") == 90 * 2**30
    assert parse_rate("25GB/s") == 25e9
    assert parse_flops("148TFLOPS") == 148e12
    link = parse_link("25GB/s,5us")
    assert link.bandwidth_gbytes_per_s == 25
    assert link.latency_us == pytest.approx(5)
    assert parse_link("2ms").latency_us == pytest.approx(2000)
    assert parse_link("2ms").bandwidth_gbytes_per_s is None
    assert parse_link("1GB/s,0").latency_us == 0
    assert bytes_text(4.2e12) == "4.2 TB"
    assert bytes_text(4.2e9) == "4.2 GB"
    assert bytes_text(3e5) == "0.3 MB"


@given(st.integers(1, 1 << 24))
def test_lengths_come_back(tokens: int) -> None:
    assert parse_lengths(tokens_text(tokens)) == (tokens,)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_lengths, ""),
        (parse_lengths, "128K,"),
        (parse_lengths, "0"),
        (parse_lengths, "-1"),
        (parse_lengths, "1.5"),
        (parse_lengths, "12X"),
        (parse_lengths, "17M"),
        (parse_lengths, "9" * 400),
        (parse_bytes, "96"),
        (parse_bytes, "0GB"),
        (parse_bytes, "nanGB"),
        (parse_rate, "25GB"),
        (parse_rate, "25GB/m"),
        (parse_flops, "148"),
        (parse_link, ""),
        (parse_link, "5us,6us"),
        (parse_link, "1GB/s,2GB/s"),
        (parse_link, "9999s"),
        (parse_link, "5us\n,x"),
    ],
)
def test_one_line_for_what_is_none(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)
