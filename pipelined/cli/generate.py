"""`pipelined generate`: one prompt, streamed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.cli.options import add_engine_options, add_trace_option, engine_config
from pipelined.errors import ConfigError, InvalidRequestError
from pipelined.messages import SamplingParams

if TYPE_CHECKING:
    import argparse

    from pipelined.llm import AsyncLLM, RequestOutput

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "generate", help="complete one prompt", description="Complete one prompt, streaming the text as it comes."
    )
    add_engine_options(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file with the prompt; - is standard input")
    prompt.add_argument("--prompt-tokens", metavar="ID,ID", help="the prompt as token ids")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="most tokens to generate (default: 128)"
    )
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling")
    sampling.add_argument("--top-k", type=int, default=-1, metavar="K", help="keep the K most likely tokens")
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add_trace_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_generate(arguments))


async def _generate(arguments: argparse.Namespace) -> int:
    from pipelined.cli.report import Report
    from pipelined.llm import AsyncLLM

    params = _params(arguments)
    params.check()
    llm = AsyncLLM(engine_config(arguments))
    prompt = _prompt(arguments, llm)
    llm.check(prompt, params)
    status = (
        "" if arguments.json or not sys.stderr.isatty() else f"loading {llm.info.ref} on {len(llm.layers)} ranks ..."
    )
    print(status, end="", file=sys.stderr, flush=True)
    async with llm:
        print("\r" + " " * len(status) + "\r" if status else "", end="", file=sys.stderr, flush=True)
        report = await Report.begin(llm)
        output = await _stream(llm, prompt, params, quiet=arguments.json)
        await report.end()
    if arguments.json:
        print(json.dumps(_as_json(output, report)))
    else:
        report.print_table(output)
    report.write(arguments.trace, arguments.timeline)
    return 0


def _params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )


def _prompt(arguments: argparse.Namespace, llm: AsyncLLM) -> str | list[int]:
    if arguments.prompt_tokens is not None:
        try:
            return [int(part) for part in arguments.prompt_tokens.split(",") if part.strip()]
        except ValueError:
            raise InvalidRequestError(
                f"--prompt-tokens {arguments.prompt_tokens!r}: expected ids such as 1,2,3"
            ) from None
    text = arguments.prompt if arguments.prompt is not None else _read(arguments.prompt_file)
    if arguments.chat and text:
        return llm.tokenizer.chat([{"role": "user", "content": text}])
    return str(text)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the prompt file {name!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt file {name!r} is not UTF-8 text (byte {error.start})") from error


async def _stream(llm: AsyncLLM, prompt: str | list[int], params: SamplingParams, *, quiet: bool) -> RequestOutput:
    shown, latest = 0, None
    async for latest in llm.generate(prompt, params):
        text = latest.outputs[0].text
        if not quiet:
            print(text[shown:], end="", flush=True)
        shown = len(text)
    assert latest is not None
    if not quiet:
        print(flush=True)
    return latest


def _as_json(output: RequestOutput, report: Any) -> dict[str, Any]:
    choice, metrics = output.outputs[0], output.metrics
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": metrics.cached_tokens,
        "completion_tokens": len(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "ttft_s": metrics.ttft_s,
        "e2e_s": metrics.e2e_s,
        "chunks": metrics.chunks,
        "stages": report.stages(),
    }
