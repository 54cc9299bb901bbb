"""From a URI to a transport: `shm://`, `faulty+memory://?seed=7`.

Plug-ins register under the entry-point group `pipelined.transports`: a class called with the URI's options, or, for a
wrapper (`Wrapper.wraps` is true), with the inner transport and the options.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from pipelined.errors import ConfigError, UnknownSchemeError, nearest

if TYPE_CHECKING:
    from pipelined.transport.base import Transport

__all__ = ["GROUP", "installed", "resolve", "split_uri"]

GROUP = "pipelined.transports"


def installed() -> dict[str, EntryPoint]:
    """Scheme -> entry point of every transport and wrapper found on this installation; nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def split_uri(uri: str) -> tuple[list[str], dict[str, str]]:
    """Schemes, outermost first, and options.

    Raises:
        ConfigError: It is not of the form `wrapper+scheme://?option=value`.
    """
    text = uri if "://" in uri else f"{uri}://"
    parts = urlsplit(text)
    if not parts.scheme:
        raise ConfigError(f"transport {uri!r} is not a URI; expected for example 'shm://' or 'memory://?window=8'")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.netloc or parts.path.strip("/"):
        options["address"] = parts.netloc + parts.path
    return parts.scheme.split("+"), options


def _load(scheme: str) -> Any:
    known = installed()
    if scheme not in known:
        raise UnknownSchemeError(f"unknown transport {scheme!r}{nearest(scheme, known)}")
    return known[scheme].load()


def resolve(uri: str) -> Transport:
    """The transport that `uri` names; wrappers composed around it.

    Raises:
        UnknownSchemeError: Names what is known.
        MissingDependencyError: Its library is not installed; carries the install line.
        ConfigError: An option is unknown or out of range.
    """
    schemes, options = split_uri(uri)
    transport: Transport = _load(schemes[-1])(**options) if len(schemes) == 1 else _load(schemes[-1])()
    for wrapper in reversed(schemes[:-1]):
        transport = _load(wrapper)(transport, options)
    return transport
