"""`pipelined bench transport`: bandwidth, round trips and idle cost between two processes of this host."""

from __future__ import annotations

import json
import statistics
import tempfile
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from pipelined.cli.measure import run_async
from pipelined.errors import ConfigError, MissingDependencyError, PipelinedError

if TYPE_CHECKING:
    import argparse

    from pipelined.cli.transport_rounds import Pair

__all__ = ["add_parser"]

_SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "4.7 MB": 4_718_592, "64 MB": 64 << 20}
_SHARE_SIZE = "4.7 MB"
_VOLUME_BYTES = 192 << 20
_FEWEST = 3
_BLOCKS, _WARM_UP, _TRIPS = 4, 30, 100
_IDLE_S = 2
_WIDTH = 110


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the kind."""
    parser = kinds.add_parser(
        "transport", help="bandwidth, round trip and idle cost of transports", description=__doc__
    )
    parser.add_argument("--transport", default="shm,tcp,zmq", metavar="URI,...", help="default: shm,tcp,zmq")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="each thing in turn, R times (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it; exit code 0 if anything could be measured."""
    import torch

    uris = [uri.strip() for uri in arguments.transport.split(",") if uri.strip()]
    if not uris:
        raise ConfigError("--transport: expected schemes or URIs, such as shm,tcp")
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds}: expected 1 or more")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = run_async(_measure(list(dict.fromkeys(uris)), arguments.rounds))
    finally:
        torch.set_num_threads(threads)
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0 if any("error" not in row for row in result["transports"].values()) else 1


async def _measure(uris: list[str], rounds: int) -> dict[str, Any]:
    """Everything in interleaved rounds, so that a busy moment of the machine hits all alike; medians."""
    from pipelined.cli.transport_rounds import Pair, PlainSocket, PlainZmq

    rows: dict[str, dict[str, Any]] = {uri: {} for uri in uris}
    pairs: dict[str, Pair] = {}
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipelined-", ignore_cleanup_errors=True))
        plain = await PlainSocket.open(f"{directory}/plain")
        stack.push_async_callback(plain.close)
        plain_zmq = await PlainZmq.open(f"{directory}/zmq")
        stack.push_async_callback(plain_zmq.close)
        for number, uri in enumerate(uris):
            try:
                _see_that_it_can(uri)
                pairs[uri] = await Pair.open(uri, f"{directory}/{number}")
                stack.push_async_callback(pairs[uri].close)
            except MissingDependencyError as error:
                rows[uri] = {"error": str(error), "install": error.install}
            except PipelinedError as error:
                rows[uri] = {"error": " ".join(str(error).split())}
        samples = _Samples()
        for _ in range(rounds):
            await _bandwidth_round(pairs, rows, samples)
            for _ in range(_BLOCKS):
                samples.trips("plain", await plain.round_trips_s(_WARM_UP + _TRIPS))
                samples.trips("plain zmq", await plain_zmq.round_trips_s(_WARM_UP + _TRIPS))
                for uri, pair in _well(pairs, rows):
                    if pair.messages:
                        await _guarded(rows[uri], samples.trips_of(uri, pair))
        for uri, pair in _well(pairs, rows):
            await _guarded(rows[uri], samples.idle_of(uri, pair))
    return samples.result(uris, rows)


def _see_that_it_can(uri: str) -> None:
    from pipelined.transport import resolve

    if not resolve(uri).capabilities.processes:
        raise ConfigError(f"{uri} links no processes")


def _well(pairs: dict[str, Pair], rows: dict[str, dict[str, Any]]) -> list[tuple[str, Pair]]:
    return [(uri, pair) for uri, pair in pairs.items() if "error" not in rows[uri]]


async def _guarded(row: dict[str, Any], work: Any) -> None:
    """One transport that fails is reported, and ends nothing else."""
    try:
        await work
    except PipelinedError as error:
        row["error"] = " ".join(str(error).split())


