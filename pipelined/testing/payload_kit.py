"""The kit for stages of custom pipelines: objects with `forward(x)`, functions, or `Stage`s that take one input a step.

What a stage gives may depend on its input alone, never on what came before; its input is read-only memory that it must
not keep; its output must be able to travel and may still be leaving when the next input comes.
"""

from __future__ import annotations

import copy
import pickle
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipelined.errors import PipelinedError
from pipelined.messages import Step, Submit
from pipelined.pipeline.payload_stage import as_stage
from pipelined.stage.poison import Snapshot, overlaps, poison, tensors_in
from pipelined.testing.check import FAIL, PASS, SKIP, CheckFailed, CheckResult, SkipCheck
from pipelined.testing.stage_chain import KitContext, travelled
from pipelined.testing.tools import same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipelined.stage import Payload, Stage

__all__ = ["check_payload_stage"]

_BAD: tuple[Payload, ...] = ({}, {"unexpected": None}, {"unexpected": torch.empty(0)})


class _Bench:
    """A stage that was set up, and what it is given."""

    def __init__(self, stage: Any, inputs: Sequence[Payload], bad_inputs: Sequence[Payload], tolerance: float) -> None:
        self.stage: Stage = as_stage(stage)
        self.inputs = inputs
        self.bad_inputs = bad_inputs
        self.tolerance = tolerance
        self.expected: list[Payload] = []
        self._number = 0

    def batch(self) -> Any:
        step = Step(0, self._number, 1, (Submit(self._number),))
        self._number += 1
        return self.stage.prepare(step)

    def raw(self, given: Payload) -> tuple[Payload, Payload]:
        """Input and output of one call, both as the stage left them."""
        arrived = travelled(given)
        return arrived, self.stage.forward(self.batch(), arrived)

    def once(self, given: Payload) -> Payload:
        """What leaves for an input. What had arrived is poisoned afterwards: its memory belongs to the sender again."""
        arrived, output = self.raw(given)
        sent = travelled(output)
        for tensor in tensors_in(arrived):
            if not any(overlaps(tensor, other) for other in tensors_in(output)):
                poison(tensor)
        return sent

    def learn(self) -> None:
        """What each input gives the first time."""
        if not self.expected:
            self.expected = [self.once(given) for given in self.inputs]

    def compare(self, index: int, output: Payload, when: str) -> None:
        """Fail unless input number `index` has given the same as the first time."""
        right = self.expected[index]
        if output.keys() != right.keys():
            raise CheckFailed("P1", f"input {index} gives {sorted(output)} {when}", f"{sorted(right)}, as at first")
        for name, value in right.items():
            if not self._alike(value, output[name]):
                raise CheckFailed("P1", f"input {index} gives another {name!r} {when}", "the same as at first")

    def _alike(self, right: Any, got: Any) -> bool:
        if not isinstance(right, torch.Tensor):
            return type(right) is type(got) and bool(right == got)
        if not isinstance(got, torch.Tensor) or right.shape != got.shape or right.dtype != got.dtype:
            return False
        if self.tolerance and right.is_floating_point():
            return torch.allclose(right, got, rtol=self.tolerance, atol=self.tolerance, equal_nan=True)
        return same(right, got)


