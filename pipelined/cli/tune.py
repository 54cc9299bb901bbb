"""`pipelined tune`: how prompts should be cut for a workload, searched in virtual time and proved by measurement."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from pipelined.cli.commands import command_text, config_command
from pipelined.cli.options import add_engine_options, engine_config
from pipelined.cli.plan import add_source_options, hardware_of, inspect_for_plan
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pipelined.llm import EngineConfig
    from pipelined.planning.plan_source import Subject
    from pipelined.planning.tune import Setting, Trial, Tuned
    from pipelined.planning.tune_measure import Measured
    from pipelined.planning.tune_workload import Workload

__all__ = ["add_parser"]

_HERE = "3GB/s,200us"
_THERE = "25GB/s,5us"
_MOST_MEASURING_S = 900.0
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class _Task:
    """What is tuned, and on what.

    Attributes:
        config: The default that the winner is held against.
        unable: Why it cannot be measured on this machine; "" if it can.
        hidden: Elements of 2 bytes of a hidden state.
    """

    subject: Subject
    config: EngineConfig
    workload: Workload
    unable: str
    hidden: int


@dataclasses.dataclass(frozen=True)
class _Proof:
    """The default and the winner, measured; or why they were not."""

    default: Measured | None = None
    winner: Measured | None = None
    gain: float = 0.0
    reason: str = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "tune", help="the best chunks for a workload, searched and proved", description=__doc__
    )
    parser.add_argument(
        "--workload", required=True, metavar="FILE", help="requests as JSON lines, or a scenario's arrivals"
    )
    parser.add_argument(
        "--goal", default="ttft", metavar="GOAL", help="ttft, latency (of whole answers) or throughput (default: ttft)"
    )
    parser.add_argument("--budget-s", type=float, default=120.0, metavar="S", help="time for the search (default: 120)")
    parser.add_argument(
        "--measure",
        action=argparse.BooleanOptionalAction,
        help="prove the winner on running engines (default: where this machine can)",
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="measurements of each (default: 1)")
    parser.add_argument(
        "--link", metavar="RATE,TIME", help=f"between stages (default: {_HERE} on this machine, {_THERE} on others)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_source_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, measure, tell."""
    from pipelined.planning.plan_units import parse_link
    from pipelined.planning.tune import Tuner

    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds} is out of range; expected 1 or more")
    if not arguments.budget_s > 0:
        raise ConfigError(f"--budget-s {arguments.budget_s} is out of range; expected more than 0 seconds")
    task = _task(arguments)
    config, subject = task.config, task.subject
    tuner = Tuner(
        subject=subject,
        workload=task.workload,
        pp_size=config.pp_size,
        default=_setting(config),
        goal=arguments.goal,
        link=parse_link(arguments.link or (_THERE if task.unable else _HERE)),
        hidden=task.hidden,
        page_size=config.page_size,
        kv_cache_tokens=config.kv_cache_tokens,
        max_running_requests=config.max_running_requests,
        known_costs=bool(config.profile),
        target_itl_s=config.target_itl_s,
        budget_s=arguments.budget_s,
        progress=_progress if sys.stderr.isatty() else None,
    )
    tuned = tuner.search()
    proof = _prove(arguments, task, tuned)
    _clear()
    chosen = tuned.default if proof.winner is not None and proof.gain < 0 else tuned.winner
    command = config_command(_with(config, chosen.setting, subject)) if subject.ref else None
    if arguments.json:
        print(json.dumps(_as_json(task, tuned, proof, command, arguments.goal)))
    else:
        _print(task, tuned, proof, command, arguments.goal)
    return 0


# ---- what is tuned ----


def _task(arguments: argparse.Namespace) -> _Task:
    from pipelined.planning.plan_source import of_model, read_plan_file
    from pipelined.planning.tune_workload import read_workload

    workload = read_workload(arguments.workload)
    source = getattr(arguments, "profile", None) or arguments.model
    model = arguments.model if source != arguments.model else arguments.model_of_profile
    found = read_plan_file(source, lambda ref: inspect_for_plan(ref, arguments), model)
    if found is None:
        if model is not None:
            raise ConfigError(f"--model goes with a profile; {source!r} is taken for a model itself")
        config = dataclasses.replace(engine_config(arguments), stage_costs="")
        info = inspect_for_plan(source, arguments)
        subject = of_model(info, hardware_of(arguments, config.pp_size, info.dtype))
        there = "" if arguments.hardware.strip().lower() == "here" else f"{arguments.hardware} is not this machine"
        return _Task(subject, config, workload, there or _too_large(subject), _hidden(subject))
    subject, scenario = found
    if scenario is not None:
        changes = {"pp_size": len(scenario.cost.stages), "page_size": scenario.page_size, "depth": scenario.depth}
        config = engine_config(arguments, model=subject.name, profile=None, **changes)
        return _Task(subject, config, workload, "a scenario is no model to run", scenario.hidden)
    return _of_profile(arguments, subject, source, workload)


