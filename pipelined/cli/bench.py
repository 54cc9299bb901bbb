"""`pipelined bench`: what is claimed, measured."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]

_BENCHES = ("prefill", "scaling", "decode", "memory", "overhead", "serve", "transport", "chunking")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its kinds."""
    parser = commands.add_parser("bench", help="measure", description="Measurements behind every figure that we quote.")
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for bench in _BENCHES:
        import_module(f"pipelined.cli.bench_{bench}").add_parser(kinds)
