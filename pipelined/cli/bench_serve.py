"""`pipelined bench serve`: a load on an OpenAI-compatible server.

Options and JSON keys are those of `vllm bench serve`, so that scripts for it go on working.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.cli.bench_serve_load import (
    Load,
    Sample,
    arrivals_s,
    file_samples,
    http_client,
    random_samples,
    run_load,
)
from pipelined.cli.bench_serve_metrics import METRICS, detailed, summarize
from pipelined.cli.measure import run_async
from pipelined.errors import ConfigError, nearest

if TYPE_CHECKING:
    import httpx2

    from pipelined.cli.bench_serve_metrics import Outcome

__all__ = ["add_parser"]

_BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the kind."""
    parser = kinds.add_parser("serve", help="a load on a running server", description=__doc__)
    option = parser.add_argument
    option("--backend", choices=_BACKENDS, default="openai", help="kind of API (default: openai)")
    option("--base-url", metavar="URL", help="default: http://HOST:PORT")
    option("--host", default="127.0.0.1", metavar="HOST")
    option("--port", type=int, default=8000, metavar="N")
    option("--endpoint", metavar="PATH", help="default: that of the backend")
    option("--model", metavar="NAME", help="default: the first that the server has")
    option("--header", nargs="*", default=[], metavar="KEY=VALUE", help="further headers")
    option("--insecure", action="store_true", help="take any certificate")
    option("--extra-body", type=_json_object, default={}, metavar="JSON", help="further fields of each request")
    option("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    option("--ignore-eos", action="store_true", help="go on after end-of-sequence (always with random prompts)")
    _add_dataset(parser)
    traffic = parser.add_argument_group("traffic").add_argument
    traffic("--num-prompts", type=int, default=1000, metavar="N", help="requests (default: 1000)")
    traffic("--request-rate", type=float, default=float("inf"), metavar="R", help="a second (default: all at once)")
    traffic("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: in bursts (default: 1)")
    traffic("--max-concurrency", type=int, metavar="N", help="most at a time")
    traffic("--num-warmups", type=int, default=0, metavar="N", help="requests before, which don't count")
    traffic("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals")
    _add_results(parser)
    parser.set_defaults(run=run)


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("prompts").add_argument
    option("--dataset-name", choices=("random", "custom", "sharegpt"), default="random", help="default: random")
    option("--dataset-path", metavar="FILE", help='JSON lines {"prompt": ...}, or ShareGPT\'s JSON')
    option("--random-input-len", "--input-len", type=int, default=1024, metavar="N", help="tokens (default: 1024)")
    option("--random-output-len", type=int, default=128, metavar="N", help="tokens (default: 128)")
    option("--output-len", "--custom-output-len", "--sharegpt-output-len", type=int, metavar="N", help="of any dataset")
    option("--random-range-ratio", type=float, default=0.0, metavar="R", help="spread of both lengths (default: 0)")
    option("--random-vocab", type=int, default=256, metavar="N", help="token ids are below that (default: 256)")


def _add_results(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("results").add_argument
    option("--percentile-metrics", default="ttft,tpot,itl", metavar="M,M", help=f"of {', '.join(METRICS)}")
    option("--metric-percentiles", default="99", metavar="P,P", help="default: 99")
    option("--goodput", nargs="+", default=[], metavar="KEY:MS", help="bounds that a good request keeps")
    option("--save-result", action="store_true", help="write a JSON file")
    option("--save-detailed", action="store_true", help="with figures of each request")
    option("--result-dir", default="", metavar="DIR")
    option("--result-filename", metavar="FILE")
    option("--label", metavar="NAME", help="beginning of the file's name (default: the backend)")
    option("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="stands in the file, too")
    option("--json", action="store_true", help="print the JSON object")
    option("--disable-tqdm", action="store_true", help="no progress")


def _json_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Run it; exit code 1 if every request failed."""
    if arguments.num_prompts < 1:
        raise ConfigError(f"--num-prompts {arguments.num_prompts}: expected 1 or more")
    result, outcomes = run_async(_bench(arguments, _client(arguments)))
    if arguments.save_result or arguments.result_filename:
        _save(arguments, result | (detailed(outcomes) if arguments.save_detailed else {}))
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result, arguments)
    return 0 if result["completed"] else 1


def _client(arguments: argparse.Namespace) -> httpx2.AsyncClient:
    headers = dict(_pair(item) for item in arguments.header)
    if os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
    return http_client(url, headers, insecure=arguments.insecure)


async def _bench(arguments: argparse.Namespace, client: httpx2.AsyncClient) -> tuple[dict[str, Any], list[Outcome]]:
    async with client:
        return await _measured(arguments, await _load(arguments, client))


async def _measured(arguments: argparse.Namespace, load: Load) -> tuple[dict[str, Any], list[Outcome]]:
    samples = _samples(arguments, text=load.chat)
    metrics, percentiles, goodput_s = _wanted(arguments)
    if arguments.num_warmups:
        count = arguments.num_warmups
        await run_load(load, [samples[number % len(samples)] for number in range(count)], [0.0] * count)
    at_s = arrivals_s(len(samples), arguments.request_rate, arguments.burstiness, arguments.seed)
    outcomes, duration_s = await run_load(load, samples, at_s)
    figures = summarize(outcomes, duration_s, metrics=metrics, percentiles=percentiles, goodput_s=goodput_s)
    rate = arguments.request_rate
    head = {
        "date": f"{datetime.now():%Y%m%d-%H%M%S}",
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": load.body["model"],
        "tokenizer_id": load.body["model"],
        "num_prompts": arguments.num_prompts,
        **dict(_pair(item) for item in arguments.metadata),
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    return head | figures, outcomes


async def _load(arguments: argparse.Namespace, client: httpx2.AsyncClient) -> Load:
    model = arguments.model or await _first_model(client)
    body = {"model": model, "temperature": arguments.temperature, **arguments.extra_body}
    if arguments.ignore_eos or arguments.dataset_name == "random":
        body["ignore_eos"] = True
    path = arguments.endpoint or _BACKENDS[arguments.backend]
    return Load(
        client,
        path,
        chat=path.endswith("/chat/completions"),
        body=body,
        keep_text=arguments.save_detailed,
        max_concurrency=arguments.max_concurrency,
    )


async def _first_model(client: httpx2.AsyncClient) -> str:
    import httpx2

    try:
        response = await client.get("/v1/models")
    except httpx2.HTTPError as error:
        raise ConfigError(f"no server answers at {client.base_url}: {error}") from error
    if response.is_error:
        raise ConfigError(
            f"{client.base_url} does not tell its models (status {response.status_code}): {response.text[:200]}"
        )
    return str(response.json()["data"][0]["id"])


def _samples(arguments: argparse.Namespace, *, text: bool) -> list[Sample]:
    if arguments.dataset_name == "random":
        return random_samples(
            arguments.num_prompts,
            arguments.random_input_len,
            arguments.output_len or arguments.random_output_len,
            arguments.random_range_ratio,
            arguments.seed,
            vocab=arguments.random_vocab,
            text=text,
        )
    if not arguments.dataset_path:
        raise ConfigError(f"--dataset-name {arguments.dataset_name} needs --dataset-path")
    return file_samples(arguments.dataset_path, arguments.num_prompts, arguments.output_len)


def _wanted(arguments: argparse.Namespace) -> tuple[list[str], list[float], dict[str, float]]:
    metrics = arguments.percentile_metrics.split(",")
    goodput_s = {}
    try:
        percentiles = [float(part) for part in arguments.metric_percentiles.split(",")]
        for item in arguments.goodput:
            name, _, bound_ms = item.partition(":")
            goodput_s[name] = float(bound_ms) / 1e3
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles and --goodput want numbers: {error}") from None
    for name, known in [
        *((each, list(METRICS)) for each in metrics),
        *((g, ["ttft", "tpot", "e2el"]) for g in goodput_s),
    ]:
        if name not in known:
            raise ConfigError(f"unknown metric {name!r}{nearest(name, known)}")
    return metrics, percentiles, goodput_s


def _pair(item: str) -> tuple[str, str]:
    name, mark, value = item.partition("=")
    if not mark:
        raise ConfigError(f"{item!r}: expected KEY=VALUE")
    return name, value


def _save(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    model = str(result["model_id"]).rpartition("/")[2]
    bound = f"-concurrency{arguments.max_concurrency}" if arguments.max_concurrency else ""
    label = arguments.label or arguments.backend
    name = f"{label}-{arguments.request_rate}qps{bound}-{model}-{result['date']}.json"
    path = Path(arguments.result_dir) / (arguments.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result), encoding="utf-8")


def _print(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    rows = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", result["request_goodput"]))
    print(f"{' Serving Benchmark Result ':=^50}")
    for name, value in rows:
        print(f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}")
    for metric in arguments.percentile_metrics.split(","):
        print(f"{METRICS[metric]:-^50}")
        for key, value in result.items():
            statistic, _, rest = key.partition("_")
            if rest == f"{metric}_ms":
                print(f"{f'{statistic.capitalize()} {metric.upper()} (ms):':<40} {value:<10.2f}")
    print("=" * 50)
