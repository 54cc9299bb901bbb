"""Cases written by hand: a plain one, and changes to it."""

from __future__ import annotations

from typing import Any

import msgspec

from pipelined.testing.fuzz import Case, Journal, play
from pipelined.testing.fuzz.case import Prompted

PLAIN = Case(
    seed=0,
    ranks=4,
    layers=4,
    hidden=2,
    vocab=997,
    context=128,
    kv=(2048,),
    eos=(),
    page_size=4,
    chunk=16,
    policy="fixed",
    depth=2,
    running=64,
    radix=True,
    device="emulated",
    launch_s=1e-3,
    row_s=1e-5,
    slow=(1.0,) * 8,
    link="latency_us=5",
    requests=(),
)


def prompt(number: int, tokens: int) -> tuple[int, ...]:
    """Tokens that no other number has."""
    return tuple(5 + (number * 131 + 7 * index) % 900 for index in range(tokens))


def asked(count: int, tokens: int = 30, every_s: float = 0.0, **changes: Any) -> tuple[Prompted, ...]:
    """So many requests, one each `every_s`."""
    settings: dict[str, Any] = {"max_tokens": 12, **changes}
    return tuple(
        Prompted(n, n * every_s, settings.get("prompt") or prompt(n, tokens), **_but_prompt(settings))
        for n in range(count)
    )


def _but_prompt(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "prompt"}


def case(**changes: Any) -> Case:
    """The plain case, changed; as many clocks, paces and layers as it has ranks."""
    ranks = changes.get("ranks", PLAIN.ranks)
    return msgspec.structs.replace(PLAIN, **{"layers": ranks, "requests": asked(8), **changes})


def held(**changes: Any) -> Journal:
    """Play it; every invariant must hold."""
    journal = play(case(**changes))
    assert not journal.failures, "\n".join(journal.failures)
    return journal


def errors(journal: Journal) -> set[str]:
    """Classes of errors that requests ended with."""
    return {type(outcome.error).__name__ for outcome in journal.outcomes.values() if outcome.error is not None}
