"""The engine: a model over a pipeline of ranks, with an asyncio face."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipelined.clock import off_loop
from pipelined.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    PipelinedError,
    nearest,
)
from pipelined.llm.config import EngineConfig
from pipelined.llm.describing import config_of, describe_ranks, inspect_model
from pipelined.llm.epochs import EngineState, Epochs, Restarts
from pipelined.llm.memory import check_memory
from pipelined.llm.partition import partition_layers
from pipelined.llm.profiles import known_costs
from pipelined.llm.quarantine import Quarantine
from pipelined.llm.requests import LiveRequest, token_ids_of, with_seed
from pipelined.llm.text import Tokenizer
from pipelined.messages import Cancel, Outputs, SamplingParams
from pipelined.pipeline import ProcessWorld, TaskWorld, World
from pipelined.rank import LinkPlan
from pipelined.scheduler import Scheduler, SchedulerConfig
from pipelined.stage import DEVICES, check_grammar
from pipelined.trace import Span

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from pipelined.llm.outputs import RequestOutput
    from pipelined.llm.watching import RequestWatcher
    from pipelined.pipeline import Driver
    from pipelined.rank.description import RankDescription

__all__ = ["AsyncLLM", "Prompt", "inspect_model"]

Prompt = str | Sequence[int]
"""Text, or token ids."""

_ENCODE_INLINE_CHARACTERS = 4_000


class AsyncLLM:
    """A language model over a pipeline of ranks.

    ::

        async with AsyncLLM("smollm2", pp_size=2) as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    What can be refused without the ranks is refused by the constructor and by `check`, before anything is spawned.

    With `recover=True` a rank that is lost ends nothing: the others keep their weights, it begins anew, and every
    request is computed again from its prompt and what was delivered of it. Its tokens, counts and log-probabilities go
    on as if nothing had happened; new requests wait meanwhile. See `state`.

    Attributes:
        on_state: Called with the state whenever it has changed.
        on_progress: Called with a rank and what it says of its set-up.
        watcher: Told what becomes of every request.
    """

    def __init__(self, model: str | EngineConfig, *, world: World | None = None, **settings: Any) -> None:
        """Args: model: its name, with `settings` as in `EngineConfig`, or a whole config. world: where ranks live.

        Raises:
            ConfigError: The model, the partition or a setting cannot be.
        """
        self.config = model if isinstance(model, EngineConfig) else config_of(model, settings)
        kind = self.config.device.partition(":")[0]
        if kind not in DEVICES:
            raise ConfigError(f"unknown device {self.config.device!r}{nearest(kind, DEVICES)}")
        self.info = inspect_model(self.config)
        if kind == "emulated" and self.info.family != "emulated":
            raise ConfigError(f"an emulated device has no time model for {self.info.ref!r}; use device='cpu'")
        self.layers = partition_layers(self.info, self.config.pp_size, self.config.layer_partition)
        self.scheduling = SchedulerConfig(
            context_length=self.info.context_length,
            vocab_size=self.info.vocab_size,
            pp_size=self.config.pp_size,
            page_size=self.config.page_size,
            chunk_policy=self.config.chunking,
            chunked_prefill_size=self.config.chunked_prefill_size,
            smoothing_factor=self.config.smoothing_factor,
            max_micro_batch_tokens=self.config.most_tokens,
            target_itl_s=self.config.target_itl_s,
            stage_costs=known_costs(self.config, self.info, self.layers),
            max_running_requests=self.config.max_running_requests,
            radix_cache=not self.config.disable_radix_cache,
        )
        Scheduler(self.scheduling)  # what rank 0 would refuse is refused now
        self._world = world
        self._processes = world.processes if world is not None else self.config.workers == "process"
        transport = self.config.transport or ("shm://" if self._processes else "memory://")
        self._links = LinkPlan.choose(transport, processes=self._processes)
        self._epochs: Epochs | None = None
        self.on_state: Callable[[EngineState], None] = lambda _: None
        self.on_progress: Callable[[int, str], None] = lambda _rank, _what: None
        self.watcher: RequestWatcher | None = None
        self._live: dict[str, LiveRequest] = {}
        self._keys = itertools.count()
        self._emptied = asyncio.Event()
        self._quarantine = Quarantine(max(1, self.config.max_restarts - 1), self.config.max_running_requests)

    def __repr__(self) -> str:
        return f"<AsyncLLM {self.info.ref} {self.config.pp_size} stages {len(self._live)} requests>"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; loaded on first use."""
        return Tokenizer.load(self.info.tokenizer, trust_remote_code=self.config.trust_remote_code)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds: known once the ranks have agreed."""
        capacity = self._running().capacity
        return (capacity or 0) * self.config.page_size

    @property
    def state(self) -> EngineState:
        """How it is doing; may be asked at any time."""
        return self._epochs.state if self._epochs is not None else EngineState()

    def now(self) -> float:
        """Seconds of the clock that the traces of all ranks share."""
        return self._running().world.clock.now()

    # ---- life ----

    async def __aenter__(self) -> AsyncLLM:
        """Start the ranks, load the weights, agree on the capacity.

        Raises:
            PipelinedError: A rank could not; names it.
        """
        world = self._world or (ProcessWorld() if self._processes else TaskWorld())
        restarts = Restarts(self.config.max_restarts, self.config.restart_window_s) if self.config.recover else None
        epochs = self._epochs = Epochs(
            world, self._descriptions, restarts, on_outputs=self._hear, on_ready=self._resume, on_end=self._fail_all
        )
        epochs.on_state = lambda state: self.on_state(state)
        world.on_progress(lambda rank, what: self.on_progress(rank, what))
        try:
            await check_memory(self.info, self.layers, self.config.device, world)
            await epochs.start()
        except BaseException:
            self._epochs = None
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop the ranks; what is unfinished fails with `EngineClosedError`."""
        epochs, self._epochs = self._epochs, None
        if epochs is not None:
            await epochs.close()

    def _descriptions(self, epoch: int, capacity: int | None) -> list[RankDescription]:
        """Of an epoch, after one in which the ranks had agreed on `capacity`."""
        return describe_ranks(
            self.config, self.info, self.layers, self.scheduling, self._links, epoch=epoch, capacity=capacity
        )

    def _running(self) -> Epochs:
        if self._epochs is None:
            raise ConfigError("the engine is not running; use `async with AsyncLLM(...) as llm:`")
        return self._epochs

    def _open(self) -> Driver:
        """The driver of an epoch that stands.

        Raises:
            ConfigError: The engine is not running.
            PipelinedError: The pipeline is lost, and the reason.
        """
        epochs = self._running()
        if epochs.end is not None:
            raise epochs.end
        driver = epochs.driver
        if driver is None:
            raise EngineClosedError("the engine is not ready yet")
        if driver.failure.done():
            raise driver.failure.result()
        return driver

    def _admitting(self) -> Epochs:
        """Whoever takes requests now: they may have to wait for an epoch.

        Raises:
            ConfigError, PipelinedError: Nobody does.
        """
        epochs = self._running()
        if epochs.draining:
            raise EngineClosedError("the engine is about to stop and takes no new requests")
        if not epochs.recovers or not epochs.state.serves:
            self._open()
        return epochs

    # ---- requests ----

    def check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's token ids, if the request can be served.

        Raises:
            InvalidRequestError: It cannot; says what would be right.
        """
        params.check()
        check_grammar(params)
        if params.constrained and not self.tokenizer.can_text:
            raise InvalidRequestError(
                "this model has no tokenizer, so that its output cannot follow a schema or pattern"
            )
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("the prompt is empty; expected at least one token")
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = token_ids_of(prompt)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; expected at least one token")
        wrong = next((token for token in tokens if not 0 <= token < self.info.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(f"token id {wrong} is out of range; expected 0 to {self.info.vocab_size - 1}")
        if len(tokens) >= self.info.context_length:
            raise InvalidRequestError(
                f"the prompt has {len(tokens)} tokens; with one of output, the context of {self.info.context_length} "
                f"leaves room for {self.info.context_length - 1}",
                code="context_length_exceeded",
            )
        capacity = self.config.kv_cache_tokens
        if capacity is not None and len(tokens) >= capacity:
            raise InvalidRequestError(f"the prompt has {len(tokens)} tokens; the KV cache was limited to {capacity}")
        return tokens

    async def checked(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """As `check`, but what may take long is done in a thread."""
        if len(prompt) > _ENCODE_INLINE_CHARACTERS or params.constrained:
            return await off_loop(lambda: self.check(prompt, params))
        return self.check(prompt, params)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        checked: bool = False,
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt; yields its output whenever it has grown, at last with `finished` true.

        The object is the same each time. Closing the generator, or cancelling the task that iterates it, aborts the
        request; its pages are back within a step.

        Args:
            prompt: Text or token ids.
            params: How to sample; None: the defaults.
            request_id: For `abort`; None: a fresh one.
            checked: The prompt is what `checked` or `check` returned for these parameters. Then the request is known,
                and can be aborted, from the first step of the generator on.

        Raises:
            InvalidRequestError: The request cannot be served. Others are not touched.
            NonFiniteError, StageError: It failed on a rank. Likewise.
            PipelinedError: The pipeline cannot go on.
        """
        self._admitting()
        params = with_seed(params or SamplingParams())
        text = prompt if isinstance(prompt, str) else None
        if not checked or isinstance(prompt, str):
            prompt = await self.checked(prompt, params)
        key = str(next(self._keys))
        request_id = request_id if request_id is not None else f"request-{key}"
        if self._named(request_id) is not None:
            raise InvalidRequestError(f"request id {request_id!r} is in use")
        key = f"{key}:{request_id}"  # so that its name is known wherever it is spoken of
        epochs = self._admitting()
        clock = epochs.world.clock
        live = LiveRequest(request_id, text, list(prompt), params, self.tokenizer, clock.now(), key)
        self._live[key] = live
        if self.watcher is not None:
            self.watcher.arrived(live, clock.now())
        try:
            self._submit(live)
            while not live.output.finished:
                await live.changed()
                yield live.output
        finally:
            del self._live[key]
            self._release(live)
            if not self._live:
                self._emptied.set()
            for sub_id in live.unfinished():
                self._cancel(sub_id)
            if self.watcher is not None:
                self.watcher.ended(live, clock.now())

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Complete a prompt; returns the finished output. Raises as `generate` does."""
        outputs = [output async for output in self.generate(prompt, params)]
        return outputs[-1]

    async def abort(self, request_id: str) -> None:
        """End a request; its output finishes with reason "abort". Unknown ids are ignored."""
        live, epochs = self._named(request_id), self._epochs
        if live is None or epochs is None:
            return
        if epochs.live is not None:
            for sub_id in live.unfinished():
                self._cancel(sub_id)
        else:  # between two epochs: nobody else works on it
            live.abort(epochs.world.clock.now())

    def lose(self, error: PipelinedError) -> None:
        """Whoever watches it has seen that the pipeline cannot go on: as if a rank had been lost (`error.rank`)."""
        driver = self._epochs.live if self._epochs is not None else None
        if driver is not None:
            driver.lose(error)

    async def drain(self) -> None:
        """Take no more requests, and wait for those that run. Call it before leaving, to finish what was promised."""
        self._running().drain()
        while self._live:
            self._emptied.clear()
            await self._emptied.wait()

    def _named(self, request_id: str) -> LiveRequest | None:
        return next((live for live in self._live.values() if live.id == request_id), None)

    def _submit(self, live: LiveRequest) -> None:
        """Ask rank 0 for whatever is missing of it; between two epochs it waits for `_resume`."""
        driver = self._epochs.live if self._epochs is not None else None
        if driver is not None:
            live.submitted = True
            for message in live.messages(self.info.eos_token_ids):
                driver.tell_nowait(message)

    def _cancel(self, sub_id: str) -> None:
        driver = self._epochs.live if self._epochs is not None else None
        if driver is not None:
            driver.tell_nowait(Cancel(sub_id))

    def _hear(self, outputs: Outputs) -> None:
        epochs = self._epochs
        if epochs is None:
            return
        now_s, watcher = epochs.world.clock.now(), self.watcher
        for news in outputs.outputs:
            key, _, choice = news.id.rpartition("/")
            live = self._live.get(key)
            if live is None:
                continue
            if news.tokens:
                epochs.progressed()
                self._release(live)
            if live.hear(int(choice), news, now_s):
                self._cancel(news.id)
            if watcher is not None:
                watcher.heard(live, int(choice), news, now_s)
        for progress in outputs.progress if watcher is not None else ():
            live = self._live.get(progress.id.rpartition("/")[0])
            if live is not None and watcher is not None:
                watcher.progressed(live, progress)

    def _resume(self) -> None:
        """A new epoch has begun: everything that is not finished is asked for again, in the order of arrival."""
        lives = [live for live in self._live.values() if live.error is None and not live.output.finished]
        for live in self._quarantine.after_loss(lives):
            self._submit(live)
        self._running().patience = self._quarantine.patience

    def _release(self, live: LiveRequest) -> None:
        if (following := self._quarantine.released(live)) is not None:
            self._submit(following)

    def _fail_all(self, error: PipelinedError) -> None:
        for live in self._live.values():
            live.fail(error)

    # ---- seeing ----

    async def stats(self) -> dict[int, dict[str, Any]]:
        """What each rank has done so far."""
        return await self._open().query("stats")

    async def integrity(self) -> dict[int, dict[str, int]]:
        """What each rank holds."""
        return await self._open().query("integrity")

    async def trace(self) -> dict[int, list[Span]]:
        """The spans of each rank since the last call."""
        spans = await self._open().query("trace")
        return {rank: [Span(*span) for span in of_rank] for rank, of_rank in spans.items()}
