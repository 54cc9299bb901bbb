"""Makes a failing case small: drops what it fails without. Bounded effort, greedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pipelined.testing.fuzz.play import play

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipelined.testing.fuzz.case import Case, Prompted
    from pipelined.testing.fuzz.journal import Journal

__all__ = ["shrink"]

TRIES = 60
"""Most runs that shrinking takes."""


def shrink(case: Case, journal: Journal, tries: int = TRIES) -> tuple[Case, Journal]:
    """A case with fewer requests and faults that still fails, and its run; the given ones if there is none."""
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if tries <= 0:
                return case, journal
            tries -= 1
            tried = play(smaller)
            if tried.failures:
                case, journal, progress = smaller, tried, True
                break
    return case, journal


def _smaller(case: Case) -> Iterator[Case]:
    """Simpler cases, the most different first."""
    replace = msgspec.structs.replace
    requests = case.requests
    for kept in (requests[: len(requests) // 2], requests[len(requests) // 2 :]):
        if 0 < len(kept) < len(requests):
            yield _with_requests(case, tuple(kept))
    for name in ("lossy", "delayed", "skews_s", "cancels", "kills", "close_at_s"):
        if getattr(case, name):
            yield replace(case, **{name: None if name == "close_at_s" else type(getattr(case, name))()})
    for name in ("cancels", "kills"):
        several = getattr(case, name)
        if len(several) > 1:
            yield from (replace(case, **{name: _without(several, index)}) for index in range(len(several)))
    if len(requests) > 1:
        yield from (_with_requests(case, _without(requests, index)) for index in range(len(requests)))
    if case.device != "emulated":
        yield replace(case, device="emulated")
    if case.policy != "fixed":
        yield replace(case, policy="fixed")


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return items[:index] + items[index + 1 :]


def _with_requests(case: Case, requests: tuple[Prompted, ...]) -> Case:
    numbers = {request.number for request in requests}
    cancels = tuple(cancel for cancel in case.cancels if cancel.number in numbers)
    return msgspec.structs.replace(case, requests=requests, cancels=cancels)
