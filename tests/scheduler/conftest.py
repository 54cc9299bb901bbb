"""A plain Python world around the scheduler: ranks whose pages hold tokens, and requests whose right answers are known.

The next token depends on all previous ones, read *through the pages*: a stale, missing or foreign page gives a wrong
token, or no token at all.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipelined.messages import (
    Admit,
    Chunk,
    Decode,
    ErrorInfo,
    Failed,
    Outcome,
    Release,
    Request,
    RequestOutput,
    Sampled,
    SamplingParams,
    Step,
    StepResult,
    pack_tokens,
    unpack_tokens,
)
from pipelined.scheduler import Scheduler, SchedulerConfig

GARBAGE = -7


def next_token(tokens: list[int], seed: int, choice: int, vocab: int) -> int:
    """The toy model."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
    return (state + 101 * seed + 37 * choice + 13 * len(tokens) * (choice + seed)) % vocab


def answer(request: Request, config: SchedulerConfig, capacity_tokens: int) -> tuple[list[int], str]:
    """What a request must get, from the start, and why it ends."""
    prompt, sampling = unpack_tokens(request.tokens), request.sampling
    limit = min(config.context_length, capacity_tokens)
    out: list[int] = []
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos))
    while True:
        out.append(next_token(prompt + out, sampling.seed or 0, request.choice, config.vocab_size))
        if out[-1] in stops:
            return out, "stop"
        if len(out) >= sampling.max_tokens or len(prompt) + len(out) >= limit:
            return out, "length"


@dataclass
class Slot:
    """A sequence on the ranks."""

    admit: Admit
    tokens: list[int]
    pages: list[int]
    filled: int


