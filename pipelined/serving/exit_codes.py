"""How the processes of `serve` end, for whoever started them. 0: as they were told to."""

from __future__ import annotations

from typing import Final

__all__ = ["EXIT_DEAD", "EXIT_ERROR", "EXIT_GIVEN_UP", "EXIT_TERMINATED"]

EXIT_ERROR: Final = 2
"""What was asked for cannot be; it has been said in one line."""

EXIT_DEAD: Final = 3
"""The engine has given up."""

EXIT_GIVEN_UP: Final = 4
"""The HTTP process ended again and again."""

EXIT_TERMINATED: Final = 143
"""A signal came before there was anything to end gracefully."""
