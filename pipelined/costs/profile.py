"""The profile file: what was measured on which model, layout and machine, and what was made of it. Versioned JSON.

Bytes in, objects out: nothing here opens a file. Every error is one line that names the place.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from pipelined.costs.fitting import Fit, Sample
from pipelined.costs.pipeline import PipelineCost
from pipelined.costs.stage import StageCost, Window
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Fingerprint",
    "Profile",
    "StageProfile",
    "decode_costs",
    "decode_profile",
    "encode_costs",
    "encode_profile",
]

VERSION = 1
MOST_BYTES = 32 << 20
_FALL = 0.5  # a bigger chunk behind the same prefix that takes less than this share of a smaller one's time is wrong

Count = Annotated[int, Meta(ge=0, le=2**40)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]
Text = Annotated[str, Meta(max_length=1000)]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What times depend on. Profiles are good for their own only.

    Attributes:
        model: Its name. digest: of its weights and configuration; where it is the same, names do not matter.
        dtype: Of its weights.
        layers: Of each stage. tp: ranks that share a stage.
        machine: Devices, or processor and cores. threads: of each rank; 0 where they do not matter.
    """

    model: Text
    layers: tuple[Positive, ...]
    machine: Text
    dtype: Text = ""
    tp: Positive = 1
    threads: Count = 0
    digest: Text = ""

    def differences(self, wanted: Fingerprint) -> list[str]:
        """What is not as it is wanted, in words."""
        names = [name for name in wanted.__struct_fields__ if name != "digest"]
        if self.digest == wanted.digest != "":
            names.remove("model")
        pairs = [(name, getattr(self, name), getattr(wanted, name)) for name in names]
        found = [f"{name} {had!r}, not {want!r}" for name, had, want in pairs if had != want]
        if self.digest != wanted.digest and self.model == wanted.model:
            found.insert(0, f"other weights or configuration of model {wanted.model!r} ({self.digest!r})")
        return found


