"""Makes a `Stage` of whatever a user passes: an object with `forward(x)`, a function, or a `Stage`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipelined.errors import ConfigError, RequestCancelled
from pipelined.messages import Step, Submit
from pipelined.stage import Payload, Stage

if TYPE_CHECKING:
    from pipelined.stage import StageContext

__all__ = ["PayloadStage", "as_stage"]


class PayloadStage(Stage):
    """Calls the user's object once an input."""

    def __init__(self, user: Any, forward: Callable[[Payload], Payload]) -> None:
        self.user = user
        self._forward = forward
        self.name = getattr(user, "name", None) or getattr(user, "__name__", None) or type(user).__name__

    def setup(self, ctx: StageContext) -> int | None:
        """The user's `setup(ctx)`, if there is one."""
        setup = getattr(self.user, "setup", None)
        if setup is not None:
            setup(ctx)
        return None

    def prepare(self, step: Step) -> int:
        """The input's id.

        Raises:
            RequestCancelled: Nobody wants it any more: the step flows void.
        """
        (item,) = step.items
        assert isinstance(item, Submit)
        if item.cancelled:
            raise RequestCancelled(f"input {item.id} was cancelled")
        return item.id

    def forward(self, batch: int, inputs: Payload) -> Payload:
        """The user's `forward(x)`."""
        return self._forward(inputs)

    def describe(self, batch: int) -> str:
        """Which input."""
        return f"input {batch}"

    def cost(self, batch: int) -> Any:
        """The user's `cost(id)`, in seconds, for emulated devices."""
        cost = getattr(self.user, "cost", None)
        return cost(batch) if cost is not None else 0.0

    def teardown(self) -> None:
        """The user's `teardown()`, if there is one."""
        teardown = getattr(self.user, "teardown", None)
        if teardown is not None:
            teardown()


def as_stage(user: Any) -> Stage:
    """The stage that a user's object stands for.

    Raises:
        ConfigError: It has neither `forward` nor can it be called.
    """
    if isinstance(user, Stage):
        return user
    if isinstance(user, type):
        raise ConfigError(f"{user.__name__} is a class; pass an instance: {user.__name__}(...)")
    forward = getattr(user, "forward", None)
    if forward is None and callable(user):
        forward = user
    if forward is None:
        raise ConfigError(f"{user!r} is no stage: expected an object with forward(x), or a function")
    return PayloadStage(user, forward)
