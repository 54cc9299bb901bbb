"""A model under check: how its stages are built, what it is asked, what it answers uncut and alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, NoReturn

import msgspec

from pipelined.errors import ConfigError
from pipelined.messages import Failed, PromptLogprobs, Sampled, SamplingParams
from pipelined.testing.check import CheckFailed
from pipelined.testing.stage_chain import StageChain
from pipelined.testing.stage_script import Answer, Asked, Planned, Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipelined.messages import Outcome, TokenLogprob
    from pipelined.stage import ModelInfo, Stage, StageContext

__all__ = ["StageWorld", "tolerance_of"]

_NEW_TOKENS = 4
_TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
_MOST_PAGES = 64


def tolerance_of(dtype: str) -> float:
    """How far a log-probability may be off: the order of summation differs between batches."""
    return _TOLERANCES.get(dtype, 0.0)


@dataclass
class StageWorld:
    """Where a check of stages runs.

    Attributes:
        info, build: The model.
        rule: Rule under check, for the errors.
        quick: Fewer cuts and fewer random runs.
        tolerance: Of log-probabilities; tokens may differ only where two are closer than that.
        reference: Right answers from elsewhere: (prompt, new tokens, sampling) -> token ids, None where it has none.
    """

    info: ModelInfo
    build: Callable[[ModelInfo, tuple[int, int], StageContext], Stage]
    rule: str
    quick: bool
    tolerance: float
    reference: Callable[[Sequence[int], int, SamplingParams], Sequence[int] | None] | None = None
    requests: list[Asked] = field(default_factory=list)
    truth: list[Answer] = field(default_factory=list)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.info.options.page_size

    # ---- judging ----

    def fail(self, happened: str, expected: str) -> NoReturn:
        """Raise `CheckFailed` for this rule."""
        raise CheckFailed(self.rule, happened, expected)

    def expect(self, holds: bool, happened: str, expected: str) -> None:
        """Fail unless `holds`."""
        if not holds:
            self.fail(happened, expected)

    def chain(self, edges: Sequence[int] | None = None) -> StageChain:
        """The stages of a cut; uncut without `edges`."""
        return StageChain(self.info, self.build, edges or (0, self.info.layers))

    def cut(self) -> tuple[int, ...]:
        """Edges of the cut that most checks use: in the middle, or none where the model cannot be cut."""
        cuts = self.info.cuts
        return (0, cuts[len(cuts) // 2], self.info.layers) if cuts else (0, self.info.layers)

    def cuts(self) -> list[tuple[int, ...]]:
        """Edges of the cuts to try: 1 to 4 stages, for each number of stages some of the legal cuts."""
        most = 1 if self.quick else 6
        found: list[tuple[int, ...]] = []
        for inner in range(min(3, len(self.info.cuts)) + 1):
            every = list(combinations(self.info.cuts, inner))
            stride = max(1, len(every) // most)
            found += [(0, *cut, self.info.layers) for cut in every[stride // 2 :: stride][:most]]
        return found

    def script(self, chain: StageChain, seed: int = 0) -> Script:
        """Steps for that chain, whose pages are handed out in an order of its own."""
        pages = _MOST_PAGES if chain.capacity is None else chain.capacity
        needed = 2 * max(-(-(len(asked.prompt) + asked.new_tokens) // self.page_size) for asked in self.requests)
        if pages < needed:
            raise ConfigError(f"the stages hold {pages} pages of {self.page_size} tokens; the kit needs {needed}")
        return Script(self.requests, self.truth, page_size=self.page_size, pages=pages, seed=seed)

    def judge(self, why: str, failing: frozenset[int] = frozenset()) -> Callable[[Planned, Sequence[Outcome]], None]:
        """What compares the outcomes of steps with the truth; `failing`: sequences that must fail."""

        def compare(planned: Planned, outcomes: Sequence[Outcome]) -> None:
            self._compare(planned, outcomes, why, failing)

        return compare

    def _compare(self, planned: Planned, outcomes: Sequence[Outcome], why: str, failing: frozenset[int]) -> None:
        due = dict(planned.due)
        scored: dict[int, int] = {}
        for outcome in outcomes:
            if outcome.seq not in planned.asked:
                self.fail(f"{why}: an outcome for sequence {outcome.seq}, which is not in the step", "none")
            name = f"{why}: request {self.requests[planned.asked[outcome.seq]].name!r}"
            if isinstance(outcome, Failed):
                self._failed(outcome, name, failing)
                due.pop(outcome.seq, None)
            elif isinstance(outcome, Sampled):
                self.expect(outcome.seq in due, f"{name} got a token too many", "one for each that was asked for")
                request, index = due.pop(outcome.seq)
                self.expect(outcome.seq not in failing, f"{name} got a token", "Failed: its input was not finite")
                self._token(outcome, request, index, f"{name}, new token {index}")
            else:
                scored[outcome.seq] = scored.get(outcome.seq, 0) + len(outcome.entries)
                self._scores(outcome, planned, name)
        if due:
            names = [self.requests[request].name for request, _ in due.values()]
            self.fail(f"{why}: no outcome in step {planned.step.number} for {', '.join(names)}", "one for each")
        for seq, positions in planned.scored.items():
            if self.truth[planned.asked[seq]].prompt and seq not in failing:
                expected, got = len(positions), scored.get(seq, 0)
                self.expect(got == expected, f"{why}: {got} prompt tokens scored", f"{expected}")

    def _failed(self, outcome: Failed, name: str, failing: frozenset[int]) -> None:
        if outcome.seq not in failing:
            self.fail(f"{name} failed: {outcome.error.kind}: {outcome.error.message}", "its tokens")

    def _token(self, outcome: Sampled, request: int, index: int, name: str) -> None:
        right = self.truth[request]
        token, logprobs = right.tokens[index], right.logprobs[index]
        if outcome.token != token and not self._tie(outcome.token, logprobs):
            self.fail(f"{name} is {outcome.token}", f"{token}, as uncut and alone")
        if bool(outcome.logprobs) != bool(logprobs):
            self.fail(f"{name} has {len(outcome.logprobs)} log-probabilities", f"{len(logprobs)}, as uncut and alone")
        self._near(outcome.logprobs, logprobs, name)

    def _tie(self, token: int, logprobs: Sequence[TokenLogprob]) -> bool:
        other = next((entry.logprob for entry in logprobs[1:] if entry.token == token), None)
        return other is not None and abs(logprobs[0].logprob - other) <= 2 * self.tolerance

    def _scores(self, outcome: PromptLogprobs, planned: Planned, name: str) -> None:
        right = self.truth[planned.asked[outcome.seq]].prompt
        for position, entries in enumerate(outcome.entries, outcome.start):
            self.expect(position in right, f"{name}: prompt position {position} was scored", f"{sorted(right)}")
            self._near(entries, right[position], f"{name}, prompt position {position}")

    def _near(self, got: Sequence[TokenLogprob], right: Sequence[TokenLogprob], name: str) -> None:
        """Log-probabilities by rank: near ties may change which token has it."""
        by_token = {entry.token: entry.logprob for entry in right}
        for entry in got:
            if entry.token in by_token and not abs(entry.logprob - by_token[entry.token]) <= self.tolerance:
                self.fail(
                    f"{name}: log-probability {entry.logprob:.6g} of token {entry.token}",
                    f"{by_token[entry.token]:.6g} within {self.tolerance:g}, as uncut and alone",
                )

    # ---- truth ----

    def learn(self) -> None:
        """Make the requests, and find the right answers: each alone, in one chunk, on uncut stages of its own."""
        self.requests = _requests(self.info)
        self.truth = [Answer() for _ in self.requests]
        for request, answer in enumerate(self.truth):
            with self.chain() as chain:
                chain.run(_alone(self.script(chain), request), partial(self._note, answer))

    def _note(self, answer: Answer, planned: Planned, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                self.fail(f"a request alone failed: {outcome.error.message}", "its tokens")
            elif isinstance(outcome, Sampled):
                answer.tokens.append(outcome.token)
                answer.logprobs.append(outcome.logprobs)
            else:
                answer.prompt.update(enumerate(outcome.entries, outcome.start))
        if planned.due and len(answer.tokens) != next(iter(planned.due.values()))[1] + 1:
            self.fail(f"a request alone has {len(answer.tokens)} tokens after {planned.step!r}", "one more each time")


def _alone(script: Script, request: int) -> Iterator[Planned]:
    """The steps of one request, each planned when it is asked for: by then the token that it carries is known."""
    seq = script.admit(request)
    while not script.running[seq].over:
        script.advance(seq, 1 << 30)
        yield script.step()


def _requests(info: ModelInfo) -> list[Asked]:
    """Prompts around the page size, of tokens that look random; greedy, sampled, with penalties, with scores."""
    page, room = info.options.page_size, info.context_length - _NEW_TOKENS
    exact = info.dtype not in ("float16", "bfloat16")
    greedy = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, logprobs=4)
    penalised = msgspec.structs.replace(greedy, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
    sampled = SamplingParams(temperature=0.9, top_k=20, seed=7, max_tokens=_NEW_TOKENS, logprobs=0)
    kinds = [
        ("one token", 1, greedy),
        ("a page less one", page - 1, greedy),
        ("a page, scored", page, msgspec.structs.replace(greedy, prompt_logprobs=1)),
        ("a page and one, penalised", page + 1, penalised),
        ("two pages and three, sampled", 2 * page + 3, sampled if exact else greedy),
        ("three pages", 3 * page, greedy),
    ]
    state, requests = 1, []
    for name, length, sampling in kinds:
        prompt: list[int] = []
        for _ in range(max(1, min(length, room))):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            prompt.append((state >> 33) % info.vocab_size)
        requests.append(Asked(name, tuple(prompt), _NEW_TOKENS, sampling))
    return requests
