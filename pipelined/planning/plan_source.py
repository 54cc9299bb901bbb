"""What is planned: a model with the costs of its layers, from a profile, a scenario, or its sizes and a device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipelined.costs import PipelineCost, StageCost, added, decode_profile, scaled
from pipelined.errors import ConfigError, PipelinedError
from pipelined.llm.partition import partition_layers
from pipelined.planning.plan_hardware import ELEMENT_BYTES, LAUNCH_S, estimated_head, estimated_layers
from pipelined.planning.scenario import decode_scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipelined.costs import Profile
    from pipelined.planning.plan_hardware import Hardware
    from pipelined.planning.scenario import Scenario
    from pipelined.stage import ModelInfo

__all__ = ["Subject", "of_model", "of_profile", "of_scenario", "read_plan_file"]

_FREE = StageCost(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Subject:
    """What is planned.

    Attributes:
        name: For people.
        ref: What a command names the model by; "" where there is none to run.
        basis: Where the costs come from, in a line.
        total: Cost of all layers on one device, where layers are not told apart.
        layers: Of each layer; empty: not told apart, any number of stages is as good as even.
        head: What the last stage has besides. launch: what each stage has besides.
        exact: Costs of the stages as they were measured, and their layers: that layout is not put together anew.
        info: Sizes of the model, if known.
    """

    name: str
    ref: str
    basis: str
    total: StageCost
    layers: tuple[StageCost, ...] = ()
    head: StageCost = _FREE
    launch: StageCost = _FREE
    exact: PipelineCost | None = None
    exact_layers: tuple[int, ...] = ()
    info: ModelInfo | None = field(default=None, repr=False)

    @property
    def context_length(self) -> int | None:
        """Longest prompt plus output; None: not known."""
        return self.info.context_length if self.info else None

    @property
    def hidden_bytes(self) -> float:
        """Of a token's hidden state; 0: not known."""
        return self.info.hidden_size * ELEMENT_BYTES.get(self.info.dtype, 2) if self.info else 0.0

    def most_stages(self) -> int | None:
        """Longest pipeline that its layers allow; None: no bound."""
        if self.info is not None:
            return len(self.info.cuts) + 1
        return len(self.layers) or None

    def parts(self, pp_size: int, partition: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """Layers [from, to) of each stage; without layers, parts of nothing.

        Raises:
            PartitionError: It cannot be cut so.
        """
        if self.info is not None:
            return partition_layers(self.info, pp_size, partition)
        if partition is None:
            count = len(self.layers)
            bounds = [rank * count // pp_size for rank in range(pp_size + 1)]
        else:
            bounds = [sum(partition[:rank]) for rank in range(pp_size + 1)]
        return list(itertools.pairwise(bounds))

    def measured(self, pp_size: int, partition: Sequence[int] | None = None) -> bool:
        """Whether that very layout was measured."""
        if self.exact is None:
            return False
        if not self.layers:
            return len(self.exact.stages) == pp_size
        return tuple(end - start for start, end in self.parts(pp_size, partition)) == self.exact_layers

    def stages(self, pp_size: int, partition: Sequence[int] | None = None) -> PipelineCost:
        """Costs of a pipeline of so many stages.

        Raises:
            PartitionError: It cannot be cut so.
        """
        if self.exact is not None and self.measured(pp_size, partition):
            return self.exact
        if not self.layers:
            return PipelineCost.even(added([scaled(self.total, 1 / pp_size), self.launch]), pp_size)
        parts = self.parts(pp_size, partition)
        last = len(parts) - 1
        return PipelineCost(
            tuple(
                added([*self.layers[start:end], self.launch, *([self.head] if rank == last else [])])
                for rank, (start, end) in enumerate(parts)
            )
        )


def of_model(info: ModelInfo, hardware: Hardware) -> Subject:
    """A model whose costs follow from its sizes and a device."""
    layers = estimated_layers(info, hardware)
    return Subject(
        name=info.ref,
        ref=info.ref,
        basis=f"an estimate from the model's sizes and {hardware.text}; profile it to know better",
        total=added(layers),
        layers=layers,
        head=estimated_head(info, hardware),
        launch=StageCost(0.0, 0.0, hardware.launch_s),
        info=info,
    )


def of_profile(profile: Profile, source: str, info: ModelInfo | None) -> Subject:
    """A model that was measured; other layouts than the measured one share a stage's costs out among its layers.

    Raises:
        ConfigError: The profile is of another model than `info`, or of one that cannot be put together.
    """
    fingerprint = profile.fingerprint
    count = sum(fingerprint.layers)
    if info is not None:
        if not _same_model(profile, info):
            renamed = fingerprint.model != info.ref
            what = f"{fingerprint.model!r}, not {info.ref!r}" if renamed else "it has other weights or settings"
            raise ConfigError(f"{source} is of another model: {what}; profile this one")
        if count != info.layers:
            raise ConfigError(f"{source} is of another model: it has {count} layers, {info.ref} {info.layers}")
    layers = tuple(
        scaled(cost, 1 / size)
        for cost, size in zip(profile.cost().stages, fingerprint.layers, strict=True)
        for _ in range(size)
    )
    stages = "-".join(str(size) for size in fingerprint.layers)
    return Subject(
        name=info.ref if info else fingerprint.model,
        ref=info.ref if info else "",
        basis=f"{source}, measured on {fingerprint.machine} with layers {stages}; other layouts share a stage's costs "
        "out among its layers",
        total=added(layers),
        layers=layers,
        exact=profile.cost() if fingerprint.tp == 1 else None,
        exact_layers=fingerprint.layers,
        info=info,
    )


def _same_model(profile: Profile, info: ModelInfo) -> bool:
    """By weights and configuration where both are known; random weights have the sizes of real ones, so names do."""
    fingerprint = profile.fingerprint
    if fingerprint.digest and info.options.load_format == "auto":
        return fingerprint.digest == info.fingerprint
    return fingerprint.model in {info.ref, info.path, Path(info.ref).name}


def of_scenario(scenario: Scenario, source: str) -> Subject:
    """Stages that are only described: their sum, shared out evenly among any number of stages."""
    cost = scenario.cost
    basis = f"{source}: the costs of its {len(cost.stages)} stages, added up and shared out evenly"
    launch_s = 0.0
    if not any(stage.c for stage in cost.stages):
        # Without any, the smallest chunks are best, and there is nothing to choose.
        launch_s = LAUNCH_S
        basis += f"; it has no cost of a launch, {1e3 * LAUNCH_S:g} ms are taken"
        cost = PipelineCost(tuple(replace(stage, c=launch_s) for stage in cost.stages))
    return Subject(
        name=scenario.name,
        ref="",
        basis=basis,
        total=added(scenario.cost.stages),
        launch=StageCost(0.0, 0.0, launch_s),
        exact=cost,
    )


def read_plan_file(
    ref: str, inspect: Callable[[str], ModelInfo], model: str | None
) -> tuple[Subject, Scenario | None] | None:
    """The subject in a file: a profile or a scenario, or a scenario that ships, by its name; None: it is neither.

    Args:
        ref: What the user gave.
        inspect: Looks up a model, raises `PipelinedError` if there is none.
        model: The profile's model, where its own name for it cannot be looked up.

    Raises:
        ConfigError: The file is no sound profile or scenario; one line, with the place.
    """
    content, source = _content(ref)
    if content is None:
        return None
    if source.endswith(".toml") or (source.endswith(".json") and not _is_profile(content)):
        scenario = decode_scenario(content, source)
        return of_scenario(scenario, source), scenario
    profile = decode_profile(content, source)
    if model is not None:
        return of_profile(profile, source, inspect(model)), None
    try:
        info = inspect(profile.fingerprint.model)
    except PipelinedError:
        info = None  # a digest, or a model that is not here: stages are known all the same
    return of_profile(profile, source, info), None


def _content(ref: str) -> tuple[bytes | None, str]:
    path = Path(ref)
    if ref.endswith((".json", ".toml")):
        try:
            return path.read_bytes(), ref
        except OSError as error:
            raise ConfigError(f"the file {ref!r} cannot be read: {error.strerror}") from error
    shipped = files("pipelined.planning") / "scenarios" / f"{path.name}.toml"
    if path.name == ref and not path.exists() and shipped.is_file():
        return shipped.read_bytes(), f"{ref}.toml"
    return None, ref


class _Head(msgspec.Struct):
    fingerprint: msgspec.Raw = msgspec.Raw()
    arrivals: msgspec.Raw = msgspec.Raw()


def _is_profile(content: bytes) -> bool:
    """Whether a JSON file is rather a profile than a scenario; of what is neither, the profile's reader complains."""
    try:
        head = msgspec.json.decode(content, type=_Head)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return True
    return bytes(head.fingerprint) != b"" or bytes(head.arrivals) == b""
