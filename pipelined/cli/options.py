"""Options that several commands share. Defaults are those of `EngineConfig`; both families' names are accepted."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.chunking import POLICIES
from pipelined.errors import ConfigError
from pipelined.llm.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["add_engine_options", "add_trace_option", "engine_config", "int_list", "output_file"]

SMOOTHING = "SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR"
PARTITION = "SGLANG_PP_LAYER_PARTITION"

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}


def int_list(text: str) -> tuple[int, ...]:
    """`14,16` as (14, 16), for argparse."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 14,16") from None


def output_file(text: str) -> str:
    """A file that can be written, for argparse: said before any work is done for it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r} to write {path.name!r} in")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: no permission")
    return text


def _partition(text: str) -> tuple[int, ...] | str:
    """`14,16`, or `auto`, for argparse."""
    return text if text == "auto" else int_list(text)


def add_engine_options(parser: argparse.ArgumentParser, *, model_may_come_later: bool = False) -> None:
    """The model and how to run it.

    Args:
        parser: Gets them.
        model_may_come_later: MODEL may be left out; `--model` (`later_model`) is another way to say it.
    """
    text = "directory, hub id, .gguf file, or the alias smollm2"
    parser.add_argument("model", metavar="MODEL", nargs="?" if model_may_come_later else None, help=text)
    if model_may_come_later:
        parser.add_argument("--model", dest="later_model", metavar="MODEL", help="the same, for a configuration file")
    group = parser.add_argument_group("engine")

    def option(*names: str, help: str, **kwargs: Any) -> None:
        field = kwargs.get("dest") or names[0].removeprefix("--").replace("-", "_")
        default = _DEFAULTS[field]
        shown = f"{help} (default: {default})" if default not in (None, False) else help
        group.add_argument(*names, help=shown, default=default, **kwargs)

    _add_layout(option)
    _add_chunking(group)
    _add_capacity(option)
    _add_running(option)


def _add_layout(option: Callable[..., None]) -> None:
    """How the model is cut."""
    option(
        "--pp-size",
        "--pp",
        "--pipeline-parallel-size",
        dest="pp_size",
        type=int,
        metavar="P",
        help="stages, a rank each",
    )
    option(
        "--layer-partition",
        type=_partition,
        metavar="N,N",
        help="layers of each stage, or auto: by what layers take, measured first or taken from --profile; "
        "default even, larger parts later (or $SGLANG_PP_LAYER_PARTITION)",
    )
    option(
        "--chunked-prefill-size",
        "--max-num-batched-tokens",
        dest="chunked_prefill_size",
        type=int,
        metavar="N",
        help="prompt tokens of a chunk; with dynamic chunking, of the first",
    )


def _add_capacity(option: Callable[..., None]) -> None:
    """What is held at a time."""
    option("--page-size", "--block-size", dest="page_size", type=int, metavar="N", help="tokens of a KV page")
    option(
        "--max-running-requests",
        "--max-num-seqs",
        dest="max_running_requests",
        type=int,
        metavar="N",
        help="most sequences at a time",
    )
    option(
        "--depth",
        "--pp-async-batch-depth",
        dest="depth",
        type=int,
        metavar="N",
        help="micro-batches in flight beyond one a stage",
    )
    option(
        "--context-length",
        "--max-model-len",
        dest="context_length",
        type=int,
        metavar="N",
        help="longest prompt plus output; default the model's",
    )
    option(
        "--kv-cache-tokens",
        "--max-total-tokens",
        dest="kv_cache_tokens",
        type=int,
        metavar="N",
        help="capacity of the KV cache; default what fits",
    )
    option(
        "--disable-radix-cache",
        "--no-enable-prefix-caching",
        dest="disable_radix_cache",
        action="store_true",
        help="compute every prefix anew",
    )


def _add_running(option: Callable[..., None]) -> None:
    """How it is loaded and run."""
    option("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16")
    option("--load-format", metavar="FORMAT", help="auto, or dummy for random weights")
    option("--trust-remote-code", action="store_true", help="run code that comes with the model")
    option("--transport", metavar="URI", help="what moves tensors: shm://, zmq://, ...; default shm://")
    option("--workers", metavar="KIND", help="process, or task for all ranks in this process")
    option("--threads-per-rank", type=int, metavar="N", help="CPU threads of each rank; default cores / P")
    option("--device", metavar="KIND", help="cpu or cuda")
    option(
        "--setup-timeout", dest="setup_timeout_s", type=float, metavar="SECONDS", help="all ranks must be ready by then"
    )
    option(
        "--step-timeout",
        dest="step_timeout_s",
        type=float,
        metavar="SECONDS",
        help="floor of deadlines on a rank that owes work",
    )


def _add_chunking(group: argparse._ArgumentGroup) -> None:
    """How prompts are cut. Without defaults, so that what was not given can come from the environment."""
    absent: Any = argparse.SUPPRESS
    group.add_argument(
        "--chunking",
        metavar="POLICY",
        default=absent,
        help=f"{', '.join(POLICIES)}: chunks of equal length, shrinking, of equal time "
        f"(default: {_DEFAULTS['chunking']})",
    )
    group.add_argument(
        "--enable-dynamic-chunking", action="store_true", default=absent, help="the same as --chunking dynamic"
    )
    group.add_argument(
        "--smoothing-factor",
        type=float,
        metavar="S",
        default=absent,
        help="of dynamic chunks: 0 is fixed, 1 follows the run times strictly "
        f"(default: ${SMOOTHING}, or {_DEFAULTS['smoothing_factor']})",
    )
    group.add_argument(
        "--max-micro-batch-tokens",
        type=int,
        metavar="N",
        default=absent,
        help="most tokens of a balanced micro-batch (default: 8192, or four chunks)",
    )
    group.add_argument(
        "--profile",
        metavar="FILE",
        default=absent,
        help="costs of the stages, as `pipelined profile` measured them on this set-up (default: learnt while serving)",
    )
    group.add_argument(
        "--target-itl-ms",
        dest="target_itl_s",
        type=_milliseconds,
        metavar="MS",
        default=absent,
        help="inter-token latency that balanced chunks keep to while others decode (default: no bound)",
    )


def _milliseconds(text: str) -> float:
    """In seconds, for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; expected milliseconds, more than 0")
    return found / 1e3


