"""`pipelined bench chunking`: `balanced` as it is beside fixed and dynamic chunks, each at the best of a sweep.

On emulated stages in real time, whose links are real, with 1, 4 and 16 prompts at a time; and on a model. A tuned
policy is measured once at each setting, its best setting then again, in turn with `balanced`, which has nothing to set.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from pipelined.cli.measure import prompt_tokens, run_async
from pipelined.cli.options import int_list
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from pipelined.planning.profile_sweep import Row, Sweep

__all__ = ["add_parser"]

_STAGE = {"a": 3.25e-10, "b": 6.03e-6, "c": 5e-3, "d": 2e-8}
"""A large model's shape at a smaller scale: attention costs as much as the rest at 9K tokens, a launch 800 tokens."""


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the kind."""
    parser = kinds.add_parser("chunking", help="balanced chunks beside tuned ones", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter prompts, smaller sweeps, at most 8 minutes")
    parser.add_argument(
        "--pp-sizes", type=int_list, default=(4, 8), metavar="P,P", help="of emulated pipelines (default: 4,8)"
    )
    parser.add_argument("--model", default="smollm2", help="measured at two stages (default: smollm2); '' for none")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    from rich.console import Console

    from pipelined.planning.profile_sweep import sweep

    if any(size < 1 for size in arguments.pp_sizes):
        raise ConfigError(f"--pp-sizes {arguments.pp_sizes}: expected 1 or more each")
    plans = [_emulated(size, quick=arguments.quick) for size in arguments.pp_sizes]
    if arguments.model:
        plans.append(_real(arguments.model, quick=arguments.quick))
    rows: list[Row] = []
    with Console(stderr=True).status("") as status:
        for plan in plans:
            rows += run_async(sweep(plan, status.update))
    if arguments.json:
        print(json.dumps([msgspec.structs.asdict(row) for row in rows]))
        return 0
    print(f"{'where':24} {'prompts':>7} {'policy':9} {'setting':14} {'TTFT':>9} {'tokens/s':>10}")
    for row in rows:
        print(
            f"{row.where:24} {row.concurrency:7} {row.policy:9} {row.setting:14} "
            f"{row.ttft_s:7.3f} s {row.tokens_per_s:10.1f}"
        )
    return 0


def _emulated(pp_size: int, *, quick: bool) -> Sweep:
    from pipelined.llm import EngineConfig
    from pipelined.planning.profile_sweep import Sweep

    tokens = 24_576 if quick else 65_536
    model = "emulated://?layers=64&hidden=2048&" + "&".join(f"{name}={value}" for name, value in _STAGE.items())
    config = EngineConfig(
        model=model,
        pp_size=pp_size,
        device="emulated",
        transport="shm://",
        kv_cache_tokens=17 * tokens,
        disable_radix_cache=True,
        threads_per_rank=1,
    )
    return Sweep(
        where=f"emulated, {pp_size} stages",
        config=config,
        prompt=[1] * tokens,
        fixed=(512, 1024, 2048, 4096, 8192) if quick else (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
        dynamic=(1024, 2048, 4096, 8192) if quick else (1024, 1536, 2048, 3072, 4096, 6144, 8192),
        smoothings=(0.75,) if quick else (0.5, 0.75, 1.0),
        loads=((1, 3), (4, 2), (16, 1)) if quick else ((1, 7), (4, 5), (16, 3)),
    )


def _real(model: str, *, quick: bool) -> Sweep:
    from pipelined.llm import EngineConfig, inspect_model
    from pipelined.planning.profile_sweep import Sweep

    config = EngineConfig(model=model, pp_size=2, threads_per_rank=1, disable_radix_cache=True)
    return Sweep(
        where=f"{model}, 2 stages",
        config=config,
        prompt=prompt_tokens(inspect_model(config), 1536 if quick else 8000),
        fixed=(128, 256, 512) if quick else (128, 256, 512, 1024),
        dynamic=(256, 512) if quick else (256, 512, 1024),
        smoothings=(0.75,) if quick else (0.5, 0.75, 1.0),
        loads=((1, 2 if quick else 3),),
    )
