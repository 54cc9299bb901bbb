"""Micro-batches of equal time. No size to tune; the costs are learnt.

A target time per micro-batch follows from the costs, the number of stages and what waits; then every micro-batch is
filled up to it, with decodes first and with chunks of one or several prompts, each sized by its own prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelined.chunking.target import FEW, FEW_PROMPTS, Target, Task, find_target
from pipelined.costs import MicroBatch
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from pipelined.chunking.base import Load
    from pipelined.costs import LiveCosts

__all__ = ["BalancedChunks"]

_DRIFT = 0.02  # costs that moved less than this leave a plan as it is
_LATE_DRIFT = 0.003  # likewise near the end, where little can be made up for
_LEAP = 2  # times the largest micro-batch measured
_MOST = 512  # prompts that a plan looks ahead to
_LAST = (
    12  # micro-batches; so near the end, or after so many of a long queue, it is worth planning again whatever moved
)


@dataclass
class _Plan:
    """A target, and what it was made for."""

    target: Target
    ends: int  # prefix + tokens left of the first prompt
    prompts: int
    version: int
    probe_s: float  # predicted time of the first chunk then, to see drift
    probe: MicroBatch
    decodes: int
    bound_s: float | None
    reached: int  # of the first prompt: another one may be as long
    planned: int = 0
    peak_s: float = 0.0  # of what was planned


class BalancedChunks:
    """Chunks of equal time, as many as give the first token soonest; longer ones the more prompts wait.

    Args:
        costs: What is known of the stages; learns on.
        page_size: Chunks are whole pages, and about 64 tokens or multiples.
        most_tokens: Of a micro-batch: what the memory for activations allows. None: no bound.
        target_itl_s: While anything decodes, a round of all micro-batches in flight takes no longer, if it can. None:
            no bound.
    """

    def __init__(
        self,
        costs: LiveCosts,
        *,
        page_size: int = 64,
        most_tokens: int | None = None,
        target_itl_s: float | None = None,
    ) -> None:
        if most_tokens is not None and most_tokens < page_size:
            raise ConfigError(
                f"max_micro_batch_tokens={most_tokens} is less than a page; expected page_size={page_size} or more"
            )
        if target_itl_s is not None and not target_itl_s > 0:
            raise ConfigError(f"target_itl_s={target_itl_s} is out of range; expected more than 0")
        self.costs = costs
        self.align = page_size * -(-64 // page_size)
        self.most_tokens = most_tokens if most_tokens is not None else 1 << 40
        self.align = min(self.align, self.most_tokens // page_size * page_size)
        self.target_itl_s = target_itl_s
        self._plan: _Plan | None = None

    def __repr__(self) -> str:
        return f"<BalancedChunks {self.costs!r}>"

    def micro_batch(self, load: Load) -> _BalancedBudget:
        """Filled up to the target that the first prompt offered leads to."""
        return _BalancedBudget(self, load)

    def target(self, load: Load, prefix_tokens: int, remaining_tokens: int) -> Target:
        """What the next micro-batch should take, if its first prompt is that one."""
        cost = self.costs.cost
        bound_s = self._bound_s(load)
        plan = self._plan
        if plan is not None and self._holds(plan, load, prefix_tokens, remaining_tokens, bound_s):
            return plan.target
        # As the queue says, but for the first prompt: its prefix may have turned out to be cached.
        queue = ((prefix_tokens, remaining_tokens), *load.queue[1 : load.prompts])
        if len(queue) < load.prompts:  # those not listed are taken to be like those that are
            queue = (queue * -(-min(load.prompts, _MOST) // len(queue)))[: load.prompts]
        task = Task(
            cost,
            queue,
            align=self.align,
            most_tokens=self.bound_tokens(),
            beside=MicroBatch((), load.decodes, load.decode_context_tokens),
            sunk_s=self._sunk_s(load, prefix_tokens + remaining_tokens),
            most_s=bound_s,
        )
        probe = MicroBatch(((prefix_tokens, max(1, min(remaining_tokens, 8 * self.align))),))
        self._plan = _Plan(
            find_target(task),
            prefix_tokens + remaining_tokens,
            load.prompts,
            self.costs.version,
            max(cost.launch_s(probe), 1e-12),
            probe,
            load.decodes,
            bound_s,
            prefix_tokens,
            peak_s=task.sunk_s,
        )
        return self._plan.target

    def bound_tokens(self) -> int:
        """Most tokens of a micro-batch: what memory allows, and no leap into what was never measured."""
        costs = self.costs
        if costs.profiled or not costs.known:
            return self.most_tokens
        return min(self.most_tokens, max(self.align, _LEAP * costs.most_tokens_seen // self.align * self.align))

    def _sunk_s(self, load: Load, ends: int) -> float:
        """The largest time on the way, by what is known now: in flight, or earlier in the same prompt."""
        cost, plan = self.costs.cost, self._plan
        sunk_s = max((cost.launch_s(work) for work in load.flying), default=0.0)
        if plan is not None and plan.ends == ends and plan.prompts == load.prompts and load.flying:
            sunk_s = max(sunk_s, plan.peak_s * cost.launch_s(plan.probe) / plan.probe_s)
        return sunk_s

    def _bound_s(self, load: Load) -> float | None:
        """What running decodes allow: each gets a token once everything in flight has gone through."""
        decoding = load.decodes or any(work.decodes for work in load.flying)
        if self.target_itl_s is None or not decoding or not self.costs.known:
            return None
        return self.target_itl_s / max(self.costs.pp_size, len(load.flying) + 1)

    def _holds(self, plan: _Plan, load: Load, prefix: int, remaining: int, bound_s: float | None) -> bool:
        if min(plan.prompts, load.prompts) > FEW_PROMPTS:  # one more or less, or the next one's turn: no matter
            if plan.planned >= _LAST or not _alike(plan.prompts, load.prompts):
                return False
        elif (plan.ends, plan.prompts) != (prefix + remaining, load.prompts) or prefix < plan.reached:
            return False
        if plan.bound_s != bound_s or not _alike(plan.decodes, load.decodes):
            return False
        left = plan.target.micro_batches - plan.planned
        if not plan.target.exact and load.prompts <= FEW_PROMPTS and left < FEW - 2:
            return False  # few enough to be cut exactly
        if plan.version != self.costs.version:
            now_s = self.costs.cost.launch_s(plan.probe)
            if abs(now_s - plan.probe_s) > (_DRIFT if left >= _LAST else _LATE_DRIFT) * plan.probe_s:
                return False
        return True

    def spent(self, seconds: float, end: int, *, first: bool) -> None:
        """A chunk was planned, up to `end` of its prompt, and its micro-batch takes so long by now."""
        if self._plan is not None:
            if first:
                self._plan.planned += 1
                self._plan.reached = end
            self._plan.peak_s = max(self._plan.peak_s, seconds)


def _alike(one: int, other: int) -> bool:
    return max(one, other) <= 1.25 * min(one, other)


class _BalancedBudget:
    """One micro-batch on its way to the target."""

    __slots__ = ("_load", "_policy", "_target_s", "_tokens", "_used_s")

    def __init__(self, policy: BalancedChunks, load: Load) -> None:
        self._policy = policy
        self._load = load
        beside = MicroBatch((), load.decodes, load.decode_context_tokens)
        self._used_s = [stage.launch_s(beside) for stage in policy.costs.cost.distinct]
        self._tokens = 0
        self._target_s = 0.0

    def offer(self, prefix_tokens: int, remaining_tokens: int) -> int:
        first, policy = not self._tokens, self._policy
        if first:
            self._target_s = policy.target(self._load, prefix_tokens, remaining_tokens).seconds
        room = float(policy.bound_tokens() - self._tokens)
        for used_s, stage in zip(self._used_s, policy.costs.cost.distinct, strict=True):
            left_s = (self._target_s - used_s) * (1 + 1e-9)
            room = min(room, stage.tokens_within(prefix_tokens, left_s))
        if room >= remaining_tokens:
            return remaining_tokens
        size = int(room // policy.align) * policy.align
        if first:
            size = max(size, min(policy.align, remaining_tokens))
        return size

    def spend(self, prefix_tokens: int, tokens: int) -> None:
        first = not self._tokens
        self._tokens += tokens
        stages = self._policy.costs.cost.distinct
        self._used_s = [
            used + stage.chunk_s(prefix_tokens, tokens) for used, stage in zip(self._used_s, stages, strict=True)
        ]
        self._policy.spent(max(self._used_s), prefix_tokens + tokens, first=first)
