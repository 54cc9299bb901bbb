"""Requests, their right answers, and steps that make stages give them: any chunks, any batches, any pages.

A script knows every token beforehand, since each `Decode` carries its own: it can be prepared ahead as far as one
likes, and what one wrong answer does is not carried into the next.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipelined.messages import Admit, Chunk, Decode, Item, Release, SamplingParams, Step, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipelined.messages import TokenLogprob

__all__ = ["Answer", "Asked", "Planned", "Script", "mixed"]


@dataclass(frozen=True)
class Asked:
    """A request of the kit's: `new_tokens` tokens after `prompt`."""

    name: str
    prompt: tuple[int, ...]
    new_tokens: int
    sampling: SamplingParams


@dataclass
class Answer:
    """What a request is answered with: tokens, log-probabilities where asked for, and the prompt's by position."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    prompt: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A step, and what it must lead to.

    Attributes:
        step: The step.
        due: By sequence: which request, and which of its new tokens is to be sampled.
        asked: By sequence: which request it serves, for all that run in this step.
        rows: By sequence: its first row and how many it has.
        scored: By sequence: prompt positions that must be scored.
    """

    step: Step
    due: Mapping[int, tuple[int, int]]
    asked: Mapping[int, int]
    rows: Mapping[int, tuple[int, int]]
    scored: Mapping[int, range]


@dataclass
class _Running:
    request: int
    asked: Asked
    answer: Answer
    admitted: int  # tokens given with its admission
    resumed: int  # of them new ones
    pages: list[int]
    done: int = 0

    @property
    def over(self) -> bool:
        return self.done == len(self.asked.prompt) + self.asked.new_tokens - 1


class Script:
    """Builds steps. `admit`, `advance` and `release` add to the next one; `step` closes it.

    Pages that a sequence gives back go to whoever asks next, from the following step on.
    """

    def __init__(
        self, requests: Sequence[Asked], answers: Sequence[Answer], *, page_size: int, pages: int, seed: int = 0
    ) -> None:
        """Args: answers: may still grow while the script is written, for the tokens not yet needed."""
        self.requests = requests
        self.answers = answers
        self.page_size = page_size
        self.rng = random.Random(seed)
        self.running: dict[int, _Running] = {}
        self.free = deque(self.rng.sample(range(pages), pages))
        self._returned: list[int] = []
        self._items: list[Item] = []
        self._due: dict[int, tuple[int, int]] = {}
        self._asked: dict[int, int] = {}
        self._rows: dict[int, tuple[int, int]] = {}
        self._scored: dict[int, range] = {}
        self._number = self._next_seq = self._width = 0
        self._holders: dict[int, int] = {}

    def pages_for(self, request: int) -> int:
        """How many pages a request takes in all."""
        asked = self.requests[request]
        return -(-(len(asked.prompt) + asked.new_tokens) // self.page_size)

    def admit(self, request: int, *, generated: int = 0, prefix: Sequence[int] = (), seq: int | None = None) -> int:
        """Admit a request, `generated` of whose new tokens are known already, and `prefix` pages of whose KV.

        Returns:
            The number of its sequence.
        """
        asked, answer = self.requests[request], self.answers[request]
        tokens = [*asked.prompt, *answer.tokens[:generated]]
        number = self._next_seq if seq is None else seq
        self._next_seq = max(self._next_seq, number) + 1
        cached = len(prefix) * self.page_size
        self.running[number] = _Running(request, asked, answer, len(tokens), generated, list(prefix), cached)
        for page in prefix:
            self._holders[page] = self._holders.get(page, 0) + 1
        self._items.append(
            Admit(number, pack_tokens(tokens), len(asked.prompt), asked.sampling, cached, tuple(prefix), 0, ())
        )
        return number

    def advance(self, seq: int, tokens: int) -> None:
        """Run the next chunk of at most `tokens` tokens, or the next decode."""
        run = self.running[seq]
        start = run.done
        if start < run.admitted:
            count = min(tokens, run.admitted - start)
            last = start + count == run.admitted
            new = self._grow(run, start + count)
            self._items.append(Chunk(seq, start, count, new, last=last))
            sampled = run.resumed if last else None
            self._score(seq, run, start, start + count)
        else:
            count, token = 1, run.answer.tokens[start - len(run.asked.prompt)]
            self._items.append(Decode(seq, start, token, self._grow(run, start + 1)))
            sampled = start - len(run.asked.prompt) + 1
        if sampled is not None:
            self._due[seq] = (run.request, sampled)
        self._asked[seq] = run.request
        self._rows[seq] = (self._width, count)
        self._width += count
        run.done = start + count

    def _score(self, seq: int, run: _Running, start: int, end: int) -> None:
        first, until = start + 1, min(end + 1, len(run.asked.prompt))
        if run.asked.sampling.prompt_logprobs is not None and first < until:
            self._scored[seq] = range(first, until)

    def _grow(self, run: _Running, tokens: int) -> tuple[int, ...]:
        need = max(0, -(-tokens // self.page_size) - len(run.pages))
        new = tuple(self.free.popleft() for _ in range(need))
        for page in new:
            self._holders[page] = self._holders.get(page, 0) + 1
        run.pages += new
        return new

    def release(self, seq: int) -> list[int]:
        """Release a sequence; its pages, of which those that nobody else holds may be used again."""
        run = self.running.pop(seq)
        self._items.append(Release(seq))
        for page in run.pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._returned.append(page)
        return run.pages

    def step(self) -> Planned:
        """The step that the items so far make."""
        step = Step(0, self._number, self._width, tuple(self._items))
        planned = Planned(step, self._due, self._asked, self._rows, self._scored)
        self.free.extendleft(reversed(self._returned))  # dirty pages first
        self._returned, self._items, self._width = [], [], 0
        self._due, self._asked, self._rows, self._scored = {}, {}, {}, {}
        self._number += 1
        return planned

    def alone(self, request: int, chunks: Sequence[int], *, generated: int = 0) -> list[Planned]:
        """One request from admission to release, nobody beside it; the last chunk size is repeated."""
        seq, steps, at = self.admit(request, generated=generated), [], 0
        while not self.running[seq].over:
            self.advance(seq, chunks[min(at, len(chunks) - 1)])
            steps.append(self.step())
            at += 1
        self.release(seq)
        return [*steps, self.step()]


def mixed(script: Script, order: Sequence[int], *, most: int = 4, longest: int = 16) -> list[Planned]:
    """All requests of `order` in random batches: who runs beside whom, in which order and in what chunks is chance."""
    rng, waiting, steps = script.rng, deque(order), []
    while waiting or script.running:
        over = [seq for seq, run in script.running.items() if run.over]
        for seq in over:
            script.release(seq)
        promised = sum(script.pages_for(run.request) - len(run.pages) for run in script.running.values())
        while waiting and len(script.running) < most and (not script.running or rng.random() < 0.6):
            if promised + script.pages_for(waiting[0]) > len(script.free):
                break
            promised += script.pages_for(waiting[0])
            script.admit(waiting.popleft())
        active = list(script.running)
        for seq in rng.sample(active, rng.randint(1, len(active)) if active else 0):
            script.advance(seq, rng.randint(1, longest))
        steps.append(script.step())
    return steps
