"""The synchronous face of the engine: `LLM(model).generate(prompts)`."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import uvloop

from pipelined.errors import EngineClosedError, InvalidRequestError, PipelinedError
from pipelined.llm.engine import AsyncLLM, Prompt
from pipelined.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from pipelined.llm.outputs import RequestOutput

__all__ = ["LLM"]


class _LoopThread:
    """A thread with a loop in which the engine lives."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self._main, name="pipelined-llm", daemon=True)
        self.thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


class LLM:
    """A language model over a pipeline of ranks, for scripts.

    ::

        with LLM("smollm2", pp_size=2) as llm:
            for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    The ranks start in the constructor and end with `close`, with the `with` block, or with the object.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        """Args: model, settings: as in `EngineConfig`.

        Raises:
            PipelinedError: As `AsyncLLM` raises it, on construction and on entering.
        """
        self.engine = AsyncLLM(model, **settings)
        thread = _LoopThread()
        life = _Life(self.engine)
        self._thread = thread
        try:
            thread.run(life.start())
        except BaseException:  # also Ctrl-C while the ranks start
            _shut_down(thread, life)
            raise
        self._close = weakref.finalize(self, _shut_down, thread, life)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the ranks. Idempotent."""
        self._close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete prompts, all at the same time; outputs in the order of the prompts.

        Args:
            prompts: A prompt (text or token ids), or a list of them.
            params: For all of them, or one each.

        Raises:
            InvalidRequestError: One of them cannot be served; nothing has been started then.
            PipelinedError: One of them failed, or the pipeline cannot go on.
        """
        self._check_open()
        many: list[Prompt] = [prompts] if _is_one(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(f"{len(each)} sampling params for {len(many)} prompts; expected one each, or one")
        for prompt, own in zip(many, each, strict=True):
            self.engine.check(prompt, own)
        outputs: list[RequestOutput] = self._thread.run(self._generate(many, each))
        return outputs

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **template_args: Any
    ) -> list[RequestOutput]:
        """Answer a conversation, through the model's chat template."""
        return self.generate([self.engine.tokenizer.chat(messages, **template_args)], params)

    async def _generate(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[RequestOutput]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(prompt, own)) for prompt, own in zip(prompts, params, strict=True)]
        results = [task.result() for task in tasks]
        for result in results:
            if isinstance(result, PipelinedError):
                raise result  # only now: the others ran to their end
        return [result for result in results if not isinstance(result, PipelinedError)]

    async def _one(self, prompt: Prompt, params: SamplingParams) -> RequestOutput | PipelinedError:
        try:
            return await self.engine.complete(prompt, params)
        except PipelinedError as error:
            return error

    def _check_open(self) -> None:
        if not self._close.alive:
            raise EngineClosedError("the LLM is closed")

    def stats(self) -> dict[int, dict[str, Any]]:
        """What each rank has done so far."""
        self._check_open()
        stats: dict[int, dict[str, Any]] = self._thread.run(self.engine.stats())
        return stats


class _Life:
    """Holds the engine open in one task, as its task groups require."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Event | None = None
        self._ready = False

    async def start(self) -> None:
        self._closing = asyncio.Event()
        ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._live(self._closing, ready), name="llm")
        await asyncio.wait([self._task, ready], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task

    async def _live(self, closing: asyncio.Event, ready: asyncio.Future[None]) -> None:
        async with self._engine:
            self._ready = True
            if not ready.done():
                ready.set_result(None)
            await closing.wait()

    async def stop(self) -> None:
        if self._closing is None or self._task is None:
            return
        self._closing.set()
        if not self._ready:
            self._task.cancel()
        await asyncio.wait([self._task])
        if self._ready and not self._task.cancelled():
            await self._task


def _shut_down(thread: _LoopThread, life: _Life) -> None:
    try:
        thread.run(life.stop())
    finally:
        thread.stop()


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (
        isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)
    )
