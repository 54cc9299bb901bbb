"""A language model over two ranks reads a document of a few thousand tokens, and finds the sentence hidden in it.

Run by `make demo`. It shows: the answer, streamed; that without the hidden sentence the answer differs; the time to
first token of two ranks against one; what each rank did when, as a table and as a picture (timeline.html).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipelined import AsyncLLM, SamplingParams
from pipelined.errors import PipelinedError
from pipelined.trace import RankTrace, Trace, attribute, stage_table, write_timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipelined.llm import RequestOutput

DOCUMENT = Path(__file__).parent / "data" / "us-constitution.txt"
HIDDEN = "The password of the harbour gate is MAGNOLIA."
QUESTION = "What is the password of the harbour gate?"
SECRET = "MAGNOLIA"
ANSWER = SamplingParams(max_tokens=32, temperature=0.0)

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Answer:
    """What one engine made of one prompt, and the spans of its ranks meanwhile."""

    output: RequestOutput
    trace: Trace
    ttft_s: float

    @property
    def text(self) -> str:
        return self.output.outputs[0].text.strip()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what takes time, with a clock that runs on a terminal, and afterwards how long it took."""
    started_s = time.perf_counter()
    if console.is_terminal:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(what)
            yield
    else:
        console.print(f"{what} ...")
        yield
    console.print(f"{what}: {time.perf_counter() - started_s:.1f} s", style="dim")


def engine(pp_size: int) -> AsyncLLM:
    """The engine, not started. What it has read before does not help it, so that every prompt costs the same."""
    return AsyncLLM("smollm2", pp_size=pp_size, threads_per_rank=1, chunked_prefill_size=256, disable_radix_cache=True)


def document(llm: AsyncLLM, tokens: int, *, hidden: bool) -> str:
    """The first `tokens` tokens, with the sentence in the middle, a paragraph of its own."""
    ids = llm.tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))[:tokens]
    first, second = (llm.tokenizer.decode(half) for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :]))
    before, _, rest = first.rpartition("\n\n")
    return f"{before}\n\n{HIDDEN}\n\n{rest}{second}" if hidden else first + second


async def ask(llm: AsyncLLM, text: str, *, stream: bool = False) -> Answer:
    """Ask the question about `text`."""
    prompt = llm.tokenizer.chat([{"role": "user", "content": f"{text}\n\n{QUESTION}"}])
    await llm.trace()  # forget what was before
    started_s = llm.now()
    answers = llm.generate(prompt, ANSWER)
    with waiting(f"reading {len(prompt):,} tokens on {llm.config.pp_size} rank{'s' * (llm.config.pp_size > 1)}"):
        output = await anext(answers)
    ttft_s = output.metrics.ttft_s
    assert ttft_s is not None
    shown = 0
    while not output.finished:
        shown = show(output, shown) if stream else 0
        output = await anext(answers)
    if stream:
        show(output, shown)
        console.print()
    spans = await llm.trace()
    ranks = [RankTrace(rank, layers(llm, rank), own) for rank, own in spans.items()]
    trace = Trace.of(ranks, started_s=started_s, ended_s=started_s + ttft_s, meta={"prompt tokens": len(prompt)})
    return Answer(output, trace, ttft_s)


def show(output: RequestOutput, shown: int) -> int:
    """Print what is new of the text."""
    text = output.outputs[0].text
    console.print(text[shown:], end="", style="bold green", markup=False)
    return len(text)


def layers(llm: AsyncLLM, rank: int) -> str:
    first, end = llm.layers[rank]
    return f"layers {first}-{end - 1}"


async def demo(arguments: argparse.Namespace) -> int:
    console.print("[bold]1. Two ranks, a process and a thread each[/]")
    with waiting("looking at the model"):
        llm = engine(2)
        document_with = document(llm, arguments.tokens, hidden=True)
        document_without = document(llm, arguments.tokens, hidden=False)
    async with started(llm):
        console.print(f"Hidden in the middle of the document: {HIDDEN}\nQuestion: {QUESTION}")
        two = await ask(llm, document_with, stream=True)
        console.print("\n[bold]2. The same document without the hidden sentence[/]")
        without = await ask(llm, document_without, stream=True)
    console.print("\n[bold]3. One rank with one thread, for comparison[/]")
    async with started(engine(1)) as single:
        one = await ask(single, document_with)
    report(one, two, arguments.timeline)
    return verdict(one, two, without)


class started:
    """An engine, loaded and warmed up by one short request, so that no measurement pays for what happens once."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm

    async def __aenter__(self) -> AsyncLLM:
        with waiting("loading the weights, warming up"):
            await self.llm.__aenter__()
            await self.llm.complete(list(range(100, 420)), SamplingParams(max_tokens=2, ignore_eos=True))
        return self.llm

    async def __aexit__(self, *exc: object) -> None:
        await self.llm.__aexit__(*exc)


def report(one: Answer, two: Answer, timeline: Path) -> None:
    """Times, table, picture."""
    console.print("\n[bold]Time to first token[/], the same prompt, nothing cached, one thread a rank")
    tokens = len(two.output.prompt_token_ids)
    for name, answer in (("one rank ", one), ("two ranks", two)):
        console.print(f"  {name}  {answer.ttft_s:6.2f} s  {tokens / answer.ttft_s:6.0f} tokens/s")
    console.print(f"  two ranks are {one.ttft_s / two.ttft_s:.2f} times as fast; twice would be perfect")
    console.print("\n[bold]The two ranks until the first token[/]")
    console.print(stage_table(attribute(two.trace)))
    write_timeline(two.trace, timeline, title="SmolLM2-135M over two ranks: a long prompt, until its first token")
    console.print(f"\nWhat each rank did when, as a picture: {timeline}")


def verdict(one: Answer, two: Answer, without: Answer) -> int:
    """0 if the demo showed what it claims."""
    failures = []
    if SECRET not in two.text:
        failures.append(f"the answer does not contain {SECRET}")
    if SECRET in without.text:
        failures.append(f"the answer contains {SECRET} without having read it")
    if one.output.outputs[0].token_ids != two.output.outputs[0].token_ids:
        failures.append(f"one rank answered something else: {one.text}")
    for failure in failures:
        console.print(f"[bold red]FAILED[/]: {failure}")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2_700, help="length of the document (default: 2700)")
    parser.add_argument("--timeline", type=Path, default=Path("timeline.html"), help="where the picture goes")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(demo(parser.parse_args()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PipelinedError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
