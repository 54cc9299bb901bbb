"""How peers find each other's addresses before any link stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

__all__ = ["FileRendezvous", "MemoryRendezvous", "Rendezvous", "part_of"]


class Rendezvous(Protocol):
    """A small key-value board that all peers of a pipeline see."""

    def publish(self, key: str, value: str) -> None:
        """Write once; visible to everybody afterwards."""
        ...

    def get(self, key: str) -> str | None:
        """What was published under `key`, or None so far."""
        ...


class MemoryRendezvous:
    """For peers in one process. `objects` is where an in-process transport keeps what it shares."""

    def __init__(self) -> None:
        self._board: dict[str, str] = {}
        self.objects: dict[str, object] = {}

    def publish(self, key: str, value: str) -> None:
        """Write once."""
        self._board[key] = value

    def get(self, key: str) -> str | None:
        """What was published, or None."""
        return self._board.get(key)


class FileRendezvous:
    """For peers on one host: a directory only its owner can enter, a file a key, written atomically."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def publish(self, key: str, value: str) -> None:
        """Write once."""
        path = self.directory / key.replace("/", "_")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(value)
        temporary.rename(path)

    def get(self, key: str) -> str | None:
        """What was published, or None."""
        try:
            return (self.directory / key.replace("/", "_")).read_text()
        except FileNotFoundError:
            return None


class _Prefixed:
    """A part of a board that has no parts of its own."""

    def __init__(self, whole: Rendezvous, name: str) -> None:
        self._whole = whole
        self._name = name

    def publish(self, key: str, value: str) -> None:
        """Write once."""
        self._whole.publish(f"{self._name}/{key}", value)

    def get(self, key: str) -> str | None:
        """What was published, or None."""
        return self._whole.get(f"{self._name}/{key}")


def part_of(rendezvous: Rendezvous, name: str) -> Rendezvous:
    """A part of the board whose keys and objects meet no others; of the same kind, and the same for all who ask."""
    if isinstance(rendezvous, FileRendezvous):
        return FileRendezvous(rendezvous.directory / name)
    if isinstance(rendezvous, MemoryRendezvous):
        part = rendezvous.objects.setdefault(f"part {name}", MemoryRendezvous())
        assert isinstance(part, MemoryRendezvous)
        return part
    return _Prefixed(rendezvous, name)