async def _bandwidth_round(pairs: dict[str, Pair], rows: dict[str, dict[str, Any]], samples: _Samples) -> None:
    from pipelined.cli.transport_rounds import memcpy_s, rotating

    for label, size_bytes in _SIZES.items():
        count = max(_FEWEST, _VOLUME_BYTES // size_bytes // 4)
        sources, targets = rotating(size_bytes), rotating(size_bytes)
        samples.rate("memcpy", label, size_bytes * count / memcpy_s(sources, targets, count, touched=True))
        samples.rate("memcpy alone", label, size_bytes * count / memcpy_s(sources, targets, count, touched=False))
        del targets
        for uri, pair in _well(pairs, rows):
            if not pair.tensors:
                continue
            await _guarded(rows[uri], samples.stream_of(uri, label, pair, sources, count, leased=False))
            if pair.leases and "error" not in rows[uri]:
                await _guarded(rows[uri], samples.stream_of(uri, label, pair, sources, count, leased=True))


class _Samples:
    """What was measured so far."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, str], list[float]] = {}
        self._trips: dict[str, list[float]] = {}
        self._idle: dict[str, float] = {}

    def rate(self, name: str, label: str, bytes_per_s: float) -> None:
        """Add a bandwidth."""
        self._rates.setdefault((name, label), []).append(bytes_per_s)

    def trips(self, name: str, trips_s: list[float]) -> None:
        """Add a block of round trips; the first ones go while the scheduler still places the processes."""
        self._trips.setdefault(name, []).append(statistics.median(trips_s[_WARM_UP:]))

    async def stream_of(
        self, uri: str, label: str, pair: Pair, buffers: list[Any], count: int, *, leased: bool
    ) -> None:
        """Measure a bandwidth."""
        took_s = await pair.stream_s(buffers, count, leased=leased)
        self.rate(f"{uri} leased" if leased else uri, label, buffers[0].numel() * count / took_s)

    async def trips_of(self, uri: str, pair: Pair) -> None:
        """Measure round trips."""
        self.trips(uri, await pair.round_trips_s(_WARM_UP + _TRIPS))

    async def idle_of(self, uri: str, pair: Pair) -> None:
        """Measure what waiting costs."""
        self._idle[uri] = await pair.idle_share(_IDLE_S)

    def result(self, uris: list[str], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Medians, and how they compare with the baselines."""
        plain_s, zmq_s = (statistics.median(self._trips[name]) for name in ("plain", "plain zmq"))
        return {
            "memcpy_gb_per_s": self._median_rates("memcpy"),
            "memcpy_alone_gb_per_s": self._median_rates("memcpy alone"),
            "plain_socket_rtt_us": plain_s * 1e6,
            "plain_zmq_rtt_us": zmq_s * 1e6,
            "transports": {uri: rows[uri] if "error" in rows[uri] else self._row(uri, plain_s, zmq_s) for uri in uris},
        }

    def _row(self, uri: str, plain_s: float, zmq_s: float) -> dict[str, Any]:
        rates, leased = self._median_rates(uri), self._median_rates(f"{uri} leased")
        copied = self._median_rates("memcpy")[_SHARE_SIZE]
        trip_s = statistics.median(self._trips[uri]) if uri in self._trips else None
        return {
            "gb_per_s": rates,
            "leased_gb_per_s": leased or None,
            "share_of_memcpy": rates[_SHARE_SIZE] / copied if rates else None,
            "leased_share_of_memcpy": leased[_SHARE_SIZE] / copied if leased else None,
            "rtt_us": trip_s * 1e6 if trip_s is not None else None,
            "rtt_of_plain_socket": trip_s / plain_s if trip_s is not None else None,
            "rtt_of_plain_zmq": trip_s / zmq_s if trip_s is not None else None,
            "idle_share": self._idle.get(uri),
        }

    def _median_rates(self, name: str) -> dict[str, float]:
        return {
            label: statistics.median(self._rates[name, label]) / 1e9 for label in _SIZES if (name, label) in self._rates
        }


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, caption="GB/s one way, written and read; share of memcpy at 4.7 MB")
    for column in ("", *_SIZES, "of memcpy", "RTT us", "of a socket", "idle"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)

    def line(name: str, rates: dict[str, float], *rest: str) -> None:
        table.add_row(name, *(f"{rates[size]:.2f}" if size in rates else "-" for size in _SIZES), *rest)

    line("memcpy, written and read", result["memcpy_gb_per_s"])
    line("memcpy alone", result["memcpy_alone_gb_per_s"])
    line("plain Unix socket", {}, "", f"{result['plain_socket_rtt_us']:.0f}")
    times = result["plain_zmq_rtt_us"] / result["plain_socket_rtt_us"]
    line("plain ZMQ socket", {}, "", f"{result['plain_zmq_rtt_us']:.0f}", f"{times:.2f}x")
    problems = []
    for uri, row in result["transports"].items():
        if "error" in row:
            problems.append(f"{uri}: {row['error']}")
            continue
        trip, times, idle = row["rtt_us"], row["rtt_of_plain_socket"], row["idle_share"]
        line(
            uri,
            row["gb_per_s"],
            _number(row["share_of_memcpy"], "{:.2f}"),
            _number(trip, "{:.0f}"),
            _number(times, "{:.2f}x"),
            _number(idle, "{:.1%}"),
        )
        if row["leased_gb_per_s"]:
            line(f"{uri}, leased", row["leased_gb_per_s"], _number(row["leased_share_of_memcpy"], "{:.2f}"))
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH  # of a file or pipe: nothing has to be cut short
    console.print(table)
    for problem in problems:
        console.print(problem, highlight=False, markup=False)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
