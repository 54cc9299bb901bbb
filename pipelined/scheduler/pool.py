"""All requests of an epoch: who waits, who holds pages, who comes next. Moves them; plans nothing.

A request is in one place at a time::

    waiting ──admit──> prefill ──begin_decode──> ready <──> in flight
       ^  └─follow─> followers of a leader          │
       └──────────── preempt ───────────────────────┘        withdraw: out of any of them, for good
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from pipelined.scheduler.state import NO_SEQ, Phase, RequestState

if TYPE_CHECKING:
    from pipelined.kv import Node, PageBooks, Prefix

__all__ = ["Pool"]


def _arrival(state: RequestState) -> int:
    return state.arrival


class Pool:
    """The requests, and the books of their pages.

    Attributes:
        books: Of this epoch's KV pages.
        requests: By id, until they end.
        waiting: Not admitted, in order of arrival.
        prefill: Admitted, with prompt tokens that are not planned yet, in order of arrival.
        ready: By seq: their next decode may be planned; longest ready first.
        live: By seq: everything admitted.
        leaving: Sequences that need a `Release`: (seq, pages, lock). Their pages are theirs until it is planned.
        decoding: How many are in phase DECODE, ready or in flight.
    """

    def __init__(self, books: PageBooks) -> None:
        self.books = books
        self.requests: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []
        self.prefill: list[RequestState] = []
        self.ready: dict[int, RequestState] = {}
        self.live: dict[int, RequestState] = {}
        self.leaving: list[tuple[int, list[int], Node | None]] = []
        self.decoding = 0
        self.following = 0
        self.preemptions = 0
        self._leaders: dict[bytes, RequestState] = {}
        self._next_seq = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits into the cache."""
        return self.books.capacity_pages * self.books.page_size

    def enqueue(self, state: RequestState) -> None:
        """It waits, at its place in the order of arrival."""
        state.phase = Phase.WAITING
        insort(self.waiting, state, key=_arrival)

    def leader_of(self, state: RequestState) -> RequestState | None:
        """Who is prefilling the same prompt right now, if waiting for him saves work."""
        return None if state.wants_prompt_logprobs else self._leaders.get(state.request.tokens)

    def follow(self, state: RequestState, leader: RequestState) -> None:
        """Out of the queue until the leader's prefill is over, one way or another."""
        self._remove(self.waiting, state)
        state.phase, state.leader = Phase.FOLLOWING, leader
        leader.followers.append(state)
        self.following += 1

    def admit(self, state: RequestState, prefix: Prefix) -> None:
        """It gets a number and the pages of its cached prefix."""
        self._remove(self.waiting, state)
        state.phase, state.seq = Phase.PREFILL, self._next_seq
        self._next_seq += 1
        state.pages, state.lock = prefix.pages, prefix.lock
        state.planned = state.computed = len(prefix.pages) * self.books.page_size
        if not state.delivered:  # what the user is told is of the prefill that led to the first token
            state.cached_tokens = state.planned
            state.chunks.clear()
            state.prompt_logprobs.clear()
        self.live[state.seq] = state
        insort(self.prefill, state, key=_arrival)
        findable = (state.prompt_tokens - 1) // self.books.page_size
        if self.books.radix_cache and len(prefix.pages) < findable:  # others who wait for it will find more than now
            self._leaders.setdefault(state.request.tokens, state)

    def prefill_planned(self, state: RequestState) -> None:
        """Its last chunk is planned."""
        self._remove(self.prefill, state)

    def begin_decode(self, state: RequestState) -> None:
        """Its prefill is done: whole pages become findable, followers may come."""
        state.phase = Phase.DECODE
        self.decoding += 1
        self._keep(state, leaving=False)
        self._free_followers(state)

    def preempt(self, state: RequestState) -> None:
        """It gives up its pages and waits to be computed again."""
        self._keep(state, leaving=True)
        self._leave(state)
        state.preemptions += 1
        self.preemptions += 1
        self.enqueue(state)

    def withdraw(self, state: RequestState, *, keep: bool) -> None:
        """It has ended. `keep`: what it computed is sound and may serve others."""
        if state.phase is Phase.WAITING:
            self._remove(self.waiting, state)
        elif state.phase is Phase.FOLLOWING:
            assert state.leader is not None, "a follower without leader"
            state.leader.followers.remove(state)
            state.leader = None
            self.following -= 1
        else:
            if keep:
                self._keep(state, leaving=True)
            self._leave(state)
        state.phase = Phase.ENDED
        del self.requests[state.request.id]

    def collect_leaving(self) -> None:
        """The Releases are planned: what the leaving held goes back."""
        for _, pages, lock in self.leaving:
            self.books.release(pages, lock)
        self.leaving = []

    def check_integrity(self) -> None:
        """Raise AssertionError if the places and the books disagree."""
        tables = [state.pages for state in self.live.values()] + [pages for _, pages, _ in self.leaving]
        self.books.check_integrity(tables)
        phases = [state.phase for state in self.requests.values()]
        assert phases.count(Phase.WAITING) == len(self.waiting), "waiting requests were lost"
        assert phases.count(Phase.FOLLOWING) == self.following, "followers were lost"
        assert phases.count(Phase.DECODE) == self.decoding, "decoding requests were miscounted"
        assert phases.count(Phase.PREFILL) + self.decoding == len(self.live), "live sequences were lost"
        assert all(self.live.get(leader.seq) is leader for leader in self._leaders.values()), "a leader has left"
        assert self.ready.keys() <= self.live.keys(), "an ended sequence is ready"

    def _keep(self, state: RequestState, *, leaving: bool) -> None:
        state.lock = self.books.keep(state.tokens, state.computed, state.pages, state.lock, leaving=leaving)

    def _leave(self, state: RequestState) -> None:
        """Out of everything that only admitted sequences are in."""
        if state.phase is Phase.DECODE:
            self.decoding -= 1
            self.ready.pop(state.seq, None)
        elif state.planned < state.total_tokens:
            self._remove(self.prefill, state)
        self._free_followers(state)
        del self.live[state.seq]
        self.leaving.append((state.seq, state.pages, state.lock))
        state.seq, state.pages, state.lock = NO_SEQ, [], None

    def _free_followers(self, leader: RequestState) -> None:
        if self._leaders.get(leader.request.tokens) is leader:
            del self._leaders[leader.request.tokens]
        for state in leader.followers:
            state.leader = None
            self.following -= 1
            self.enqueue(state)
        leader.followers = []

    @staticmethod
    def _remove(line: list[RequestState], state: RequestState) -> None:
        at = bisect_left(line, state.arrival, key=_arrival)
        assert line[at] is state, "a request is not where it should be"
        del line[at]
