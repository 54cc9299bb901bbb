"""What each layer takes, measured: for stages that take equal time rather than equal numbers of layers.

A model is run once, cut where its kinds of layers begin and end, with one chunk at a time. Or a profile is asked: it
tells stages, whose times are shared out among their layers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelined.costs import MicroBatch, PipelineCost, StageCost, added, encode_costs, scaled
from pipelined.errors import ConfigError
from pipelined.llm.describing import inspect_model
from pipelined.llm.partition import partition_by_cost, partition_layers
from pipelined.llm.profiles import fingerprint, read_profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.costs import Profile
    from pipelined.llm.config import EngineConfig
    from pipelined.stage import ModelInfo

__all__ = ["LayerCosts", "measure_layers", "measuring_sizes", "with_auto_partition"]

_TOKENS = 256
_ROUNDS = 5
_KINDS = 4
_WORTH = 0.02  # a division of another than the profile's layers must be better by this share


@dataclass(frozen=True)
class LayerCosts:
    """Seconds of a chunk: of each layer, and of what the first and the last stage do besides."""

    layers: tuple[float, ...]
    embedding_s: float = 0.0
    head_s: float = 0.0

    def slowest_s(self, parts: Sequence[tuple[int, int]]) -> float:
        """What the slowest of those stages takes."""
        times = [sum(self.layers[start:end]) for start, end in parts]
        times[0] += self.embedding_s
        times[-1] += self.head_s
        return max(times)


def with_auto_partition(config: EngineConfig) -> EngineConfig:
    """The configuration with a `layer_partition` made from measured costs, of its profile's if it has one.

    Measuring starts an engine and takes as long as loading the model does. Blocks.

    Raises:
        ConfigError: The profile is of another model or machine.
        PartitionError: The model cannot be cut into so many stages, or they have too little memory.
    """
    config = dataclasses.replace(config, layer_partition=None)
    info = inspect_model(config)
    even = partition_layers(info, config.pp_size)
    if config.pp_size in (1, len(info.cuts) + 1):
        return config  # there is but one way
    if config.profile is not None:
        return _from_profile(config, info, read_profile(config.profile))
    with ThreadPoolExecutor(1, thread_name_prefix="pipelined-layer-costs") as thread:  # this one may have a loop
        costs = thread.submit(lambda: asyncio.run(measure_layers(config, info))).result()
    parts = _divided(config, info, costs)
    return config if parts == even else dataclasses.replace(config, layer_partition=_sizes(parts))


def _divided(config: EngineConfig, info: ModelInfo, costs: LayerCosts) -> list[tuple[int, int]]:
    return partition_by_cost(
        info,
        config.pp_size,
        costs.layers,
        embedding_s=costs.embedding_s,
        head_s=costs.head_s,
        stage_bytes=_stage_bytes(config.device),
        kv_tokens=config.kv_cache_tokens or info.context_length,
    )


def _sizes(parts: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(end - start for start, end in parts)


def _stage_bytes(device: str) -> int | None:
    """Memory of a device; None where stages share the machine's, so that cutting elsewhere saves none."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return None
    import torch

    return int(0.9 * torch.cuda.get_device_properties(int(index or 0)).total_memory)


# ---- from a profile ----


