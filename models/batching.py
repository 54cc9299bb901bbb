"""Applies steps to the sequences of a stage: token ids, KV slots and what to run next.

Pure Python, no torch: every model stage keeps its host-side state with it, and every rank gets the same from the same
steps. Knows nothing of weights or of the memory that slots point into.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipelined.errors import ProtocolError
from pipelined.messages import Admit, Chunk, Decode, Release, SamplingParams, unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipelined.messages import Step

__all__ = ["Batch", "Segment", "SequenceState", "Sequences", "SlotRun"]

SlotRun = tuple[int, int]
"""(first slot, number of slots), consecutive in memory; slot = page id * page size + offset in the page."""


@dataclass(frozen=True)
class Segment:
    """The tokens of one sequence that a step runs.

    Attributes:
        seq: Which sequence.
        start: Position of its first token; the KV of all positions before it is there already.
        token_ids: The tokens to run.
        runs: KV slots of the positions [0, start + length), in order; maximal consecutive runs.
        sample: Whether the token after the last row is asked for.
        prompt_logprobs: As in `SamplingParams`, where this segment's rows predict prompt tokens; else None.
        prompt_targets: Only with `prompt_logprobs`: the prompt tokens that the rows predict, at positions start + 1
            on. One fewer than there are rows where the last row predicts the first generated token.
    """

    seq: int
    start: int
    token_ids: tuple[int, ...]
    runs: tuple[SlotRun, ...]
    sample: bool
    prompt_logprobs: int | None = None
    prompt_targets: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Rows of this segment."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Batch:
    """What a step runs: rows of activations are those of its segments, back to back."""

    number: int
    rows: int
    segments: tuple[Segment, ...]

    def __repr__(self) -> str:
        return f"<Batch {self.number} rows={self.rows} segments={len(self.segments)}>"

    def describe(self) -> str:
        """For traces: `#7 prefill 1024@2048, #3 decode 1@90` (tokens behind a prefix)."""
        return ", ".join(
            f"#{segment.seq} {'decode' if segment.length == 1 and segment.start else 'prefill'} "
            f"{segment.length}@{segment.start}"
            for segment in self.segments
        )


@dataclass
class SequenceState:
    """What a stage knows of an admitted sequence. Changed only by `Sequences.apply`.

    Attributes:
        seq: The scheduler's number for it.
        tokens: Prompt and what was generated and has been run or is being run.
        prompt_tokens: How many of them are prompt.
        sampling, choice, eos: As admitted.
        done: Positions whose KV is there, or will be once the steps applied so far have run.
        pages: Number of pages held.
    """

    seq: int
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    choice: int
    eos: tuple[int, ...]
    done: int = 0
    pages: int = 0
    _runs: list[SlotRun] = field(default_factory=list)
    _prompt_ids: tuple[int, ...] | None = None

    @property
    def generated(self) -> tuple[int, ...]:
        """The generated tokens so far (a copy)."""
        return tuple(self.tokens[self.prompt_tokens :])

    def prompt_ids(self) -> tuple[int, ...]:
        """The distinct token ids of the prompt; found once, as a prompt may be a million tokens long."""
        if self._prompt_ids is None:
            self._prompt_ids = tuple(set(self.tokens[: self.prompt_tokens]))
        return self._prompt_ids

    def add_pages(self, pages: Sequence[int], page_size: int) -> None:
        """The next positions live in these pages."""
        runs = self._runs
        for page in pages:
            slot = page * page_size
            if runs and runs[-1][0] + runs[-1][1] == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + page_size)
            else:
                runs.append((slot, page_size))
        self.pages += len(pages)

    def runs(self, length: int, page_size: int) -> tuple[SlotRun, ...]:
        """Slots of the first `length` positions. Costs a copy of the run list, whatever the length."""
        excess, last = self.pages * page_size - length, len(self._runs)
        while last and excess >= self._runs[last - 1][1]:
            last -= 1
            excess -= self._runs[last][1]
        cut = self._runs[:last]
        if excess:
            cut[-1] = (cut[-1][0], cut[-1][1] - excess)
        return tuple(cut)


class Sequences:
    """All admitted sequences of a stage."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._states: dict[int, SequenceState] = {}

    def __repr__(self) -> str:
        return f"<Sequences {len(self._states)} admitted, page_size={self._page_size}>"

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def states(self) -> Mapping[int, SequenceState]:
        """By number. Live: changes with the next `apply`."""
        return self._states

    def apply(self, step: Step) -> Batch | None:
        """Apply the items of `step`, in order.

        Returns:
            What to run, independent of later steps; None if nothing flows (`rows` is 0).

        Raises:
            ProtocolError: An unknown or doubly admitted sequence, a gap (the start is not what was run so far), too few
                pages, rows that the items don't add up to. The plan and this rank have parted: nothing can go on.
        """
        segments: list[Segment] = []
        for item in step.items:
            if isinstance(item, Chunk):
                segments.append(self._chunk(step, item))
            elif isinstance(item, Decode):
                segments.append(self._decode(step, item))
            elif isinstance(item, Admit):
                self._admit(step, item)
            elif isinstance(item, Release):
                self._state(step, item)
                del self._states[item.seq]
            else:
                raise _violation(step, f"a stage that runs sequences got {item!r}")
        if len({segment.seq for segment in segments}) != len(segments):
            raise _violation(step, "a sequence appears in two segments of one step")
        rows = sum(segment.length for segment in segments)
        if rows != step.rows:
            raise _violation(step, f"the step says {step.rows} rows, its items add up to {rows}")
        return Batch(step.number, rows, tuple(segments)) if rows else None

    def reset(self) -> None:
        """Forget all sequences."""
        self._states.clear()

    def integrity(self) -> dict[str, int]:
        """What is held; a page shared by two sequences counts twice."""
        return {"sequences": len(self._states), "pages": sum(state.pages for state in self._states.values())}

    def _admit(self, step: Step, item: Admit) -> None:
        if item.seq in self._states:
            raise _violation(step, f"sequence {item.seq} is admitted twice")
        tokens = unpack_tokens(item.tokens)
        cached = item.cached_tokens
        if not 0 < item.prompt_tokens <= len(tokens):
            raise _violation(step, f"sequence {item.seq}: {item.prompt_tokens} prompt tokens of {len(tokens)}")
        if cached % self._page_size or not 0 <= cached < len(tokens):
            raise _violation(
                step,
                f"sequence {item.seq}: {cached} cached tokens of {len(tokens)}; expected a multiple of "
                f"{self._page_size} that leaves at least one token to run",
            )
        state = SequenceState(item.seq, tokens, item.prompt_tokens, item.sampling, item.choice, item.eos, done=cached)
        state.add_pages(item.pages, self._page_size)
        self._check_pages(step, state, cached)
        self._states[item.seq] = state

    def _chunk(self, step: Step, item: Chunk) -> Segment:
        state = self._state(step, item)
        end = item.start + item.tokens
        if item.tokens < 1 or end > len(state.tokens):
            raise _violation(
                step, f"sequence {item.seq}: chunk of {item.tokens} tokens at {item.start} of {len(state.tokens)}"
            )
        if item.last and end != len(state.tokens):
            raise _violation(step, f"sequence {item.seq}: last chunk ends at {end} of {len(state.tokens)} tokens")
        return self._advance(step, state, item.start, end, item.new_pages, sample=item.last)

    def _decode(self, step: Step, item: Decode) -> Segment:
        state = self._state(step, item)
        if item.position != len(state.tokens):
            raise _violation(
                step, f"sequence {item.seq}: token to decode at {item.position}, but {len(state.tokens)} are known"
            )
        state.tokens.append(item.token)
        return self._advance(step, state, item.position, item.position + 1, item.new_pages, sample=True)

    def _advance(
        self, step: Step, state: SequenceState, start: int, end: int, pages: Sequence[int], *, sample: bool
    ) -> Segment:
        if start != state.done:
            raise _violation(step, f"sequence {state.seq}: starts at {start}, but {state.done} tokens have been run")
        state.add_pages(pages, self._page_size)
        self._check_pages(step, state, end)
        state.done = end
        asked = state.sampling.prompt_logprobs
        targets: tuple[int, ...] = ()
        if asked is not None and start + 1 < state.prompt_tokens:
            targets = tuple(state.tokens[start + 1 : min(end + 1, state.prompt_tokens)])
        return Segment(
            seq=state.seq,
            start=start,
            token_ids=tuple(state.tokens[start:end]),
            runs=state.runs(end, self._page_size),
            sample=sample,
            prompt_logprobs=asked if targets else None,
            prompt_targets=targets,
        )

    def _check_pages(self, step: Step, state: SequenceState, tokens: int) -> None:
        if state.pages * self._page_size < tokens:
            raise _violation(
                step, f"sequence {state.seq}: {state.pages} pages of {self._page_size} cannot hold {tokens} tokens"
            )

    def _state(self, step: Step, item: Chunk | Decode | Release) -> SequenceState:
        state = self._states.get(item.seq)
        if state is None:
            raise _violation(step, f"{type(item).__name__} of sequence {item.seq}, which is not admitted")
        return state


def _violation(step: Step, what: str) -> ProtocolError:
    return ProtocolError(f"step {step.epoch}.{step.number}: {what}")
