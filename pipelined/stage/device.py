"""The contract of a device: launching returns at once, results come later, in order.

It is that of a GPU's stream from the first day. On a GPU, and on the emulated stream, the outputs of a launch are known
at once and hold garbage until its event fires. On a CPU thread the outputs are not even known before. Both are one
contract: `when_known` says when outputs may be *named* (posted for sending after the event), `event` when they may be
*read*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pipelined.stage.base import Payload
    from pipelined.transport.base import Event

__all__ = ["Device", "Launch"]


class Launch(Protocol):
    """A piece of work handed to a device. Touched from the owner's loop only."""

    @property
    def event(self) -> Event:
        """Fires when the work has completed, well or not."""
        ...

    @property
    def started_s(self) -> float:
        """When the device began it, by the rank's clock. Valid once the event has fired."""
        ...

    @property
    def ended_s(self) -> float:
        """When the device completed it. Valid once the event has fired."""
        ...

    def when_known(self, callback: Callable[[Launch], None]) -> None:
        """Call back on the owner's loop as soon as `outputs()` may be called; at once if it may be now."""
        ...

    def outputs(self) -> Any:
        """What the work returned. Readable only once `event` has fired.

        Raises:
            BaseException: What the work raised.
        """
        ...


class Device(Protocol):
    """A queue of work that completes in order. Made for one rank; used from its loop."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device live."""
        ...

    def launch(
        self,
        work: Callable[[], Any],
        *,
        after: Sequence[Event] = (),
        reads: Sequence[torch.Tensor] = (),
        cost: Any = None,
    ) -> Launch:
        """Queue `work`, to run once everything launched before it and all of `after` has completed. Returns at once.

        Args:
            work: Called off the loop (CPU), or on it if it only enqueues kernels (CUDA) or is emulated.
            after: Events that must have fired before the work may read its inputs.
            reads: The tensors that the work reads and that must stay as they are until the event (received buffers).
                The stream device checks that they do; others ignore it.
            cost: What an emulated device's time model is asked; ignored by others.
        """
        ...

    def to_host(self, outputs: Payload, after: Event) -> Launch:
        """Copy the tensors among `outputs` to the host, on a stream of their own, after `after`. Returns at once.

        The launch's outputs are a payload of host tensors; on a CPU the same ones.
        """
        ...

    def retire(self, tensors: Sequence[torch.Tensor]) -> None:
        """The owner is about to give this memory back. Emulated streams poison it; others do nothing."""
        ...

    async def aclose(self) -> None:
        """Wait for what was launched, then stop threads. Idempotent."""
        ...
