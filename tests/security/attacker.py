"""Finds every listening socket of some processes, and throws random and mutated bytes at them from a thread."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from pipelined.messages import DRIVER, PROTOCOL_VERSION, Hello, Peer, TensorHeader
from pipelined.transport.hello import encode_hello
from pipelined.transports.shm_lanes import Kind as ShmKind
from pipelined.transports.tcp_frames import encode
from pipelined.transports.wire import Frame, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

Address = str | tuple[str, int]

_HELD = 200  # connections left open at a time, more than any listener's allowance for strangers
_ACCEPTS = 0x00010000


def listening(pids: Iterable[int]) -> set[Address]:
    """Addresses on which these processes listen: paths, abstract names (`@...`), and (host, port)."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found: set[Address] = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and int(fields[3], 16) & _ACCEPTS and fields[6] in inodes:
            found.add(fields[7])
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                found.add((_numeric(host), int(port, 16)))
    return found


def _numeric(host: str) -> str:
    """An address as the kernel lists it, 32-bit words in the machine's order, as text."""
    words = struct.pack(f"={len(host) // 8}I", *(int(host[at : at + 8], 16) for at in range(0, len(host), 8)))
    address = ipaddress.ip_address(words)
    return str(getattr(address, "ipv4_mapped", None) or address)


def templates(pipeline: str, size: int) -> list[bytes]:
    """What real peers would send first, and later, as far as a stranger can know it."""
    world = tuple(sorted(Peer(pipeline, rank) for rank in range(DRIVER, size)))
    found = []
    for me in world:
        hello = encode_hello(Hello(PROTOCOL_VERSION, pipeline, 0, me, world, ""))
        found.append(struct.pack("<IBB", len(hello), ShmKind.HELLO, 0) + hello)
        found.append(encode(Frame.pack(Kind.HELLO, 0, 64), 16 + len(hello)) + bytes(16) + hello)
    tensor = msgspec.msgpack.encode(TensorHeader(0, 0, shape=(1 << 40,)))
    for kind in Kind:
        found.append(encode(Frame.pack(kind, 5, 0), 1 << 40, len(tensor)) + tensor)
        found.append(encode(Frame.pack(kind, 1, 0), 8) + bytes(8))
    found += [struct.pack("<IBB", length, kind, 1) for kind in ShmKind for length in (0, 0xFFFFFFFF)]
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    found += [greeting, greeting + ready, greeting + ready + b"\x02" + struct.pack(">Q", 1 << 60)]
    return found


class Attacker:
    """A thread that attacks `addresses` until it is stopped. `thrown`: connections made, by address."""

    def __init__(self, addresses: set[Address], known: list[bytes], seed: int) -> None:
        self.addresses = sorted(addresses, key=str)
        self.thrown: Counter[Address] = Counter()
        self._known = known
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._held: list[socket.socket] = []
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="attacker", daemon=True)

    def __enter__(self) -> Attacker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for held in self._held:
            held.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            address = self._rng.choice(self.addresses)
            with contextlib.suppress(OSError, zmq.ZMQError):
                if self._rng.random() < 0.2:
                    self._as_zmq(address)
                else:
                    self._as_bytes(address)
                self.thrown[address] += 1
            time.sleep(0.002)

    def _as_bytes(self, address: Address) -> None:
        sock = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
        sock.settimeout(0.3)
        try:
            sock.connect(address.replace("@", "\0", 1) if isinstance(address, str) else address)
            for _ in range(self._rng.randint(1, 4)):
                sock.send(self._bytes())
                if self._rng.random() < 0.2:
                    sock.settimeout(0.01)
                    with contextlib.suppress(TimeoutError):
                        sock.recv(4096)
        finally:
            if self._rng.random() < 0.5:
                self._held.append(sock)
            elif self._rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                sock.close()
            else:
                sock.close()
            if len(self._held) > _HELD:
                self._held.pop(self._rng.randrange(_HELD)).close()

    def _as_zmq(self, address: Address) -> None:
        if isinstance(address, str) and address.startswith("@"):
            return
        url = f"ipc://{address}" if isinstance(address, str) else f"tcp://{address[0]}:{address[1]}"
        with self._context.socket(self._rng.choice([zmq.DEALER, zmq.REQ, zmq.PUSH, zmq.SUB])) as sock:
            sock.setsockopt(zmq.LINGER, 20)
            sock.setsockopt(zmq.SNDTIMEO, 20)
            sock.connect(url)
            for _ in range(self._rng.randint(1, 5)):
                sock.send_multipart([self._bytes()[:2000] for _ in range(self._rng.randint(1, 4))])

    def _bytes(self) -> bytes:
        rng = self._rng
        kind = rng.random()
        if kind < 0.25:
            return rng.randbytes(rng.choice([1, 7, 40, 64, 700, 70_000]))
        data = bytearray(rng.choice(self._known))
        if kind < 0.4:
            return bytes(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            how = rng.randrange(5)
            if how == 0:
                data[at] = rng.randrange(256)
            elif how == 1:
                data[at] ^= 1 << rng.randrange(8)
            elif how == 2:
                data[at:at] = rng.randbytes(rng.randint(1, 9))
            elif how == 3:
                data[at : at + 4] = b"\xff\xff\xff\x7f"
            elif len(data) > at + 1:
                del data[at + 1 :]
        return bytes(data)