def _from_profile(config: EngineConfig, info: ModelInfo, profile: Profile) -> EngineConfig:
    """Stages put together from the layers that were measured; the profile itself where its layers are as good."""
    assert config.profile is not None
    measured = list(itertools.pairwise(itertools.accumulate(profile.fingerprint.layers, initial=0)))
    threads = dataclasses.replace(config, threads_per_rank=config.threads)
    profile.check(fingerprint(threads, info, measured), config.profile)
    if measured[-1][1] != info.layers:
        raise ConfigError(f"{config.profile} is of {measured[-1][1]} layers; {info.ref} has {info.layers}")
    stages = profile.cost().stages
    work = MicroBatch(((info.context_length // 4, _TOKENS),))
    each = tuple(
        (stage.launch_s(work) - stage.c) / (end - start)
        for stage, (start, end) in zip(stages, measured, strict=True)
        for _ in range(start, end)
    )
    costs = LayerCosts(each)
    parts = _divided(config, info, costs)
    if len(measured) == config.pp_size and costs.slowest_s(measured) <= (1 + _WORTH) * costs.slowest_s(parts):
        return dataclasses.replace(config, layer_partition=_sizes(measured))
    layers = [
        scaled(dataclasses.replace(stage, c=0.0), 1 / (end - start))  # a launch is the stage's, not a layer's
        for stage, (start, end) in zip(stages, measured, strict=True)
    ]
    of_layer = [layers[index] for index, (start, end) in enumerate(measured) for _ in range(start, end)]
    launch = StageCost(0.0, 0.0, statistics.fmean(stage.c for stage in stages))
    composed = PipelineCost(tuple(added([launch, *of_layer[start:end]]) for start, end in parts))
    return dataclasses.replace(config, layer_partition=_sizes(parts), profile=None, stage_costs=encode_costs(composed))


# ---- measured at the start ----


def _kinds(info: ModelInfo) -> list[tuple[int, ...]]:
    """Layers of one kind are taken to take the same time."""
    extras = [values for values in (info.windows, info.active_bytes) if values]
    return list(zip(info.layer_bytes, info.kv_bytes_per_token, *extras, strict=True))


def measuring_sizes(info: ModelInfo) -> list[int]:
    """Stages to measure on: the first and the last as small as can be, between them a run of each kind of layer."""
    first, last, kinds = min(info.cuts), max(info.cuts), _kinds(info)
    bounds = {0, first, last, info.layers}
    cuts = sorted(cut for cut in info.cuts if first <= cut <= last)
    runs: dict[tuple[int, ...], tuple[int, int]] = {}
    for start, end in itertools.combinations(cuts, 2):
        if len(set(kinds[start:end])) == 1 and end - start > -_shortness(runs.get(kinds[start])):
            runs[kinds[start]] = (start, end)
    longest = sorted(runs.values(), key=_shortness)[:_KINDS]
    for run in longest:
        bounds.update(run)
    return [end - start for start, end in itertools.pairwise(sorted(bounds))]


def _shortness(run: tuple[int, int] | None) -> int:
    """Minus the length of a run, so that the longest come first."""
    return run[0] - run[1] if run else 0


async def measure_layers(config: EngineConfig, info: ModelInfo) -> LayerCosts:
    """Run the model on stages of one kind of layer each, a chunk at a time."""
    sizes = tuple(measuring_sizes(info))
    parts = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    times = await _stage_times(config, info, sizes)
    kinds = _kinds(info)
    alone: dict[tuple[int, ...], list[float]] = {}
    for seconds, (start, end) in zip(times, parts, strict=True):
        inner = start > 0 and end < info.layers
        if len(set(kinds[start:end])) == 1 and inner:
            alone.setdefault(kinds[start], []).append(seconds / (end - start))
    each = {kind: min(found) for kind, found in alone.items()}
    if not each:  # two cuts side by side: whatever there is counts
        each = {kinds[0]: min(seconds / size for seconds, size in zip(times, sizes, strict=True))}
    per_byte = statistics.fmean(seconds / max(1, kind[0]) for kind, seconds in each.items())
    layers = tuple(each.get(kind, kind[0] * per_byte) for kind in kinds)
    embedding_s = max(0.0, times[0] - sum(layers[: sizes[0]]))
    head_s = max(0.0, times[-1] - sum(layers[-sizes[-1] :]))
    return LayerCosts(layers, embedding_s, head_s)


async def _stage_times(config: EngineConfig, info: ModelInfo, sizes: tuple[int, ...]) -> list[float]:
    """Seconds of a chunk that samples on each of those stages; no two of them work at a time."""
    from pipelined.llm.engine import AsyncLLM
    from pipelined.messages import SamplingParams

    tokens = min(-(-_TOKENS // config.page_size) * config.page_size, info.context_length - 1)
    plain = dataclasses.replace(
        config,
        pp_size=len(sizes),
        layer_partition=sizes,
        threads_per_rank=config.threads,
        chunking="fixed",
        chunked_prefill_size=-(-tokens // config.page_size) * config.page_size,
        max_micro_batch_tokens=None,
        target_itl_s=None,
        stage_costs="",
        kv_cache_tokens=4 * config.page_size + 2 * tokens,
        disable_radix_cache=True,
    )
    prompt = [(7919 * place + place * place) % info.vocab_size for place in range(tokens)]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
    found: list[list[float]] = [[] for _ in sizes]
    async with AsyncLLM(plain) as llm:
        for turn in range(_ROUNDS + 2):
            await llm.complete(prompt, params)
            for rank, spans in (await llm.trace()).items():
                if turn >= 2:  # the first launches are slow
                    found[rank] += [one.end_s - one.start_s for one in spans if one.name == "forward"]
    return [statistics.median(times) for times in found]
