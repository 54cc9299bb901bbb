from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.serving.gate import Gate
from pipelined.serving.problems import Problem


async def test_it_counts_what_is_inside() -> None:
    gate = Gate(4)
    with gate.admit("a", 3):
        assert (gate.inside, gate.ids, gate.sequences("a"), gate.sequences("b")) == (3, ("a",), 3, 0)
        assert repr(gate) == "<Gate 3/4>"
        with pytest.raises(Problem) as full:
            gate.check("b", 2)
        assert full.value.status == 429
        assert int(full.value.headers["Retry-After"]) >= 1
        with pytest.raises(Problem, match="in use"):
            gate.check("a", 1)
        with gate.admit("b", 1):
            assert gate.inside == 4
    assert (gate.inside, gate.ids) == (0, ())
    with pytest.raises(Problem, match="at most 4"):
        gate.check("c", 5)
    gate.closed = True
    with pytest.raises(Problem) as closed:
        gate.check("c", 1)
    assert closed.value.status == 503


async def test_aborts_are_noted_while_inside() -> None:
    gate = Gate(4)
    gate.abort("a")
    assert not gate.is_aborted("a")
    with gate.admit("a", 1):
        assert not gate.is_aborted("a")
        gate.abort("a")
        assert gate.is_aborted("a")
    assert not gate.is_aborted("a")


async def test_when_to_come_back_follows_the_pace() -> None:
    gate = Gate(100)
    with ExitStack() as stack:
        stack.enter_context(gate.admit("long", 1))
        for number in range(50):
            with gate.admit(str(number), 1):
                await asyncio.sleep(0)
        assert gate.retry_after_s(10) == 1  # they end at once
    assert 1 <= gate.retry_after_s(10_000_000) <= 120


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=30))
def test_it_never_holds_more_than_its_limit(moves: list[tuple[int, bool]]) -> None:
    async def play() -> None:
        gate, inside = Gate(8), {}
        for number, (sequences, leave) in enumerate(moves):
            if leave and inside:
                inside.pop(next(iter(inside))).close()
            stack = ExitStack()
            try:
                stack.enter_context(gate.admit(str(number), sequences))
                inside[str(number)] = stack
            except Problem:
                assert gate.inside + sequences > 8
            assert gate.inside == sum(gate.sequences(each) for each in inside) <= 8
        for stack in inside.values():
            stack.close()
        assert gate.inside == 0

    asyncio.run(play())
