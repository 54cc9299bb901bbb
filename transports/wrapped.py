"""What all wrappers share: a transport around another, which adds a tap to every lane.

Any transport whose endpoints and lanes are those of `pipelined.transport` can be wrapped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pipelined.errors import ConfigError
from pipelined.transport.endpoint import BaseEndpoint
from pipelined.transport.options import integer_option, known_options

if TYPE_CHECKING:
    from pipelined.transport import Endpoint, EndpointSpec, Transport
    from pipelined.transport.lane_end import LaneEnd
    from pipelined.transport.taps import Tap

__all__ = ["WrappedTransport"]


class WrappedTransport:
    """Subclass it: name the scheme and the options, and make a tap for each lane end."""

    wraps: ClassVar = True
    options: ClassVar[tuple[str, ...]] = ()
    name: ClassVar[str] = ""
    adds_frames: ClassVar = False
    """Whether taps send frames of their own: the wire gets twice the window then, and each tap narrows its lane."""

    def __init__(self, inner: Transport, options: dict[str, str]) -> None:
        """Args: options: those that `options` names, as in the URI.

        Raises:
            ConfigError: Unknown, or out of range.
        """
        known_options(f"{self.name}+{inner.scheme}", options, self.options)
        self.inner = inner
        self.scheme = f"{self.name}+{inner.scheme}"
        self.capabilities = inner.capabilities
        self.window = integer_option(self.scheme, options, "window", at_least=1) if self.adds_frames else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.scheme}>"

    async def open(self, spec: EndpointSpec) -> Endpoint:
        """See `Transport`.

        Raises:
            ConfigError: The inner transport's endpoints have no place for taps.
        """
        if self.adds_frames:
            spec = replace(spec, window=2 * (self.window or spec.window))
        endpoint = await self.inner.open(self.tapped(spec))
        if BaseEndpoint not in type(endpoint).__mro__:
            endpoint.abort()
            raise ConfigError(
                f"{self.name}+ can't wrap {self.inner.scheme}://: its endpoint is no pipelined.transport.endpoint."
                "BaseEndpoint, which has the place where wrappers stand"
            )
        return endpoint

    def tapped(self, spec: EndpointSpec) -> EndpointSpec:
        """What the inner transport is opened with. A wrapper with state of one endpoint makes it here."""
        return replace(spec, taps=(*spec.taps, self.tap))

    def tap(self, endpoint: BaseEndpoint, lane: LaneEnd) -> Tap:
        """The tap of a new lane end."""
        raise NotImplementedError
