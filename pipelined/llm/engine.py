"""The engine: a model over a pipeline of ranks, with an asyncio face."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import msgspec

from pipelined.clock import off_loop
from pipelined.errors import ConfigError, InvalidRequestError, ModelError, PipelinedError, TransportError, nearest
from pipelined.llm.config import EngineConfig
from pipelined.llm.partition import partition_layers
from pipelined.llm.requests import LiveRequest, with_seed
from pipelined.llm.text import Tokenizer
from pipelined.messages import Cancel, Outputs, SamplingParams
from pipelined.pipeline import Driver, ProcessWorld, TaskWorld, World
from pipelined.rank import LinkPlan, RankConfig
from pipelined.rank.description import FAMILIES, ModelPart, PlannerRef, RankDescription
from pipelined.scheduler import Scheduler, SchedulerConfig
from pipelined.stage import DEVICES, LoadOptions, ModelInfo
from pipelined.trace import Span

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pipelined.llm.outputs import RequestOutput

__all__ = ["AsyncLLM", "Prompt", "inspect_model"]

Prompt = str | Sequence[int]
"""Text, or token ids."""

_ENCODE_INLINE_CHARACTERS = 4_000


def inspect_model(config: EngineConfig) -> ModelInfo:
    """What is known of the model before anything is spawned.

    Raises:
        ModelError: No family knows it, or it cannot be used; says why.
    """
    options = LoadOptions(
        dtype=config.dtype,
        load_format=config.load_format,
        context_length=config.context_length,
        trust_remote_code=config.trust_remote_code,
        page_size=config.page_size,
        kv_cache_tokens=config.kv_cache_tokens,
    )
    points = sorted(entry_points(group=FAMILIES), key=lambda point: (point.name == "hf", point.name))
    for point in points:  # the Hugging Face family comes last: it claims whatever could be a hub id
        found = point.load()()
        if found.claims(config.model):
            info: ModelInfo = found.inspect(config.model, options)
            return info
    raise ModelError(f"no model family knows {config.model!r}; installed: {', '.join(p.name for p in points)}")


class AsyncLLM:
    """A language model over a pipeline of ranks.

    ::

        async with AsyncLLM("smollm2", pp_size=2) as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    What can be refused without the ranks is refused by the constructor and by `check`, before anything is spawned.
    """

    def __init__(self, model: str | EngineConfig, *, world: World | None = None, **settings: Any) -> None:
        """Args: model: its name, with `settings` as in `EngineConfig`, or a whole config. world: where ranks live.

        Raises:
            ConfigError: The model, the partition or a setting cannot be.
        """
        self.config = model if isinstance(model, EngineConfig) else _config(model, settings)
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
            stage_costs=self.config.stage_costs,
            max_running_requests=self.config.max_running_requests,
            radix_cache=not self.config.disable_radix_cache,
        )
        Scheduler(self.scheduling)  # what rank 0 would refuse is refused now
        self._world = world
        self._processes = world.processes if world is not None else self.config.workers == "process"
        transport = self.config.transport or ("shm://" if self._processes else "memory://")
        self._links = LinkPlan.choose(transport, processes=self._processes)
        self._driver: Driver | None = None
        self._live: dict[str, LiveRequest] = {}
        self._keys = itertools.count()

    def __repr__(self) -> str:
        return f"<AsyncLLM {self.info.ref} {self.config.pp_size} stages {len(self._live)} requests>"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; loaded on first use."""
        return Tokenizer.load(self.info.tokenizer, trust_remote_code=self.config.trust_remote_code)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds: known once the ranks have agreed."""
        return (self._open().capacity or 0) * self.config.page_size

    def now(self) -> float:
        """Seconds of the clock that the traces of all ranks share."""
        return self._open().clock.now()

    # ---- life ----

    async def __aenter__(self) -> AsyncLLM:
        """Start the ranks, load the weights, agree on the capacity.

        Raises:
            PipelinedError: A rank could not; names it.
        """
        world = self._world or (ProcessWorld() if self._processes else TaskWorld())
        driver = Driver(self._descriptions(), world, on_outputs=self._hear)
        await driver.__aenter__()
        driver.failure.add_done_callback(lambda failure: self._fail_all(failure.result()))
        self._driver = driver
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop the ranks; what is unfinished fails with `EngineClosedError`."""
        driver, self._driver = self._driver, None
        if driver is not None:
            await driver.__aexit__(*exc)

    def _descriptions(self) -> list[RankDescription]:
        config = self.config
        planner = PlannerRef("pipelined.scheduler:from_json", msgspec.json.encode(self.scheduling).decode())
        return [
            RankDescription(
                config=RankConfig(
                    pipeline="llm",
                    rank=rank,
                    size=config.pp_size,
                    window=config.pp_size + config.depth,
                    step_timeout_s=config.step_timeout_s,
                    setup_timeout_s=config.setup_timeout_s,
                ),
                links=self._links,
                device=config.device,
                threads=config.threads,
                part=ModelPart(self.info, layers),
                planner=planner if rank == 0 else None,
            )
            for rank, layers in enumerate(self.layers)
        ]

    def _open(self) -> Driver:
        if self._driver is None:
            raise ConfigError("the engine is not running; use `async with AsyncLLM(...) as llm:`")
        if self._driver.failure.done():
            raise self._driver.failure.result()
        return self._driver

    # ---- requests ----

    def check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's token ids, if the request can be served.

        Raises:
            InvalidRequestError: It cannot; says what would be right.
        """
        params.check()
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("the prompt is empty; expected at least one token")
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = _token_ids(prompt)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; expected at least one token")
        wrong = next((token for token in tokens if not 0 <= token < self.info.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(f"token id {wrong} is out of range; expected 0 to {self.info.vocab_size - 1}")
        if len(tokens) >= self.info.context_length:
            raise InvalidRequestError(
                f"the prompt has {len(tokens)} tokens; with one of output, the context of {self.info.context_length} "
                f"leaves room for {self.info.context_length - 1}"
            )
        capacity = self.config.kv_cache_tokens
        if capacity is not None and len(tokens) >= capacity:
            raise InvalidRequestError(f"the prompt has {len(tokens)} tokens; the KV cache was limited to {capacity}")
        return tokens

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt; yields its output whenever it has grown, at last with `finished` true.

        The object is the same each time. Closing the generator, or cancelling the task that iterates it, aborts the
        request; its pages are back within a step.

        Raises:
            InvalidRequestError: The request cannot be served. Others are not touched.
            NonFiniteError, StageError: It failed on a rank. Likewise.
            PipelinedError: The pipeline cannot go on.
        """
        driver = self._open()
        params = with_seed(params or SamplingParams())
        text = prompt if isinstance(prompt, str) else None
        if len(prompt) > _ENCODE_INLINE_CHARACTERS:
            tokens = await off_loop(lambda: self.check(prompt, params))
        else:
            tokens = self.check(prompt, params)
        key = str(next(self._keys))
        request_id = request_id if request_id is not None else f"request-{key}"
        if self._named(request_id) is not None:
            raise InvalidRequestError(f"request id {request_id!r} is in use")
        live = LiveRequest(request_id, text, tokens, params, self.tokenizer, driver.clock.now(), key)
        self._live[key] = live
        try:
            for message in live.messages(self.info.eos_token_ids):
                await driver.tell(message)
            while not live.output.finished:
                await live.changed()
                yield live.output
        finally:
            del self._live[key]
            if not driver.failure.done():
                for sub_id in live.unfinished():
                    await self._cancel(sub_id)

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Complete a prompt; returns the finished output. Raises as `generate` does."""
        outputs = [output async for output in self.generate(prompt, params)]
        return outputs[-1]

    async def abort(self, request_id: str) -> None:
        """End a request; its output finishes with reason "abort". Unknown ids are ignored."""
        live = self._named(request_id)
        for sub_id in live.unfinished() if live else ():
            await self._cancel(sub_id)

    def _named(self, request_id: str) -> LiveRequest | None:
        return next((live for live in self._live.values() if live.id == request_id), None)

    async def _cancel(self, sub_id: str) -> None:
        try:
            await self._open().tell(Cancel(sub_id))
        except (ConfigError, PipelinedError, TransportError):
            return  # the pipeline is over, and the request with it

    def _hear(self, outputs: Outputs) -> None:
        driver = self._driver
        if driver is None:
            return
        now_s = driver.clock.now()
        for news in outputs.outputs:
            key, _, choice = news.id.rpartition("/")
            live = self._live.get(key)
            if live is not None and live.hear(int(choice), news, now_s):
                driver.tell_nowait(Cancel(news.id))

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


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        wrong = next(token for token in prompt if not hasattr(token, "__index__"))
        raise InvalidRequestError(f"token id {wrong!r} is no whole number; expected text, or a list of them") from None


def _config(model: str, settings: dict[str, Any]) -> EngineConfig:
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, known)}")
    partition = settings.get("layer_partition")
    if partition is not None:
        settings = {**settings, "layer_partition": tuple(partition)}
    return EngineConfig(model=model, **settings)
