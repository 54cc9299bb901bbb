"""Plans one step from the pool: decodes first, then chunks of those in prefill, then newcomers.

When pages run out, an older request takes them from the one that arrived last; nobody takes from an older one, so the
oldest always gets on. Pages given up in a step are free from the next step on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipelined.chunking import Load
from pipelined.costs import MicroBatch
from pipelined.messages import Admit, Chunk, Decode, Release
from pipelined.scheduler.state import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipelined.chunking import Budget, ChunkPolicy
    from pipelined.messages import Item
    from pipelined.scheduler.pool import Pool
    from pipelined.scheduler.state import RequestState

__all__ = ["Draft", "Work"]

_LISTED = 32
"""Policies are told the lengths of so many prompts; planning must not get slower as more wait."""


class Work(NamedTuple):
    """A sequence's share of a step: then the KV of `computed` tokens is there. `samples`: and a token comes."""

    state: RequestState
    seq: int
    computed: int
    samples: bool


class Draft:
    """A step in the making.

    Attributes:
        items: In order, without the Releases.
        works: One for each sequence with rows.
        rows: Rows so far.
        decodes: How many of the works are decodes.
    """

    def __init__(self, pool: Pool, max_running_requests: int) -> None:
        self.items: list[Item] = []
        self.works: list[Work] = []
        self.rows = 0
        self.decodes = 0
        self._pool = pool
        self._max_running = max_running_requests
        self._busy: set[int] = set()
        self._context_tokens = 0
        self._chunks: list[tuple[int, int]] = []

    @property
    def work(self) -> MicroBatch:
        """What it costs."""
        return MicroBatch(tuple(self._chunks), self.decodes, self._context_tokens)

    def releases(self) -> list[Item]:
        """What leaves with this step, known when all else is planned."""
        return [Release(seq) for seq, _, _ in self._pool.leaving]

    def add_decodes(self, most: int) -> None:
        """Up to `most` of those that are ready, longest ready first; who lacks a page is passed over."""
        pool = self._pool
        page_size = pool.books.page_size
        for state in list(pool.ready.values()) if most else ():
            if self.decodes == most:
                break
            if state.seq not in pool.ready:  # preempted a moment ago
                continue
            position = state.planned
            if position < len(state.pages) * page_size:
                new_pages: tuple[int, ...] = ()
            elif self._make_room(state):
                new_pages = tuple(pool.books.take(1, state.pages[-1]))
                state.pages += new_pages
            else:
                continue
            del pool.ready[state.seq]
            self.items.append(Decode(state.seq, position, state.last_token, new_pages))
            self._add_work(state, 1, samples=True)
            self.decodes += 1
            self._context_tokens += position

    def add_chunks(self, policy: ChunkPolicy, flying: Iterable[MicroBatch] = ()) -> None:
        """Fill the policy's budget: first those already admitted, then newcomers, each in order of arrival."""
        pool = self._pool
        prompts = len(pool.prefill) + len(pool.waiting)
        if not prompts:
            return
        queue = [(state.planned, state.total_tokens - state.planned) for state in pool.prefill[:_LISTED]]
        queue += [(0, state.total_tokens) for state in pool.waiting[: _LISTED - len(queue)]]
        load = Load(self.decodes, self._context_tokens, prompts, tuple(queue), tuple(flying))
        budget = policy.micro_batch(load)
        for state in list(pool.prefill):
            if state.phase is Phase.PREFILL and not self._add_chunk(state, budget):
                return
        while pool.waiting and len(pool.live) < self._max_running:
            if not self._admit(pool.waiting[0], budget):
                return

    def _admit(self, state: RequestState, budget: Budget) -> bool:
        """Whether to go on with the next of the queue."""
        pool = self._pool
        leader = pool.leader_of(state)
        if leader is not None:
            pool.follow(state, leader)
            return True
        if state.refused_at == pool.books.version and pool.live:
            return False  # nothing has changed since, and looking a long prompt up again is not free
        total = state.total_tokens
        if not budget.offer(0, total):
            return False
        prefix = pool.books.match(state.tokens, 0 if state.wants_prompt_logprobs else total - 1)
        cached = len(prefix.pages) * pool.books.page_size
        need = pool.books.pages_for(total) - len(prefix.pages)
        size = self._whole_pages(cached, total, budget.offer(cached, total - cached))
        if not size or need + self._promised_pages() > pool.books.available_pages:
            pool.books.release(*prefix)
            state.refused_at = pool.books.version if size else None
            return False
        pool.admit(state, prefix)
        request = state.request
        self.items.append(
            Admit(
                seq=state.seq,
                tokens=bytes(state.tokens),
                prompt_tokens=state.prompt_tokens,
                sampling=request.sampling,
                cached_tokens=cached,
                pages=tuple(prefix.pages),
                choice=request.choice,
                eos=() if request.sampling.ignore_eos else request.eos,
            )
        )
        return self._add_chunk(state, budget)

    def _promised_pages(self) -> int:
        """Pages that admitted prompts still need, and one more for each live sequence, so that it can go on a while."""
        books = self._pool.books
        owed = sum(books.pages_for(state.total_tokens) - len(state.pages) for state in self._pool.prefill)
        return owed + len(self._pool.live)

    def _add_chunk(self, state: RequestState, budget: Budget) -> bool:
        """Plan the next chunk of an admitted prompt; whether the micro-batch may have room for another."""
        pool, books = self._pool, self._pool.books
        start, total = state.planned, state.total_tokens
        size = self._whole_pages(start, total, budget.offer(start, total - start))
        if not size or not self._make_room(state):
            return False
        held = len(state.pages)
        end = min(start + size, (held + books.available_pages) * books.page_size)
        new_pages = tuple(books.take(books.pages_for(end) - held, state.pages[-1] if held else None))
        state.pages += new_pages
        last = end == total
        self.items.append(Chunk(state.seq, start, end - start, new_pages, last))
        self._chunks.append((start, end - start))
        self._add_work(state, end - start, samples=last)
        state.prefilled_tokens += end - start
        if not state.delivered:
            state.chunks.append(end - start)
        if last:
            pool.prefill_planned(state)
        budget.spend(start, end - start)
        return end == start + size

    def _whole_pages(self, start: int, total: int, offered: int) -> int:
        """Chunks end with a page or with the prompt, so that they all begin with one."""
        if offered >= total - start:
            return total - start
        page_size = self._pool.books.page_size
        return max(0, (start + offered) // page_size * page_size - start)

    def _make_room(self, state: RequestState) -> bool:
        """Whether there is a page for it now. If not, whoever arrived last may lose his, for the next step."""
        pool = self._pool
        if pool.books.available_pages:
            return True
        if not pool.leaving:
            victim = max(pool.live.values(), key=lambda other: other.arrival)
            # One that works in this very step stays: the next step will find it idle, or out of pages itself.
            if victim.arrival > state.arrival and victim.seq not in self._busy:
                pool.preempt(victim)
        return False

    def _add_work(self, state: RequestState, rows: int, *, samples: bool) -> None:
        state.planned += rows
        self.rows += rows
        self._busy.add(state.seq)
        self.works.append(Work(state, state.seq, state.planned, samples))
