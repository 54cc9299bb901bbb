"""What a scheduler is told before it starts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import msgspec

from pipelined.costs import LiveCosts, decode_costs
from pipelined.errors import ConfigError, nearest

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Settings of the LLM scheduler. Wrong ones raise ConfigError, which says what would be right.

    Attributes:
        context_length: Longest prompt plus output, in tokens.
        vocab_size: Token ids are 0 to `vocab_size - 1`.
        pp_size: Stages of the pipeline: over so many micro-batches in flight are decodes spread.
        page_size: Tokens of a KV page.
        chunk_policy: Name of the chunk policy: "fixed", "dynamic" or "balanced".
        chunked_prefill_size: Prompt tokens of a fixed chunk, or of the first dynamic one; a multiple of `page_size`.
        smoothing_factor: Of dynamic chunks: 0 is fixed, 1 follows the run times strictly.
        max_micro_batch_tokens: Most tokens of a balanced micro-batch (activations take memory); None: no bound.
        target_itl_s: Inter-token latency that balanced micro-batches keep to while decodes run; None: no bound.
        stage_costs: Measured before (`pipelined.costs.encode_costs`), "" to learn from nothing.
        max_running_requests: Most sequences that hold pages at a time; others wait.
        radix_cache: Serve prompts' prefixes from pages computed before.
    """

    context_length: int
    vocab_size: int
    pp_size: int = 1
    page_size: int = 64
    chunk_policy: str = "fixed"
    chunked_prefill_size: int = 1024
    smoothing_factor: float = 0.75
    max_micro_batch_tokens: int | None = None
    target_itl_s: float | None = None
    stage_costs: str = ""
    max_running_requests: int = 64
    radix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("context_length", "vocab_size", "pp_size", "page_size", "max_running_requests"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} is out of range; expected 1 or more")
        if self.context_length < 2:
            raise ConfigError("context_length=1 leaves no room for a token of output; expected 2 or more")
        size, page = self.chunked_prefill_size, self.page_size
        if size < 1:
            raise ConfigError(f"chunked_prefill_size={size} is out of range; expected a multiple of page_size={page}")
        if size % page:
            near = max(page, size // page * page)
            raise ConfigError(
                f"chunked_prefill_size={size} is not a multiple of page_size={page}; "
                f"take {near} or {near + page}, or another page size"
            )

    def costs(self) -> LiveCosts:
        """What is known of the stages at the start.

        Raises:
            ConfigError: `stage_costs` are no costs, or of another number of stages.
        """
        profile = decode_costs(self.stage_costs, "stage_costs") if self.stage_costs else None
        if profile is not None and len(profile.stages) != self.pp_size:
            raise ConfigError(f"stage_costs are of {len(profile.stages)} stages, pp_size={self.pp_size}; profile again")
        return LiveCosts(self.pp_size, profile)

    @classmethod
    def from_json(cls, text: str) -> SchedulerConfig:
        """What `msgspec.json.encode` made of a config.

        Raises:
            ConfigError: An unknown key, or a value out of range.
        """
        values = msgspec.json.decode(text, type=dict[str, object])
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown scheduler setting {key!r}{nearest(key, known)}")
        return cls(**values)  # type: ignore[arg-type]
