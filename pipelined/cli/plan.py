"""`pipelined plan`: which layout serves long prompts best on so many devices, before any of them is there."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from pipelined.cli.commands import command_text, serve_command
from pipelined.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.table import Table

    from pipelined.planning.plan import Candidate, Plan
    from pipelined.planning.plan_hardware import Hardware
    from pipelined.planning.plan_source import Subject
    from pipelined.stage import ModelInfo

__all__ = ["add_parser", "add_source_options", "hardware_of", "inspect_for_plan"]

_LINK = "25GB/s,5us"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("plan", help="the layout for so many devices, predicted", description=__doc__)
    parser.add_argument(
        "source",
        metavar="MODEL|FILE",
        help="a model (only looked at), a profile.json, a scenario (.toml, .json), or the name of one that ships",
    )
    parser.add_argument("--lengths", required=True, metavar="N,N", help="prompt tokens: 128K,1M; K is 1024, M 1024 K")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="how many there are")
    parser.add_argument(
        "--link", default=_LINK, metavar="RATE,TIME", help=f"between any two of them (default: {_LINK})"
    )
    parser.add_argument("--memory", metavar="SIZE", help="of each device: 96GB; default what the hardware has")
    add_source_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """What to take for the costs of a model that has no profile, and for the model of a profile."""
    group = parser.add_argument_group("costs")
    group.add_argument(
        "--hardware",
        default="here",
        metavar="NAME|RATES",
        help="what a device without a profile is: h100, 148TFLOPS,4TB/s,96GB, ...; default this machine, measured",
    )
    group.add_argument("--efficiency", type=float, metavar="E", help="share of its operations that layers reach")
    group.add_argument("--model", dest="model_of_profile", metavar="MODEL", help="what a profile is of, for its sizes")


def run(arguments: argparse.Namespace) -> int:
    """Plan."""
    from pipelined.planning.plan import make_plan
    from pipelined.planning.plan_units import parse_bytes, parse_lengths, parse_link

    lengths, link = parse_lengths(arguments.lengths), parse_link(arguments.link)
    if not 1 <= arguments.devices <= 1024:
        raise ConfigError(f"--devices {arguments.devices} is out of range; expected 1 to 1024")
    memory_bytes = parse_bytes(arguments.memory) if arguments.memory else 0.0
    subject, hidden, hardware = _subject(arguments)
    if hardware is not None:
        memory_bytes = memory_bytes or hardware.memory_bytes
    show = sys.stderr.isatty()

    def progress(layout: str) -> None:
        print(f"\r{layout:40}", end="", file=sys.stderr, flush=True)

    plan = make_plan(
        subject,
        lengths,
        arguments.devices,
        link,
        memory_bytes=memory_bytes,
        hidden=hidden,
        progress=progress if show else None,
    )
    print("\r" + " " * 40 + "\r" if show else "", end="", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps(_as_json(plan)))
    else:
        _print(plan)
    return 0


def _subject(arguments: argparse.Namespace) -> tuple[Subject, int, Hardware | None]:
    """(what is planned, elements of its hidden state if only a scenario knows them, the device if it was described)."""
    from pipelined.planning.plan_source import of_model, read_plan_file

    found = read_plan_file(arguments.source, lambda ref: inspect_for_plan(ref, arguments), arguments.model_of_profile)
    if found is not None:
        subject, scenario = found
        return subject, scenario.hidden if scenario else 0, None
    if arguments.model_of_profile is not None:
        raise ConfigError(f"--model goes with a profile; {arguments.source!r} is taken for a model itself")
    info = inspect_for_plan(arguments.source, arguments)
    hardware = hardware_of(arguments, arguments.devices, info.dtype)
    return of_model(info, hardware), 0, hardware


def hardware_of(arguments: argparse.Namespace, devices: int, dtype: str) -> Hardware:
    """The device that the options describe, or a share of this machine."""
    from pipelined.planning.plan_hardware import measure_here, parse_hardware

    efficiency = arguments.efficiency
    if efficiency is not None and not 0 < efficiency <= 1:
        raise ConfigError(f"--efficiency {efficiency} is out of range; expected more than 0, at most 1")
    if arguments.hardware.strip().lower() == "here":
        return measure_here(devices, dtype, efficiency)
    return parse_hardware(arguments.hardware, efficiency)


def inspect_for_plan(ref: str, arguments: argparse.Namespace) -> ModelInfo:
    """A model's sizes, from its configuration alone where its weights are not here.

    Raises:
        ModelError: It is not known.
    """
    from pipelined.llm import EngineConfig, inspect_model

    given = {
        name: getattr(arguments, name)
        for name in ("dtype", "context_length", "trust_remote_code", "load_format")
        if getattr(arguments, name, None) is not None
    }
    try:
        return inspect_model(EngineConfig(model=ref, **given))
    except ModelError:
        try:
            return inspect_model(EngineConfig(model=ref, **{**given, "load_format": "dummy"}))
        except ModelError:
            pass
        raise


def _command(plan: Plan) -> list[str] | None:
    """Arguments that run what is recommended; None: nothing can be run, or there is no model to run."""
    if plan.recommended is None or not plan.subject.ref:
        return None
    return serve_command(plan.subject.ref, {"pp_size": plan.recommended.layout.pp, "chunking": "balanced"})


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.subject.name,
        "basis": plan.subject.basis,
        "lengths": plan.lengths,
        "devices": plan.devices,
        "link": {
            "bandwidth_bytes_per_s": plan.link.bandwidth_gbytes_per_s and 1e9 * plan.link.bandwidth_gbytes_per_s,
            "latency_s": 1e-6 * plan.link.latency_us,
        },
        "memory_bytes": plan.memory_bytes or None,
        "command": _command(plan),
        "recommended": str(plan.recommended.layout) if plan.recommended else None,
        "best": str(plan.best.layout) if plan.best else None,
        "layouts": [_layout_as_json(one) for one in plan.candidates],
    }


def _layout_as_json(one: Candidate) -> dict[str, Any]:
    return {
        "name": str(one.layout),
        **one.layout._asdict(),
        "devices": one.layout.devices,
        "runnable": one.layout.runnable,
        "problem": one.problem or None,
        "partition": one.partition or None,
        "kv_tokens": one.kv_tokens,
        "estimates": [
            {
                **dataclasses.asdict(estimate),
                "moved": {**dataclasses.asdict(estimate.moved), "total": estimate.moved.total}
                if estimate.moved
                else None,
            }
            for estimate in one.estimates
        ],
    }


def _print(plan: Plan) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    _print_advice(plan, console)
    for tokens in plan.lengths:
        console.print(_table(plan, tokens))
    failed = [one for one in plan.candidates if one.problem]
    for one in failed:
        what = "does not serve all lengths" if one.estimates else "cannot be"
        console.print(f"{one.layout} {what}: {one.problem}", markup=False, soft_wrap=True)


def _print_advice(plan: Plan, console: Console) -> None:
    command, chosen, best = _command(plan), plan.recommended, plan.best
    lines = []
    if command is not None:
        lines.append(command_text(command))
    elif chosen is not None:
        lines.append(f"best that can be run: {chosen.layout} (no command: {plan.subject.name} is no model to run)")
    else:
        lines.append("no layout that can be run fits")
    if best is not None and not best.layout.runnable:
        lines.append(f"{best.layout} is predicted to be better, but cannot be run yet: the runtime runs pipelines")
    memory = f", {plan.memory_bytes / 1e9:.4g} GB each" if plan.memory_bytes else ""
    rate = f"{plan.link.bandwidth_gbytes_per_s:g} GB/s" if plan.link.bandwidth_gbytes_per_s else "no bound"
    lines.append(f"{plan.devices} devices{memory}; link {rate}, {plan.link.latency_us:g} us")
    lines.append(f"costs: {plan.subject.basis}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _table(plan: Plan, tokens: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    from pipelined.planning.plan_units import bytes_text, tokens_text

    shown = [(estimate, one) for one in plan.candidates if (estimate := one.estimate(tokens)) is not None]
    shown.sort(key=lambda pair: pair[0].ttft_s)
    queued = shown[0][0].queued if shown else 0
    title = f"\nprompts of {tokens_text(tokens)} tokens; throughput of {queued} at once"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("layout", no_wrap=True)
    for name in ("first token", "tokens/s", "bubble", "moved", "KV tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not")
    for estimate, one in shown:
        recommended = plan.recommended is not None and one.layout == plan.recommended.layout
        table.add_row(
            str(one.layout),
            f"{estimate.ttft_s:.3f} s",
            f"{estimate.tokens_per_s:,.0f}",
            f"{100 * estimate.bubble:.1f} %",
            bytes_text(estimate.moved.total) if estimate.moved else "-",
            f"{one.kv_tokens:,}" if one.kv_tokens is not None else "-",
            Text("recommended" if recommended else estimate.why),
        )
    return table
