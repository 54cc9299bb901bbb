"""What a `toy://` URI says."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pipelined.errors import ModelError, nearest

__all__ = ["ToyParams"]


@dataclass(frozen=True)
class ToyParams:
    """What the URI says.

    Attributes:
        layers, vocab, hidden, context: Sizes.
        kv: Tokens that the KV cache of each stage could hold; a list (`kv=4096,512`) gives each rank its own.
        eos: End-of-sequence tokens, possibly none.
        seed: Chooses the "weights".
        fail_seq_token, fail_layer: A prompt with this token fails at this layer. -1: never.
        raise_token, raise_layer: Likewise, but the stage raises.
    """

    layers: int = 8
    vocab: int = 997
    hidden: int = 8
    context: int = 4096
    kv: tuple[int, ...] = (65536,)
    eos: tuple[int, ...] = ()
    seed: int = 0
    fail_seq_token: int = -1
    fail_layer: int = 0
    raise_token: int = -1
    raise_layer: int = 0

    @classmethod
    def parse(cls, ref: str) -> ToyParams:
        """From `toy://?key=value&...`.

        Raises:
            ModelError: An unknown key, or a value that is no number or out of range.
        """
        known = {field.name for field in fields(cls)}
        given: dict[str, Any] = {}
        for key, text in parse_qsl(urlsplit(ref).query, keep_blank_values=True):
            if key not in known:
                raise ModelError(f"{ref}: no parameter {key!r}{nearest(key, known)}")
            try:
                numbers = tuple(int(part) for part in text.split(",") if part)
            except ValueError:
                numbers = ()
            if key not in ("eos", "kv") and len(numbers) != 1:
                raise ModelError(f"{ref}: {key}={text!r}, expected a whole number")
            given[key] = numbers if key in ("eos", "kv") else numbers[0]
        params = cls(**given)
        for key in ("layers", "vocab", "hidden", "context", "kv"):
            size = getattr(params, key) if key != "kv" else min(params.kv, default=0)
            if size < 1:
                raise ModelError(f"{ref}: {key}={size}, expected at least 1")
        return params
