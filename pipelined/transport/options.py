"""Reading the options of a transport's URI: unknown and senseless ones are errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipelined.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["integer_option", "known_options", "number_option"]


def known_options(scheme: str, options: Mapping[str, str], known: Collection[str]) -> None:
    """See that there are no other options.

    Raises:
        ConfigError: Names the unknown one and what is known.
    """
    for name in options:
        if name not in known:
            raise ConfigError(f"{scheme}:// has no option {name!r}{nearest(name, known)}")


def integer_option(scheme: str, options: Mapping[str, str], name: str, *, at_least: int = 0) -> int | None:
    """An option's value, None if it was not given.

    Raises:
        ConfigError: It is not a whole number, or too small.
    """
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(f"{scheme}://?{name}={text}: expected a whole number, at least {at_least}")
    return int(text)


def number_option(
    scheme: str,
    options: Mapping[str, str],
    name: str,
    default: float,
    *,
    at_least: float = 0.0,
    at_most: float = math.inf,
) -> float:
    """An option's value, `default` if it was not given.

    Raises:
        ConfigError: It is not a number, or out of range.
    """
    text = options.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not at_least <= number <= at_most:
        upper = f" and at most {at_most:g}" if at_most < math.inf else ""
        raise ConfigError(f"{scheme}://?{name}={text}: expected a number, at least {at_least:g}{upper}")
    return number
