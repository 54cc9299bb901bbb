"""Command lines that say what was found, in words that the parser accepts."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from pipelined.llm.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["command_text", "config_command", "serve_command"]

_FLAGS: Final = {
    "pp_size": "--pp-size",
    "layer_partition": "--layer-partition",
    "chunking": "--chunking",
    "chunked_prefill_size": "--chunked-prefill-size",
    "smoothing_factor": "--smoothing-factor",
    "max_micro_batch_tokens": "--max-micro-batch-tokens",
    "profile": "--profile",
    "depth": "--depth",
    "page_size": "--page-size",
    "max_running_requests": "--max-running-requests",
    "context_length": "--context-length",
    "kv_cache_tokens": "--kv-cache-tokens",
    "dtype": "--dtype",
    "load_format": "--load-format",
    "transport": "--transport",
    "workers": "--workers",
    "threads_per_rank": "--threads-per-rank",
    "device": "--device",
}


def serve_command(ref: str, settings: Mapping[str, Any]) -> list[str]:
    """Arguments after `pipelined` that serve a model with these settings of `EngineConfig`, but for those of None."""
    words = ["serve", ref]
    for name, value in settings.items():
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [_FLAGS[name], text]
    return words


def config_command(config: EngineConfig) -> list[str]:
    """Arguments that serve with that configuration: what differs from the defaults, and how prompts are cut."""
    default = EngineConfig(model=config.model)
    always = {"pp_size", "chunking"} | ({"chunked_prefill_size"} if config.chunking != "balanced" else set())
    always |= {"smoothing_factor"} if config.chunking == "dynamic" else set()
    names = [name for name in _FLAGS if name in always or getattr(config, name) != getattr(default, name)]
    words = serve_command(config.model, {name: getattr(config, name) for name in names})
    return words + (["--trust-remote-code"] if config.trust_remote_code else [])


def command_text(words: Sequence[str]) -> str:
    """To be copied into a shell."""
    return shlex.join(["pipelined", *words])
