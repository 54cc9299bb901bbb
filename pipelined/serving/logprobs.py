"""Log-probabilities in the two shapes that OpenAI's API has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipelined.llm.outputs import Logprob

__all__ = ["CompletionLogprobs", "chat_logprobs"]

_LEAST: Final = -9999.0
"""JSON has no infinity."""


def _name(token: int, text: str | None, *, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids or text is None else text


class CompletionLogprobs:
    """Builds the object of `/v1/completions` piece by piece, with offsets that go on."""

    def __init__(self, token_text: Callable[[int], str | None], *, as_ids: bool = False, offset: int = 0) -> None:
        """Args: as_ids: name tokens `token_id:NUMBER`. offset: characters before the first token."""
        self._token_text = token_text
        self._as_ids = as_ids
        self._offset = offset

    def of(self, entries: Iterable[dict[int, Logprob] | None], tokens: Sequence[int]) -> dict[str, Any]:
        """The next tokens; of the first token of a prompt nothing is known (None)."""
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, entry in zip(tokens, entries, strict=False):
            chosen = entry[token] if entry is not None else None
            text = self._token_text(token) if chosen is None else chosen.decoded_token
            name = _name(token, text, as_ids=self._as_ids)
            found["tokens"].append(name)
            found["token_logprobs"].append(None if chosen is None else max(chosen.logprob, _LEAST))
            found["top_logprobs"].append(None if entry is None else self._top(entry))
            found["text_offset"].append(self._offset)
            self._offset += len(name)
        return found

    def _top(self, entry: dict[int, Logprob]) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, one in entry.items():  # of two tokens with one text, the likelier counts
            name = _name(token, one.decoded_token, as_ids=self._as_ids)
            top[name] = max(one.logprob, top.get(name, _LEAST))
        return top


def chat_logprobs(
    entries: Sequence[dict[int, Logprob]], tokens: Sequence[int], top: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """The object of `/v1/chat/completions`; `top` of the most likely tokens at each place."""

    def one(token: int, entry: Logprob) -> dict[str, Any]:
        name = _name(token, entry.decoded_token, as_ids=as_ids)
        broken = "\N{REPLACEMENT CHARACTER}" in name
        return {
            "token": name,
            "logprob": max(entry.logprob, _LEAST),
            "bytes": None if broken else list(name.encode("utf-8", "replace")),
        }

    content = []
    for token, entry in zip(tokens, entries, strict=True):
        likely = sorted(entry.items(), key=lambda pair: -pair[1].logprob)[:top]
        content.append(one(token, entry[token]) | {"top_logprobs": [one(*pair) for pair in likely]})
    return {"content": content, "refusal": None}
