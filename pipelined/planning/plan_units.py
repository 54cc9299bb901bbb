"""How lengths, sizes, rates and times are written on the command line. Every error is one line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pipelined.errors import ConfigError
from pipelined.planning.scenario import MOST_PROMPT_TOKENS, Link

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["bytes_text", "parse_bytes", "parse_flops", "parse_lengths", "parse_link", "parse_rate", "tokens_text"]

_K: Final = 1024
_TOKENS: Final = {"": 1, "k": _K, "m": _K * _K}
_BYTES: Final = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
    "tib": 2.0**40,
}
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_FLOPS: Final = {"gflops": 1e9, "tflops": 1e12, "pflops": 1e15}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*(\S*)")


def _quantity(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    factor = units.get(match[2].lower()) if match else None
    value = float(match[1]) * factor if match and factor is not None else 0.0
    if not 0 < value < 1e30:
        raise ConfigError(f"{text.strip()!r} is no {what}; expected one such as {example}")
    return value


def parse_lengths(text: str) -> tuple[int, ...]:
    """`128K,1M` as tokens, in rising order: K is 1,024 and M is 1,048,576.

    Raises:
        ConfigError: One of them is no length, or out of range.
    """
    found = set()
    for part in text.split(","):
        tokens = _quantity(part, _TOKENS, "prompt length", "131072, 128K or 1M")
        if tokens != int(tokens) or tokens > MOST_PROMPT_TOKENS:
            raise ConfigError(f"length {part.strip()!r} is out of range; expected whole tokens, at most 16M")
        found.add(int(tokens))
    return tuple(sorted(found))


def tokens_text(tokens: int) -> str:
    """As `parse_lengths` reads it."""
    for unit, size in (("M", _K * _K), ("K", _K)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def bytes_text(size: float) -> str:
    """With the unit that suits it."""
    factor, unit = next((size_of for size_of in ((1e12, "TB"), (1e9, "GB")) if size >= size_of[0]), (1e6, "MB"))
    return f"{size / factor:.3g} {unit}"


def parse_bytes(text: str) -> float:
    """`96GB` or `90GiB` as bytes.

    Raises:
        ConfigError: It is no size.
    """
    return _quantity(text, _BYTES, "size", "96GB or 90GiB")


def parse_rate(text: str) -> float:
    """`25GB/s` as bytes a second.

    Raises:
        ConfigError: It is no rate.
    """
    head, slash, tail = text.strip().rpartition("/")
    if not slash or tail != "s":
        raise ConfigError(f"{text.strip()!r} is no bandwidth; expected one such as 25GB/s")
    return _quantity(head, _BYTES, "bandwidth", "25GB/s")


def parse_flops(text: str) -> float:
    """`148TFLOPS` as operations a second.

    Raises:
        ConfigError: It is none.
    """
    return _quantity(text, _FLOPS, "rate of operations", "148TFLOPS")


def parse_link(text: str) -> Link:
    """`25GB/s,5us`: bandwidth and latency, in either order; what is left out is free.

    Raises:
        ConfigError: It is no link.
    """
    bandwidth: float | None = None
    latency_s: float | None = None
    for part in text.split(","):
        if "/" in part and bandwidth is None:
            bandwidth = parse_rate(part)
        elif "/" not in part and latency_s is None:
            latency_s = 0.0 if part.strip() in ("0", "0us") else _quantity(part, _SECONDS, "latency", "5us")
        else:
            raise ConfigError(f"--link {text!r} says the same twice; expected a bandwidth and a latency: 25GB/s,5us")
    if latency_s is not None and latency_s > 1e3:
        raise ConfigError(f"--link {text!r}: a latency of {latency_s:g} s is out of range; expected one such as 5us")
    gbytes = None if bandwidth is None else bandwidth / 1e9
    return Link(latency_us=1e6 * (latency_s or 0.0), bandwidth_gbytes_per_s=gbytes)