class Point(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A measurement: chunks (prefix, tokens), decodes and their context, seconds."""

    seconds: Annotated[float, Meta(gt=0, lt=1e9)]
    chunks: tuple[tuple[Count, Positive], ...] = ()
    decodes: Count = 0
    context_tokens: Count = 0


class WindowTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `Window`."""

    tokens: Positive
    a: Annotated[float, Meta(ge=0)] = 0.0
    d: Annotated[float, Meta(ge=0)] = 0.0


class Coefficients(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """As `StageCost`."""

    a: Annotated[float, Meta(ge=0)]
    b: Annotated[float, Meta(ge=0)]
    c: Annotated[float, Meta(ge=0)]
    d: Annotated[float, Meta(ge=0)] = 0.0
    windows: tuple[WindowTerm, ...] = ()
    per_decode: Annotated[float, Meta(ge=0)] | None = None
    per_context: Annotated[float, Meta(ge=0)] | None = None

    def cost(self) -> StageCost:
        """The model with these."""
        windows = tuple(Window(w.tokens, w.a, w.d) for w in self.windows)
        return StageCost(self.a, self.b, self.c, self.d, windows, self.per_decode, self.per_context)

    @classmethod
    def of(cls, cost: StageCost) -> Coefficients:
        """Those of a model."""
        windows = tuple(WindowTerm(w.tokens, w.a, w.d) for w in cost.windows)
        return cls(cost.a, cost.b, cost.c, cost.d, windows, cost.per_decode, cost.per_context)


class StageProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured on a stage, and its fit."""

    points: tuple[Point, ...]
    cost: Coefficients
    mean_error: Annotated[float, Meta(ge=0)] = 0.0

    @classmethod
    def of(cls, samples: Sequence[Sample], found: Fit) -> StageProfile:
        """A stage's part of the file."""
        points = tuple(
            Point(sample.seconds, sample.work.chunks, sample.work.decodes, sample.work.context_tokens)
            for sample in samples
        )
        return cls(points, Coefficients.of(found.cost), found.mean_error)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file. `version`: of the format."""

    version: int
    fingerprint: Fingerprint
    stages: tuple[StageProfile, ...]

    @classmethod
    def of(cls, fingerprint: Fingerprint, stages: Sequence[StageProfile]) -> Profile:
        """A profile in today's format."""
        return cls(version=VERSION, fingerprint=fingerprint, stages=tuple(stages))

    def cost(self) -> PipelineCost:
        """The model of the pipeline."""
        return PipelineCost(tuple(stage.cost.cost() for stage in self.stages))

    def check(self, wanted: Fingerprint, source: str = "the profile") -> None:
        """Refuse to be used for anything else than what was measured.

        Raises:
            ConfigError: Names what differs.
        """
        if differences := self.fingerprint.differences(wanted):
            raise ConfigError(f"{source} is of another set-up: {'; '.join(differences)}; profile this one")


def encode_profile(profile: Profile) -> bytes:
    """The file's content: JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def decode_profile(content: bytes, source: str = "profile") -> Profile:
    """What `encode_profile` made; `source` is the file's name, for errors.

    Raises:
        ConfigError: One line, with the place in the file, for whatever is not a sound profile.
    """
    if not content.strip():
        raise ConfigError(f"{source} is empty; expected a profile as `pipelined profile` writes it")
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{source} has {len(content)} bytes; a profile has at most {MOST_BYTES}")
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.version != VERSION:
            raise ConfigError(f"{source} is a profile of version {head.version}; expected {VERSION}: profile again")
        profile = msgspec.json.decode(content, type=Profile)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not a profile: {' '.join(str(error).split())}") from error
    _check(profile, source)
    return profile


def encode_costs(cost: PipelineCost) -> str:
    """A pipeline's coefficients alone, for settings: a JSON list, a stage an entry."""
    return msgspec.json.encode([Coefficients.of(stage) for stage in cost.stages]).decode()


def decode_costs(text: str, source: str = "stage costs") -> PipelineCost:
    """What `encode_costs` made.

    Raises:
        ConfigError: With the place in the text.
    """
    try:
        stages = msgspec.json.decode(text, type=tuple[Coefficients, ...])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from error
    return PipelineCost(tuple(stage.cost() for stage in stages))


class _Head(msgspec.Struct):
    version: int


def _check(profile: Profile, source: str) -> None:
    """What types alone do not say."""
    layers = len(profile.fingerprint.layers)
    if not profile.stages or len(profile.stages) != layers:
        raise ConfigError(
            f"{source}: $.stages has {len(profile.stages)} entries, $.fingerprint.layers {layers}; "
            "expected as many of one as of the other, and at least one"
        )
    for number, stage in enumerate(profile.stages):
        place = f"{source}: $.stages[{number}]"
        values = msgspec.structs.asdict(stage.cost)
        numbers = [(name, value) for name, value in values.items() if isinstance(value, float)]
        numbers += [(f"windows[{i}]", max(w.a, w.d)) for i, w in enumerate(stage.cost.windows)]
        for name, value in [*numbers, ("mean_error", stage.mean_error)]:
            if not math.isfinite(value):
                raise ConfigError(f"{place}.{name} is {value}; expected a finite number")
        if stage.cost.cost().chunk_s(0, 1) <= 0:
            raise ConfigError(f"{place}.cost: time does not grow with tokens; expected a or b above 0")
        for at, point in enumerate(stage.points):
            if not point.chunks and not point.decodes:
                raise ConfigError(f"{place}.points[{at}] has neither chunks nor decodes; expected one of them")
        _check_growth(stage, place)


def _check_growth(stage: StageProfile, place: str) -> None:
    """More tokens behind the same prefix do not take far less time."""
    single = [
        (*p.chunks[0], p.seconds, at) for at, p in enumerate(stage.points) if len(p.chunks) == 1 and not p.decodes
    ]
    for prefix, group in itertools.groupby(sorted(single), key=lambda item: item[0]):
        sizes = [(tokens, list(same)) for tokens, same in itertools.groupby(group, key=lambda item: item[1])]
        # The best of repeated measurements: one slow first time is the fit's business
        fastest = [(tokens, min(same, key=lambda item: item[2])) for tokens, same in sizes]
        for at in range(len(fastest) - 1, 0, -1):
            tokens, (_, _, seconds, index) = fastest[at]
            smaller = [best for _, best in fastest[:at]]
            if len(smaller) > 1 or len(fastest) == 2:
                least = sorted(item[2] for item in smaller)[len(smaller) // 2]
                if seconds < _FALL * least:
                    raise ConfigError(
                        f"{place}.points[{index}]: {tokens} tokens after {prefix} took {seconds} s, less than half of "
                        f"what fewer took ({least} s); expected times that grow"
                    )
