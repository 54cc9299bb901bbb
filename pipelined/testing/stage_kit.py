"""The kit for the stages of a model: every check, and how they are run."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.errors import ModelError, nearest
from pipelined.rank.description import FAMILIES
from pipelined.stage import LoadOptions
from pipelined.testing import stage_checks
from pipelined.testing.check import FAIL, PASS, SKIP, CheckFailed, CheckResult, SkipCheck
from pipelined.testing.stage_world import StageWorld, tolerance_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipelined.messages import SamplingParams
    from pipelined.stage import ModelFamily

__all__ = ["STAGE_CHECKS", "StageCheck", "check_stage", "family_of", "run_stage_checks"]

_KIT_OPTIONS = LoadOptions(page_size=8, kv_cache_tokens=512)


@dataclass(frozen=True)
class StageCheck:
    """One named check of one rule.

    Attributes:
        rule: "S1" to "S9".
        run: The check itself; raises `CheckFailed`.
    """

    rule: str
    run: Callable[[StageWorld], None]

    @property
    def name(self) -> str:
        """Name of the function without its prefix."""
        return str(getattr(self.run, "__name__", self.run)).removeprefix("check_")


STAGE_CHECKS: tuple[StageCheck, ...] = (
    StageCheck("S1", stage_checks.check_the_reference_agrees),
    StageCheck("S1", stage_checks.check_any_cut_gives_the_same),
    StageCheck("S2", stage_checks.check_any_batch_gives_the_same),
    StageCheck("S3", stage_checks.check_any_chunks_give_the_same),
    StageCheck("S4", stage_checks.check_released_pages_carry_nothing_over),
    StageCheck("S4", stage_checks.check_a_cached_prefix_gives_the_same),
    StageCheck("S4", stage_checks.check_a_resumed_request_goes_on_the_same),
    StageCheck("S5", stage_checks.check_preparing_ahead_changes_nothing),
    StageCheck("S5", stage_checks.check_a_void_step_hurts_nobody_else),
    StageCheck("S6", stage_checks.check_reset_forgets),
    StageCheck("S7", stage_checks.check_nothing_is_held_after_release),
    StageCheck("S8", stage_checks.check_a_non_finite_input_fails_its_sequence_alone),
    StageCheck("S9", stage_checks.check_inputs_and_outputs_are_left_alone),
    StageCheck("S9", stage_checks.check_payloads_can_travel),
)
"""Every check, by rule."""


def family_of(ref: str) -> ModelFamily:
    """The installed family that claims `ref`.

    Raises:
        ModelError: None does; names those that are installed.
    """
    points = {point.name: point for point in entry_points(group=FAMILIES)}
    for point in points.values():
        family: ModelFamily = point.load()()
        if family.claims(ref):
            return family
    raise ModelError(f"no installed model family knows {ref!r}{nearest(ref, points)}")


def run_stage_checks(
    model: str | ModelFamily,
    ref: str | None = None,
    *,
    options: LoadOptions = _KIT_OPTIONS,
    reference: Callable[[Sequence[int], int, SamplingParams], Sequence[int] | None] | None = None,
    tolerance: float | None = None,
    quick: bool = False,
    only: Iterable[str] = (),
    deadline_s: float = 600.0,
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Hold the stages of a model against the contract of `Stage`.

    Args:
        model: What a user would call it, or a family object: anything with `inspect(ref, options)` and
            `build(info, layers, ctx)`. With a family, `ref` is what it is asked for.
        ref: See `model`.
        options: How it is loaded; small pages find more.
        reference: Right answers from elsewhere: (prompt, new tokens, sampling) -> token ids, None where it has none.
        tolerance: How far log-probabilities may be off; by the model's dtype unless given.
        quick: Fewer cuts and random batches.
        only: Names of checks or rules; all without any.
        deadline_s: A check that takes longer has hung.
        on_result: Called with each result as it comes.

    Raises:
        ModelError: There is no such model.
    """
    if isinstance(model, str):
        family, name = family_of(model), model
    else:
        family, name = model, ref or ""
    info = family.inspect(name, options)
    limit = tolerance_of(info.dtype) if tolerance is None else tolerance
    world = StageWorld(info, family.build, "S1", quick, limit, reference)
    wanted, results = set(only), []
    for check in STAGE_CHECKS:
        if not wanted or {check.name, check.rule} & wanted:
            results.append(_run(check, world, deadline_s))
            if on_result is not None:
                on_result(results[-1])
    return results


def check_stage(model: str | ModelFamily, ref: str | None = None, **settings: Any) -> dict[str, Any]:
    """Run the kit; `{model, passed, failed, skipped, results: [...]}` as builtins, for JSON. See `run_stage_checks`."""
    results = run_stage_checks(model, ref, **settings)
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in (PASS, FAIL, SKIP)}
    return {
        "model": model if isinstance(model, str) else ref or "",
        "passed": counts[PASS],
        "failed": counts[FAIL],
        "skipped": counts[SKIP],
        "results": [asdict(result) for result in results],
    }


def _run(check: StageCheck, world: StageWorld, deadline_s: float) -> CheckResult:
    """Run one check in a thread of its own, so that a stage that hangs fails it instead of hanging the kit."""
    start_s, verdict = time.monotonic(), [FAIL, f"{check.rule}: hung: not over after {deadline_s:g} s"]

    def work() -> None:
        world.rule = check.rule
        try:
            if not world.truth or not all(answer.tokens for answer in world.truth):
                world.learn()
            check.run(world)
        except BaseException as error:  # noqa: BLE001  (the supervisor of foreign code: whatever it raises fails it)
            verdict[:] = _judged(check.rule, error)
        else:
            verdict[:] = [PASS, ""]

    thread = threading.Thread(target=work, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    outcome, reason = verdict
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        reason += f" in {traceback.format_stack(frame)[-1].strip()}" if frame else ""
    return CheckResult(check.rule, check.name, outcome, reason, time.monotonic() - start_s)


def _judged(rule: str, error: BaseException) -> list[str]:
    if isinstance(error, SkipCheck):
        return [SKIP, str(error)]
    if isinstance(error, CheckFailed):
        return [FAIL, str(error)]
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {Path(place[0].filename).name}:{place[0].lineno}" if place else ""
    return [FAIL, f"{rule}: raised {type(error).__name__}: {error}{where}"]
