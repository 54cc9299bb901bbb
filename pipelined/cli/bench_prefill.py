"""`pipelined bench prefill`: time to first token of a long prompt, beside a baseline in the same run."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from pipelined.cli.measure import Baseline, measure_prefill, median, prompt_tokens, run_async
from pipelined.cli.options import add_engine_options, add_trace_option, engine_config
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from pipelined.llm import EngineConfig

__all__ = ["add_parser"]


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the kind."""
    parser = kinds.add_parser("prefill", help="time to first token of a long prompt", description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--prompt-tokens", type=int, default=4096, metavar="N", help="length (default: 4096)")
    parser.add_argument("--requests", type=int, default=3, metavar="R", help="measured prompts (default: 3)")
    parser.add_argument("--baseline", choices=("transformers",), help="measure it too, in turn with ours")
    parser.add_argument("--baseline-threads", type=int, metavar="T", help="default: threads of all our ranks together")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_trace_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    if arguments.requests < 1:
        raise ConfigError(f"--requests {arguments.requests}: expected 1 or more")
    config = engine_config(arguments, disable_radix_cache=True)
    predicted_s = _predicted_s(config, arguments.prompt_tokens)
    result = run_async(_prefill(arguments, config, predicted_s))
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"pipelined     pp {result['pp_size']}: {result['ttft_s']:.3f} s, {result['tokens_per_s']:.1f} tokens/s")
    if result["predicted_ttft_s"] is not None:
        print(f"predicted     {result['predicted_ttft_s']:.3f} s, {result['prediction_error']:+.1%}")
    if (other := result["baseline"]) is not None:
        print(
            f"{other['name']}  {other['threads']} threads: {other['ttft_s']:.3f} s, "
            f"{other['tokens_per_s']:.1f} tokens/s"
        )
    return 0


def _predicted_s(config: EngineConfig, count: int) -> float | None:
    """What the profile says, if there is one; a layer partition may have made other costs of it."""
    if config.profile is None and not config.stage_costs:
        return None
    from pipelined.llm import AsyncLLM
    from pipelined.planning.profile_predict import predict_ttft_s

    llm = AsyncLLM(config)  # not started: it tells what would be served
    prompt_tokens(llm.info, count)  # refuses what has no room
    return predict_ttft_s(config, llm.info, llm.layers, count)


async def _prefill(arguments: argparse.Namespace, config: EngineConfig, predicted_s: float | None) -> dict[str, Any]:
    from pipelined.cli.report import Report
    from pipelined.llm import AsyncLLM

    llm = AsyncLLM(config)
    tokens = prompt_tokens(llm.info, arguments.prompt_tokens)
    threads = arguments.baseline_threads or config.threads * config.pp_size
    baseline = Baseline.load(llm.info, threads) if arguments.baseline else None
    ours: list[float] = []
    theirs: list[float] = []
    async with llm:
        await measure_prefill(llm, tokens[: min(len(tokens), 512)])
        if baseline is not None:
            await asyncio.to_thread(baseline.prefill_s, tokens[:512])
        report = await Report.begin(llm)
        for _ in range(arguments.requests):
            ours.append(await measure_prefill(llm, tokens))
            if baseline is not None:
                theirs.append(await asyncio.to_thread(baseline.prefill_s, tokens))
        await report.end()
    report.write(arguments.trace, arguments.timeline)
    return {
        "pp_size": config.pp_size,
        "prompt_tokens": len(tokens),
        "ttft_s": median(ours),
        "tokens_per_s": len(tokens) / median(ours),
        "predicted_ttft_s": predicted_s,
        "prediction_error": predicted_s / median(ours) - 1 if predicted_s is not None else None,
        "baseline": {
            "name": arguments.baseline,
            "threads": threads,
            "ttft_s": median(theirs),
            "tokens_per_s": len(tokens) / median(theirs),
        }
        if theirs
        else None,
    }
