"""Stages for pipelines in tests. A module of its own, so that child processes can import them."""

from __future__ import annotations

import time
from typing import Any

import torch

from pipelined.errors import ConfigError


class Add:
    """Adds to every number of the payload."""

    def __init__(self, amount: int = 1, name: str = "", seconds: float = 0.0) -> None:
        self.amount = amount
        self.name = name or f"add {amount}"
        self.seconds = seconds

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        if self.seconds:
            time.sleep(self.seconds)
        return {key: self._one(value) for key, value in x.items()}

    def _one(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.dtype is torch.bool else value + self.amount
        return value + self.amount if type(value) in (int, float) else value

    def cost(self, input_id: int) -> float:
        return self.seconds or 1e-4


class Pass:
    """What comes in goes out: the very tensors."""

    name = "pass"

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return x


class RaisesOn:
    """Raises on inputs whose "n" is among `bad`; notes all that it saw."""

    def __init__(self, *bad: int, name: str = "picky", error: type[Exception] = ValueError) -> None:
        self.bad = bad
        self.name = name
        self.error = error
        self.seen: list[int] = []

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(x["n"])
        if x["n"] in self.bad:
            raise self.error(f"I do not like {x['n']}")
        return x

    def cost(self, input_id: int) -> float:
        return 1e-3


class Returns:
    """Returns something of its own for inputs whose "n" is `on`."""

    def __init__(self, what: Any, on: int = 1) -> None:
        self.what = what
        self.on = on
        self.name = "returns"

    def forward(self, x: dict[str, Any]) -> Any:
        return self.what if x["n"] == self.on else x


class FailsInSetup:
    """Cannot be set up."""

    name = "broken"

    def __init__(self, ours: bool = False) -> None:
        self.ours = ours

    def setup(self, ctx: Any) -> None:
        if self.ours:
            raise ConfigError("the file weights.bin is missing")
        raise FileNotFoundError("weights.bin")

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return x


class SlowSetup(Add):
    """Takes its time to set up."""

    def __init__(self, setup_s: float) -> None:
        super().__init__(1)
        self.setup_s = setup_s

    def setup(self, ctx: Any) -> None:
        time.sleep(self.setup_s)


class Lives:
    """Notes its own life."""

    def __init__(self) -> None:
        self.name = "lives"
        self.log: list[str] = []

    def setup(self, ctx: Any) -> None:
        self.log.append(f"setup {ctx.rank}/{ctx.size}")

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        self.log.append("forward")
        return x

    def teardown(self) -> None:
        self.log.append("teardown")


class NotPicklable(Add):
    """Holds something that pickle refuses."""

    def __init__(self) -> None:
        super().__init__(1)
        self.held = lambda: None


class Exits:
    """Ends its own process on inputs whose "n" is `on`."""

    def __init__(self, on: int, code: int = 3) -> None:
        self.on = on
        self.code = code
        self.name = "exits"

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        import os

        if x["n"] == self.on:
            os._exit(self.code)
        return x
