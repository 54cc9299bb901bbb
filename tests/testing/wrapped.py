"""A transport around another, whose every part can be overridden: what the broken transports are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipelined.transport import Transfer, resolve

if TYPE_CHECKING:
    from collections.abc import Callable


def relay(inner: Transfer[Any], make: Callable[[str], Transfer[Any]] = Transfer, **how: Any) -> Transfer[Any]:
    """A transfer that ends as `inner` does, with `how["result"]` and `how["error"]` applied; None: never ends."""
    outer = make(f"relayed {inner!r}")

    def ended(_: Transfer[Any]) -> None:
        if inner.error is not None:
            error = how.get("error", lambda error: error)(inner.error)
            if error is not None:
                outer.fail(error)
        else:
            outer.finish(how.get("result", lambda result: result)(inner.result()))

    inner.add_done_callback(ended)
    return outer


class Wrapped:
    """Hands on whatever it has not overridden."""

    def __init__(self, inner: Any, endpoint: Endpoint | None = None, peer: Any = None, lane: Any = None) -> None:
        self.inner, self.endpoint, self.peer, self.lane = inner, endpoint, peer, lane
        self.state: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Endpoint(Wrapped):
    """An endpoint whose links are of the classes `tensor_link` and `message_link`."""

    tensor_link: type[Wrapped] = Wrapped
    message_link: type[Wrapped] = Wrapped

    def __init__(self, inner: Any, transport: Transport, spec: Any) -> None:
        super().__init__(inner)
        self.transport, self.spec = transport, spec
        self.links: dict[Any, Wrapped] = {}
        self.shared: dict[Any, Any] = getattr(spec.rendezvous, "objects", {})  # what both ends see

    @property
    def capabilities(self) -> Any:
        return self.transport.capabilities

    def tensors(self, peer: Any, lane: Any) -> Wrapped:
        return self._link(self.tensor_link, self.inner.tensors(peer, lane), peer, lane)

    def messages(self, peer: Any, lane: Any) -> Wrapped:
        return self._link(self.message_link, self.inner.messages(peer, lane), peer, lane)

    def _link(self, kind: type[Wrapped], inner: Any, peer: Any, lane: Any) -> Wrapped:
        key = (kind, inner)
        if key not in self.links:
            self.links[key] = kind(inner, self, peer, lane)
        return self.links[key]

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Transport:
    """Opens endpoints of class `endpoint` around those of `around`."""

    around = "memory://"
    endpoint: type[Endpoint] = Endpoint
    declares: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.inner = resolve(self.around)
        self.capabilities = replace(self.inner.capabilities, **self.declares)
        self.scheme = "wrapped"

    def change(self, spec: Any) -> Any:
        """The spec that the inner transport gets."""
        return spec

    async def open(self, spec: Any) -> Endpoint:
        return self.endpoint(await self.inner.open(self.change(spec)), self, spec)


def transport(*, tensors: type[Wrapped] | None = None, messages: type[Wrapped] | None = None, **more: Any) -> Any:
    """A transport class with these links."""
    base = more.pop("endpoint", Endpoint)
    links = {"tensor_link": tensors or base.tensor_link, "message_link": messages or base.message_link}
    return type("Broken", (Transport,), {"endpoint": type("BrokenEndpoint", (base,), links), **more})
