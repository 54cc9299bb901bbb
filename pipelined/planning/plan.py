"""Which layout serves long prompts best on so many devices: each is run in virtual time, and the others told why not.

Pipelines run on the real scheduler. Tensor and context parallelism are the same pipelines with stages that are faster
by the ranks that share them and slower by what those have to tell each other: a prediction of what cannot be run yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pipelined.costs import PipelineCost
from pipelined.errors import ConfigError, PartitionError
from pipelined.planning.communication import Moved, moved_bytes, tp_hops
from pipelined.planning.layouts import Layout, layouts
from pipelined.planning.plan_costs import shared
from pipelined.planning.plan_units import bytes_text, tokens_text
from pipelined.planning.scenario import Arrival, Chunking, Link, Scenario, StagePart
from pipelined.planning.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipelined.planning.plan_source import Subject

__all__ = ["Candidate", "Estimate", "Plan", "make_plan"]

MOST_TOKENS: Final = 8192
"""Of a micro-batch, as the engine's default is."""

_FOR_ACTIVATIONS: Final = 0.1
_QUEUED_TOKENS: Final = 1 << 21
_ALIKE: Final = 1e-3


@dataclass(frozen=True)
class Estimate:
    """What a layout does with prompts of one length.

    Attributes:
        tokens: Of a prompt.
        ttft_s: Time to first token of a lone one.
        tokens_per_s: Of prompts, where `queued` of them wait at once.
        bubble: Share of the stages' time that is idle while the lone one is served.
        moved: Bytes of a chain of devices; None: the model's sizes are not known.
        told_s: What ranks that share a stage wait for each other, on the busiest stage.
        why: Why it is not the one to take; "" if it is.
    """

    tokens: int
    ttft_s: float
    tokens_per_s: float
    queued: int
    bubble: float
    moved: Moved | None
    told_s: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Candidate:
    """A layout.

    Attributes:
        layout: Stages and ranks.
        problem: Why it cannot be, or not for all lengths; "" if it can.
        partition: Layers of each stage; empty: not known.
        kv_tokens: How many the KV caches hold; None: not known.
        estimates: By length, the shortest first, as long as they fit.
    """

    layout: Layout
    problem: str = ""
    partition: tuple[int, ...] = ()
    kv_tokens: int | None = None
    estimates: tuple[Estimate, ...] = ()

    @property
    def score(self) -> float:
        """Less is better: the mean logarithm of its times to first token; infinite if it does not serve all lengths."""
        if self.problem:
            return math.inf
        return sum(math.log(one.ttft_s) for one in self.estimates) / len(self.estimates)

    def estimate(self, tokens: int) -> Estimate | None:
        """For prompts of that length; None: they do not fit."""
        return next((one for one in self.estimates if one.tokens == tokens), None)


@dataclass(frozen=True)
class Plan:
    """All layouts, the best first.

    Attributes:
        recommended: The best that can be run; None: none can.
    """

    subject: Subject
    lengths: tuple[int, ...]
    devices: int
    link: Link
    memory_bytes: float
    candidates: tuple[Candidate, ...]
    recommended: Candidate | None

    @property
    def best(self) -> Candidate | None:
        """The best of all, whether it can be run or not; None: nothing fits."""
        return self.candidates[0] if self.candidates and not self.candidates[0].problem else None


