"""How steps are planned: one behaviour at a time."""

from __future__ import annotations

from typing import Any

import pytest

from pipelined.messages import (
    Admit,
    Chunk,
    Decode,
    pack_tokens,
    unpack_tokens,
)


def test_chunks_of_one_prompt_follow_each_other_without_waiting(toolbox: Any) -> None:
    hand = toolbox.hand()
    hand.scheduler.submit(toolbox.request("a", list(range(30))))
    assert [toolbox.chunks(step) for step in hand.steps()] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 8)], [(0, 24, 6)]]
    assert [step.items[-1].last for step in hand.flying] == [False, False, False, True]  # type: ignore[union-attr]
    assert hand.flying[0].items[0] == Admit(
        seq=0, tokens=pack_tokens(list(range(30))), prompt_tokens=30, sampling=toolbox.request("a", [1]).sampling
    )
    news = hand.finish()
    assert [unpack_tokens(output.tokens) for output in news] == [[5]] * 8
    assert (news[0].chunks, news[0].prefilled_tokens, news[0].cached_tokens) == ((8, 8, 8, 6), 30, 0)
    assert (news[-1].finish_reason, news[-1].chunks) == ("length", (8, 8, 8, 6))


def test_short_prompts_share_a_step_and_chunks_end_with_pages(toolbox: Any) -> None:
    hand = toolbox.hand()
    for name, length in (("a", 3), ("b", 30), ("c", 2)):
        hand.scheduler.submit(toolbox.request(name, [7] * length))
    assert [toolbox.chunks(step) for step in hand.steps(2)] == [[(0, 0, 3), (1, 0, 4)], [(1, 4, 8)]]
    assert hand.flying[0].rows == 7


def test_prefill_and_decode_mix_in_a_step(toolbox: Any) -> None:
    hand = toolbox.hand()
    hand.scheduler.submit(toolbox.request("a", [1, 2]))
    hand.step()
    hand.apply()
    hand.scheduler.submit(toolbox.request("b", [3] * 12))
    step = hand.step()
    assert step is not None
    assert [type(item) for item in step.items] == [Decode, Admit, Chunk]
    assert (step.items[0].position, step.items[0].token, step.rows) == (2, 5, 9)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("running", "sizes"), [(8, [2, 2, 2, 2]), (5, [2, 1, 1, 1]), (3, [1, 1, 1]), (9, [3, 2, 2, 2])]
)
def test_decodes_are_spread_over_the_slots(toolbox: Any, running: int, sizes: list[int]) -> None:
    hand = toolbox.hand(chunked_prefill_size=64)
    for number in range(running):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number], max_tokens=50))
    hand.step()
    hand.apply()
    for _ in range(12):  # it stays so
        hand.steps()
        assert sorted(map(toolbox.decodes, hand.flying), reverse=True) == sizes
        hand.apply()


def test_unequal_groups_even_out(toolbox: Any) -> None:
    hand = toolbox.hand(pp_size=2, chunked_prefill_size=64)
    for number in range(8):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number], max_tokens=3 if number < 3 else 50))
    hand.step()
    for _ in range(20):
        hand.apply()
        hand.steps()
    assert sorted(map(toolbox.decodes, hand.flying)) == [2, 3]


def test_first_come_first_served_within_the_limit_of_running_requests(toolbox: Any) -> None:
    hand = toolbox.hand(max_running_requests=2)
    for number in range(6):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number] * 5, max_tokens=3))
    ends = [output.id for output in hand.finish() if output.finish_reason]
    assert ends == [f"r{number}" for number in range(6)]
    assert "running=0" in repr(hand.scheduler)


def test_a_long_prompt_is_not_starved_by_short_ones(toolbox: Any) -> None:
    hand = toolbox.hand(capacity=12)
    for number in range(10):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number] * 8, max_tokens=4))
    hand.steps()
    hand.scheduler.submit(toolbox.request("long", [50] * 40, max_tokens=2))
    for number in range(10, 30):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number] * 2, max_tokens=4))
    ends = [output.id for output in hand.finish() if output.finish_reason]
    assert ends.index("long") == 10


def test_continuations_of_one_prompt_wait_for_its_prefill(toolbox: Any) -> None:
    hand = toolbox.hand()
    prompt = list(range(18))
    for choice in range(3):
        hand.scheduler.submit(toolbox.request(f"c{choice}", prompt, choice=choice))
    hand.scheduler.submit(toolbox.request("other", [9] * 3))
    assert [toolbox.chunks(step) for step in hand.steps()] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 2), (1, 0, 3)]]
    for _ in range(3):
        hand.apply()
    step = hand.step()
    assert toolbox.chunks(step) == [(2, 16, 2), (3, 16, 2)]
    news = hand.finish()
    assert {output.id: output.cached_tokens for output in news if output.finish_reason} == {
        "c0": 0, "c1": 16, "c2": 16, "other": 0,
    }  # fmt: skip


