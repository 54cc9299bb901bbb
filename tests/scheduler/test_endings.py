"""How requests and epochs end: one behaviour at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipelined.errors import CapacityError, ProtocolError
from pipelined.messages import (
    ErrorInfo,
    PromptLogprobs,
    Release,
    StepResult,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)


def test_a_void_step_fails_who_was_in_it_and_caches_nothing(toolbox: Any) -> None:
    hand = toolbox.hand()
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
    assert toolbox.chunks(hand.step()) == [(2, 0, 8)]


def test_a_failure_hurts_one(toolbox: Any) -> None:
    hand = toolbox.hand()
    for name in ("a", "b"):
        hand.scheduler.submit(toolbox.request(name, [ord(name) - 90] * 3, max_tokens=2))
    hand.step()
    hand.apply(failed=(0,))
    news = hand.finish()
    assert [(output.id, output.error is None) for output in news] == [("a", False), ("b", True), ("b", True)]


@pytest.mark.parametrize("when", ["waiting", "in prefill", "prefill planned", "decoding", "ready", "ended"])
def test_cancel_at_any_moment(toolbox: Any, when: str) -> None:
    hand = toolbox.hand()
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
    hand = toolbox.hand(capacity=10 if not settings else 100, **settings)
    hand.scheduler.submit(toolbox.request("bad", prompt))
    hand.scheduler.submit(toolbox.request("good", [1], max_tokens=1))
    bad, good = hand.finish()
    assert good.finish_reason == "length"
    assert bad.error is not None
    assert bad.error.kind == "InvalidRequestError"
    with pytest.raises(Exception, match=message):
        raise bad.error.exception()


def test_bad_sampling_and_bad_packing_are_refused(toolbox: Any) -> None:
    hand = toolbox.hand()
    hand.scheduler.submit(toolbox.request("a", [1], max_tokens=0))
    hand.scheduler.submit(msgspec.structs.replace(toolbox.request("b", [1]), tokens=b"123"))
    errors = [output.error for output in hand.finish()]
    assert [error is not None and error.message.split()[0] for error in errors] == ["max_tokens=0", "packed"]


def test_generation_ends_where_context_or_capacity_end(toolbox: Any) -> None:
    for settings, most in (({"context_length": 10}, 7), ({"capacity": 2}, 5)):
        hand = toolbox.hand(**settings)  # type: ignore[arg-type]
        hand.scheduler.submit(toolbox.request("a", [1] * 3, max_tokens=50))
        news = hand.finish()
        assert (len(news), news[-1].finish_reason) == (most, "length")


def test_stop_tokens(toolbox: Any) -> None:
    for sampling, reason in (
        ({"eos": (5,)}, "stop"),
        ({"eos": (5,), "ignore_eos": True}, "length"),
        ({"stop_token_ids": (4, 5)}, "stop"),
    ):
        hand = toolbox.hand()
        hand.scheduler.submit(toolbox.request("a", [1] * 3, max_tokens=3, **sampling))
        last = hand.finish()[-1]
        assert (last.finish_reason, last.stop_token) == (reason, 5 if reason == "stop" else None)


def test_a_resumed_request_goes_on_after_what_was_delivered(toolbox: Any) -> None:
    hand = toolbox.hand()
    request = toolbox.request("a", [1] * 3, max_tokens=4)
    hand.scheduler.submit(msgspec.structs.replace(request, generated=pack_tokens([5, 5])))
    step = hand.step()
    assert toolbox.chunks(step) == [(0, 0, 5)]
    assert [unpack_tokens(output.tokens) for output in hand.finish()] == [[5], [5]]
    hand.scheduler.submit(msgspec.structs.replace(request, id="b", generated=pack_tokens([5] * 4)))
    assert [output.finish_reason for output in hand.finish()] == ["length"]


def test_prompt_logprobs_come_once_and_whole(toolbox: Any) -> None:
    hand = toolbox.hand()
    hand.scheduler.submit(toolbox.request("warm", [1] * 12, max_tokens=1))
    hand.finish()
    hand.scheduler.submit(toolbox.request("a", [1] * 12, max_tokens=2, prompt_logprobs=0))
    assert toolbox.chunks(hand.step()) == [(1, 0, 8)]  # a cached prefix would have none
    entries = tuple((TokenLogprob(1, -float(position)),) for position in range(1, 12))
    hand.apply(extra=(PromptLogprobs(1, 1, entries[:8]),))
    assert hand.scheduler.news() == []
    hand.step()
    hand.apply(extra=(PromptLogprobs(1, 9, entries[8:]),))
    first, second = hand.finish()
    assert (first.prompt_logprobs, second.prompt_logprobs) == (entries, ())


def test_a_resumed_request_owes_no_prompt_logprobs(toolbox: Any) -> None:
    hand = toolbox.hand()
    request = toolbox.request("a", [1] * 3, max_tokens=2, prompt_logprobs=0)
    hand.scheduler.submit(msgspec.structs.replace(request, generated=pack_tokens([5])))
    hand.step()
    hand.apply(extra=(PromptLogprobs(0, 1, ((TokenLogprob(1, -1.0),),) * 2),))
    (news,) = hand.finish()
    assert (news.prompt_logprobs, news.chunks, news.finish_reason) == ((), (), "length")


def test_an_epoch_ends_and_another_begins(toolbox: Any) -> None:
    hand = toolbox.hand()
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
    hand = toolbox.hand()
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
