"""`pipelined bench overhead`: the real runtime around stages that take a known time."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

from pipelined.cli.options import output_file
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pipelined.pipeline import Pipeline
    from pipelined.stage import Payload, StageContext

__all__ = ["BenchStage", "add_parser"]

_WARM_UP = 20
_LATENCY_SAMPLES = 50
_SIM_LINK = "sim://?latency_us=100&bandwidth_gbytes_per_s=2"


class BenchStage:
    """Takes `stage_s` and makes a fresh output of `hidden_bytes`, in the link's memory (`leases`) or outside of it."""

    name = "bench"

    def __init__(self, stage_s: float, hidden_bytes: int, *, leases: bool, sleep: bool) -> None:
        self.stage_s = stage_s
        self.hidden_bytes = hidden_bytes
        self.leases = leases
        self.sleep = sleep
        self._ctx: StageContext | None = None

    def setup(self, ctx: StageContext) -> None:
        """Keep the context: outputs come from it."""
        self._ctx = ctx

    def cost(self, _id: int) -> float:
        """For the emulated device."""
        return self.stage_s

    def forward(self, x: Payload) -> Payload:
        """Every byte is written; on a thread, the rest of the stage's time is slept."""
        import torch

        started_s = time.monotonic()
        assert self._ctx is not None
        shape = (self.hidden_bytes,)
        out = self._ctx.empty(shape, torch.uint8) if self.leases else torch.empty(shape, dtype=torch.uint8)
        out.fill_(int(x["number"]) % 251)
        if self.sleep:
            time.sleep(max(0.0, started_s + self.stage_s - time.monotonic()))
        return {"hidden": out, "number": x["number"]}


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the kind."""
    parser = kinds.add_parser("overhead", help="makespan, rate and latency of the runtime itself", description=__doc__)
    parser.add_argument("--pp-size", "--pp", type=int, default=8, metavar="P", help="stages (default: 8)")
    parser.add_argument("--micro-batches", type=int, default=400, metavar="M", help="inputs (default: 400)")
    parser.add_argument("--stage-ms", type=float, default=10.0, metavar="MS", help="time of each stage (default: 10)")
    parser.add_argument("--hidden-bytes", type=int, default=2_359_296, metavar="N", help="output of each stage")
    parser.add_argument("--transport", default=None, metavar="URI", help="shm, memory, zmq, ...")
    parser.add_argument("--workers", choices=("process", "task"), help="default: task for memory, else process")
    parser.add_argument("--device", choices=("emulated", "thread"), default="emulated", help="what takes the time")
    parser.add_argument("--leases", action="store_true", help="write outputs straight into the link's memory")
    parser.add_argument(
        "--sim-link",
        default=_SIM_LINK,
        metavar="URI",
        help=f"of the same run in virtual time, with --device emulated (default: {_SIM_LINK}, about what shm:// does)",
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="R", help="runs; medians are printed (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trace", type=output_file, metavar="FILE", help="write a Chrome trace of the last run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    import uvloop

    from pipelined.clock import virtual

    for name in ("pp_size", "micro_batches", "hidden_bytes", "repeat"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected 1 or more")
    if not 0 <= arguments.stage_ms < 1e6:
        raise ConfigError(f"--stage-ms {arguments.stage_ms}: expected 0 or more")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_overhead(arguments))
    if arguments.device == "emulated" and arguments.stage_ms:  # without, it would only measure the host
        simulated_s = virtual.run(_simulated(arguments))
        result |= {
            "simulated_link": arguments.sim_link,
            "simulated_makespan_s": simulated_s,
            "simulation_error": simulated_s / result["makespan_s"] - 1,
        }
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20} {value if value is not None else '-'}")
    return 0


async def _overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from pipelined.pipeline import Pipeline
    from pipelined.trace import RankTrace, Trace, write_chrome

    transport = arguments.transport or ("memory" if arguments.workers == "task" else "shm")
    workers = arguments.workers or ("task" if transport.startswith("memory") else "process")
    thread = arguments.device == "thread"
    torch.set_num_threads(1)  # as in the processes of ranks: what is measured is the runtime, not torch's threads
    stages = _stages(arguments, sleep=thread)
    pipeline = Pipeline(stages, workers=workers, transport=transport, device="cpu" if thread else "emulated")
    async with pipeline as pipe:
        await _makespan(pipe, _WARM_UP)
        await pipe.trace()
        started_s = time.monotonic()
        makespans = [await _makespan(pipe, arguments.micro_batches) for _ in range(arguments.repeat)]
        latencies = [await _makespan(pipe, 1) for _ in range(_LATENCY_SAMPLES)]
        if arguments.trace:
            spans = await pipe.trace()
            ranks = [RankTrace(rank, f"stage {rank}", own) for rank, own in spans.items()]
            write_chrome(Trace.of(ranks, started_s=started_s), arguments.trace)
    makespan_s = statistics.median(makespans)
    ideal_s = (arguments.micro_batches + arguments.pp_size - 1) * arguments.stage_ms / 1e3
    return {
        "makespan_s": makespan_s,
        "ideal_s": ideal_s,
        "ratio": makespan_s / ideal_s if ideal_s else None,
        "per_s": arguments.micro_batches / makespan_s,
        "latency_s": statistics.median(latencies),
    }


def _stages(arguments: argparse.Namespace, *, sleep: bool) -> list[BenchStage]:
    stage_s = arguments.stage_ms / 1e3
    return [
        BenchStage(stage_s, arguments.hidden_bytes, leases=arguments.leases, sleep=sleep)
        for _ in range(arguments.pp_size)
    ]


async def _simulated(arguments: argparse.Namespace) -> float:
    """The makespan of the same pipeline and runtime in virtual time: only devices and links take time."""
    from pipelined.clock import LoopClock
    from pipelined.pipeline import Pipeline, TaskWorld

    world = TaskWorld(clock=lambda _: LoopClock())
    stages = _stages(arguments, sleep=False)
    now = asyncio.get_running_loop().time
    async with Pipeline(stages, transport=arguments.sim_link, device="emulated", world=world) as pipe:
        await _makespan(pipe, _WARM_UP, now)
        return await _makespan(pipe, arguments.micro_batches, now)


async def _makespan(pipe: Pipeline, count: int, now: Callable[[], float] = time.monotonic) -> float:
    """Seconds from the first input to the last output; the driver looks at each output."""
    started_s = now()
    number = 0
    async for y in pipe.stream({"number": n} for n in range(count)):
        assert int(y["hidden"][-1]) == number % 251, "an output of another input"
        number += 1
    assert number == count
    return now() - started_s
