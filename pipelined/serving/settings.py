"""Settings of the HTTP server: one frozen dataclass; the command line takes its defaults from here."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field

from pipelined.errors import ConfigError, nearest

__all__ = ["TOOL_CALL_PARSERS", "ServerSettings"]

TOOL_CALL_PARSERS = ("hermes", "mistral", "llama3")
"""Ways in which models write tool calls."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the engine is offered over HTTP.

    Attributes:
        host: Address to listen on.
        port: TCP port; 0 takes a free one.
        api_keys: Any of them opens the door (`Authorization: Bearer KEY`); none: whoever reaches the port may use it.
        allow_anonymous: Listen beyond this machine even without a key.
        served_model_names: What clients call the model; the first is reported. Empty: the model as it was given.
        chat_template: Used in place of the model's own.
        trust_request_chat_template: Take templates from requests: programs that may run for ever, if in a sandbox.
        tool_call_parser: How tool calls stand in the model's text; "auto" looks at the chat template.
        max_body_bytes: Largest request body.
        max_queued_requests: Sequences that may wait beyond those that run; further ones are told to come back later.
        request_timeout_s: A request that takes longer is ended; None: no limit.
        drain_timeout_s: After SIGTERM, requests under way may take that long.
        watchdog_timeout_s: No progress for so long while work is owed: say where it is stuck and recover. None: never.
        probe_timeout_s: `/health_generate` waits that long for its token.
        keep_alive_s: Interval of comments on a silent event stream, so that nobody between closes it.
        tls_certfile, tls_keyfile: PEM files; both or none.
        profile_dir: Where profiles are written.
        allowed_origins: Web pages that may call the API from a browser (CORS).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_anonymous: bool = False
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str = "auto"
    max_body_bytes: int = 64 * 2**20
    max_queued_requests: int = 1024
    request_timeout_s: float | None = None
    drain_timeout_s: float = 60.0
    watchdog_timeout_s: float | None = 300.0
    probe_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    tls_certfile: str | None = None
    tls_keyfile: str | None = None
    profile_dir: str = "."
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port={self.port} is out of range; expected 0 to 65535")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes={self.max_body_bytes} is out of range; expected 1 or more")
        if self.max_queued_requests < 0:
            raise ConfigError(f"max_queued_requests={self.max_queued_requests} is out of range; expected 0 or more")
        for name in ("request_timeout_s", "watchdog_timeout_s", "probe_timeout_s", "keep_alive_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} is out of range; expected more than 0, finite")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigError(f"drain_timeout_s={self.drain_timeout_s} is out of range; expected 0 or more")
        if (self.tls_certfile is None) != (self.tls_keyfile is None):
            raise ConfigError("TLS needs both a certificate and its key; give tls_certfile and tls_keyfile, or neither")
        if self.tool_call_parser not in ("auto", *TOOL_CALL_PARSERS):
            known = ("auto", *TOOL_CALL_PARSERS)
            raise ConfigError(
                f"unknown tool_call_parser {self.tool_call_parser!r}{nearest(self.tool_call_parser, known)}"
            )
        if not all(self.api_keys):
            raise ConfigError("an API key is empty; give at least one character, or no key")
        if not self.api_keys and not self.allow_anonymous and not self.local:
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and there is no API key: set one (--api-key, or "
                "$PIPELINED_API_KEY), listen on 127.0.0.1, or say --allow-anonymous"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the port."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """Where it is to be found."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_certfile else 'http'}://{host}:{self.port}"
