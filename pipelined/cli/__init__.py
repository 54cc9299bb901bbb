"""The command line: one short file a command."""

from pipelined.cli.main import main

__all__ = ["main"]
