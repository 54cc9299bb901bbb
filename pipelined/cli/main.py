"""Parses the command line, runs a command, turns errors into one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import pipelined
from pipelined.errors import PipelinedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = (
    "generate",
    "serve",
    "bench",
    "trace",
    "transports",
    "fuzz",
    "soak",
    "stages",
    "profile",
    "simulate",
    "replay",
    "plan",
    "tune",
)
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pipelined ARGUMENTS`; returns the exit code: 0, 2 for an error that was said in one line, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    arguments.argv = list(argv)  # a command may read more options from a file
    try:
        code: int = arguments.run(arguments)
    except PipelinedError as error:
        print(f"pipelined: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pipelined: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone: nothing is left to say
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pipelined", description=pipelined.__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"pipelined {pipelined.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        import_module(f"pipelined.cli.{command}").add_parser(commands)
    return parser


def _one_line(error: PipelinedError) -> str:
    return " ".join(str(error).split())
