"""Who may talk to whom over sockets: addresses on the rendezvous, hellos with a proof, where one may listen."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import socket
from typing import TYPE_CHECKING

import msgspec

from pipelined.errors import ConfigError, HandshakeError
from pipelined.transport.hello import HELLO_LIMIT_BYTES, check_hello, decode_hello, encode_hello

if TYPE_CHECKING:
    from pipelined.messages import Hello, Peer
    from pipelined.transport import EndpointSpec

__all__ = ["Address", "Greeter", "find", "listening_host", "publish"]


class Address(msgspec.Struct, frozen=True):
    """What a listening endpoint publishes. `token`: known to those alone who can read the rendezvous."""

    epoch: int
    url: str
    token: str
    public_key: str = ""


def _key(scheme: str, peer: Peer) -> str:
    return f"{scheme}.{peer.pipeline}.{peer.rank}"


def publish(scheme: str, spec: EndpointSpec, url: str, public_key: str = "") -> Address:
    """Say where this endpoint listens. A later epoch's address replaces that of an earlier one."""
    address = Address(spec.epoch, url, secrets.token_hex(16), public_key)
    spec.rendezvous.publish(_key(scheme, spec.me), msgspec.json.encode(address).decode())
    return address


def find(scheme: str, spec: EndpointSpec, peer: Peer) -> Address | None:
    """What `peer` has published, of whatever epoch, or None so far.

    Raises:
        HandshakeError: It is no address.
    """
    text = spec.rendezvous.get(_key(scheme, peer))
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Address)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"the address that {peer} published does not decode: {error}") from error


class Greeter:
    """Makes and checks hellos. A proof stands in for the secret, which itself never travels.

    The proof is an HMAC under the secret over the listener's challenge and the rest of the hello: worth nothing to
    another listener or, where the challenge is fresh for each link, at another time.
    """

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._secret = hello.secret.encode()

    def hello(self, challenge: bytes) -> bytes:
        """The hello to a listener that gave this challenge, encoded."""
        return encode_hello(msgspec.structs.replace(self._hello, secret=self._proof(challenge, self._hello)))

    def answer(self, challenge: bytes) -> bytes:
        """A listener's own proof, for who dialled with that challenge."""
        return hmac.digest(self._secret, b"answer" + challenge, hashlib.sha256)

    def check_answer(self, challenge: bytes, answer: bytes) -> bool:
        """Whether a listener's proof is one of the same secret."""
        return hmac.compare_digest(self.answer(challenge), answer)

    @staticmethod
    def decode(encoded: bytes) -> Hello:
        """What came as the first frame of a link.

        Raises:
            HandshakeError: It is no hello.
        """
        if len(encoded) > HELLO_LIMIT_BYTES:
            raise HandshakeError(f"a hello of {len(encoded)} bytes; the limit is {HELLO_LIMIT_BYTES}")
        return decode_hello(encoded)

    def check(self, theirs: Hello, challenge: bytes) -> None:
        """Check the proof of a hello and all that both sides have to agree on.

        Raises:
            HandshakeError: Names what differs.
        """
        proven = hmac.compare_digest(self._proof(challenge, theirs).encode(), theirs.secret.encode())
        # As if it had carried the secret itself; any other text stands for a wrong one.
        shown = self._hello.secret if proven else f"not {self._hello.secret}"
        check_hello(self._hello, msgspec.structs.replace(theirs, secret=shown))

    def _proof(self, challenge: bytes, hello: Hello) -> str:
        message = challenge + encode_hello(msgspec.structs.replace(hello, secret=""))
        return hmac.digest(self._secret, message, hashlib.sha256).hex()


async def listening_host(scheme: str, host: str, secret: str) -> tuple[str, bool]:
    """The numeric address to listen on, and whether it is a loopback one.

    Raises:
        ConfigError: It can't be resolved, is a wildcard, or is reachable from outside and there is no secret.
    """
    numeric = host.strip("[]")
    try:
        address = ipaddress.ip_address(numeric)
    except ValueError:
        numeric = await _resolved(scheme, host)
        address = ipaddress.ip_address(numeric.split("%")[0])
    if address.is_unspecified:
        raise ConfigError(f"{scheme}://{host}: peers can't reach a wildcard; give this host's own address")
    if not address.is_loopback and not secret:
        raise ConfigError(
            f"{scheme}://{host} can be reached from other hosts, so it needs a shared secret; set one, or use 127.0.0.1"
        )
    return numeric, address.is_loopback


async def _resolved(scheme: str, host: str) -> str:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{scheme}://{host}: the address to listen on can't be resolved: {error}") from error
    return str(found[0][4][0])
