from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.errors import HandshakeError
from pipelined.messages import Peer
from pipelined.transport import EndpointSpec, MemoryRendezvous
from pipelined.transport.hello import check_hello, decode_hello, encode_hello, hello_of

WORLD = (Peer("p", -1), Peer("p", 0), Peer("p", 1))


def hello(rank: int = 0, **changes: object):
    spec = EndpointSpec(
        me=Peer("p", rank),
        world=WORLD,
        rendezvous=MemoryRendezvous(),
        connect=(),
        secret="s3cret",
        dtype="bfloat16",
    )
    return msgspec.structs.replace(hello_of(spec), **changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"version": 99}, "protocol version 99"),
        ({"secret": "guess"}, "different secrets"),
        ({"epoch": 4}, "epoch 4, p/0 has 0"),
        ({"world": WORLD[1:]}, "world p/0, p/1"),
        ({"pipeline": "q"}, "pipeline 'q'"),
        ({"dtype": "float16"}, "p/1 has dtype 'float16', p/0 has 'bfloat16'"),
        ({"me": Peer("p", 7)}, "expected p/1"),
    ],
)
def test_what_differs_is_named_and_no_secret(changes: dict[str, object], match: str) -> None:
    check_hello(hello(), hello(1), Peer("p", 1))
    with pytest.raises(HandshakeError, match=match) as caught:
        check_hello(hello(), hello(1, **changes), Peer("p", 1))
    assert "s3cret" not in str(caught.value)
    assert "guess" not in str(caught.value)


def test_the_order_of_the_world_does_not_matter() -> None:
    spec = EndpointSpec(
        me=WORLD[0], world=WORLD[::-1], rendezvous=MemoryRendezvous(), connect=(), secret="s3cret", dtype="bfloat16"
    )
    check_hello(hello(), hello_of(spec))


def test_a_stranger_is_not_of_the_world() -> None:
    with pytest.raises(HandshakeError, match="not another peer"):
        check_hello(hello(), hello(1, me=Peer("p", 9)))
    with pytest.raises(HandshakeError, match="not another peer"):
        check_hello(hello(), hello())


@given(st.binary(max_size=200))
def test_garbage_is_a_handshake_error(frame: bytes) -> None:
    with pytest.raises(HandshakeError):
        decode_hello(frame)


def test_round_trip() -> None:
    assert decode_hello(encode_hello(hello())) == hello()
