"""What the benchmarks of models share: a prompt, an engine, a baseline, medians."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelined.errors import ConfigError, MissingDependencyError
from pipelined.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from pipelined.llm import AsyncLLM
    from pipelined.stage import ModelInfo

__all__ = ["Baseline", "measure_prefill", "median", "prompt_tokens", "run_async"]

_FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

median = statistics.median


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run on a fresh uvloop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def prompt_tokens(info: ModelInfo, count: int) -> list[int]:
    """A prompt of `count` tokens that spreads over the vocabulary and never repeats with a short period.

    Raises:
        ConfigError: The context has no room for it.
    """
    if not 1 <= count < info.context_length:
        raise ConfigError(f"{count} prompt tokens: expected 1 to {info.context_length - 1}, the context less one")
    state, tokens = 1, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append((state >> 33) % info.vocab_size)
    return tokens


async def measure_prefill(llm: AsyncLLM, tokens: Sequence[int]) -> float:
    """Time to first token of a lone prompt, seconds. The engine must not have cached it."""
    output = await llm.complete(tokens, _FIRST_TOKEN)
    if output.metrics.cached_tokens:
        raise ConfigError("the prompt was served from the prefix cache; measure with --disable-radix-cache")
    assert output.metrics.ttft_s is not None
    return output.metrics.ttft_s


@dataclass
class Baseline:
    """The same weights through plain `transformers`, in this process.

    Attributes:
        threads: torch threads that it computes with.
    """

    model: Any
    threads: int

    @classmethod
    def load(cls, info: ModelInfo, threads: int) -> Baseline:
        """Load the whole model.

        Raises:
            MissingDependencyError: `transformers` is not installed.
        """
        try:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils.logging import disable_progress_bar
        except ImportError as error:
            raise MissingDependencyError("the baseline", "pip install 'pipelined[llm]'") from error
        if info.options.load_format == "dummy":
            raise ConfigError("the baseline needs real weights; leave out --load-format dummy")
        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(info.path, dtype=getattr(torch, info.dtype)).eval()
        return cls(model, threads)

    def prefill_s(self, tokens: Sequence[int]) -> float:
        """One forward over the prompt with a KV cache, logits of the last token only; seconds."""
        import torch

        torch.set_num_threads(self.threads)
        ids = torch.tensor([list(tokens)])
        started_s = time.perf_counter()
        with torch.inference_mode():
            self.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return time.perf_counter() - started_s

    def decode_tokens_per_s(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """`generate` with its cache, greedy; tokens a second over the whole batch, without the prefill."""
        import torch

        torch.set_num_threads(self.threads)
        ids = torch.tensor([list(prompt) for prompt in prompts])

        def generate(count: int) -> float:
            started_s = time.perf_counter()
            with torch.inference_mode():
                self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    min_new_tokens=count,
                    max_new_tokens=count,
                    pad_token_id=0,
                )
            return time.perf_counter() - started_s

        first_s = generate(1)
        return len(prompts) * (new_tokens - 1) / (generate(new_tokens) - first_s)
