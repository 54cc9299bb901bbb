"""Random workloads through the scheduler: right tokens, exact counts, all pages back."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.messages import Request, pack_tokens
from pipelined.scheduler import SchedulerConfig


def random_case(toolbox: Any, rng: random.Random) -> tuple[Any, Any]:
    """A world and what shall happen in it."""
    page = rng.choice([1, 2, 4, 8])
    capacity = rng.randint(3, 40)
    pp_size = rng.randint(1, 8)
    config = SchedulerConfig(
        pp_size=pp_size,
        page_size=page,
        chunked_prefill_size=page * rng.randint(1, 6),
        max_running_requests=rng.randint(1, 12),
        radix_cache=rng.random() < 0.8,
        context_length=rng.randint(4, 200),
        vocab_size=rng.choice([3, 50]),
    )
    world = toolbox.world(config, capacity, window=pp_size + rng.randint(0, 3))
    longest = min(config.context_length, capacity * page) - 1
    stems = [[rng.randrange(config.vocab_size) for _ in range(longest)] for _ in range(2)]
    arrivals: list[tuple[int, Request]] = []
    now = 0
    for number in range(rng.randint(1, 14)):
        now += rng.choice([0, 0, 1, 5, 30])
        arrivals.append((now, random_request(toolbox, rng, config, f"r{number}", stems, longest)))
        if rng.random() < 0.2 and not arrivals[-1][1].generated:  # n > 1
            first = arrivals[-1][1]
            arrivals += [(now, msgspec.structs.replace(first, id=f"{first.id}.{c}", choice=c)) for c in (1, 2)]
    cancels = [(rng.randint(0, now + 60), request.id) for _, request in arrivals if rng.random() < 0.15]
    cancels = [(max(at, now), id) for at, id in cancels for now, request in arrivals if request.id == id]
    faults = rng.random() < 0.3
    load = toolbox.workload(
        arrivals,
        cancels,
        fail_share=0.02 if faults else 0.0,
        void_share=0.02 if faults else 0.0,
        seed=rng.randrange(2**32),
    )
    return world, load


def random_request(
    toolbox: Any, rng: random.Random, config: SchedulerConfig, id: str, stems: list[list[int]], longest: int
) -> Request:
    length = rng.randint(1, longest)
    prompt = rng.choice(stems)[: rng.randint(0, length)]
    prompt = prompt + [rng.randrange(config.vocab_size) for _ in range(length - len(prompt))]
    request: Request = toolbox.request(
        id, prompt, max_tokens=rng.randint(1, 40), seed=rng.randint(0, 2), eos=(2,) if rng.random() < 0.5 else ()
    )
    if rng.random() < 0.1:  # resumed after a loss
        right, _ = toolbox.answer(request, config, longest + 1)
        request = msgspec.structs.replace(request, generated=pack_tokens(right[: rng.randint(1, len(right))]))
    return request


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**40))
def test_every_request_ends_once_with_the_right_tokens(toolbox: Any, seed: int) -> None:
    world, load = random_case(toolbox, random.Random(seed))
    world.run(load)
    world.check(load)


def test_random_workloads_reach_what_they_are_meant_to_reach(toolbox: Any) -> None:
    counts: Counter[str] = Counter()
    in_flight = 0
    for seed in range(120):
        world, load = random_case(toolbox, random.Random(seed))
        world.run(load)
        world.check(load)
        counts += world.counts
        in_flight += world.most_chunks_in_flight > 1
    assert counts["preempted"] > 30
    assert counts["cached"] > 100
    assert counts["evicted"] > 500
    assert min(counts[reason] for reason in ("stop", "length", "abort", "error")) > 10
    assert in_flight > 40
