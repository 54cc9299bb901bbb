"""A payload as frames of tensors, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pipelined.errors import ConfigError, ProtocolError
from pipelined.messages import ErrorInfo, TensorHeader
from pipelined.stage import LOGICAL_BYTES
from pipelined.transport.buffers import dtype_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.stage import Payload
    from pipelined.transport import Received

__all__ = ["MAX_TENSORS", "join", "split", "void"]

MAX_TENSORS = 64

_NOTHING = torch.empty(0, dtype=torch.uint8)
_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode


def split(payload: Payload, *, step: int, rows: int) -> list[tuple[TensorHeader, torch.Tensor]]:
    """The frames that carry a payload: one for each tensor; builtins travel in the first one's header.

    `LOGICAL_BYTES` does not travel: the first header says what a simulated link charges.

    Raises:
        ConfigError: A value is neither a tensor nor something that msgspec can encode, or there are too many tensors.
    """
    if not isinstance(payload, dict):
        raise ConfigError(f"a payload is a dict of tensors and builtins, not a {type(payload).__name__}")
    charged_bytes = 0
    if LOGICAL_BYTES in payload:
        payload = dict(payload)
        charged_bytes = payload.pop(LOGICAL_BYTES)
        if type(charged_bytes) is not int or charged_bytes < 0:
            raise ConfigError(f"{LOGICAL_BYTES}={charged_bytes!r}: expected a whole number of bytes, 0 or more")
    tensors = [(name, value) for name, value in payload.items() if isinstance(value, torch.Tensor)]
    for name in payload:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a payload has the key {name!r}; expected strings, not empty")
    for name, tensor in tensors:
        _check_tensor(name, tensor)
    if len(tensors) > MAX_TENSORS:
        raise ConfigError(f"a payload of {len(tensors)} tensors; at most {MAX_TENSORS} may flow in one step")
    meta = b""
    if len(tensors) < len(payload):
        builtins = {name: value for name, value in payload.items() if not isinstance(value, torch.Tensor)}
        try:
            meta = _encode(builtins)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            kinds = ", ".join(f"{name!r}: {type(value).__name__}" for name, value in builtins.items())
            raise ConfigError(
                f"a payload holds tensors and builtins that msgspec can encode; these cannot travel ({kinds}): {error}"
            ) from error
    if not tensors:
        return [(TensorHeader(0, step, rows=rows, meta=meta, logical_bytes=charged_bytes), _NOTHING)]
    count = len(tensors)
    frames = [
        (TensorHeader(0, step, index, count, rows, name, meta=b"" if index else meta), tensor)
        for index, (name, tensor) in enumerate(tensors)
    ]
    if charged_bytes:  # all of it with the first frame
        frames[0] = (msgspec.structs.replace(frames[0][0], logical_bytes=charged_bytes), frames[0][1])
    return frames


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Only memory that can be seen as bytes crosses a link; said before a part of the payload has left."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        kind = f"{tensor.dtype} on {tensor.device}, {tensor.layout}"
        raise ConfigError(f"tensor {name!r} ({kind}) cannot travel; expected a dense tensor with data")
    try:
        dtype_of(str(tensor.dtype).removeprefix("torch."))
    except ProtocolError as error:
        raise ConfigError(f"tensor {name!r} of {tensor.dtype} cannot travel: {error}") from None


def void(error: ErrorInfo, *, step: int, rows: int) -> list[tuple[TensorHeader, torch.Tensor]]:
    """The frame of a void step: nobody downstream waits in vain."""
    return [(TensorHeader(0, step, rows=rows, status=1, meta=_encode(error)), _NOTHING)]


def join(received: Sequence[Received]) -> Payload | ErrorInfo:
    """The payload that frames carry, or the error of a void step.

    Raises:
        ProtocolError: The builtins cannot be decoded.
    """
    head = received[0].header
    try:
        if head.status:
            return msgspec.msgpack.decode(head.meta, type=ErrorInfo)
        payload: dict[str, Any] = {frame.header.name: frame.tensor for frame in received if frame.header.name}
        if head.meta:
            payload.update(_decode(head.meta))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"step {head.step}: the payload's builtins cannot be decoded: {error}") from error
    return payload
