"""From a URI to a transport: `shm://`, `faulty+memory://?seed=7`.

Plug-ins register under the entry-point group `pipelined.transports`: a class called with the URI's options as keyword
arguments, or, for a wrapper (its `wraps` is true), with the inner transport and a dict. A wrapper declares the names of
its own options in `options`; each option of a URI goes to the outermost wrapper that declares it, or to the transport.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from functools import lru_cache
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
    return dict(_found(tuple(sys.path)))


@lru_cache(maxsize=4)
def _found(_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """By what is searched: reading them takes milliseconds, which every rank of a process would pay for."""
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
    if scheme not in known:  # or it was installed a moment ago
        _found.cache_clear()
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
    wrappers = [_load(scheme) for scheme in schemes[:-1]]
    for scheme, wrapper in zip(schemes, wrappers, strict=False):
        if not getattr(wrapper, "wraps", False):
            raise ConfigError(f"transport {uri!r}: {scheme!r} wraps nothing, so it must come last")
    innermost = _load(schemes[-1])
    if getattr(innermost, "wraps", False):
        raise ConfigError(
            f"transport {uri!r}: {schemes[-1]!r} is a wrapper; put it before one, as in '{schemes[-1]}+shm://'"
        )
    known = {name: scheme for scheme, wrapper in zip(schemes, wrappers, strict=False) for name in wrapper.options}
    own = [{name: options.pop(name) for name in wrapper.options if name in options} for wrapper in wrappers]
    transport = _made(innermost, options, known)
    for wrapper, given in zip(reversed(wrappers), reversed(own), strict=True):
        transport = wrapper(transport, given)
    return transport


def _made(innermost: Any, options: dict[str, str], known: dict[str, str]) -> Transport:
    try:
        transport: Transport = innermost(**options)
    except ConfigError as error:
        # What the transport does not know may have been meant for a wrapper.
        meant = next((name for name in options if get_close_matches(name, known, n=1)), None)
        if type(error) is not ConfigError or meant is None:
            raise
        of = "+, ".join(dict.fromkeys(known.values()))
        raise ConfigError(f"{error}; options of {of}+{nearest(meant, known)}") from error
    return transport
