"""One request at the front: its continuations, their text, and what the user sees of them."""

from __future__ import annotations

import asyncio
import operator
import secrets
from typing import TYPE_CHECKING

import msgspec

from pipelined.errors import InvalidRequestError
from pipelined.llm.outputs import CompletionOutput, RequestOutput, logprobs_of, prompt_logprobs_of
from pipelined.llm.text import TextStream
from pipelined.messages import Request, pack_tokens, unpack_tokens
from pipelined.messages import RequestOutput as News

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.errors import PipelinedError
    from pipelined.llm.text import Tokenizer
    from pipelined.messages import SamplingParams, TokenLogprob

__all__ = ["LiveRequest", "token_ids_of", "with_seed"]


def with_seed(params: SamplingParams) -> SamplingParams:
    """The same, with a fresh seed if it had none."""
    return params if params.seed is not None else msgspec.structs.replace(params, seed=secrets.randbits(63))


def token_ids_of(prompt: Sequence[int]) -> list[int]:
    """The prompt, if it is a list of whole numbers.

    Raises:
        InvalidRequestError: It is not; names what is none.
    """
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        wrong = next(token for token in prompt if not hasattr(token, "__index__"))
        raise InvalidRequestError(f"token id {wrong!r} is no whole number; expected text, or a list of them") from None


class LiveRequest:
    """Turns news from rank 0 into a `RequestOutput` that grows.

    It is also the record by which a request goes on after a loss: its prompt, and what was delivered of it.

    Attributes:
        submitted: Whether rank 0 was ever asked.
        losses: How often the pipeline was lost since the last token of it.
        probed: How often of these while it was the only suspect.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        now_s: float,
        key: str,
    ) -> None:
        """Args: key: names it to rank 0; never used twice, whatever ids users choose."""
        self.id = request_id
        self.key = key
        self.params = params
        self.output = RequestOutput(request_id, prompt, token_ids, [CompletionOutput(i) for i in range(params.n)])
        self.error: PipelinedError | None = None
        self.submitted = False
        self.losses = 0
        self.probed = 0
        self._tokenizer = tokenizer
        self._submitted_s = now_s
        self._streams = [TextStream(tokenizer, params.stop) for _ in range(params.n)]
        self._preempted = 0
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        done = sum(choice.finished for choice in self.output.outputs)
        return f"<LiveRequest {self.id} {done}/{self.params.n} finished>"

    def sub_id(self, choice: int) -> str:
        """The scheduler's name for one continuation."""
        return f"{self.key}/{choice}"

    def messages(self, eos: tuple[int, ...]) -> list[Request]:
        """What rank 0 is asked: a sequence for each continuation that is not finished, with what there is of it."""
        tokens = pack_tokens(self.output.prompt_token_ids)
        eos = () if self.params.ignore_eos else eos
        self._preempted = self.output.metrics.preemptions
        return [
            Request(
                self.sub_id(choice.index),
                tokens,
                self.params,
                choice=choice.index,
                eos=eos,
                generated=pack_tokens(choice.token_ids),
            )
            for choice in self.output.outputs
            if not choice.finished
        ]

    def unfinished(self) -> list[str]:
        """Sub-ids that rank 0 still works on."""
        return [self.sub_id(choice.index) for choice in self.output.outputs if not choice.finished]

    def hear(self, choice: int, news: News, now_s: float) -> bool:
        """Take in news of one continuation.

        Returns:
            Whether a stop string has just ended it, so that rank 0 must be told.
        """
        output, metrics = self.output, self.output.metrics
        mine, stream = output.outputs[choice], self._streams[choice]
        if mine.finished:
            return False
        tokens = unpack_tokens(news.tokens)
        if tokens and self.params.prompt_logprobs is not None and output.prompt_logprobs is None:
            # They come whole with the first token of each continuation, equal in all of them.
            output.prompt_logprobs = prompt_logprobs_of(news.prompt_logprobs, self._tokenizer.token_text)
        if tokens and metrics.ttft_s is None:
            metrics.ttft_s = now_s - self._submitted_s
        if choice == 0:
            metrics.cached_tokens = max(metrics.cached_tokens, news.cached_tokens)
            metrics.chunks.extend(news.chunks[len(metrics.chunks) :])
        metrics.preemptions = max(metrics.preemptions, self._preempted + news.preemptions)
        if tokens:
            self.losses = self.probed = 0
        for index, token in enumerate(tokens):
            mine.token_ids.append(token)
            if self.params.logprobs is not None and index < len(news.logprobs):
                self._add_logprobs(mine, news.logprobs[index])
            stream.push(token, check_stops=len(mine.token_ids) >= self.params.min_tokens)
            if stream.stopped_by is not None:
                self._finish(mine, "stop", stream.stopped_by, now_s)
                return news.finish_reason is None
        if news.error is not None:
            self.fail(news.error.exception())
        elif news.finish_reason is not None:
            stream.finish()
            reason = stream.stopped_by or (news.stop_token if news.stop_token in self.params.stop_token_ids else None)
            self._finish(mine, "stop" if stream.stopped_by else news.finish_reason, reason, now_s)
        mine.text = stream.text
        self._changed.set()
        return False

    def _add_logprobs(self, mine: CompletionOutput, entry: tuple[TokenLogprob, ...]) -> None:
        mine.logprobs = (mine.logprobs or []) + logprobs_of([entry], self._tokenizer.token_text)
        mine.cumulative_logprob = (mine.cumulative_logprob or 0.0) + entry[0].logprob

    def _finish(self, mine: CompletionOutput, reason: str, stop_reason: int | str | None, now_s: float) -> None:
        mine.text = self._streams[mine.index].text
        mine.finish_reason, mine.stop_reason = reason, stop_reason
        if all(choice.finished for choice in self.output.outputs):
            self.output.finished = True
            self.output.metrics.e2e_s = now_s - self._submitted_s
        self._changed.set()

    def abort(self, now_s: float) -> None:
        """Its owner ends it while nobody works on it."""
        for choice in self.output.outputs:
            if not choice.finished:
                self.hear(choice.index, News(self.sub_id(choice.index), finish_reason="abort"), now_s)

    def fail(self, error: PipelinedError) -> None:
        """It ends with an error."""
        self.error = self.error or error
        self._changed.set()

    async def changed(self) -> None:
        """Wait for news since the last call.

        Raises:
            PipelinedError: The request failed.
        """
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error
