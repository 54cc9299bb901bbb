"""Stages of custom pipelines: good ones pass, each fault is found by its check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipelined.errors import ConfigError
from pipelined.testing import check_payload_stage

INPUTS = [{"t": torch.arange(6.0) * n, "n": n, "tags": ["a", n]} for n in range(1, 4)]


def outcomes(stage: Any, **settings: Any) -> dict[str, tuple[str, str]]:
    return {result.name: (result.outcome, result.reason) for result in check_payload_stage(stage, INPUTS, **settings)}


def failed(stage: Any, **settings: Any) -> set[str]:
    return {name for name, (outcome, _) in outcomes(stage, **settings).items() if outcome == "fail"}


def double(x: dict[str, Any]) -> dict[str, Any]:
    return {"t": x["t"] * 2, "n": x["n"]}


class Good:
    """Allocates in setup, writes fresh outputs, refuses what it does not know."""

    def setup(self, ctx: Any) -> None:
        self.weight, self.ctx = torch.full((6,), 3.0), ctx

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        out = self.ctx.empty((6,), torch.float32)
        torch.mul(x["t"], self.weight, out=out)
        return {"t": out}


class Counts:
    count = 0

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {"t": x["t"] + self.count}


class Warms:
    """Its answers settle only after the first input."""

    scale: torch.Tensor | None = None

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        self.scale = x["t"].clone() if self.scale is None else self.scale
        return {"t": x["t"] * self.scale}


class Writes:
    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        out = {"t": x["t"] * 2}
        x["t"].zero_()
        return out


class Pops:
    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return {"n": x.pop("n")}


class Appends:
    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        tags = [*x["tags"]]
        x["tags"].append(1)
        return {"tags": tags}


class GivesObject:
    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return {"it": object()}


class OneBuffer:
    def __init__(self) -> None:
        self.buffer = torch.empty(6)

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return {"t": torch.mul(x["t"], 2, out=self.buffer)}


class Keeps:
    """Reads the input before: by then its memory is somebody else's."""

    last: torch.Tensor | None = None

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        t = x["t"].clone()
        if self.last is not None and self.last.isnan().any():
            t += 1
        self.last = x["t"]
        return {"t": t}


class Sulks:
    broken = False

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        if "t" not in x:
            self.broken = True
            raise KeyError("t")
        return {"t": x["t"] + self.broken}


@pytest.mark.parametrize("stage", [double, Good()])
def test_good_stages_pass(stage: Any) -> None:
    assert {name: told for name, told in outcomes(stage).items() if told[0] != "pass"} == {}


@pytest.mark.parametrize(
    ("stage", "check"),
    [
        (Counts(), "the_same_whatever_came_before"),
        (Keeps(), "the_same_whatever_came_before"),
        (Warms(), "a_fresh_copy_gives_the_same"),
        (Writes(), "inputs_are_left_alone"),
        (Pops(), "inputs_are_left_alone"),
        (Appends(), "inputs_are_left_alone"),
        (GivesObject(), "outputs_can_travel"),
        (OneBuffer(), "outputs_stay_as_they_were"),
        (Sulks(), "an_exception_poisons_nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_each_fault_is_found(stage: Any, check: str) -> None:
    assert check in failed(stage)


def test_what_refuses_nothing_is_not_judged_on_it() -> None:
    assert outcomes(lambda x: {"ok": True})["an_exception_poisons_nothing"][0] == "skip"


def test_what_cannot_be_copied_is_skipped() -> None:
    class Local:
        def __init__(self) -> None:
            self.lines = (line for line in "abc")

        def forward(self, x: dict[str, Any]) -> dict[str, Any]:
            return {"t": x["t"]}

    assert outcomes(Local())["a_fresh_copy_gives_the_same"][0] == "skip"


def test_noise_within_the_tolerance_passes() -> None:
    class Noisy:
        count = 0

        def forward(self, x: dict[str, Any]) -> dict[str, Any]:
            self.count += 1
            return {"t": x["t"] + 1e-6 * self.count}

    assert "the_same_whatever_came_before" in failed(Noisy())
    assert "the_same_whatever_came_before" not in failed(Noisy(), tolerance=1e-3)


def test_no_stage_and_no_inputs_are_refused() -> None:
    with pytest.raises(ConfigError):
        check_payload_stage(3, INPUTS)
    with pytest.raises(ValueError, match="no inputs"):
        check_payload_stage(double, [])