def add_trace_option(parser: argparse.ArgumentParser) -> None:
    """`--trace` and `--timeline`."""
    group = parser.add_argument_group("trace")
    group.add_argument(
        "--trace", type=output_file, metavar="FILE", help="write a Chrome trace: one track per rank and coroutine"
    )
    group.add_argument(
        "--timeline", type=output_file, metavar="FILE", help="write a picture of what each stage did when (HTML)"
    )


def engine_config(arguments: argparse.Namespace, **changes: Any) -> EngineConfig:
    """The engine's settings from parsed options; `changes` win. Options not given may come from the environment.

    A layer partition of "auto" is measured here, which takes as long as loading the model.

    Raises:
        ConfigError: A value is out of range.
    """
    given = {name: getattr(arguments, name) for name in _DEFAULTS if hasattr(arguments, name)}
    if getattr(arguments, "enable_dynamic_chunking", False):
        if given.get("chunking", "dynamic") != "dynamic":
            raise ConfigError(f"--enable-dynamic-chunking contradicts --chunking {given['chunking']}; leave one out")
        given["chunking"] = "dynamic"
    given |= changes
    _add_environment(given)
    if given.get("chunked_prefill_size", 1) < 1:
        raise ConfigError(
            f"chunked_prefill_size={given['chunked_prefill_size']} is out of range; "
            f"expected a multiple of page_size={given['page_size']}"
        )
    if given.get("layer_partition") == "auto":
        from pipelined.llm.layer_costs import with_auto_partition

        return with_auto_partition(EngineConfig(**{**given, "layer_partition": None}))
    return EngineConfig(**given)


def _add_environment(given: dict[str, Any]) -> None:
    """The variables of another server whose command lines are accepted too. What was given wins."""
    text = os.environ.get(SMOOTHING, "").strip()
    if text and "smoothing_factor" not in given:
        try:
            given["smoothing_factor"] = float(text)
        except ValueError:
            raise ConfigError(f"{SMOOTHING}={text!r} is no number; expected 0 (fixed) to 1 (strict)") from None
        if not 0 <= given["smoothing_factor"] <= 1:
            raise ConfigError(f"{SMOOTHING}={text} is out of range; expected 0 (fixed) to 1 (strict)")
    text = os.environ.get(PARTITION, "").strip()
    if text and given.get("layer_partition") is None:
        try:
            given["layer_partition"] = int_list(text)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{PARTITION}: {error}") from None
        parts, stages = len(given["layer_partition"]), given.get("pp_size", 1)
        if parts != stages:
            raise ConfigError(
                f"{PARTITION}={text} has {parts} parts for {stages} stages; expected one a stage: "
                "change it, unset it, or give --layer-partition"
            )
