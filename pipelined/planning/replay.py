"""Published results, replayed: each ships as a scenario and runs on the real scheduler in virtual time.

Three runs of each: their policy on the model that was published (the error is how far that is from what they measured);
then, with an overhead for each launch where the model has none, their policy again and `balanced`, beside the exact
optimum of all cuts. Without any overhead the smallest chunks would be best, and there would be nothing to choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from pipelined.chunking import optimum
from pipelined.planning.scenario import Chunking, decode_scenario
from pipelined.planning.simulate import simulate

if TYPE_CHECKING:
    from pipelined.planning.scenario import Scenario

__all__ = ["Replayed", "replay", "replays"]

_WITHIN = 2e-4


@dataclass(frozen=True)
class Replayed:
    """One published result beside ours. Times to first token, in seconds.

    Attributes:
        name: Model, machine, prompt.
        setting: Theirs.
        published_s: What they measured.
        theirs_s: Their setting in virtual time, on the model as published.
        error: `theirs_s` over `published_s`, less 1.
        overhead_s: Added to each launch in what follows.
        theirs_with_overhead_s: Their setting with it.
        balanced_s: `balanced` with it, untuned.
        optimum_s: The best of all cuts with it.
        gain: How much sooner `balanced` is than their setting, of that one's time; both with the overhead.
        efficiency: The same as a share of the optimum's gain.
        note: What the reader should know.
    """

    name: str
    setting: str
    published_s: float
    theirs_s: float
    error: float
    overhead_s: float
    theirs_with_overhead_s: float
    balanced_s: float
    optimum_s: float
    gain: float
    efficiency: float
    note: str = ""


def replays() -> list[Scenario]:
    """The published results that ship with the package, by file name."""
    folder = files("pipelined.planning") / "scenarios"
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda entry: entry.name)
    return [decode_scenario(entry.read_bytes(), entry.name) for entry in found]


def replay(scenario: Scenario) -> Replayed:
    """Run one; not to be called on a running loop. Its stages are alike, and its only request is the published one."""
    published = scenario.published
    assert published is not None, "a replay has what was published"
    assert scenario.stage is not None, "and stages that are alike"
    theirs_s = _ttft_s(scenario)
    burdened = msgspec.structs.replace(
        scenario, stage=msgspec.structs.replace(scenario.stage, c=scenario.stage.c + published.overhead_s)
    )
    theirs_with_s = _ttft_s(burdened) if published.overhead_s else theirs_s
    tokens = scenario.arrivals[0].prompt_tokens
    # No bound on a micro-batch: of their memory nothing is known.
    chunking = Chunking(policy="balanced", max_micro_batch_tokens=max(tokens, scenario.page_size))
    balanced_s = _ttft_s(msgspec.structs.replace(burdened, chunking=chunking))
    cost = burdened.cost
    best_s = optimum(cost.stages[0], tokens, len(cost.stages) - 1, align=published.align_tokens, within=_WITHIN).seconds
    possible_s = theirs_with_s - best_s
    return Replayed(
        name=published.name,
        setting=published.setting,
        published_s=published.ttft_s,
        theirs_s=theirs_s,
        error=theirs_s / published.ttft_s - 1,
        overhead_s=published.overhead_s,
        theirs_with_overhead_s=theirs_with_s,
        balanced_s=balanced_s,
        optimum_s=best_s,
        gain=1 - balanced_s / theirs_with_s,
        efficiency=(theirs_with_s - balanced_s) / possible_s if possible_s > _WITHIN * best_s else 1.0,
        note=published.note,
    )


def _ttft_s(scenario: Scenario) -> float:
    return simulate(scenario).requests[0].ttft_s
