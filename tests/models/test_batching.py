from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.errors import ProtocolError
from pipelined.messages import Admit, Chunk, Decode, Item, Release, SamplingParams, Step, Submit, pack_tokens
from pipelined.models.batching import Sequences

PAGE = 4


def admit(seq: int, tokens: list[int], **more: object) -> Admit:
    more.setdefault("sampling", SamplingParams())
    return Admit(seq, pack_tokens(tokens), more.pop("prompt_tokens", len(tokens)), **more)  # type: ignore[arg-type]


def step(rows: int, *items: Item) -> Step:
    return Step(epoch=0, number=3, rows=rows, items=items)


def slots(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [slot for first, count in runs for slot in range(first, first + count)]


@given(st.data())
def test_runs_cover_exactly_the_positions_in_page_order_and_are_maximal(data: st.DataObject) -> None:
    pages = data.draw(st.permutations(range(12)))
    length = data.draw(st.integers(1, 12 * PAGE))
    sequences, done, given_pages = Sequences(PAGE), 0, 0
    tokens = list(range(length))
    sequences.apply(step(0, admit(7, tokens)))
    while done < length:
        tokens_now = data.draw(st.integers(1, length - done))
        end = done + tokens_now
        pages_now = data.draw(st.integers(max(0, -(-end // PAGE) - given_pages), 12 - given_pages))
        new = tuple(pages[given_pages : given_pages + pages_now])
        batch = sequences.apply(step(tokens_now, Chunk(7, done, tokens_now, new, last=end == length)))
        assert batch is not None
        (segment,) = batch.segments
        expected = [pages[position // PAGE] * PAGE + position % PAGE for position in range(end)]
        assert slots(segment.runs) == expected
        assert all(a + n != b for (a, n), (b, _) in zip(segment.runs, segment.runs[1:], strict=False))
        assert segment.token_ids == tuple(tokens[done:end])
        assert (segment.start, segment.end, segment.sample) == (done, end, end == length)
        done, given_pages = end, given_pages + pages_now
    assert sequences.integrity() == {"sequences": 1, "pages": given_pages}


def test_a_batch_does_not_change_with_later_steps() -> None:
    sequences = Sequences(PAGE)
    first = sequences.apply(step(3, admit(1, [5, 6, 7]), Chunk(1, 0, 3, (0,), last=True)))
    kept = repr(first and first.segments)
    sequences.apply(step(1, Decode(1, 3, 8)))
    sequences.apply(step(1, Decode(1, 4, 9, (1,))))
    assert repr(first and first.segments) == kept
    state = sequences.states[1]
    assert (state.tokens, state.generated, state.done, state.pages) == ([5, 6, 7, 8, 9], (8, 9), 5, 2)


def test_mixed_step_keeps_the_order_of_items_and_releases() -> None:
    sequences = Sequences(PAGE)
    sequences.apply(step(2, admit(1, [1, 2]), Chunk(1, 0, 2, (9,), last=True), admit(2, [3, 4, 5])))
    batch = sequences.apply(step(3, Decode(1, 2, 7), Chunk(2, 0, 2, (4,)), Release(1)))
    assert batch is not None
    assert [(s.seq, s.start, s.token_ids, s.runs, s.sample) for s in batch.segments] == [
        (1, 2, (7,), ((36, 3),), True),
        (2, 0, (3, 4), ((16, 2),), False),
    ]
    assert repr(batch) == "<Batch 3 rows=3 segments=2>"
    assert sequences.integrity() == {"sequences": 1, "pages": 1}
    assert sequences.apply(step(0, Release(2))) is None
    assert sequences.integrity() == {"sequences": 0, "pages": 0}


def test_cached_prefix_is_not_run_and_its_pages_may_be_shared() -> None:
    sequences = Sequences(PAGE)
    batch = sequences.apply(
        step(
            3,
            admit(1, list(range(6)), cached_tokens=4, pages=(3,)),
            admit(2, list(range(5)), cached_tokens=4, pages=(3,)),
            Chunk(1, 4, 2, (5,), last=True),
            Chunk(2, 4, 1, (6,), last=True),
        )
    )
    assert batch is not None
    assert [(s.token_ids, s.runs) for s in batch.segments] == [((4, 5), ((12, 4), (20, 2))), ((4,), ((12, 4), (24, 1)))]


def test_prompt_targets_are_the_prompt_tokens_that_the_rows_predict() -> None:
    sequences, sampling = Sequences(PAGE), SamplingParams(prompt_logprobs=2)
    admitted = admit(1, [10, 11, 12, 13, 14], sampling=sampling, prompt_tokens=4)
    found = []
    for number, item in enumerate((Chunk(1, 0, 2, (0,)), Chunk(1, 2, 2, (1,)), Chunk(1, 4, 1, last=True))):
        batch = sequences.apply(step(item.tokens, *([admitted] if number == 0 else []), item))
        assert batch is not None
        found.append((batch.segments[0].prompt_logprobs, batch.segments[0].prompt_targets))
    assert found == [(2, (11, 12)), (2, (13,)), (None, ())]


FIRST = (admit(1, [1, 2, 3, 4, 5]), Chunk(1, 0, 3, (0,)))


@pytest.mark.parametrize(
    ("rows", "items", "message"),
    [
        (1, (Chunk(2, 0, 1, (1,)),), "not admitted"),
        (1, (Decode(2, 0, 1),), "not admitted"),
        (0, (Release(2),), "not admitted"),
        (0, (admit(1, [1]),), "admitted twice"),
        (1, (Chunk(1, 2, 1),), "starts at 2, but 3 tokens"),
        (1, (Chunk(1, 4, 1, (1,)),), "starts at 4, but 3 tokens"),
        (2, (Chunk(1, 3, 2, last=True),), "1 pages of 4 cannot hold 5"),
        (3, (Chunk(1, 3, 3, (1,)),), "3 tokens at 3 of 5"),
        (0, (Chunk(1, 3, 0),), "0 tokens at 3"),
        (1, (Chunk(1, 3, 1, last=True),), "ends at 4 of 5"),
        (1, (Decode(1, 3, 9),), "at 3, but 5 are known"),
        (1, (Decode(1, 5, 9, (1,)),), "starts at 5, but 3 tokens"),
        (2, (Chunk(1, 3, 1),), "says 2 rows, its items add up to 1"),
        (2, (Chunk(1, 3, 1), Chunk(1, 4, 1, (1,))), "two segments"),
        (0, (admit(2, [1, 2, 3, 4], cached_tokens=4, pages=(1,)),), "leaves at least one"),
        (0, (admit(2, [1, 2, 3, 4], cached_tokens=3, pages=(1,)),), "multiple of 4"),
        (0, (admit(2, [1, 2, 3, 4, 5], cached_tokens=4),), "0 pages of 4 cannot hold 4"),
        (0, (admit(2, []),), "0 prompt tokens of 0"),
        (1, (Submit(5),), "Submit"),
    ],
)
def test_a_plan_that_does_not_fit_is_a_protocol_error(rows: int, items: tuple[Item, ...], message: str) -> None:
    sequences = Sequences(PAGE)
    sequences.apply(step(3, *FIRST))
    with pytest.raises(ProtocolError, match=f"step 0.3: .*{message}"):
        sequences.apply(step(rows, *items))


def test_a_chunk_of_a_long_prompt_does_not_cost_its_prefix() -> None:
    """With the work of a chunk proportional to the prefix, 2,000 chunks of a million tokens would take minutes."""
    sequences, chunk = Sequences(64), 512
    total = 1_000_000 // chunk * chunk
    sequences.apply(step(0, admit(1, [3] * total)))
    began = time.process_time()
    for start in range(0, total, chunk):
        pages = tuple(range(start // 64, (start + chunk) // 64))
        sequences.apply(step(chunk, Chunk(1, start, chunk, pages)))
    assert time.process_time() - began < 1.0


def test_reset_forgets_everything() -> None:
    sequences = Sequences(PAGE)
    sequences.apply(step(3, *FIRST))
    sequences.reset()
    assert sequences.integrity() == {"sequences": 0, "pages": 0}
    assert repr(sequences) == "<Sequences 0 admitted, page_size=4>"
