"""`pipelined bench decode`: tokens a second while decoding a batch, beside a baseline in the same run."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from pipelined.cli.measure import Baseline, median, prompt_tokens, run_async
from pipelined.cli.options import add_engine_options, add_trace_option, engine_config
from pipelined.errors import ConfigError
from pipelined.messages import SamplingParams

if TYPE_CHECKING:
    import argparse

    from pipelined.llm import AsyncLLM

__all__ = ["add_parser"]


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the kind."""
    parser = kinds.add_parser("decode", help="tokens a second while decoding", description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences at a time (default: 1)")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="length of each (default: 128)")
    parser.add_argument("--new-tokens", type=int, default=48, metavar="N", help="to generate (default: 48)")
    parser.add_argument("--requests", type=int, default=3, metavar="R", help="measured batches (default: 3)")
    parser.add_argument("--baseline", choices=("transformers",), help="measure it too, in turn with ours")
    parser.add_argument("--baseline-threads", type=int, metavar="T", help="default: threads of all our ranks together")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_trace_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    for name, least in (("batch", 1), ("requests", 1), ("new_tokens", 2)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected {least} or more")
    result = run_async(_decode(arguments))
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"pipelined     pp {result['pp_size']}, batch {result['batch']}: {result['tokens_per_s']:.1f} tokens/s")
    if (other := result["baseline"]) is not None:
        print(f"{other['name']}  {other['threads']} threads: {other['tokens_per_s']:.1f} tokens/s")
    return 0


async def _decode(arguments: argparse.Namespace) -> dict[str, Any]:
    from pipelined.cli.report import Report
    from pipelined.llm import AsyncLLM

    config = engine_config(arguments, disable_radix_cache=True)
    llm = AsyncLLM(config)
    total = prompt_tokens(llm.info, min(arguments.batch * arguments.prompt_tokens, llm.info.context_length - 1))
    prompts = [
        [total[(row * arguments.prompt_tokens + at) % len(total)] for at in range(arguments.prompt_tokens)]
        for row in range(arguments.batch)
    ]
    threads = arguments.baseline_threads or config.threads * config.pp_size
    baseline = Baseline.load(llm.info, threads) if arguments.baseline else None
    ours: list[float] = []
    theirs: list[float] = []
    async with llm:
        await _tokens_per_s(llm, prompts, 4)
        report = await Report.begin(llm)
        for _ in range(arguments.requests):
            ours.append(await _tokens_per_s(llm, prompts, arguments.new_tokens))
            if baseline is not None:
                theirs.append(await asyncio.to_thread(baseline.decode_tokens_per_s, prompts, arguments.new_tokens))
        await report.end()
    report.write(arguments.trace, arguments.timeline)
    other = {"name": arguments.baseline, "threads": threads, "tokens_per_s": median(theirs)} if theirs else None
    return {
        "pp_size": config.pp_size,
        "batch": arguments.batch,
        "prompt_tokens": arguments.prompt_tokens,
        "tokens_per_s": median(ours),
        "baseline": other,
    }


async def _tokens_per_s(llm: AsyncLLM, prompts: list[list[int]], new_tokens: int) -> float:
    """Over the whole batch, from its last first token to its end."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(llm.complete(prompt, params)) for prompt in prompts]
    metrics = [task.result().metrics for task in tasks]
    began_s = max(one.ttft_s or 0.0 for one in metrics)
    ended_s = max(one.e2e_s or 0.0 for one in metrics)
    return len(prompts) * (new_tokens - 1) / (ended_s - began_s)
