"""What a profile says of a prompt before it is served: the engine's own scheduler in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelined.costs import decode_costs
from pipelined.errors import ConfigError
from pipelined.llm.profiles import known_costs
from pipelined.planning.scenario import Arrival, Chunking, Scenario, StagePart
from pipelined.planning.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.llm import EngineConfig
    from pipelined.stage import ModelInfo

__all__ = ["predict_ttft_s"]


def predict_ttft_s(
    config: EngineConfig, info: ModelInfo, layers: Sequence[tuple[int, int]], prompt_tokens: int
) -> float:
    """Time to first token of a lone prompt; not to be called on a running loop.

    Raises:
        ConfigError: The engine has neither a profile nor costs, or they are of another set-up.
    """
    costs = known_costs(config, info, layers)
    if not costs:
        raise ConfigError("nothing is known of the stages; make a profile (`pipelined profile`) and give it")
    scenario = Scenario(
        stages=tuple(StagePart.of(cost) for cost in decode_costs(costs).stages),
        arrivals=(Arrival(prompt_tokens=prompt_tokens),),
        chunking=Chunking(
            policy=config.chunking,
            chunked_prefill_size=config.chunked_prefill_size,
            smoothing_factor=config.smoothing_factor,
            max_micro_batch_tokens=config.most_tokens if config.chunking == "balanced" else None,
        ),
        page_size=config.page_size,
        depth=config.depth,
    )
    return simulate(scenario).requests[0].ttft_s
