"""A workload: requests with their lengths and moments. From a file of JSON lines, or from a scenario's arrivals.

A line of the file is a request, in the order of time::

    {"at_s": 0, "prompt_tokens": 8000, "output_tokens": 100}
    {"at_s": 2.5, "prompt_tokens": 500, "count": 3}

`at_s` (0 if left out) counts from the start; `output_tokens` is 1, `count` 1. Empty lines are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pipelined.errors import ConfigError
from pipelined.planning.scenario import Arrival, decode_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Workload", "read_workload"]

MOST_BYTES: Final = 32 << 20
MOST_REQUESTS: Final = 100_000


class Workload(msgspec.Struct, frozen=True):
    """Requests in the order of time.

    Attributes:
        arrivals: What comes when.
        places: Where each stands in the file, for messages.
    """

    arrivals: tuple[Arrival, ...]
    places: tuple[str, ...]

    @property
    def requests(self) -> int:
        """How many there are."""
        return sum(arrival.count for arrival in self.arrivals)

    @property
    def prompt_tokens(self) -> int:
        """Of all of them."""
        return sum(arrival.count * arrival.prompt_tokens for arrival in self.arrivals)

    @property
    def longest_prompt(self) -> int:
        """Of one."""
        return max(arrival.prompt_tokens for arrival in self.arrivals)

    def check(self, context_length: int | None, kv_cache_tokens: int | None, page_size: int) -> None:
        """That each request can be served.

        Raises:
            ConfigError: One is longer than the context or the KV cache; names its place.
        """
        for arrival, place in zip(self.arrivals, self.places, strict=True):
            tokens = arrival.prompt_tokens + arrival.output_tokens
            what = f"{place}: {arrival.prompt_tokens} prompt tokens and {arrival.output_tokens} of output are"
            if context_length is not None and tokens > context_length:
                raise ConfigError(f"{what} beyond the context of {context_length} tokens")
            if kv_cache_tokens is not None and tokens > kv_cache_tokens // page_size * page_size:
                raise ConfigError(f"{what} more than a KV cache of {kv_cache_tokens} tokens holds")


def read_workload(path: str | Path) -> Workload:
    """The workload in a file: a scenario if its name ends with `.toml` or `.json`, JSON lines otherwise.

    Raises:
        ConfigError: One line, with the place in the file, for whatever is none.
    """
    source = str(path)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the workload {source!r} cannot be read: {error.strerror}") from error
    if source.endswith((".toml", ".json")) and not _is_lines(content):
        arrivals = decode_scenario(content, source).arrivals
        return Workload(arrivals, tuple(f"{source}: $.arrivals[{index}]" for index in range(len(arrivals))))
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{source} has {len(content)} bytes; a workload has at most {MOST_BYTES}")
    found = list(_lines(content, source))
    if not found:
        raise ConfigError(f'{source} is empty; expected a request a line, such as {{"prompt_tokens": 8000}}')
    workload = Workload(tuple(arrival for arrival, _ in found), tuple(place for _, place in found))
    if workload.requests > MOST_REQUESTS:
        raise ConfigError(f"{source} has {workload.requests} requests; a workload has at most {MOST_REQUESTS}")
    return workload


def _is_lines(content: bytes) -> bool:
    """Whether a `.json` file holds requests all the same: its first line is one."""
    try:
        msgspec.json.decode(content.strip().partition(b"\n")[0], type=Arrival)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return True


def _lines(content: bytes, source: str) -> Iterator[tuple[Arrival, str]]:
    before_s = 0.0
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{source}: line {number}"
        try:
            arrival = msgspec.json.decode(line, type=Arrival)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place} is no request: {' '.join(str(error).split())}") from error
        if arrival.at_s < before_s:
            raise ConfigError(
                f"{place}: at_s is {arrival.at_s}, before the {before_s} ahead of it; expected time order"
            )
        before_s = arrival.at_s
        yield arrival, place