def _of_profile(arguments: argparse.Namespace, subject: Subject, source: str, workload: Workload) -> _Task:
    """The engine that was measured, unless options say otherwise; measured again if this is the same machine."""
    pp_size = arguments.pp_size if arguments.pp_size > 1 else len(subject.exact_layers)
    auto = source if arguments.layer_partition == "auto" else None  # layers by the profile's own costs
    config = engine_config(arguments, model=subject.ref or subject.name, pp_size=pp_size, profile=auto)
    config = dataclasses.replace(config, profile=None, stage_costs="")
    if config.layer_partition is None and pp_size == len(subject.exact_layers):
        even = tuple(end - start for start, end in subject.parts(pp_size))
        if even != subject.exact_layers:
            config = dataclasses.replace(config, layer_partition=subject.exact_layers)
    if subject.info is None:
        return _Task(subject, config, workload, f"{subject.name!r} cannot be looked up; give --model", 4096)
    unable = _another_set_up(config, subject, source) or _too_large(subject)
    if not unable and subject.measured(pp_size, config.layer_partition):
        config = dataclasses.replace(config, profile=source)
    return _Task(subject, config, workload, unable, _hidden(subject))


def _another_set_up(config: EngineConfig, subject: Subject, source: str) -> str:
    """Why the profile is not of this machine; "" if it is, whatever the layers."""
    from pipelined.llm.profiles import fingerprint, read_profile

    assert subject.info is not None
    profile = read_profile(source)
    layers = subject.parts(len(subject.exact_layers), subject.exact_layers)
    measured = dataclasses.replace(config, pp_size=len(layers), layer_partition=subject.exact_layers)
    try:
        profile.check(fingerprint(measured, subject.info, layers), source)
    except ConfigError as error:
        return str(error)
    return ""


def _too_large(subject: Subject) -> str:
    from pipelined.planning.tune_measure import too_large

    assert subject.info is not None
    return too_large(subject.info)


def _hidden(subject: Subject) -> int:
    return max(1, round(subject.hidden_bytes / 2))


def _setting(config: EngineConfig) -> Setting:
    from pipelined.planning.tune import Setting

    return Setting(
        policy=config.chunking,
        chunked_prefill_size=config.chunked_prefill_size,
        smoothing_factor=config.smoothing_factor,
        max_micro_batch_tokens=config.max_micro_batch_tokens,
        depth=config.depth,
        partition=config.layer_partition,
    )


def _with(config: EngineConfig, setting: Setting, subject: Subject) -> EngineConfig:
    """The engine with that setting; with the profile only where the profile is of those layers."""
    balanced = setting.policy == "balanced"
    changes: dict[str, Any] = {
        "max_micro_batch_tokens": None,
        "target_itl_s": config.target_itl_s if balanced else None,
        "layer_partition": None,
        "profile": config.profile if subject.measured(config.pp_size, setting.partition) else None,
        **setting.settings(),
    }
    return dataclasses.replace(config, **changes)


# ---- the proof ----


def _prove(arguments: argparse.Namespace, task: _Task, tuned: Tuned) -> _Proof:
    from pipelined.cli.measure import run_async
    from pipelined.planning.tune_measure import measure

    if arguments.measure is False:
        return _Proof(reason="--no-measure")
    if task.unable:
        if arguments.measure:
            raise ConfigError(f"--measure: this machine cannot run it: {task.unable}")
        return _Proof(reason=task.unable)
    if tuned.winner is tuned.default:
        return _Proof(reason="nothing is predicted to be better than the default")
    takes_s = arguments.rounds * (tuned.default.wall_s + tuned.winner.wall_s)
    if takes_s > _MOST_MEASURING_S and not arguments.measure:
        return _Proof(reason=f"it would take about {takes_s:.0f} s; --measure does it all the same")
    configs = [
        dataclasses.replace(_with(task.config, trial.setting, task.subject), disable_radix_cache=True)
        for trial in (tuned.default, tuned.winner)
    ]
    tell = _tell if sys.stderr.isatty() else lambda _: None
    default, winner = run_async(measure(configs, task.workload, rounds=arguments.rounds, progress=tell))
    gain = 1 - winner.score(arguments.goal) / default.score(arguments.goal)
    return _Proof(default, winner, gain)


