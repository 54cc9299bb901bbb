"""One behaviour of the scheduler at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipelined.errors import CapacityError, ProtocolError
from pipelined.messages import (
    Admit,
    Chunk,
    Decode,
    ErrorInfo,
    Failed,
    PromptLogprobs,
    Release,
    RequestOutput,
    Sampled,
    Step,
    StepResult,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)
from pipelined.scheduler import Scheduler, SchedulerConfig

DEFAULTS = {
    "pp_size": 4,
    "page_size": 4,
    "chunked_prefill_size": 8,
    "context_length": 1000,
    "vocab_size": 100,
}


class Hand:
    """A scheduler driven by hand: every sampled token is `token`."""

    def __init__(self, capacity: int = 100, **settings: Any) -> None:
        self.scheduler = Scheduler(SchedulerConfig(**{**DEFAULTS, **settings}))
        self.scheduler.start(0, capacity)
        self.flying: list[Step] = []
        self.token = 5

    def step(self) -> Step | None:
        step = self.scheduler.next_step(0.0)
        if step is not None and step.rows:
            self.flying.append(step)
        return step

    def steps(self, most: int = 100) -> list[Step]:
        """All that can be planned now."""
        made: list[Step] = []
        while len(made) < most and (step := self.step()) is not None:
            made.append(step)
        return made

    def apply(
        self, *, failed: tuple[int, ...] = (), error: ErrorInfo | None = None, extra: tuple[Any, ...] = ()
    ) -> None:
        """The oldest step comes back."""
        step = self.flying.pop(0)
        outcomes: list[Any] = list(extra)
        for item in step.items:
            if isinstance(item, Chunk | Decode):
                if item.seq in failed:
                    outcomes.append(Failed(item.seq, ErrorInfo("NonFiniteError", "NaN")))
                elif isinstance(item, Decode) or item.last:
                    outcomes.append(Sampled(item.seq, self.token))
        self.scheduler.apply(StepResult(0, step.number, () if error else tuple(outcomes), error))

    def finish(self) -> list[RequestOutput]:
        """Run until idle; all the news."""
        news = self.scheduler.news()
        for _ in range(1000):
            self.steps(most=4 - len(self.flying))
            if self.flying:
                self.apply()
            news += self.scheduler.news()
            if self.scheduler.idle():
                assert not any(self.scheduler.integrity().values())
                return news
        raise AssertionError("not idle after 1000 results")


def chunks(step: Step | None) -> list[tuple[int, int, int]]:
    assert step is not None
    return [(item.seq, item.start, item.tokens) for item in step.items if isinstance(item, Chunk)]


def decodes(step: Step) -> int:
    return sum(isinstance(item, Decode) for item in step.items)


def test_chunks_of_one_prompt_follow_each_other_without_waiting(toolbox: Any) -> None:
    hand = Hand()
    hand.scheduler.submit(toolbox.request("a", list(range(30))))
    assert [chunks(step) for step in hand.steps()] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 8)], [(0, 24, 6)]]
    assert [step.items[-1].last for step in hand.flying] == [False, False, False, True]  # type: ignore[union-attr]
    assert hand.flying[0].items[0] == Admit(
        seq=0, tokens=pack_tokens(list(range(30))), prompt_tokens=30, sampling=toolbox.request("a", [1]).sampling
    )
    news = hand.finish()
    assert [unpack_tokens(output.tokens) for output in news] == [[5]] * 8
    assert (news[0].chunks, news[0].prefilled_tokens, news[0].cached_tokens) == ((8, 8, 8, 6), 30, 0)
    assert (news[-1].finish_reason, news[-1].chunks) == ("length", (8, 8, 8, 6))


def test_short_prompts_share_a_step_and_chunks_end_with_pages(toolbox: Any) -> None:
    hand = Hand()
    for name, length in (("a", 3), ("b", 30), ("c", 2)):
        hand.scheduler.submit(toolbox.request(name, [7] * length))
    assert [chunks(step) for step in hand.steps(2)] == [[(0, 0, 3), (1, 0, 4)], [(1, 4, 8)]]
    assert hand.flying[0].rows == 7


def test_prefill_and_decode_mix_in_a_step(toolbox: Any) -> None:
    hand = Hand()
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
    hand = Hand(chunked_prefill_size=64)
    for number in range(running):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number], max_tokens=50))
    hand.step()
    hand.apply()
    for _ in range(12):  # it stays so
        hand.steps()
        assert sorted(map(decodes, hand.flying), reverse=True) == sizes
        hand.apply()


def test_unequal_groups_even_out(toolbox: Any) -> None:
    hand = Hand(pp_size=2, chunked_prefill_size=64)
    for number in range(8):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number], max_tokens=3 if number < 3 else 50))
    hand.step()
    for _ in range(20):
        hand.apply()
        hand.steps()
    assert sorted(map(decodes, hand.flying)) == [2, 3]


def test_first_come_first_served_within_the_limit_of_running_requests(toolbox: Any) -> None:
    hand = Hand(max_running_requests=2)
    for number in range(6):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number] * 5, max_tokens=3))
    ends = [output.id for output in hand.finish() if output.finish_reason]
    assert ends == [f"r{number}" for number in range(6)]
    assert "running=0" in repr(hand.scheduler)


def test_a_long_prompt_is_not_starved_by_short_ones(toolbox: Any) -> None:
    hand = Hand(capacity=12)
    for number in range(10):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number] * 8, max_tokens=4))
    hand.steps()
    hand.scheduler.submit(toolbox.request("long", [50] * 40, max_tokens=2))
    for number in range(10, 30):
        hand.scheduler.submit(toolbox.request(f"r{number}", [number] * 2, max_tokens=4))
    ends = [output.id for output in hand.finish() if output.finish_reason]
    assert ends.index("long") == 10


def test_continuations_of_one_prompt_wait_for_its_prefill(toolbox: Any) -> None:
    hand = Hand()
    prompt = list(range(18))
    for choice in range(3):
        hand.scheduler.submit(toolbox.request(f"c{choice}", prompt, choice=choice))
    hand.scheduler.submit(toolbox.request("other", [9] * 3))
    assert [chunks(step) for step in hand.steps()] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 2), (1, 0, 3)]]
    for _ in range(3):
        hand.apply()
    step = hand.step()
    assert chunks(step) == [(2, 16, 2), (3, 16, 2)]
    news = hand.finish()
    assert {output.id: output.cached_tokens for output in news if output.finish_reason} == {
        "c0": 0, "c1": 16, "c2": 16, "other": 0,
    }  # fmt: skip


@pytest.mark.parametrize("how", ["cancel", "fail", "cancel follower"])
def test_followers_do_not_hang_on_a_leader_that_ends(toolbox: Any, how: str) -> None:
    hand = Hand()
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
    hand = Hand(radix_cache=False, chunked_prefill_size=64)
    for choice in range(2):
        hand.scheduler.submit(toolbox.request(f"c{choice}", list(range(18)), choice=choice))
    assert chunks(hand.step()) == [(0, 0, 18), (1, 0, 18)]
    hand.finish()
    assert hand.scheduler.stats()["cached_pages"] == 0


def test_the_last_token_of_a_prompt_is_always_run(toolbox: Any) -> None:
    hand = Hand()
    hand.scheduler.submit(toolbox.request("a", list(range(16)), max_tokens=1))
    hand.finish()
    hand.scheduler.submit(toolbox.request("b", list(range(16)), max_tokens=1))
    step = hand.step()
    assert chunks(step) == [(1, 12, 4)]
    (last,) = hand.finish()
    assert (last.cached_tokens, last.chunks, last.finish_reason) == (12, (4,), "length")


def test_output_is_cached_too(toolbox: Any) -> None:
    hand = Hand()
    hand.scheduler.submit(toolbox.request("a", list(range(6)), max_tokens=4))
    hand.finish()
    hand.scheduler.submit(toolbox.request("b", [*range(6), 5, 5, 5, 5, 1]))
    assert chunks(hand.step()) == [(1, 8, 3)]


def test_a_void_step_fails_who_was_in_it_and_caches_nothing(toolbox: Any) -> None:
    hand = Hand()
    hand.scheduler.submit(toolbox.request("a", list(range(20))))
    hand.steps(1)
    hand.scheduler.submit(toolbox.request("b", [9] * 3))
    hand.steps()
    hand.apply(error=ErrorInfo("StageError", "broken", rank=1))
    (news,) = hand.scheduler.news()
    assert news.id == "a"
    assert news.error is not None
    assert news.error.message == "broken"
    step = hand.step()
    assert step is not None
    assert step.items == (Release(0),)
    assert step.rows == 0
    assert [output.id for output in hand.finish() if output.finish_reason] == ["b"]
    hand.scheduler.submit(toolbox.request("again", list(range(20))))
    assert chunks(hand.step()) == [(2, 0, 8)]


def test_a_failure_hurts_one(toolbox: Any) -> None:
    hand = Hand()
    for name in ("a", "b"):
        hand.scheduler.submit(toolbox.request(name, [ord(name) - 90] * 3, max_tokens=2))
    hand.step()
    hand.apply(failed=(0,))
    news = hand.finish()
    assert [(output.id, output.error is None) for output in news] == [("a", False), ("b", True), ("b", True)]


@pytest.mark.parametrize("when", ["waiting", "in prefill", "prefill planned", "decoding", "ready", "ended"])
def test_cancel_at_any_moment(toolbox: Any, when: str) -> None:
    hand = Hand()
    hand.scheduler.submit(toolbox.request("a", list(range(20)), max_tokens=5))
    if when != "waiting":
        hand.steps(2 if when == "in prefill" else 9)
    if when in ("ready", "decoding"):
        for _ in range(3):
            hand.apply()
    if when == "decoding":
        hand.steps()
    if when == "ended":
        assert hand.finish()[-1].finish_reason == "length"
    told = len(hand.scheduler.news())
    hand.scheduler.cancel("a")
    hand.scheduler.cancel("a")
    hand.scheduler.cancel("nobody")
    assert told == (when in ("ready", "decoding"))
    assert [output.finish_reason for output in hand.scheduler.news()] == ["abort"] * (when != "ended")
    step = hand.step()
    assert (step.items if step else ()) == (() if when in ("waiting", "ended") else (Release(0),))
    assert hand.finish() == []


def test_the_latest_arrival_gives_up_its_pages_and_comes_back(toolbox: Any) -> None:
    hand = Hand(capacity=6, pp_size=1)
    for name in ("a", "b"):
        hand.scheduler.submit(toolbox.request(name, [ord(name) - 90] * 7, max_tokens=12))
    news = hand.finish()
    ends = {output.id: output for output in news if output.finish_reason}
    assert (ends["a"].preemptions, ends["b"].preemptions) == (0, 1)
    assert [len([n for n in news if n.id == name]) for name in ("a", "b")] == [12, 12]
    assert ends["b"].chunks == (7,)  # of the prefill that gave the first token
    assert ends["b"].prefilled_tokens > 7  # of all


def test_one_victim_at_a_time(toolbox: Any) -> None:
    hand = Hand(capacity=8, pp_size=1)
    for name in "abcd":
        hand.scheduler.submit(toolbox.request(name, [ord(name) - 90] * 3, max_tokens=8))
    ends = {output.id: output.preemptions for output in hand.finish() if output.finish_reason}
    assert ends == {"a": 0, "b": 0, "c": 0, "d": 1}


def test_a_newcomer_leaves_room_for_those_that_run(toolbox: Any) -> None:
    hand = Hand(capacity=6, pp_size=1)
    hand.scheduler.submit(toolbox.request("a", [1] * 7, max_tokens=6))
    hand.scheduler.submit(toolbox.request("b", [2] * 16, max_tokens=2))
    news = hand.finish()
    assert [output.id for output in news if output.finish_reason] == ["a", "b"]
    assert not any(output.preemptions for output in news)


@pytest.mark.parametrize(("applied", "cached"), [(0, 0), (1, 8), (2, 16)])
def test_only_what_is_known_to_be_computed_is_cached(toolbox: Any, applied: int, cached: int) -> None:
    hand = Hand()
    hand.scheduler.submit(toolbox.request("a", list(range(30))))
    hand.steps()
    for _ in range(applied):
        hand.apply()
    hand.scheduler.cancel("a")
    hand.scheduler.submit(toolbox.request("b", list(range(30))))
    assert chunks(hand.step()) == [(1, cached, 8)]


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 64, {"context_length": 64}, "has 64 tokens.*context length of 64; shorten it to 63"),
        ([1] * 40, {}, r"has 40 tokens.*KV cache of 40 tokens \(10 pages of 4\); shorten it to 39"),
        ([1, 100], {}, "prompt has token id 100; expected 0 to 99"),
        ([1, -1], {}, "prompt has token id -1; expected 0 to 99"),
    ],
)
def test_bad_requests_are_told_why(toolbox: Any, prompt: list[int], settings: dict[str, int], message: str) -> None:
    hand = Hand(capacity=10 if not settings else 100, **settings)
    hand.scheduler.submit(toolbox.request("bad", prompt))
    hand.scheduler.submit(toolbox.request("good", [1], max_tokens=1))
    bad, good = hand.finish()
    assert good.finish_reason == "length"
    assert bad.error is not None
    assert bad.error.kind == "InvalidRequestError"
    with pytest.raises(Exception, match=message):
        raise bad.error.exception()


def test_bad_sampling_and_bad_packing_are_refused(toolbox: Any) -> None:
    hand = Hand()
    hand.scheduler.submit(toolbox.request("a", [1], max_tokens=0))
    hand.scheduler.submit(msgspec.structs.replace(toolbox.request("b", [1]), tokens=b"123"))
    errors = [output.error for output in hand.finish()]
    assert [error is not None and error.message.split()[0] for error in errors] == ["max_tokens=0", "packed"]


def test_generation_ends_where_context_or_capacity_end(toolbox: Any) -> None:
    for settings, most in (({"context_length": 10}, 7), ({"capacity": 2}, 5)):
        hand = Hand(**settings)  # type: ignore[arg-type]
        hand.scheduler.submit(toolbox.request("a", [1] * 3, max_tokens=50))
        news = hand.finish()
        assert (len(news), news[-1].finish_reason) == (most, "length")


def test_stop_tokens(toolbox: Any) -> None:
    for sampling, reason in (
        ({"eos": (5,)}, "stop"),
        ({"eos": (5,), "ignore_eos": True}, "length"),
        ({"stop_token_ids": (4, 5)}, "stop"),
    ):
        hand = Hand()
        hand.scheduler.submit(toolbox.request("a", [1] * 3, max_tokens=3, **sampling))
        last = hand.finish()[-1]
        assert (last.finish_reason, last.stop_token) == (reason, 5 if reason == "stop" else None)


def test_a_resumed_request_goes_on_after_what_was_delivered(toolbox: Any) -> None:
    hand = Hand()
    request = toolbox.request("a", [1] * 3, max_tokens=4)
    hand.scheduler.submit(msgspec.structs.replace(request, generated=pack_tokens([5, 5])))
    step = hand.step()
    assert chunks(step) == [(0, 0, 5)]
    assert [unpack_tokens(output.tokens) for output in hand.finish()] == [[5], [5]]
    hand.scheduler.submit(msgspec.structs.replace(request, id="b", generated=pack_tokens([5] * 4)))
    assert [output.finish_reason for output in hand.finish()] == ["length"]


def test_prompt_logprobs_come_once_and_whole(toolbox: Any) -> None:
    hand = Hand()
    hand.scheduler.submit(toolbox.request("warm", [1] * 12, max_tokens=1))
    hand.finish()
    hand.scheduler.submit(toolbox.request("a", [1] * 12, max_tokens=2, prompt_logprobs=0))
    assert chunks(hand.step()) == [(1, 0, 8)]  # a cached prefix would have none
    entries = tuple((TokenLogprob(1, -float(position)),) for position in range(1, 12))
    hand.apply(extra=(PromptLogprobs(1, 1, entries[:8]),))
    assert hand.scheduler.news() == []
    hand.step()
    hand.apply(extra=(PromptLogprobs(1, 9, entries[8:]),))
    first, second = hand.finish()
    assert (first.prompt_logprobs, second.prompt_logprobs) == (entries, ())


def test_a_resumed_request_owes_no_prompt_logprobs(toolbox: Any) -> None:
    hand = Hand()
    request = toolbox.request("a", [1] * 3, max_tokens=2, prompt_logprobs=0)
    hand.scheduler.submit(msgspec.structs.replace(request, generated=pack_tokens([5])))
    hand.step()
    hand.apply(extra=(PromptLogprobs(0, 1, ((TokenLogprob(1, -1.0),),) * 2),))
    (news,) = hand.finish()
    assert (news.prompt_logprobs, news.chunks, news.finish_reason) == ((), (), "length")


def test_an_epoch_ends_and_another_begins(toolbox: Any) -> None:
    hand = Hand()
    for name in ("a", "b"):
        hand.scheduler.submit(toolbox.request(name, [ord(name) - 90] * 20))
    hand.steps(2)
    hand.scheduler.abandon(ErrorInfo("RankLostError", "rank 2 is gone"))
    assert hand.scheduler.next_step(0.0) is None
    assert [(output.id, output.error is not None) for output in hand.scheduler.news()] == [("a", True), ("b", True)]
    assert hand.scheduler.idle()
    assert not any(hand.scheduler.integrity().values())
    with pytest.raises(ProtocolError, match="has not started"):
        hand.scheduler.submit(toolbox.request("c", [1]))
    hand.scheduler.start(1, 100)
    hand.scheduler.submit(toolbox.request("a", [1] * 20))
    hand.scheduler.apply(StepResult(0, 0))  # of the old epoch
    step = hand.scheduler.next_step(0.0)
    assert step is not None
    assert repr(step) == "<Step 1.0 rows=8 items=2>"


def test_mistakes_of_others_are_named(toolbox: Any) -> None:
    hand = Hand()
    with pytest.raises(CapacityError, match="how many KV pages"):
        hand.scheduler.start(0, None)
    hand.scheduler.submit(toolbox.request("a", [1] * 3))
    with pytest.raises(ProtocolError, match="submitted twice"):
        hand.scheduler.submit(toolbox.request("a", [1] * 3))
    with pytest.raises(ProtocolError, match="step 4 came, expected none"):
        hand.scheduler.apply(StepResult(0, 4))
    hand.step()
    with pytest.raises(ProtocolError, match="step 1 came, expected step 0"):
        hand.scheduler.apply(StepResult(0, 1))
    hand.scheduler.apply(StepResult(0, 0))
    (news,) = hand.scheduler.news()
    assert news.error is not None
    assert "no token for request 'a'" in news.error.message
