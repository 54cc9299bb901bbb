"""What the URI of an emulated model says of its stages."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from pipelined.costs import PipelineCost, StageCost, Window, encode_costs
from pipelined.errors import ModelError, PipelinedError
from pipelined.models.emulated import EmulatedParams

COSTS = PipelineCost((StageCost(1e-10, 1e-6, 1e-3, windows=(Window(512, 1e-11),)), StageCost(0, 2e-6, 0, per_decode=1)))


def test_stages_alike() -> None:
    params = EmulatedParams.parse("emulated://?a=1e-10&b=1e-6&c=0.5&d=1e-9")
    assert params.pipeline(3) == PipelineCost.even(StageCost(1e-10, 1e-6, 0.5, 1e-9), 3)


def test_each_stage_of_its_own() -> None:
    params = EmulatedParams.parse(f"emulated://?costs={quote(encode_costs(COSTS))}")
    assert params.pipeline(2) == COSTS


@pytest.mark.parametrize("costs", ["[", "{}", "[]", '[{"a": -1, "b": 1, "c": 1}]'])
def test_bad_costs_are_refused(costs: str) -> None:
    with pytest.raises(ModelError, match=r"costs?"):
        EmulatedParams.parse(f"emulated://?costs={quote(costs)}")


async def test_costs_of_another_number_of_stages_are_refused() -> None:
    from pipelined.llm import AsyncLLM

    llm = AsyncLLM(f"emulated://?costs={quote(encode_costs(COSTS))}", pp_size=3, workers="task", device="emulated")
    with pytest.raises(PipelinedError, match="costs of 2 stages for a pipeline of 3"):
        async with llm:
            pass
