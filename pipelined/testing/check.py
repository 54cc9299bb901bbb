"""What a check is, what it results in, and how it fails. Knows no transport and no rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelined.errors import PipelinedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pipelined.testing.world import World

__all__ = ["FAIL", "PASS", "SKIP", "Check", "CheckFailed", "CheckResult", "SkipCheck"]

PASS, FAIL, SKIP = "pass", "fail", "skip"


class CheckFailed(PipelinedError):
    """A rule of the contract is broken.

    Attributes:
        rule: "R1" to "R15".
        happened: What was seen.
        expected: What the rule asks for.
    """

    def __init__(self, rule: str, happened: str, expected: str) -> None:
        super().__init__(f"{rule}: {happened}; expected {expected}")
        self.rule = rule
        self.happened = happened
        self.expected = expected


class SkipCheck(PipelinedError):
    """Raised by a check that finds nothing to look at; the message is the reason."""


@dataclass(frozen=True)
class Check:
    """One named check of one rule.

    Attributes:
        rule: "R1" to "R15".
        run: The check itself; raises `CheckFailed`.
        needs: Names of the flags in `Capabilities` without which it is skipped.
        deadline_s: It has hung if it takes longer (real time).
        full_deadline_s: The same in full mode.
    """

    rule: str
    run: Callable[[World], Awaitable[None]]
    needs: tuple[str, ...] = ("tensors",)
    deadline_s: float = 30.0
    full_deadline_s: float = 60.0

    @property
    def name(self) -> str:
        """Name of the function without its prefix."""
        return str(getattr(self.run, "__name__", self.run)).removeprefix("check_")

    @property
    def says(self) -> str:
        """The first line of the check's docstring: what it looks at."""
        return (getattr(self.run, "__doc__", None) or "").strip().partition("\n")[0]


@dataclass(frozen=True)
class CheckResult:
    """What became of a check.

    Attributes:
        rule, name: Of the check.
        outcome: "pass", "fail" or "skip".
        reason: Why it failed or was skipped; "" if it passed.
        seconds: How long it took, real time.
    """

    rule: str
    name: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
