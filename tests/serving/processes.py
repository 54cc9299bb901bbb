"""A server as its users start it: `pipelined serve` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

START_S = 180.0


class ServerProcess:
    """Attributes: url: where it listens, once it does. log: what it has said so far."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "pipelined", "serve", *words, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.log: list[str] = []
        self._listening = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listening on (\S+)", line):
                self.url = found.group(1)
                self._listening.set()
        self._listening.set()

    def wait_until_it_listens(self) -> None:
        assert self._listening.wait(START_S), "".join(self.log)
        assert self.url, "".join(self.log)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextmanager
def server_process(*words: str, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    server = ServerProcess(*words, env=env)
    try:
        server.wait_until_it_listens()
        yield server
    finally:
        server.kill()


def client_of(server: ServerProcess) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, timeout=60)
