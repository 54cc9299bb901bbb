"""Between text and token ids: the tokenizer, text that streams token by token, and stop strings.

Knows nothing of requests or of the engine. `transformers` is imported when a tokenizer is loaded, and only then.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipelined.errors import InvalidRequestError, MissingDependencyError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["IncrementalDetokenizer", "NoTokenizer", "StopChecker", "TextStream", "Tokenizer", "overlap"]

_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
# A character is four bytes at most, and a token carries a byte at least: what an unfinished character still waits for
# began no more than this many tokens ago.
_UNFINISHED_TOKENS: Final = 3
_SILENT_TOKENS: Final = 16


class Tokenizer:
    """A model's tokenizer, as far as the engine needs one.

    Args:
        inner: A tokenizer of `transformers`, or anything with its `encode`, `decode` and `apply_chat_template`.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.special_token_ids: frozenset[int] = frozenset(getattr(inner, "all_special_ids", None) or ())

    @classmethod
    def load(cls, ref: str, *, trust_remote_code: bool = False) -> Tokenizer:
        """The tokenizer at `ref`: a directory, a `.gguf` file or a name; `""` gives a `NoTokenizer`.

        Raises:
            MissingDependencyError: `transformers` is not installed.
            ModelError: There is no usable tokenizer at `ref`.
        """
        if not ref:
            return NoTokenizer()
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingDependencyError("a tokenizer", "pip install 'pipelined[llm]'") from error
        source, extra = ref, {}
        if ref.endswith(".gguf"):
            source, extra = str(Path(ref).parent), {"gguf_file": Path(ref).name}
        try:
            inner = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **extra)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"no tokenizer could be loaded from {ref!r}: {reason}") from error
        return cls(inner)

    @property
    def can_text(self) -> bool:
        """Whether there is a tokenizer at all; False: token ids only."""
        return True

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token as the tokenizer knows it; the model may know more."""
        eos = getattr(self._inner, "eos_token_id", None)
        return () if eos is None else (int(eos),)

    @property
    def chat_template(self) -> str:
        """The template's source; of several, all of them; "" where there is none."""
        template = getattr(self._inner, "chat_template", None) or ""
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work."""
        return bool(self.chat_template)

    @property
    def inner(self) -> Any:
        """The tokenizer of `transformers`; None without one."""
        return self._inner

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens that the model wants at its beginning, such as a BOS.

        Raises:
            InvalidRequestError: `text` is not valid Unicode.
        """
        _check_unicode(text)
        return [int(token) for token in self._inner.encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; U+FFFD stands for bytes that make no character, nothing for ids that are unknown."""
        text: str = self._inner.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_text(self, token_id: int) -> str | None:
        """Text of one token on its own, special or not. None without a tokenizer."""
        return self.decode([token_id], skip_special_tokens=False)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_args: Any,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: `{"role": ..., "content": ...}` each.
            add_generation_prompt: End with what makes the model answer.
            chat_template: Used in place of the model's own.
            template_args: Handed to the template (`tools`, `enable_thinking`, ...).

        Raises:
            InvalidRequestError: The model has no chat template, or its template refuses the messages.
        """
        return self.encode(
            self.chat_text(
                messages, add_generation_prompt=add_generation_prompt, chat_template=chat_template, **template_args
            ),
            add_special_tokens=False,  # the template has written them already
        )

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_args: Any,
    ) -> str:
        """The text that `chat` encodes. Same arguments and errors."""
        if not chat_template and not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template; send a plain prompt, or give a chat template of your own"
            )
        _check_messages(messages)
        try:
            text: str = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_args,
            )
        except _template_errors() as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}") from error
        return text