def _progress(setting: str, best: float) -> None:
    _tell(f"{setting}{f'; best so far {best:.3f} s' if best else ''}")


def _tell(text: str) -> None:
    print(f"\r{text:100.100}", end="", file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r" + " " * 100 + "\r", end="", file=sys.stderr, flush=True)


# ---- what is told ----


def _as_json(task: _Task, tuned: Tuned, proof: _Proof, command: list[str] | None, goal: str) -> dict[str, Any]:
    measured = None
    if proof.default is not None and proof.winner is not None:
        measured = {
            "default": dataclasses.asdict(proof.default),
            "winner": dataclasses.asdict(proof.winner),
            "gain": proof.gain,
            "proven": proof.gain > 0,
        }
    return {
        "name": task.subject.name,
        "basis": task.subject.basis,
        "goal": goal,
        "pp_size": task.config.pp_size,
        "workload": {"requests": task.workload.requests, "prompt_tokens": task.workload.prompt_tokens},
        "command": command,
        "gain": tuned.gain,
        "default": _trial_as_json(tuned.default),
        "winner": _trial_as_json(tuned.winner),
        "measured": measured,
        "not_measured": proof.reason or None,
        "cut_short": tuned.cut_short,
        "trials": [_trial_as_json(trial) for trial in tuned.trials],
    }


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    return {
        "setting": trial.setting.settings(),
        "text": trial.setting.text,
        "step": trial.step,
        "score": trial.score,
        "ttft_s": dataclasses.asdict(trial.ttft),
        "itl_s": dataclasses.asdict(trial.itl) if trial.itl else None,
        "latency_s": trial.latency_s,
        "prompt_tokens_per_s": trial.prompt_tokens_per_s,
        "wall_s": trial.wall_s,
    }


def _print(task: _Task, tuned: Tuned, proof: _Proof, command: list[str] | None, goal: str) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(command_text(command) if command else f"best: {tuned.winner.setting.text} (no command: no model to run)")
    names = {"ttft": "time to first token", "latency": "time to last token", "throughput": "time of the whole"}
    won, default = tuned.winner, tuned.default
    say(f"predicted {names[goal]}: {won.score:.3f} s, {tuned.gain:.1%} less than {default.score:.3f} s by default")
    if proof.default is not None and proof.winner is not None:
        less = f"{proof.gain:.1%} less than" if proof.gain >= 0 else f"{-proof.gain:.1%} MORE than"
        say(f"measured: {proof.winner.score(goal):.3f} s, {less} {proof.default.score(goal):.3f} s by default")
        if proof.gain < 0:
            say("the winner is not proved: the command is the default's")
    else:
        say(f"not measured: {proof.reason}")
    say(f"costs: {task.subject.basis}")
    if tuned.cut_short:
        say("the search was cut short; give it more time with --budget-s")
    _print_table(console, tuned)


def _print_table(console: Console, tuned: Tuned) -> None:
    firsts = {trial.setting.policy: trial for trial in reversed(tuned.trials)}.values()
    wanted = [*tuned.trials[:_SHOWN], *firsts, tuned.default, tuned.winner]
    shown = [trial for trial in tuned.trials if any(trial is one for one in wanted)]
    console.print(_table(shown, tuned.default))
    if len(tuned.trials) > len(shown):
        console.print(f"and {len(tuned.trials) - len(shown)} more", markup=False)


def _table(shown: list[Trial], default: Trial) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("setting")
    for name in ("first token", "p90", "last token", "inter-token", "tokens/s", "all"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("found by")
    for trial in shown:
        table.add_row(
            Text(trial.setting.text),
            f"{trial.ttft.mean:.3f} s",
            f"{trial.ttft.p90:.3f} s",
            f"{trial.latency_s:.3f} s",
            f"{trial.itl.mean:.3f} s" if trial.itl else "-",
            f"{trial.prompt_tokens_per_s:,.0f}",
            f"{trial.wall_s:.2f} s",
            "the default" if trial is default else trial.step,
        )
    return table