@pytest.mark.parametrize("how", ["cancel", "fail", "cancel follower"])
def test_followers_do_not_hang_on_a_leader_that_ends(toolbox: Any, how: str) -> None:
    hand = toolbox.hand()
    for choice in range(3):
        hand.scheduler.submit(toolbox.request(f"c{choice}", list(range(18)), choice=choice))
    hand.steps()
    if how == "fail":
        hand.apply(failed=(0,))
    else:
        hand.scheduler.cancel("c0" if how == "cancel" else "c1")
    ends = {output.id: output.finish_reason for output in hand.finish() if output.finish_reason or output.error}
    lost = {"fail": ("c0", None), "cancel": ("c0", "abort"), "cancel follower": ("c1", "abort")}[how]
    assert ends == {**dict.fromkeys(("c0", "c1", "c2"), "length"), lost[0]: lost[1]}


def test_without_radix_cache_nobody_waits_or_hits(toolbox: Any) -> None:
    hand = toolbox.hand(radix_cache=False, chunked_prefill_size=64)
    for choice in range(2):
        hand.scheduler.submit(toolbox.request(f"c{choice}", list(range(18)), choice=choice))
    assert toolbox.chunks(hand.step()) == [(0, 0, 18), (1, 0, 18)]
    hand.finish()
    assert hand.scheduler.stats()["cached_pages"] == 0


def test_the_last_token_of_a_prompt_is_always_run(toolbox: Any) -> None:
    hand = toolbox.hand()
    hand.scheduler.submit(toolbox.request("a", list(range(16)), max_tokens=1))
    hand.finish()
    hand.scheduler.submit(toolbox.request("b", list(range(16)), max_tokens=1))
    step = hand.step()
    assert toolbox.chunks(step) == [(1, 12, 4)]
    (last,) = hand.finish()
    assert (last.cached_tokens, last.chunks, last.finish_reason) == (12, (4,), "length")


def test_output_is_cached_too(toolbox: Any) -> None:
    hand = toolbox.hand()
    hand.scheduler.submit(toolbox.request("a", list(range(6)), max_tokens=4))
    hand.finish()
    hand.scheduler.submit(toolbox.request("b", [*range(6), 5, 5, 5, 5, 1]))
    assert toolbox.chunks(hand.step()) == [(1, 8, 3)]


def test_the_latest_arrival_gives_up_its_pages_and_comes_back(toolbox: Any) -> None:
    hand = toolbox.hand(capacity=6, pp_size=1)
    for name in ("a", "b"):
        hand.scheduler.submit(toolbox.request(name, [ord(name) - 90] * 7, max_tokens=12))
    news = hand.finish()
    ends = {output.id: output for output in news if output.finish_reason}
    assert (ends["a"].preemptions, ends["b"].preemptions) == (0, 1)
    assert [len([n for n in news if n.id == name]) for name in ("a", "b")] == [12, 12]
    assert ends["b"].chunks == (7,)  # of the prefill that gave the first token
    assert ends["b"].prefilled_tokens > 7  # of all


def test_one_victim_at_a_time(toolbox: Any) -> None:
    hand = toolbox.hand(capacity=8, pp_size=1)
    for name in "abcd":
        hand.scheduler.submit(toolbox.request(name, [ord(name) - 90] * 3, max_tokens=8))
    ends = {output.id: output.preemptions for output in hand.finish() if output.finish_reason}
    assert ends == {"a": 0, "b": 0, "c": 0, "d": 1}


def test_a_newcomer_leaves_room_for_those_that_run(toolbox: Any) -> None:
    hand = toolbox.hand(capacity=6, pp_size=1)
    hand.scheduler.submit(toolbox.request("a", [1] * 7, max_tokens=6))
    hand.scheduler.submit(toolbox.request("b", [2] * 16, max_tokens=2))
    news = hand.finish()
    assert [output.id for output in news if output.finish_reason] == ["a", "b"]
    assert not any(output.preemptions for output in news)


@pytest.mark.parametrize(("applied", "cached"), [(0, 0), (1, 8), (2, 16)])
def test_only_what_is_known_to_be_computed_is_cached(toolbox: Any, applied: int, cached: int) -> None:
    hand = toolbox.hand()
    hand.scheduler.submit(toolbox.request("a", list(range(30))))
    hand.steps()
    for _ in range(applied):
        hand.apply()
    hand.scheduler.cancel("a")
    hand.scheduler.submit(toolbox.request("b", list(range(30))))
    assert toolbox.chunks(hand.step()) == [(1, cached, 8)]