class NoTokenizer(Tokenizer):
    """For models without a tokenizer: token ids in, token ids out; the text is always empty."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def can_text(self) -> bool:
        """False."""
        return False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Refused.

        Raises:
            InvalidRequestError: Always.
        """
        raise InvalidRequestError("this model has no tokenizer; send the prompt as token ids instead of text")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Nothing."""
        return ""

    def token_text(self, token_id: int) -> str | None:
        """None."""
        return None


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens, piece by piece.

    Nothing emitted is ever taken back, no piece ends inside a character, and the pieces together are what decoding all
    tokens at once gives. (Tokenizers that spell rare characters as `<0xHH>` tokens replace a whole run of them once a
    byte in it is invalid; there, that holds for valid text.)

    A piece of text depends on its neighbours (a space before a word, bytes of one character spread over tokens), so
    tokens are decoded behind one token of context, the last one emitted, and wait until their text is complete. A token
    costs the decoding of those few, never of the whole output.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._waiting: list[int] = []
        self._anchor: list[int] | None = None

    def push(self, token_id: int) -> str:
        """Append a token; returns the text that is now certain, often that of the token, sometimes none."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_token_ids:
            return ""
        self._waiting.append(token_id)
        text = self._decode_waiting()
        if text and not text.endswith(_BROKEN):
            self._advance(len(self._waiting), token_id)
            return text
        if not text:
            if len(self._waiting) > _SILENT_TOKENS:
                del self._waiting[0]
            return ""
        return self._settle(text)

    def flush(self) -> str:
        """No more tokens come: the text that waited, with U+FFFD for a character that was not finished."""
        text = self._decode_waiting()
        self._waiting.clear()
        return text

    def _decode_waiting(self) -> str:
        if not self._waiting:
            return ""
        return self._decode(self._context + self._waiting)[len(self._context_text) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _settle(self, text: str) -> str:
        # The text ends in U+FFFD. What lies further back than an unfinished character can reach is settled, if it can
        # be cut off there without changing the text: so a stream of invalid bytes neither stalls nor grows the window.
        for cut in range(len(self._waiting) - _UNFINISHED_TOKENS, 0, -1):
            head = self._decode(self._context + self._waiting[:cut])[len(self._context_text) :]
            anchor, anchor_text = self._anchored()
            tail = self._decode(anchor + self._waiting[cut:])[len(anchor_text) :]
            if head and anchor and head + tail == text:
                self._advance(cut, None)
                return head
        return ""

    def _advance(self, count: int, last: int | None) -> None:
        del self._waiting[:count]
        if last is not None:
            text = self._decode([last])
            if text and _BROKEN not in text:
                self._context, self._context_text = [last], text
                return
        self._context, self._context_text = self._anchored()

    def _anchored(self) -> tuple[list[int], str]:
        """A harmless token of context, for where the last one emitted is only part of a character."""
        if self._anchor is None:
            tokens = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
            text = self._decode(tokens)
            self._anchor = tokens if text and _BROKEN not in text else []
        return list(self._anchor), self._decode(self._anchor) if self._anchor else ""


class StopChecker:
    """Ends a stream of text at the first stop string, wherever its pieces are cut.

    Text that may be the beginning of a stop string is held back. The stop string that is complete first wins (of two
    that end at the same place, the longer one), so the outcome does not depend on how the text is cut into pieces.

    Attributes:
        stopped_by: The stop string that was found, or None.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise InvalidRequestError("a stop string is empty; leave it out, or give at least one character")
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, text: str, *, check: bool = True) -> str:
        """Append `text`; returns what may be shown. After a stop: nothing, ever.

        Args:
            text: What comes next.
            check: False lets it all pass unseen (the request asked for more tokens before anything may stop it).
        """
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        self._held = ""
        if not check or not self._stops:
            return text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped_by = min(found)
            return text[:start]
        keep = max(overlap(text, stop) for stop in self._stops)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text

    def flush(self) -> str:
        """No more text comes: what was held back after all was no stop string."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """Token ids in, text to show out: an `IncrementalDetokenizer` and a `StopChecker` in a row, for one continuation.

    Attributes:
        text: Everything emitted so far.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = (), *, skip_special_tokens: bool = True) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._checker = StopChecker(stops)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it, or None."""
        return self._checker.stopped_by

    def push(self, token_id: int, *, check_stops: bool = True) -> str:
        """Append a token; returns the text that may be shown now. Look at `stopped_by` afterwards."""
        return self._emit(self._checker.push(self._detokenizer.push(token_id), check=check_stops))

    def finish(self) -> str:
        """No more tokens come: the rest of the text. Sets `stopped_by` if that completes a stop string."""
        rest = self._checker.push(self._detokenizer.flush())
        return self._emit(rest + self._checker.flush())

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _template_errors() -> tuple[type[Exception], ...]:
    """What a template raises: its own errors, and Python's where a message is not of the form that it expects."""
    python_errors = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    try:
        from jinja2 import TemplateError
    except ImportError:
        return python_errors
    return (TemplateError, *python_errors)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt is not valid Unicode: a lone surrogate at character {error.start}; send well-formed text"
        ) from error


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequestError("the conversation is empty; send at least one message")
    for number, message in enumerate(messages):
        if "role" not in message or not isinstance(message["role"], str):
            raise InvalidRequestError(f'message {number} has no role; expected {{"role": "user", "content": ...}}')
