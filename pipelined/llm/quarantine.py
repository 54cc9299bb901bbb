"""After losses: which requests may have been the cause, and how to find out without harm to the others."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pipelined.errors import RankLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.llm.requests import LiveRequest

__all__ = ["PROBES", "Quarantine"]

PROBES = 2
"""A suspect may be run so often as the only one."""


class Quarantine:
    """A prompt that kills a rank kills it again whenever it is run.

    So a request during which the pipeline was lost several times, without a token of its own between, is a suspect.
    Suspects are run one at a time, beside everything else: one that gets a token is cleared, one during whose runs the
    pipeline is lost again and again is given up.
    """

    def __init__(self, most_losses: int, most_running: int) -> None:
        """Args: most_losses: before it is a suspect. most_running: requests that arrived later only wait."""
        self._most_losses = most_losses
        self._most_running = most_running
        self._held: deque[LiveRequest] = deque()
        self.probe: LiveRequest | None = None

    def __repr__(self) -> str:
        return f"<Quarantine probe={self.probe!r}, {len(self._held)} held>"

    @property
    def patience(self) -> int:
        """How many more losses than usual are to be borne."""
        return 0 if self.probe is None else PROBES

    def after_loss(self, lives: Sequence[LiveRequest]) -> list[LiveRequest]:
        """What to ask for in the next epoch, of what is unfinished, in order of arrival. Fails what is given up."""
        ahead = 0
        for live in lives:
            if live.submitted and ahead < self._most_running:
                live.losses += 1
                live.probed += live is self.probe
            ahead += len(live.unfinished())
        guilty = [live for live in lives if live.probed >= PROBES]
        for live in guilty:
            live.fail(RankLostError(f"the pipeline was lost {live.losses} times while it worked on this request"))
        suspects = [live for live in lives if live.losses >= self._most_losses and live not in guilty]
        others = [live for live in lives if live.losses < self._most_losses]
        for live in suspects:
            live.submitted = False
        self.probe = suspects[0] if suspects else None
        self._held = deque(suspects[1:])
        return suspects[:1] + others

    def released(self, live: LiveRequest) -> LiveRequest | None:
        """It got a token, or ended. Returns which suspect is to be asked for next."""
        if live is self.probe:
            self.probe = self._held.popleft() if self._held else None
            return self.probe
        if live in self._held:
            self._held.remove(live)
        return None
