"""Faults that users of other systems reported, as scenarios in virtual time. See docs/reliability.md."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fuzz_cases import asked, case, errors, held, prompt

from pipelined.clock import LoopClock
from pipelined.clock.virtual import run
from pipelined.errors import DeadlineError, PipelinedError, RankLostError
from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.pipeline import TaskWorld
from pipelined.stage.emulated import EmulatedDevice
from pipelined.testing.fuzz import play
from pipelined.testing.fuzz.case import Cancellation, Kill

GREEDY = SamplingParams(max_tokens=8, temperature=0, seed=1)
SLOW_LINK = "latency_us=5000&bandwidth_gbytes_per_s=0.001"


def engine(
    body: Callable[[AsyncLLM], Awaitable[Any]], *, transport: str = "sim://", step_s: float = 1e-3, **changes: Any
) -> Any:
    """Run `body(llm)` with four ranks, in virtual time."""
    settings: dict[str, Any] = {"pp_size": 4, "page_size": 4, "chunked_prefill_size": 16, **changes}

    async def go() -> Any:
        world = TaskWorld(lambda _: LoopClock(), lambda _, clock: EmulatedDevice(clock, lambda _: step_s))
        async with AsyncLLM("toy://?layers=8&hidden=2", world=world, transport=transport, **settings) as llm:
            return await body(llm)

    return run(go())


# ---- ranks that each decide ----


def test_a_storm_of_cancellations_on_eight_ranks() -> None:
    requests = asked(60, tokens=20, every_s=0.004, max_tokens=24)
    hows, whens = ("abort", "task"), ("submitted", "later", "applying")
    cancels = tuple(
        Cancellation(n, whens[n % 3], hows[n % 2], delay_s=0.013 * (n % 7), count=n % 11, rank=n % 8) for n in range(60)
    )
    journal = held(ranks=8, requests=requests, cancels=cancels, link="latency_us=500")
    assert journal.counts["cancel.prefill"] >= 5
    assert journal.counts["idle_and_alive"] == 1
    assert len({tuple(chain) for chain in journal.chains}) == 1


@pytest.mark.parametrize("rank", range(4))
def test_an_abort_between_agreeing_and_applying(rank: int) -> None:
    """While one rank prepares a step that the ranks before it have applied and those behind it have not."""
    for count in range(0, 24, 3):
        cancels = tuple(Cancellation(n, "applying", "abort", count=count, rank=rank) for n in range(4))
        journal = held(requests=asked(5), cancels=cancels, link="latency_us=500")
        assert len({tuple(chain) for chain in journal.chains}) == 1


def test_aborting_everything_leaves_every_queue_empty() -> None:
    cancels = tuple(Cancellation(n, "later", "abort", delay_s=0.03) for n in range(20))
    journal = held(requests=asked(20, tokens=60, max_tokens=40), cancels=cancels, link=SLOW_LINK)
    assert journal.counts["ended.abort"] == 20
    assert journal.counts["idle_and_alive"] == 1


def test_ranks_that_prepare_at_different_paces() -> None:
    """What only one rank is ready for does not exist: all follow the plan, each at its pace."""
    pace = (1.0, 7.0, 0.2, 3.0)
    journal = held(slow=pace, delayed="delay=0.5&delay_ms=200", requests=asked(10, every_s=0.01))
    assert journal.counts["link.delay"] > 50


@pytest.mark.parametrize("skew_s", [1e6, -1e6, 3600.0])
def test_skewed_clocks_time_nothing_out(skew_s: float) -> None:
    skews_s = (0.0, skew_s, -skew_s, 2 * skew_s, 0.5)
    journal = held(skews_s=skews_s, requests=asked(8, every_s=0.05), step_timeout_s=1.0)
    assert not errors(journal)


def test_unequal_capacities_are_the_least_of_them() -> None:
    journal = held(kv=(4096, 100, 300, 4096), requests=asked(8, tokens=40, max_tokens=40, every_s=0.001))
    assert journal.capacity_tokens == 100
    assert journal.counts["preemptions"] or journal.counts["evictions"]


def test_completions_in_any_order() -> None:
    """Every lane of every rank delays at will; results still reach rank 0 step by step."""
    for seed in range(4):
        held(seed=seed, delayed="delay=1&delay_ms=50&lanes=RESULTS,HIDDEN", requests=asked(6))


def test_prefix_hits_are_the_same_on_every_rank() -> None:
    shared = prompt(1, 40)
    journal = held(requests=asked(10, every_s=0.05, prompt=shared), kv=(200,))
    assert journal.counts["prefix_hits"] >= 8


# ---- hangs, leaks, liveness ----


def test_a_question_is_answered_while_all_ranks_are_busy() -> None:
    """Nobody forwards a control request, so that nobody waits for another to."""

    async def body(llm: AsyncLLM) -> tuple[float, set[int]]:
        loop = asyncio.get_running_loop()
        busy = [loop.create_task(llm.complete(prompt(n, 60), GREEDY)) for n in range(6)]
        await asyncio.sleep(150.0)
        asked_s = loop.time()
        stats = await llm.stats()
        took_s = loop.time() - asked_s
        await asyncio.gather(*busy)
        return took_s, set(stats)

    took_s, ranks = engine(body, step_s=60.0)
    assert took_s < 0.01
    assert ranks == {0, 1, 2, 3}


def test_a_question_needs_the_answer_of_every_rank() -> None:
    async def body(llm: AsyncLLM) -> str:
        with pytest.raises(DeadlineError) as raised:
            await llm.integrity()
        return str(raised.value)

    assert "ranks [2] did not answer" in engine(body, transport="faulty+sim://?stall=1&lanes=HEALTH&ranks=2")


@pytest.mark.parametrize("rank", [1, 3])
def test_a_start_that_hangs_names_who_is_missing(rank: int) -> None:
    async def body(_: AsyncLLM) -> None:
        pytest.fail("started")

    uri = f"faulty+sim://?stall=1&lanes=RESULTS&ranks={rank}"
    with pytest.raises(DeadlineError, match=rf"ranks \[{rank}\] were not ready within 30 s"):
        engine(body, transport=uri, setup_timeout_s=30.0)


def test_pages_come_back_under_pressure_while_transfers_are_slow() -> None:
    """On devices that poison what is given back too early."""
    requests = asked(10, tokens=40, max_tokens=24, every_s=0.01)
    journal = held(device="stream", kv=(100,), link=SLOW_LINK, requests=requests)
    assert journal.counts["preemptions"] or journal.counts["evictions"]


@pytest.mark.parametrize("how", ["task", "abort"])
@pytest.mark.parametrize("rank", range(4))
def test_each_rank_ended_in_turn(rank: int, how: str) -> None:
    """In mid-transfer: a frame takes milliseconds here."""
    for phase in ("setup", "prefill", "decode", "idle", "closing"):
        kill = Kill(rank, phase, how, count=3 if phase in ("prefill", "decode") else 0, delay_s=0.003)
        journal = held(kills=(kill,), link=SLOW_LINK, requests=asked(6, every_s=0.02))
        assert journal.struck or phase == "closing"
        if phase in ("prefill", "decode"):
            assert errors(journal) == {"RankLostError"}
            assert {o.error.rank for o in journal.outcomes.values() if isinstance(o.error, RankLostError)} == {rank}


def test_a_dead_scheduler_is_noticed() -> None:
    """Rank 0 answers on no lane any more: idle or not, the pipeline is lost within the bound of the heartbeat."""

    async def body(llm: AsyncLLM) -> float:
        endpoint = llm._world.rendezvous.objects["sim"]  # type: ignore[union-attr]
        (rank_0,) = (one for peer, of_peer in endpoint._endpoints.items() for one in of_peer if peer.rank == 0)
        for lane in rank_0._lanes():
            lane.transmit = lambda *_, **__: None
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(PipelinedError, match="heartbeat"):
            await llm.complete(prompt(0, 10), GREEDY)
        return asyncio.get_running_loop().time() - began_s

    assert engine(body) < 20.0


def test_a_long_step_is_no_death() -> None:
    """Four times as long as a rank may be silent."""

    async def body(llm: AsyncLLM) -> list[int]:
        output = await llm.complete(prompt(0, 60), GREEDY)
        return output.outputs[0].token_ids

    assert len(engine(body, step_s=60.0)) == 8


def test_heartbeats_do_not_pile_up() -> None:
    """A rank that answers none is lost before its lane is full."""

    async def body(llm: AsyncLLM) -> int:
        with pytest.raises(RankLostError, match="no heartbeat"):
            while True:
                await asyncio.sleep(1.0)
                await llm.complete(prompt(0, 10), GREEDY)
        driver = llm._epochs.driver  # type: ignore[union-attr]
        assert driver is not None
        return 128 - driver.links.health[2].credits()

    assert engine(body, transport="faulty+sim://?stall=1&lanes=HEALTH&ranks=2") <= 20


def test_two_chunks_of_a_prompt_are_in_flight() -> None:
    """Chunks that produce no token are not waited for."""
    journal = held(requests=asked(1, tokens=100, max_tokens=1), link="latency_us=0&bandwidth_gbytes_per_s=inf")
    first = next(line for line in journal.lines if "applies 0.1 " in line)
    result_s = next(float(line.split()[0]) for line in journal.lines if "news of" in line)
    assert float(first.split()[0]) < 1e-3 < result_s


def test_nothing_is_left_of_a_case_that_could_not_start() -> None:
    journal = play(case(kills=(Kill(1, "setup", "abort", 1),)))
    assert not journal.failures, journal.failures
    assert journal.counts["start_failed"] == 1


def test_rows_that_do_not_fit_the_plan_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelined.rank import commit
    from pipelined.rank.payload import split

    monkeypatch.setattr(commit, "split", lambda payload, step, rows: split(payload, step=step, rows=rows + (step == 2)))
    journal = play(case())
    assert errors(journal) == {"ProtocolError"}
    assert any("rows for step 2" in str(outcome.error) for outcome in journal.outcomes.values())
