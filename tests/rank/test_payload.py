"""Payloads as frames, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelined.errors import ConfigError, ProtocolError
from pipelined.messages import ErrorInfo, TensorHeader
from pipelined.rank.payload import MAX_TENSORS, join, split, void

tensors = st.builds(torch.full, st.lists(st.integers(0, 3), max_size=2).map(tuple), st.integers(0, 9))
builtins = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.lists(st.integers(0, 5))
payloads = st.dictionaries(st.text(min_size=1), tensors | builtins, max_size=8)


def received(frames: list[tuple[TensorHeader, torch.Tensor]]) -> list[Any]:
    """As they come off a link: headers encoded and decoded."""
    code = lambda header: msgspec.msgpack.decode(msgspec.msgpack.encode(header), type=TensorHeader)  # noqa: E731
    return [SimpleNamespace(header=code(header), tensor=tensor) for header, tensor in frames]


@given(payload=payloads, step=st.integers(0, 2**40), rows=st.integers(1, 2**20))
def test_there_and_back(payload: dict[str, Any], step: int, rows: int) -> None:
    frames = split(payload, step=step, rows=rows)
    headers = [header for header, _ in frames]
    assert [(h.step, h.rows, h.index, h.count) for h in headers] == [
        (step, rows, index, len(frames)) for index in range(len(frames))
    ]
    back = join(received(frames))
    assert isinstance(back, dict)
    assert back.keys() == payload.keys()
    for key, value in payload.items():
        assert torch.equal(back[key], value) if isinstance(value, torch.Tensor) else back[key] == value


def test_how_many_frames() -> None:
    assert len(split({}, step=0, rows=1)) == 1
    assert len(split({"a": 1}, step=0, rows=1)) == 1
    assert len(split({str(n): torch.ones(1) for n in range(MAX_TENSORS)} | {"b": 2}, step=0, rows=1)) == MAX_TENSORS
    with pytest.raises(ConfigError, match="65 tensors; at most 64"):
        split({str(n): torch.ones(1) for n in range(MAX_TENSORS + 1)}, step=0, rows=1)


def test_a_void_step_carries_its_error() -> None:
    error = ErrorInfo("StageError", "no", rank=3, stage="s", step=7, traceback="here")
    (frame,) = received(void(error, step=7, rows=2))
    assert (frame.header.step, frame.header.rows, frame.header.status) == (7, 2, 1)
    assert join([frame]) == error


@pytest.mark.parametrize("status", [0, 1])
def test_garbage_is_a_protocol_error(status: int) -> None:
    header = TensorHeader(0, 5, status=status, meta=b"\xc1\xff")
    with pytest.raises(ProtocolError, match="step 5"):
        join([SimpleNamespace(header=header, tensor=torch.empty(0))])  # type: ignore[list-item]
