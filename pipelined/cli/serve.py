"""`pipelined serve`: the model over HTTP, for OpenAI's clients."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.cli.config_file import with_config_file
from pipelined.cli.options import add_engine_options, engine_config
from pipelined.errors import ConfigError, MissingDependencyError
from pipelined.llm.config import EngineConfig
from pipelined.serving.settings import TOOL_CALL_PARSERS, ServerSettings

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]

KEY = "PIPELINED_API_KEY"

_TERMINATED = 143

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ServerSettings)}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        description="Serve a model over HTTP: OpenAI's API, metrics, a dashboard. See docs/serving.md.",
    )
    add_engine_options(parser, model_may_come_later=True)
    parser.add_argument("--config", metavar="FILE", help="YAML with any of these options; the command line wins")
    parser.add_argument(
        "--no-recover", action="store_true", help="end when a rank is lost, instead of starting it anew"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=EngineConfig.max_restarts,
        metavar="N",
        help="more losses than that in a row, without a token between, end it (default: %(default)s)",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        dest="heartbeat_bound_s",
        type=float,
        default=EngineConfig.heartbeat_bound_s,
        metavar="SECONDS",
        help="a rank that is silent for so long is lost (default: %(default)s)",
    )
    _add_server_options(parser)
    _add_limits(parser)
    parser.set_defaults(run=run, parser=parser)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    option = group.add_argument
    option("--host", default=_DEFAULTS["host"], metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    option("--port", type=int, default=_DEFAULTS["port"], metavar="N", help="port; 0 takes a free one (default: 8000)")
    option(
        "--api-key",
        dest="api_keys",
        action="append",
        default=[],
        metavar="KEY",
        help=f"clients must show it; may be repeated; better given as ${KEY}, which no process list shows",
    )
    option("--allow-anonymous", action="store_true", help="listen beyond this machine even without a key")
    option(
        "--served-model-name",
        dest="served_model_names",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="what clients call the model (default: MODEL)",
    )
    option("--chat-template", metavar="FILE", help="a Jinja template used in place of the model's own")
    option(
        "--trust-request-chat-template",
        action="store_true",
        help="take templates from requests: programs that may run for ever, if in a sandbox",
    )
    option(
        "--tool-call-parser",
        default=_DEFAULTS["tool_call_parser"],
        metavar="NAME",
        help=f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)} (default: auto, by its template)",
    )
    option("--tls-certfile", "--ssl-certfile", metavar="FILE", help="serve https with this certificate (PEM)")
    option("--tls-keyfile", "--ssl-keyfile", metavar="FILE", help="its key")
    option("--log-format", choices=("text", "json"), default="text", help="of the log (default: %(default)s)")
    option("--profile-dir", default=".", metavar="DIR", help="where /stop_profile writes (default: here)")
    option(
        "--allowed-origins",
        nargs="+",
        action="extend",
        default=[],
        metavar="ORIGIN",
        help="web pages that may call the API from a browser",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")

    def option(name: str, field: str, kind: Any, unit: str, text: str) -> None:
        default = _DEFAULTS[field]
        group.add_argument(
            name, dest=field, type=kind, default=default, metavar=unit, help=f"{text} (default: {default or 'none'})"
        )

    option("--max-body-bytes", "max_body_bytes", int, "N", "largest request body")
    option("--max-queued-requests", "max_queued_requests", int, "N", "sequences that may wait; more get a 429")
    option("--request-timeout", "request_timeout_s", _seconds, "SECONDS", "a request that takes longer is ended")
    option("--drain-timeout", "drain_timeout_s", float, "SECONDS", "after SIGTERM, requests may take that long")
    option(
        "--watchdog-timeout",
        "watchdog_timeout_s",
        _seconds,
        "SECONDS",
        "no progress for so long: say where it is stuck, and recover; 0: never",
    )


def _seconds(text: str) -> float | None:
    """For argparse; 0 is none."""
    return float(text) or None


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    import uvloop

    arguments = with_config_file(arguments, "serve")
    settings = _settings(arguments)
    arguments.model = arguments.model or arguments.later_model
    if not arguments.model:
        raise ConfigError("no model: give MODEL, or `model:` in the configuration file")
    try:
        from pipelined.serving.logs import set_up_logs
        from pipelined.serving.run import listen, serve
        from pipelined.serving.supervisor import Supervisor
    except ImportError as error:
        raise MissingDependencyError("pipelined serve", "pip install 'pipelined[serve]'") from error
    from pipelined.llm import AsyncLLM

    config = engine_config(arguments, recover=not arguments.no_recover)
    set_up_logs(arguments.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if config.workers == "task":  # all in this process
                return runner.run(serve(AsyncLLM(config), settings))
            supervisor = Supervisor(config, settings, listen(settings), log_format=arguments.log_format)
            return runner.run(supervisor.run())
    except asyncio.CancelledError:
        return _TERMINATED


def _settings(arguments: argparse.Namespace) -> ServerSettings:
    given = {name: getattr(arguments, name) for name in _DEFAULTS if hasattr(arguments, name)}
    for name in ("api_keys", "served_model_names", "allowed_origins"):
        given[name] = tuple(given[name])
    if os.environ.get(KEY):
        given["api_keys"] += (os.environ[KEY],)
    if given["chat_template"]:
        given["chat_template"] = _template(given["chat_template"])
    return ServerSettings(**given)


def _template(name: str) -> str:
    if "{" in name:
        return name
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {name!r} cannot be read: {error}") from error