class Rank:
    """Applies steps, in order, and holds the planner to its promises."""

    def __init__(self, capacity_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.capacity_pages = capacity_pages
        self.store: dict[tuple[int, int], int] = {}
        self.slots: dict[int, Slot] = {}
        self.seen: set[int] = set()

    def write(self, seq: int, position: int, token: int) -> None:
        page = self.slots[seq].pages[position // self.page_size]
        readers = [other for other, slot in self.slots.items() if other != seq and page in slot.pages]
        assert not readers, f"page {page} is written by {seq} while {readers} may read it"
        self.store[page, position % self.page_size] = token

    def read(self, seq: int, length: int) -> list[int]:
        pages = self.slots[seq].pages
        return [self.store[pages[at // self.page_size], at % self.page_size] for at in range(length)]

    def grow(self, seq: int, new_pages: tuple[int, ...], end: int) -> None:
        slot = self.slots[seq]
        assert all(0 <= page < self.capacity_pages for page in new_pages)
        slot.pages += new_pages
        assert len(set(slot.pages)) == len(slot.pages), "a page twice in one table"
        assert len(slot.pages) == -(-end // self.page_size), "pages that nothing was planned for, or too few"

    def apply(self, step: Step, vocab: int, *, void: bool) -> dict[int, int]:
        """Returns the tokens sampled. A void step leaves garbage in its pages."""
        sampled: dict[int, int] = {}
        rows, worked = 0, set[int]()
        for item in step.items:
            if isinstance(item, Admit):
                assert item.seq not in self.seen, "a sequence number is used twice"
                self.seen.add(item.seq)
                assert item.cached_tokens == len(item.pages) * self.page_size
                tokens = unpack_tokens(item.tokens)
                assert item.cached_tokens < len(tokens), "no row is left to run"
                self.slots[item.seq] = Slot(item, tokens, list(item.pages), item.cached_tokens)
            elif isinstance(item, Chunk | Decode):
                assert item.seq not in worked, "a sequence twice in a step"
                worked.add(item.seq)
                rows += self._run(item, sampled, vocab, void=void)
        assert rows == step.rows
        for item in step.items:  # what is released may not be written before the next step
            if isinstance(item, Release):
                assert item.seq not in worked
                del self.slots[item.seq]
        return sampled

    def _run(self, item: Chunk | Decode, sampled: dict[int, int], vocab: int, *, void: bool) -> int:
        slot = self.slots[item.seq]
        if isinstance(item, Chunk):
            start, count, last = item.start, item.tokens, item.last
            assert count > 0
            assert start % self.page_size == 0, "a chunk begins inside a page"
            assert last == (start + count == len(slot.tokens))
        else:
            start, count, last = item.position, 1, True
            slot.tokens.append(item.token)
            assert len(slot.tokens) == start + 1
        assert start == slot.filled, "a gap, or tokens run twice"
        slot.filled += count
        self.grow(item.seq, item.new_pages, slot.filled)
        for at in range(start, start + count):
            self.write(item.seq, at, GARBAGE if void else slot.tokens[at])
        if last and not void:
            admit = slot.admit
            sampled[item.seq] = next_token(
                self.read(item.seq, slot.filled), admit.sampling.seed or 0, admit.choice, vocab
            )
        return count


@dataclass
class Workload:
    """What happens to a scheduler.

    Attributes:
        arrivals: (round, request). cancels: (round, id).
        fail_share, void_share: How often a sequence, or a whole step, fails.
    """

    arrivals: list[tuple[int, Request]]
    cancels: list[tuple[int, str]] = field(default_factory=list)
    fail_share: float = 0.0
    void_share: float = 0.0
    seed: int = 0


class World:
    """A scheduler, a window of steps in flight, and ranks that run behind it."""

    def __init__(self, config: SchedulerConfig, capacity_pages: int, window: int) -> None:
        self.config, self.window = config, window
        self.capacity_tokens = capacity_pages * config.page_size
        self.scheduler = Scheduler(config)
        self.scheduler.start(3, capacity_pages)
        self.rank = Rank(capacity_pages, config.page_size)
        self.planned: deque[Step] = deque()
        self.executed: deque[tuple[StepResult, Step]] = deque()
        self.owner: dict[int, str] = {}
        self.delivered: dict[str, list[int]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.hurt: set[str] = set()
        self.steps: list[Step] = []
        self.most_chunks_in_flight = 0
        self.counts: Counter[str] = Counter()
        self._admit_order: deque[str] = deque()

    def in_flight(self) -> list[Step]:
        return [step for step in (*(s for _, s in self.executed), *self.planned) if step.rows]

    def plan(self) -> Step | None:
        if len(self.in_flight()) >= self.window:
            return None
        step = self.scheduler.next_step(0.0)
        if step is not None:
            assert step.items
            assert (step.epoch, step.number) == (3, len(self.steps))
            self.steps.append(step)
            self.planned.append(step)
            self._check_flight()
        return step

    def _check_flight(self) -> None:
        decodes, chunks = Counter[int](), Counter[int]()
        steps = self.in_flight()
        for step in steps:
            decodes.update(item.seq for item in step.items if isinstance(item, Decode))
            chunks.update(item.seq for item in step.items if isinstance(item, Chunk))
        assert max(decodes.values(), default=0) <= 1, "a sequence decodes in two steps in flight"
        self.most_chunks_in_flight = max(self.most_chunks_in_flight, *chunks.values(), 0)
        with_decodes = [step for step in steps if any(isinstance(item, Decode) for item in step.items)]
        assert len(with_decodes) <= self.config.pp_size
        for item in self.steps[-1].items:
            if isinstance(item, Admit):
                self.counts["cached"] += item.cached_tokens > 0

    def execute(self, rng: random.Random, load: Workload) -> None:
        step = self.planned.popleft()
        void = bool(step.rows) and rng.random() < load.void_share
        tokens = self.rank.apply(step, self.config.vocab_size, void=void)
        if not step.rows:
            return
        outcomes: list[Outcome] = []
        works = [item.seq for item in step.items if isinstance(item, Chunk | Decode)]
        for seq in works:
            if not void and rng.random() < load.fail_share:
                outcomes.append(Failed(seq, ErrorInfo("NonFiniteError", "injected")))
                self.hurt.add(f"seq{seq}")
            elif seq in tokens:
                outcomes.append(Sampled(seq, tokens[seq]))
        error = ErrorInfo("StageError", "injected") if void else None
        if void:
            self.hurt.update(f"seq{seq}" for seq in works)
        self.executed.append((StepResult(3, step.number, tuple(outcomes), error), step))

    def report(self) -> None:
        result, _ = self.executed.popleft()
        self.scheduler.apply(result)

    def read_news(self) -> None:
        for output in self.scheduler.news():
            assert output.id not in self.ended, f"{output.id} got news after its end"
            self.delivered.setdefault(output.id, []).extend(unpack_tokens(output.tokens))
            if output.finish_reason or output.error:
                self.ended[output.id] = output
                self.counts["preempted"] += output.preemptions
                self.counts[output.finish_reason or "error"] += 1

    def run(self, load: Workload, max_rounds: int = 20_000) -> None:
        """Until everything has ended; rounds are random in what moves."""
        rng = random.Random(load.seed)
        arrivals, cancels = deque(sorted(load.arrivals, key=lambda a: a[0])), deque(sorted(load.cancels))
        for now in range(max_rounds):
            while arrivals and arrivals[0][0] <= now:
                self.scheduler.submit(arrivals.popleft()[1])
            while cancels and cancels[0][0] <= now:
                self.scheduler.cancel(cancels.popleft()[1])
            for _ in range(rng.randint(0, self.window)):
                self.plan()
            for _ in range(rng.randint(0, 2)):
                if self.planned:
                    self.execute(rng, load)
            if self.executed and rng.random() < 0.6:
                self.report()
            self.read_news()
            if now % 16 == 0:
                self.scheduler.integrity()
            if not arrivals and not cancels and self.scheduler.idle() and not self.planned:
                return
            if not (arrivals or self.planned or self.executed or self.plan()) and not self.scheduler.idle():
                raise AssertionError(f"stuck: {self.scheduler!r}")
        raise AssertionError(f"not done after {max_rounds} rounds: {self.scheduler!r}")

    def check(self, load: Workload) -> None:
        """Every request ended once, with the right tokens or an error that something explains."""
        scheduler = self.scheduler
        assert not any(scheduler.integrity().values()), scheduler.integrity()
        assert not self.rank.slots, "a sequence was left on the ranks"
        stats = scheduler.stats()
        assert stats["available_pages"] == stats["pages"], "pages were left behind"
        self.counts["evicted"] += stats["evicted_pages"]
        cancelled = {id for _, id in load.cancels}
        first = min(load.arrivals, key=lambda arrival: arrival[0])[1]
        assert not self.ended[first.id].preemptions, "the oldest request was preempted"
        assert set(self.ended) == {request.id for _, request in load.arrivals}
        for _, request in load.arrivals:
            last = self.ended[request.id]
            resumed = unpack_tokens(request.generated)
            right, reason = answer(request, self.config, self.capacity_tokens)
            got = resumed + self.delivered[request.id]
            assert got == right[: len(got)], f"{request.id}: wrong tokens"
            if last.error is not None:
                assert load.fail_share or load.void_share, f"{request.id}: {last.error}"
            elif last.finish_reason == "abort":
                assert request.id in cancelled
            else:
                assert (got, last.finish_reason) == (right, reason)
                assert last.stop_token == (right[-1] if reason == "stop" and len(got) > len(resumed) else None)
                if not resumed:
                    assert last.cached_tokens + sum(last.chunks) == len(unpack_tokens(request.tokens))


def make_request(
    id: str, prompt: list[int], *, choice: int = 0, eos: tuple[int, ...] = (), **sampling: object
) -> Request:
    """A request with seed 0 and the given sampling."""
    params = SamplingParams(**{"seed": 0, "max_tokens": 8, **sampling})  # type: ignore[arg-type]
    return Request(id=id, tokens=pack_tokens(prompt), sampling=params, choice=choice, eos=eos)


DEFAULTS = {
    "pp_size": 4,
    "page_size": 4,
    "chunked_prefill_size": 8,
    "context_length": 1000,
    "vocab_size": 100,
}


class Hand:
    """A scheduler driven by hand: every sampled token is `token`."""

    def __init__(self, capacity: int = 100, **settings: Any) -> None:
        self.scheduler = Scheduler(SchedulerConfig(**{**DEFAULTS, **settings}))
        self.scheduler.start(0, capacity)
        self.flying: list[Step] = []
        self.token = 5

    def step(self) -> Step | None:
        step = self.scheduler.next_step(0.0)
        if step is not None and step.rows:
            self.flying.append(step)
        return step

    def steps(self, most: int = 100) -> list[Step]:
        """All that can be planned now."""
        made: list[Step] = []
        while len(made) < most and (step := self.step()) is not None:
            made.append(step)
        return made

    def apply(
        self, *, failed: tuple[int, ...] = (), error: ErrorInfo | None = None, extra: tuple[Any, ...] = ()
    ) -> None:
        """The oldest step comes back."""
        step = self.flying.pop(0)
        outcomes: list[Any] = list(extra)
        for item in step.items:
            if isinstance(item, Chunk | Decode):
                if item.seq in failed:
                    outcomes.append(Failed(item.seq, ErrorInfo("NonFiniteError", "NaN")))
                elif isinstance(item, Decode) or item.last:
                    outcomes.append(Sampled(item.seq, self.token))
        self.scheduler.apply(StepResult(0, step.number, () if error else tuple(outcomes), error))

    def finish(self) -> list[RequestOutput]:
        """Run until idle; all the news."""
        news = self.scheduler.news()
        for _ in range(1000):
            self.steps(most=4 - len(self.flying))
            if self.flying:
                self.apply()
            news += self.scheduler.news()
            if self.scheduler.idle():
                assert not any(self.scheduler.integrity().values())
                return news
        raise AssertionError("not idle after 1000 results")


def chunks(step: Step | None) -> list[tuple[int, int, int]]:
    assert step is not None
    return [(item.seq, item.start, item.tokens) for item in step.items if isinstance(item, Chunk)]


def decodes(step: Step) -> int:
    return sum(isinstance(item, Decode) for item in step.items)


@dataclass
class Toolbox:
    """What tests get from here."""

    world = World
    hand = Hand
    chunks = staticmethod(chunks)
    decodes = staticmethod(decodes)
    workload = Workload
    request = staticmethod(make_request)
    answer = staticmethod(answer)


@pytest.fixture(scope="session")
def toolbox() -> Toolbox:
    return Toolbox()
