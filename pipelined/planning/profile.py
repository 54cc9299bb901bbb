"""Measures what chunks and decodes take on every stage of a running engine, and fits the cost models to it.

Prompts of real text are cut into chunks of many sizes, so that each stage sees sizes and prefixes of all kinds while
its neighbours work beside it as they do when serving. Lengths grow as far as the time allows; then sequences decode.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelined.costs import SHAPE, Fit, MicroBatch, Profile, Sample, StageProfile, fit
from pipelined.errors import ConfigError
from pipelined.llm.profiles import fingerprint
from pipelined.planning.profile_cuts import Cut, cut_params, cut_world
from pipelined.planning.profile_text import TextTokens
from pipelined.trace import parse_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipelined.llm import AsyncLLM, EngineConfig, RequestOutput
    from pipelined.trace import Span

__all__ = ["Measurement", "StageFit", "condensed", "cuts_for", "measure", "sample_of"]

LEAST_BUDGET_S = 1.0
_DECODE_SHARE = 0.15  # of the time, for decodes
_SAFETY = 1.15  # what is predicted before much is known may take longer
_ROUNDS = 64
_DECODES = 6  # tokens that each sequence gets
_WARM = 0  # place of the cut of what is not counted, and of prompts that only have to be there
_SIZES = 5
_NEAR = 64  # contexts so near each other are alike


@dataclass(frozen=True)
class StageFit:
    """What was measured on one stage, and what was made of it."""

    rank: int
    layers: tuple[int, int]
    samples: tuple[Sample, ...]
    fit: Fit


@dataclass(frozen=True)
class Measurement:
    """Of all stages.

    Attributes:
        profile: For the file. Meant to be used only once `check` has passed.
        stages: In order.
        seconds: How long it took, without starting the ranks.
    """

    profile: Profile
    stages: tuple[StageFit, ...]
    seconds: float

    def check(self) -> None:
        """Refuse a bad fit.

        Raises:
            ConfigError: Names the stage and the reason.
        """
        for stage in self.stages:
            if stage.fit.problem:
                raise ConfigError(
                    f"stage {stage.rank}: the cost model does not fit: {stage.fit.problem}; no profile was written, "
                    "measure again on an idle machine, or with a larger --budget-s"
                )


def cuts_for(context_length: int, page_size: int) -> list[Cut]:
    """How prompts are cut: the first for what is not counted, then sizes in orders that differ."""
    largest = max(1024, min(8192, context_length // 16))
    sizes = [max(page_size, (largest >> halvings) // page_size * page_size) for halvings in range(_SIZES)]
    orders = [(2, 4, 1, 3, 0), (1, 0, 3, 2, 4), (3, 1, 4, 0, 2), (2,)]
    return [Cut(sizes=(sizes[2],)), *(Cut(sizes=tuple(sizes[place] for place in order)) for order in orders)]


async def measure(
    config: EngineConfig,
    *,
    budget_s: float,
    longest_tokens: int | None = None,
    text: str | None = None,
    tell: Callable[[float, str], None] = lambda _share, _what: None,
) -> Measurement:
    """Start an engine, measure, stop it.

    Args:
        config: Which one; how it cuts does not matter.
        budget_s: Time to measure in, once the ranks are ready. What is under way then ends first.
        longest_tokens: Of a prompt; None: what the context allows.
        text: Whose tokens prompts are made of; None: a text that comes with Python.
        tell: Hears which share of the time has passed, and what is measured next.

    Raises:
        ConfigError: The budget is too short to fit anything.
    """
    from pipelined.llm import AsyncLLM

    if not budget_s >= LEAST_BUDGET_S:
        raise ConfigError(f"a budget of {budget_s:g} s is too short to measure anything; expected {LEAST_BUDGET_S:g}")
    llm = AsyncLLM(config)
    context = llm.info.context_length
    longest = min(longest_tokens or context - _DECODES - 2, context - _DECODES - 2)
    if longest_tokens is not None and not 1 <= longest_tokens <= longest:
        raise ConfigError(f"prompts of {longest_tokens} tokens: expected 1 to {longest}, the context less some output")
    cuts = cuts_for(longest, config.page_size)
    llm = AsyncLLM(config, world=cut_world(cuts, processes=config.workers == "process"))
    source = TextTokens(llm.tokenizer, llm.info, text)
    tell(0.0, "starting ranks")
    async with llm:
        session = _Session(llm, source, budget_s, tell)
        await session.run(longest, len(cuts))
        return session.result()


class _Session:
    """One engine, measured."""

    def __init__(self, llm: AsyncLLM, source: TextTokens, budget_s: float, tell: Callable[[float, str], None]) -> None:
        self._llm, self._source, self._tell = llm, source, tell
        self._budget_s = budget_s
        self._began_s = llm.now()
        self._samples: list[list[Sample]] = [[] for _ in llm.layers]
        self._longest: list[int] = []

    @property
    def _spent_s(self) -> float:
        return self._llm.now() - self._began_s

    async def run(self, longest: int, cuts: int) -> None:
        """Prompts, then decodes."""
        await self._warm(min(512, longest))
        seconds, tokens = await self._prompt(min(1024, longest), 1), min(1024, longest)
        rate = seconds / SHAPE.chunk_s(0, tokens)
        for turn in range(_ROUNDS):
            left_s = self._budget_s * (1 - _DECODE_SHARE) - self._spent_s
            length = min(longest, int(SHAPE.tokens_within(0, left_s / rate / _SAFETY)))
            if length < min(512, longest):
                break
            seconds = await self._prompt(length, 1 + turn % (cuts - 1))
            rate = seconds / SHAPE.chunk_s(0, length)
        await self._decode()

    def result(self) -> Measurement:
        """What came of it.

        Raises:
            ConfigError: Too few points.
        """
        llm = self._llm
        windows = tuple(sorted({window for window in llm.info.windows if window}))
        stages = []
        for rank, all_samples in enumerate(self._samples):
            samples = condensed(all_samples)
            try:
                found = fit(samples, windows=windows)
            except ConfigError as error:
                raise ConfigError(f"stage {rank}: {error}; give it more time (--budget-s)") from error
            stages.append(StageFit(rank, llm.layers[rank], tuple(samples), found))
        profile = Profile.of(
            fingerprint(llm.config, llm.info, llm.layers),
            [StageProfile.of(stage.samples, stage.fit) for stage in stages],
        )
        return Measurement(profile, tuple(stages), self._spent_s)

    async def _warm(self, length: int) -> None:
        """First launches are slow, and nobody's business."""
        self._say("warm-up")
        for _ in range(2):
            await self._llm.complete(self._source.prompt(length), cut_params(_WARM, 2))
        await self._llm.trace()

    async def _prompt(self, length: int, cut: int) -> float:
        """A prompt cut into chunks of many sizes; seconds to its first token."""
        self._say(f"a prompt of {length} tokens")
        tokens = self._source.prompt(length)
        output = await self._llm.complete(tokens, cut_params(cut))
        await self._collect()
        self._longest = max(self._longest, tokens, key=len)
        assert output.metrics.ttft_s is not None
        return output.metrics.ttft_s

    async def _decode(self) -> None:
        """Few and many sequences, of short and of long context. Long prompts are in the cache: they cost nothing."""
        stages, most = len(self._llm.layers), self._llm.config.max_running_requests
        page = self._llm.config.page_size
        short = min(page, len(self._longest))
        for batch, prompt in ((1, short), (1, 0), (4, 0), (8, short), (16, short)):
            if self._spent_s >= self._budget_s or batch * stages > most:
                continue
            self._say(f"{batch} decodes at a time, context {prompt or len(self._longest)}")
            prompts = [self._source.prompt(prompt) if prompt else self._longest for _ in range(batch * stages)]
            async with asyncio.TaskGroup() as group:
                for tokens in prompts:
                    group.create_task(self._answer(tokens))
            await self._collect()

    async def _answer(self, tokens: Sequence[int]) -> RequestOutput:
        return await self._llm.complete(tokens, cut_params(_WARM, _DECODES))

    async def _collect(self) -> None:
        """What the ranks have done since the last time."""
        for rank, spans in (await self._llm.trace()).items():
            self._samples[rank] += [sample for span in spans if (sample := sample_of(span)) is not None]

    def _say(self, what: str) -> None:
        self._tell(min(1.0, self._spent_s / self._budget_s), what)


def condensed(samples: Sequence[Sample]) -> list[Sample]:
    """Work that was measured several times, give or take a page of context, once, with its median time."""
    groups: dict[MicroBatch, list[Sample]] = {}
    for sample in samples:
        work = sample.work
        each = max(1, work.decodes)
        near = work._replace(context_tokens=work.context_tokens // each // _NEAR * each * _NEAR)
        groups.setdefault(near, []).append(sample)
    return [sorted(group, key=lambda one: one.seconds)[len(group) // 2] for group in groups.values()]


def sample_of(span: Span) -> Sample | None:
    """What a device's span measured; None: it is another span, or does not say."""
    seconds = span.end_s - span.start_s
    if (span.track, span.name) != ("device", "forward") or seconds <= 0:
        return None
    chunks: list[tuple[int, int]] = []
    contexts: list[int] = []
    for work in parse_work(span.detail):
        if work.prefix < 0 or work.tokens < 1:
            return None
        if work.kind == "decode":
            contexts.append(work.prefix)
        else:
            chunks.append((work.prefix, work.tokens))
    if not chunks and not contexts:
        return None
    return Sample(MicroBatch(tuple(chunks), len(contexts), sum(contexts)), seconds)
