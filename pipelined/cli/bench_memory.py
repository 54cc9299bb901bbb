"""`pipelined bench memory`: what each rank takes beyond its imports, over the number of stages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipelined.cli.measure import measure_prefill, prompt_tokens, run_async
from pipelined.cli.options import add_engine_options, engine_config, int_list

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the kind."""
    parser = kinds.add_parser("memory", help="memory of each rank beyond its imports", description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--prompt-tokens", type=int, default=4096, metavar="N", help="KV in use (default: 4096)")
    parser.add_argument("--pp-sizes", type=int_list, default=(1, 2), metavar="P,P", help="default: 1,2")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    rows = [run_async(_memory(arguments, size)) for size in arguments.pp_sizes]
    for row in rows:
        row["share"] = max(row["rank_bytes"]) / max(rows[0]["rank_bytes"])
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return 0
    for row in rows:
        sizes = ", ".join(f"{size / 1e6:.0f} MB" for size in row["rank_bytes"])
        print(f"{row['pp_size']} stages: {sizes} each; the largest is {row['share']:.2f} of one stage alone")
    return 0


async def _memory(arguments: argparse.Namespace, size: int) -> dict[str, Any]:
    from pipelined.llm import AsyncLLM

    llm = AsyncLLM(engine_config(arguments, pp_size=size, disable_radix_cache=True))
    tokens = prompt_tokens(llm.info, arguments.prompt_tokens)
    async with llm:
        await measure_prefill(llm, tokens)
        stats = await llm.stats()
    return {
        "pp_size": size,
        "prompt_tokens": len(tokens),
        "rank_bytes": [own["rss_bytes"] - own["rss_imports_bytes"] for _, own in sorted(stats.items())],
    }
