"""Settings of the engine: one frozen dataclass; the command line takes its defaults from here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pipelined.errors import ConfigError

__all__ = ["EngineConfig"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to run and how.

    Attributes:
        model: A Hugging Face directory or hub id, a .gguf file, or an alias (`smollm2`).
        pp_size: Pipeline stages, a rank each.
        layer_partition: Layers of each stage; None: even, the larger parts on the later stages.
        dtype: "auto", "float32", "bfloat16" or "float16".
        load_format: "auto", or "dummy" for random weights from the configuration.
        context_length: Longest prompt plus output; None: the model's own.
        trust_remote_code: Run code that comes with the model.
        page_size: Tokens of a KV page.
        kv_cache_tokens: Capacity of the KV cache; None: what fits.
        chunked_prefill_size: Most tokens of a micro-batch, a multiple of `page_size`.
        max_running_requests: Most sequences that hold pages at a time.
        disable_radix_cache: Compute every prefix anew.
        workers: "process" (a process a rank) or "task" (all in this process and loop).
        transport: URI for tensors; None: shm:// for processes, memory:// for tasks.
        device: "cpu", "stream", "emulated" or "cuda".
        threads_per_rank: CPU threads of each rank; None: the cores divided by `pp_size`.
        depth: Steps in flight beyond one a stage.
        step_timeout_s: Floor of every deadline on a rank that owes work.
        setup_timeout_s: All ranks must be ready within this time.
    """

    model: str
    pp_size: int = 1
    layer_partition: tuple[int, ...] | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    context_length: int | None = None
    trust_remote_code: bool = False
    page_size: int = 64
    kv_cache_tokens: int | None = None
    chunked_prefill_size: int = 512
    max_running_requests: int = 64
    disable_radix_cache: bool = False
    workers: str = "process"
    transport: str | None = None
    device: str = "cpu"
    threads_per_rank: int | None = None
    depth: int = 2
    step_timeout_s: float = 300.0
    setup_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("pp_size", "page_size", "max_running_requests", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; expected 1 or more")
        for name in ("context_length", "kv_cache_tokens", "threads_per_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is out of range; expected 1 or more")
        for name in ("step_timeout_s", "setup_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; expected more than 0")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.page_size:
            raise ConfigError(f"kv_cache_tokens={self.kv_cache_tokens} is less than a page of {self.page_size} tokens")
        if self.workers not in ("process", "task"):
            raise ConfigError(f"workers={self.workers!r}: expected 'process' or 'task'")

    @property
    def threads(self) -> int:
        """CPU threads of each rank."""
        return self.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // self.pp_size)
