"""One engine, prompts cut in several ways; and policies compared on it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pipelined.llm import AsyncLLM, EngineConfig
from pipelined.planning.profile_cuts import Cut, cut_params, cut_world
from pipelined.planning.profile_sweep import Row, Sweep, sweep

CONFIG = EngineConfig(
    model="emulated://?layers=8&context=20000&hidden=64&a=1e-10&b=2e-7&c=1e-3",
    pp_size=2,
    device="emulated",
    workers="task",
    transport="shm://",
    disable_radix_cache=True,
)


def test_each_prompt_is_cut_as_it_asks() -> None:
    async def chunks() -> list[list[int]]:
        cuts = [Cut(sizes=(128, 256)), Cut("fixed", 512), Cut("balanced")]
        async with AsyncLLM(CONFIG, world=cut_world(cuts, processes=False)) as llm:
            outputs = [await llm.complete([1] * 1000, cut_params(place)) for place in (0, 1, 0, 2)]
            assert len(outputs[0].outputs[0].token_ids) == 1
            return [list(output.metrics.chunks) for output in outputs]

    listed, fixed, again, balanced = asyncio.run(chunks())
    assert listed == again == [128, 256, 128, 256, 128, 104]
    assert fixed == [512, 488]
    assert sum(balanced) == 1000


def test_a_sweep_compares_the_best_of_each() -> None:
    plan = Sweep(
        where="here",
        config=CONFIG,
        prompt=[1] * 8000,
        fixed=(64, 1024, 4096),
        dynamic=(1024,),
        smoothings=(0.5, 1.0),
        loads=((1, 1), (3, 2)),
    )
    said: list[str] = []
    rows = asyncio.run(sweep(plan, said.append))
    assert [(row.concurrency, row.policy) for row in rows] == [
        (count, policy) for count in (1, 3) for policy in ("fixed", "dynamic", "balanced")
    ]
    assert {row.where for row in rows} == {"here"}
    assert all(row.ttft_s > 0 and row.tokens_per_s > 0 for row in rows)
    assert rows[0].setting != "64", "125 launches of a millisecond more"
    assert "here, 3 at a time: fixed 64" not in said, "larger chunks pay the more prompts wait"
    assert "σ" in rows[1].setting
    assert rows[2].setting == "", "nothing was set"
    assert set(msgspec.structs.asdict(rows[0])) == set(Row.__struct_fields__)


@pytest.mark.parametrize(
    ("cut", "setting"), [(Cut("fixed", 64), "64"), (Cut("dynamic", 64), "64, σ 0.75"), (Cut(), "")]
)
def test_settings_are_named(cut: Cut, setting: str) -> None:
    assert cut.setting == setting
