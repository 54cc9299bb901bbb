"""Settings of the engine: one frozen dataclass; the command line takes its defaults from here."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from pipelined.chunking import POLICIES
from pipelined.errors import ConfigError, nearest

__all__ = ["EngineConfig"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to run and how.

    Attributes:
        model: A Hugging Face directory or hub id, a .gguf file, or an alias (`smollm2`).
        pp_size: Pipeline stages, a rank each.
        layer_partition: Layers of each stage; None: even, the larger parts on the later stages. As a keyword of `LLM`
            and `AsyncLLM` also "auto": by what layers take, measured at once.
        dtype: "auto", "float32", "bfloat16" or "float16".
        load_format: "auto", or "dummy" for random weights from the configuration.
        context_length: Longest prompt plus output; None: the model's own.
        trust_remote_code: Run code that comes with the model.
        page_size: Tokens of a KV page.
        kv_cache_tokens: Capacity of the KV cache; None: what fits.
        chunking: How prompts are cut: "fixed", "dynamic" or "balanced".
        chunked_prefill_size: Prompt tokens of a fixed chunk, or of the first dynamic one; a multiple of `page_size`.
        smoothing_factor: Of dynamic chunks: 0 is fixed, 1 follows the run times strictly.
        max_micro_batch_tokens: Most tokens of a balanced micro-batch (activations take memory); None: see `most_tokens`
        target_itl_s: Inter-token latency that balanced micro-batches keep to while decodes run; None: no bound.
        profile: File that `pipelined profile` made of this set-up: costs of the stages at the start; None: none.
        stage_costs: Likewise as text (`pipelined.costs.encode_costs`); "": learnt while serving.
        max_running_requests: Most sequences that hold pages at a time.
        disable_radix_cache: Compute every prefix anew.
        workers: "process" (a process a rank) or "task" (all in this process and loop).
        transport: URI for tensors; None: shm:// for processes, memory:// for tasks.
        device: "cpu", "stream", "emulated" or "cuda".
        threads_per_rank: CPU threads of each rank; None: the cores divided by `pp_size`.
        depth: Steps in flight beyond one a stage.
        step_timeout_s: Floor of every deadline on a rank that owes work.
        setup_timeout_s: All ranks must be ready within this time.
        heartbeat_bound_s: A rank whose loop is silent for so long counts as lost.
        recover: Begin a new epoch when a rank is lost, and go on with every request, instead of failing them all.
        max_restarts: More losses than that within `restart_window_s`, without a token between them, end the engine. A
            request during which the pipeline was lost as often, without a token of its own between, fails.
        restart_window_s: See `max_restarts`.
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
    chunking: str = "fixed"
    chunked_prefill_size: int = 256
    smoothing_factor: float = 0.75
    max_micro_batch_tokens: int | None = None
    target_itl_s: float | None = None
    profile: str | None = None
    stage_costs: str = ""
    max_running_requests: int = 64
    disable_radix_cache: bool = False
    workers: str = "process"
    transport: str | None = None
    device: str = "cpu"
    threads_per_rank: int | None = None
    depth: int = 2
    step_timeout_s: float = 300.0
    setup_timeout_s: float = 600.0
    heartbeat_bound_s: float = 15.0
    recover: bool = False
    max_restarts: int = 3
    restart_window_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("pp_size", "page_size", "max_running_requests", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; expected 1 or more")
        for name in ("context_length", "kv_cache_tokens", "threads_per_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is out of range; expected 1 or more")
        if self.max_restarts < 1:
            raise ConfigError(f"max_restarts={self.max_restarts} is out of range; expected 1 or more, or recover=False")
        for name in ("step_timeout_s", "setup_timeout_s", "heartbeat_bound_s", "restart_window_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; expected more than 0")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.page_size:
            raise ConfigError(f"kv_cache_tokens={self.kv_cache_tokens} is less than a page of {self.page_size} tokens")
        if self.workers not in ("process", "task"):
            raise ConfigError(f"workers={self.workers!r}: expected 'process' or 'task'")
        self._check_chunking()

    def _check_chunking(self) -> None:
        if self.chunking not in POLICIES:
            raise ConfigError(f"unknown chunking {self.chunking!r}{nearest(self.chunking, POLICIES)}")
        if not 0 <= self.smoothing_factor <= 1:
            raise ConfigError(
                f"smoothing_factor={self.smoothing_factor} is out of range; expected 0 (fixed) to 1 (strict)"
            )
        for name in ("max_micro_batch_tokens", "target_itl_s"):
            if getattr(self, name) is not None and self.chunking != "balanced":
                raise ConfigError(f"{name} is of chunking='balanced' alone, not {self.chunking!r}; leave it out")
        if self.target_itl_s is not None and not 0 < self.target_itl_s < math.inf:
            raise ConfigError(f"target_itl_s={self.target_itl_s} is out of range; expected more than 0, finite")
        if self.profile is not None and self.stage_costs:
            raise ConfigError("both a profile and stage_costs are given; leave one out")
        most = self.max_micro_batch_tokens
        if most is not None and most < self.page_size:
            raise ConfigError(f"max_micro_batch_tokens={most} is less than a page of {self.page_size} tokens")

    @property
    def most_tokens(self) -> int:
        """Of a balanced micro-batch: as given, or 8192, or four chunks where that is more."""
        return self.max_micro_batch_tokens or max(8192, 4 * self.chunked_prefill_size)

    @property
    def threads(self) -> int:
        """CPU threads of each rank."""
        return self.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // self.pp_size)