def check_payload_stage(
    stage: Any,
    inputs: Iterable[Payload],
    *,
    bad_inputs: Iterable[Payload] = _BAD,
    tolerance: float = 0.0,
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Hold a stage of a custom pipeline against what a pipeline needs of it.

    Args:
        stage: As passed to `Pipeline`. It is set up here, and torn down.
        inputs: Inputs that it must accept, two or more that give different outputs.
        bad_inputs: Inputs of which it may refuse some by raising.
        tolerance: Relative and absolute, for floating-point outputs; 0: every bit.
        on_result: Called with each result as it comes.

    Raises:
        ConfigError: It is no stage.
        ValueError: There are no inputs.
    """
    given = list(inputs)
    if not given:
        raise ValueError("no inputs: expected at least one that the stage accepts")
    original = _copied(stage)
    bench = _Bench(stage, given, list(bad_inputs), tolerance)
    checks: list[tuple[str, Callable[[], None]]] = [
        ("P1", partial(_the_same_whatever_came_before, bench)),
        ("P1", partial(_a_fresh_copy_gives_the_same, bench, original)),
        ("P2", partial(_inputs_are_left_alone, bench)),
        ("P3", partial(_outputs_can_travel, bench)),
        ("P4", partial(_outputs_stay_as_they_were, bench)),
        ("P5", partial(_an_exception_poisons_nothing, bench)),
    ]
    results = []
    context = KitContext(0, 1)
    try:
        bench.stage.setup(context)
        bench.stage.start(None)
        for rule, run in checks:
            results.append(_result(rule, run))
            if on_result is not None:
                on_result(results[-1])
    finally:
        bench.stage.teardown()
    return results


def _result(rule: str, run: Callable[[], None]) -> CheckResult:
    start_s = time.monotonic()
    name = getattr(getattr(run, "func", run), "__name__", "").removeprefix("_")
    outcome, reason = PASS, ""
    try:
        run()
    except SkipCheck as skipped:
        outcome, reason = SKIP, str(skipped)
    except CheckFailed as failed:
        outcome, reason = FAIL, str(CheckFailed(rule, failed.happened, failed.expected))
    except Exception as error:  # noqa: BLE001  (the supervisor of foreign code: whatever it raises fails it)
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{rule}: raised {type(error).__name__}: {error} at {Path(place.filename).name}:{place.lineno}"
        outcome = FAIL
    return CheckResult(rule, name, outcome, reason, time.monotonic() - start_s)


def _copied(stage: Any) -> Any:
    """A copy as a child process would get it; None if there is none to be had."""
    try:
        return pickle.loads(pickle.dumps(stage))
    except (pickle.PicklingError, TypeError, AttributeError):
        pass
    try:
        return copy.deepcopy(stage)
    except (TypeError, copy.Error):
        return None


def _the_same_whatever_came_before(bench: _Bench) -> None:
    bench.learn()
    count = len(bench.inputs)
    orders = {"in reverse": range(count - 1, -1, -1), "again": range(count), "twice each": sorted([*range(count)] * 2)}
    for when, order in orders.items():
        for index in order:
            bench.compare(index, bench.once(bench.inputs[index]), when)


def _a_fresh_copy_gives_the_same(bench: _Bench, original: Any) -> None:
    if original is None:
        raise SkipCheck("the stage can be neither pickled nor copied")
    bench.learn()
    fresh = _Bench(original, bench.inputs, (), bench.tolerance)
    fresh.stage.setup(KitContext(0, 1))
    try:
        fresh.stage.start(None)
        for index in reversed(range(len(bench.inputs))):
            bench.compare(index, fresh.once(bench.inputs[index]), "in a fresh copy of the stage")
    finally:
        fresh.stage.teardown()


def _inputs_are_left_alone(bench: _Bench) -> None:
    for index, given in enumerate(bench.inputs):
        arrived = travelled(given)
        names = list(arrived)
        before = {name: Snapshot(value) for name, value in arrived.items() if isinstance(value, torch.Tensor)}
        bench.stage.forward(bench.batch(), arrived)
        if list(arrived) != names:
            raise CheckFailed("P2", f"input {index} has the keys {list(arrived)} afterwards", f"{names}, as before")
        builtins = travelled({name: value for name, value in given.items() if name not in before})
        changed = [name for name, snapshot in before.items() if not snapshot.same()]
        changed += [name for name, value in builtins.items() if arrived[name] != value]
        if changed:
            raise CheckFailed("P2", f"the stage wrote to {changed} of input {index}", "inputs are read-only")


def _outputs_can_travel(bench: _Bench) -> None:
    for index, given in enumerate(bench.inputs):
        _, output = bench.raw(given)
        try:
            travelled(output)
        except PipelinedError as error:
            raise CheckFailed("P3", f"input {index}: {error}", "a dict of tensors and builtins") from error


def _outputs_stay_as_they_were(bench: _Bench) -> None:
    held: list[tuple[int, dict[str, Snapshot]]] = []
    for index, given in enumerate([*bench.inputs, *bench.inputs]):
        _, output = bench.raw(given)
        for other, snapshots in held:
            for name, snapshot in snapshots.items():
                if not snapshot.same():
                    raise CheckFailed(
                        "P4", f"output {name!r} of input {other} changed with a later input", "a fresh tensor each time"
                    )
        tensors = {name: Snapshot(value) for name, value in output.items() if isinstance(value, torch.Tensor)}
        held.append((index % len(bench.inputs), tensors))


def _an_exception_poisons_nothing(bench: _Bench) -> None:
    bench.learn()
    raised = 0
    for bad in bench.bad_inputs:
        try:
            bench.once(bad)
        except Exception:  # noqa: BLE001  (whatever foreign code raises is what is looked for)
            raised += 1
        for index, given in enumerate(bench.inputs):
            bench.compare(index, bench.once(given), "after an input that was refused")
    if not raised:
        raise SkipCheck("the stage refused none of the bad inputs; pass some that it refuses as `bad_inputs`")
