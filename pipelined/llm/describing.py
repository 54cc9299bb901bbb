"""From settings to what ranks are started from: finds the model, describes the ranks of an epoch."""

from __future__ import annotations

import dataclasses
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import msgspec

from pipelined.errors import ConfigError, ModelError, nearest
from pipelined.llm.config import EngineConfig
from pipelined.rank import LinkPlan, RankConfig
from pipelined.rank.description import FAMILIES, ModelPart, PlannerRef, RankDescription
from pipelined.stage import LoadOptions, ModelInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.scheduler import SchedulerConfig

__all__ = ["config_of", "describe_ranks", "inspect_model"]


def inspect_model(config: EngineConfig) -> ModelInfo:
    """What is known of the model before anything is spawned.

    Raises:
        ModelError: No family knows it, or it cannot be used; says why.
    """
    options = LoadOptions(
        dtype=config.dtype,
        load_format=config.load_format,
        context_length=config.context_length,
        trust_remote_code=config.trust_remote_code,
        page_size=config.page_size,
        kv_cache_tokens=config.kv_cache_tokens,
    )
    points = sorted(entry_points(group=FAMILIES), key=lambda point: (point.name == "hf", point.name))
    for point in points:  # the Hugging Face family comes last: it claims whatever could be a hub id
        found = point.load()()
        if found.claims(config.model):
            info: ModelInfo = found.inspect(config.model, options)
            return info
    raise ModelError(f"no model family knows {config.model!r}; installed: {', '.join(p.name for p in points)}")


def describe_ranks(
    config: EngineConfig,
    info: ModelInfo,
    layers: Sequence[tuple[int, int]],
    scheduling: SchedulerConfig,
    links: LinkPlan,
    *,
    epoch: int,
    capacity: int | None,
) -> list[RankDescription]:
    """The ranks of an epoch, after one in which they had agreed on `capacity` pages (None: there was none)."""
    planner = PlannerRef("pipelined.scheduler:from_json", msgspec.json.encode(scheduling).decode())
    if capacity is not None:  # a rank that begins anew must have room for as much as the others hold
        options = msgspec.structs.replace(info.options, kv_cache_tokens=capacity * config.page_size)
        info = msgspec.structs.replace(info, options=options)
    return [
        RankDescription(
            config=RankConfig(
                pipeline="llm",
                rank=rank,
                size=config.pp_size,
                window=config.pp_size + config.depth,
                step_timeout_s=config.step_timeout_s,
                setup_timeout_s=config.setup_timeout_s,
                heartbeat_bound_s=config.heartbeat_bound_s,
            ),
            links=links,
            epoch=epoch,
            device=config.device,
            threads=config.threads,
            part=ModelPart(info, part),
            planner=planner if rank == 0 else None,
            linger_s=config.setup_timeout_s if config.recover else 0.0,
        )
        for rank, part in enumerate(layers)
    ]


def config_of(model: str, settings: dict[str, Any]) -> EngineConfig:
    """Settings as keyword arguments.

    A `layer_partition` of "auto" is measured, or taken from the profile, at once: see `with_auto_partition`.

    Raises:
        ConfigError: One is unknown or out of range.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, known)}")
    partition = settings.get("layer_partition")
    if partition == "auto":
        from pipelined.llm.layer_costs import with_auto_partition

        return with_auto_partition(EngineConfig(model=model, **{**settings, "layer_partition": None}))
    if partition is not None:
        settings = {**settings, "layer_partition": tuple(partition)}
    return EngineConfig(model=model, **settings)