def make_plan(
    subject: Subject,
    lengths: Sequence[int],
    devices: int,
    link: Link,
    *,
    memory_bytes: float = 0.0,
    hidden: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Compare all layouts. Takes about a second for each and a length. Not to be called on a running loop.

    Args:
        subject: Whose costs.
        lengths: Of prompts, in rising order.
        devices: How many there are, at least 1.
        link: Between any two of them.
        memory_bytes: Of each; 0: not known, everything fits.
        hidden: Elements of 2 bytes of a hidden state, where the subject does not know its sizes.
        progress: Told what is being looked at.

    Raises:
        ConfigError: A length is beyond the model's context; names them.
    """
    _check(subject, lengths, devices)
    hidden_bytes = subject.hidden_bytes or 2.0 * (hidden or 4096)
    found = []
    for layout in layouts(devices):
        if subject.info is None and not layout.runnable:
            continue
        if progress is not None:
            progress(str(layout))
        found.append(_candidate(subject, layout, lengths, link, memory_bytes, hidden_bytes))
    found.sort(key=lambda one: (one.score, one.layout.devices))
    # Of layouts as good as each other, the one that takes fewer devices.
    runnable = [one for one in found if one.layout.runnable and not one.problem]
    alike = [one for one in runnable if one.score <= runnable[0].score + _ALIKE]
    chosen = min(alike, key=lambda one: one.layout.devices, default=None)
    told = tuple(_with_reasons(one, chosen, devices) for one in found)
    recommended = next((one for one in told if chosen is not None and one.layout == chosen.layout), None)
    return Plan(subject, tuple(lengths), devices, link, memory_bytes, told, recommended)


def _check(subject: Subject, lengths: Sequence[int], devices: int) -> None:
    if not 1 <= devices <= 1024:
        raise ConfigError(f"{devices} devices cannot be planned for; expected 1 to 1024")
    context = subject.context_length
    beyond = [tokens for tokens in lengths if context is not None and tokens > context]
    if beyond:
        names = ", ".join(f"{tokens_text(tokens)} ({tokens} tokens)" for tokens in beyond)
        raise ConfigError(f"beyond the context of {subject.name}, {context} tokens: {names}; leave out what is longer")


def _candidate(
    subject: Subject, layout: Layout, lengths: Sequence[int], link: Link, memory_bytes: float, hidden_bytes: float
) -> Candidate:
    problem = _impossible(subject, layout)
    if problem:
        return Candidate(layout, problem)
    try:
        parts = subject.parts(layout.pp)
    except PartitionError as error:
        return Candidate(layout, str(error))
    partition = tuple(end - start for start, end in parts) if subject.layers else ()
    kv_tokens, problem = _room(subject, layout, parts, memory_bytes)
    fitting = [tokens for tokens in lengths if not problem and (kv_tokens is None or tokens <= kv_tokens)]
    if not problem and len(fitting) < len(lengths):
        problem = f"room for {kv_tokens} tokens of keys and values; the longest prompt has {lengths[-1]}"
    cost = _cost(subject, layout, parts, link, hidden_bytes)
    estimates = tuple(_estimate(subject, layout, parts, cost, tokens, link, hidden_bytes) for tokens in fitting)
    return Candidate(layout, problem, partition, kv_tokens, estimates)


def _impossible(subject: Subject, layout: Layout) -> str:
    most = subject.most_stages()
    if most is not None and layout.pp > most:
        return f"the model can be cut into {most} stages at most"
    if layout.tp > 1 and subject.info is not None:
        heads, groups = subject.info.heads, subject.info.kv_heads
        if not heads:
            return "how many heads the model has is not known"
        if heads % layout.tp:
            return f"{heads} heads are not to be divided by {layout.tp}"
        if groups % layout.tp and layout.tp % groups:
            return f"{groups} heads of keys and values are not to be divided by {layout.tp}, nor the other way round"
    return ""


def _room(
    subject: Subject, layout: Layout, parts: Sequence[tuple[int, int]], memory_bytes: float
) -> tuple[int | None, str]:
    """(tokens that all KV caches hold, or why the weights alone do not fit)."""
    info = subject.info
    if info is None or not memory_bytes:
        return None, ""
    least = math.inf
    copies = layout.tp / min(layout.tp, max(1, info.kv_heads))  # more ranks than heads: several hold the same
    for rank, (start, end) in enumerate(parts):
        weights = sum(info.layer_bytes[start:end]) + (info.embedding_bytes if rank == 0 else 0)
        weights = (weights + (info.head_bytes if rank == len(parts) - 1 else 0)) // layout.tp
        left = memory_bytes * (1 - _FOR_ACTIVATIONS) - weights
        if left <= 0:
            return 0, f"{bytes_text(weights)} of weights on rank {rank}; a device has {bytes_text(memory_bytes)}"
        each = sum(info.kv_bytes_per_token[start:end]) * copies / layout.tp / layout.cp
        least = min(least, left / each if each else math.inf)
    return (None if least == math.inf else int(least)), ""


def _kv_bytes(subject: Subject, start: int, end: int) -> float:
    return sum(subject.info.kv_bytes_per_token[start:end]) if subject.info else 0.0


def _cost(
    subject: Subject, layout: Layout, parts: Sequence[tuple[int, int]], link: Link, hidden_bytes: float
) -> PipelineCost:
    stages = zip(subject.stages(layout.pp).stages, parts, strict=True)
    return PipelineCost(
        tuple(
            shared(
                stage,
                layout,
                link,
                layers=end - start,
                hidden_bytes=hidden_bytes,
                kv_bytes=_kv_bytes(subject, start, end),
            )
            for stage, (start, end) in stages
        )
    )


def _scenario(cost: PipelineCost, link: Link, hidden_bytes: float, tokens: int, count: int) -> Scenario:
    return Scenario(
        stages=tuple(StagePart.of(stage) for stage in cost.stages),
        chunking=Chunking(policy="balanced", max_micro_batch_tokens=MOST_TOKENS),
        link=link,
        hidden=max(1, round(hidden_bytes / 2)),
        arrivals=(Arrival(prompt_tokens=tokens, count=count),),
    )


def _estimate(
    subject: Subject,
    layout: Layout,
    parts: Sequence[tuple[int, int]],
    cost: PipelineCost,
    tokens: int,
    link: Link,
    hidden_bytes: float,
) -> Estimate:
    lone = simulate(_scenario(cost, link, hidden_bytes / layout.cp, tokens, 1))
    queued = max(2, min(16, _QUEUED_TOKENS // tokens))
    many = simulate(_scenario(cost, link, hidden_bytes / layout.cp, tokens, queued))
    whole_ns = sum(use.wall_ns for use in lone.stages)
    moved, told_s = None, 0.0
    if subject.info is not None:
        layers = subject.info.layers
        kv_bytes = _kv_bytes(subject, 0, layers)
        moved = moved_bytes(layout, tokens, layers=layers, hidden_bytes=hidden_bytes, kv_bytes=kv_bytes)
        rate = 1e9 * link.bandwidth_gbytes_per_s if link.bandwidth_gbytes_per_s else math.inf
        share = max(end - start for start, end in parts) / layers
        hops = (tp_hops(layout.tp) + layout.cp - 1) * layers * len(lone.requests[0].chunks)
        told_s = share * ((moved.tp + moved.cp) / rate + hops * 1e-6 * link.latency_us)
    return Estimate(
        tokens=tokens,
        ttft_s=lone.ttft.mean,
        tokens_per_s=many.prompt_tokens_per_s,
        queued=queued,
        bubble=sum(use.idle_ns for use in lone.stages) / whole_ns if whole_ns else 0.0,
        moved=moved,
        told_s=told_s,
    )


def _with_reasons(one: Candidate, chosen: Candidate | None, devices: int) -> Candidate:
    """Why each is not the one to take, at each length."""
    if chosen is None or one.layout == chosen.layout:
        return one
    told = []
    for mine in one.estimates:
        best = chosen.estimate(mine.tokens)
        assert best is not None, "what is chosen serves all lengths"
        told.append(replace(mine, why=_why(one, mine, best, devices)))
    return replace(one, estimates=tuple(told))


def _why(one: Candidate, mine: Estimate, best: Estimate, devices: int) -> str:
    ratio = mine.ttft_s / best.ttft_s
    if ratio < 1 - _ALIKE:
        if not one.layout.runnable:
            return f"predicted {1 - ratio:.1%} sooner; cannot be run yet"
        return f"{1 - ratio:.1%} sooner, but {'longer prompts do not fit' if one.problem else 'later at other lengths'}"
    if ratio <= 1 + _ALIKE:
        return "as good, no better"
    return f"{ratio:.2f} times as long: {_reason(one, mine, best, devices)}"


def _reason(one: Candidate, mine: Estimate, best: Estimate, devices: int) -> str:
    """What costs it most."""
    bubble_s = mine.bubble * mine.ttft_s - best.bubble * best.ttft_s
    if one.layout.devices < devices and mine.told_s == 0:
        return f"{one.layout.devices} of {devices} devices"
    if mine.told_s > 0 and mine.told_s >= bubble_s:
        moved = f"{bytes_text(mine.moved.total)} moved, " if mine.moved else ""
        return f"{moved}{mine.told_s:.3g} s waiting for each other"
    return f"{mine.bubble:.0%} of the time is a bubble"
