"""Prompts of real text for measurements: what experts, caches and numbers see should be what users send."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelined.llm.text import Tokenizer
    from pipelined.stage import ModelInfo

__all__ = ["TextTokens", "prose"]

_MOST_CHARACTERS = 400_000
_STRIDE = 4099
"""Prompts begin so many tokens apart, a prime, so that none begins like another and is served from the cache."""


def prose() -> str:
    """A long text that comes with Python: its manual; where that was left out, what modules say of themselves."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return "\n".join(
            str(entry.__doc__) for name in ("os", "math", "socket") for entry in vars(import_module(name)).values()
        )
    return "\n".join(topics[name] for name in sorted(topics))


class TextTokens:
    """Prompts of any length, each with another beginning.

    Args:
        tokenizer: Of the model.
        info: The model. One without a tokenizer gets made-up tokens.
        text: Whose tokens; None: `prose`.
    """

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, text: str | None = None) -> None:
        self._vocab = info.vocab_size
        self._tokens: list[int] = []
        if info.tokenizer:
            self._tokens = tokenizer.encode((prose() if text is None else text)[:_MOST_CHARACTERS])
        self._at = 0

    def prompt(self, length: int) -> list[int]:
        """The next one."""
        self._at += 1
        if not self._tokens:
            return [(self._at * 7919 + place * place) % self._vocab for place in range(length)]
        start = self._at * _STRIDE % len(self._tokens)
        found = self._tokens[start : start + length]
        while len(found) < length:
            found += self._tokens[: length - len(found)]
        return found
