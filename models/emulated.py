"""Models that compute nothing and take the time that a cost model says: for simulations and measurements of schedules.

All the rest is real: requests, steps, pages, links. A stage sends a few bytes on, whose header charges a simulated link
for the hidden states of a model of that size. Use it with `device="emulated"`, in virtual or in real time::

    emulated://?layers=64&hidden=8192&a=1e-12&b=2e-6&c=1e-3&d=1e-9

A stage takes t = c + d*L + b*x + a*(2*L*x + x*x) seconds for x tokens behind a prefix of L, c once a micro-batch, the
rest for each of its sequences. `costs` tells stages apart: one entry each, as `pipelined.costs.encode_costs` writes
them, with windows and decodes of their own. What comes out are made-up tokens that depend on the position alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import torch

from pipelined.costs import MicroBatch, PipelineCost, StageCost, decode_costs
from pipelined.errors import ConfigError, InvalidRequestError, ModelError, ProtocolError, nearest
from pipelined.messages import Admit, Chunk, Decode, ErrorInfo, Failed, Release, Sampled, TokenLogprob
from pipelined.stage import LOGICAL_BYTES, ModelInfo, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.messages import Outcome, Step
    from pipelined.stage import LoadOptions, Payload, StageContext

__all__ = ["EmulatedBatch", "EmulatedFamily", "EmulatedParams", "EmulatedStage"]

_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class EmulatedParams:
    """What the URI says.

    Attributes:
        layers, hidden, vocab, context: Sizes.
        kv: Tokens that the KV cache of each stage could hold; 0: twice the context.
        eos: End-of-sequence token; -1: none, so that every answer has `max_tokens`.
        a, b, c, d: Of the time model, in seconds, for each stage, however many layers it has.
        costs: Those of each stage instead, as `encode_costs` writes them.
    """

    layers: int = 64
    hidden: int = 4096
    vocab: int = 32_000
    context: int = 1 << 22
    kv: int = 0
    eos: int = -1
    a: float = 0.0
    b: float = 1e-6
    c: float = 1e-3
    d: float = 0.0
    costs: str = ""

    @classmethod
    def parse(cls, ref: str) -> EmulatedParams:
        """From `emulated://?key=value&...`.

        Raises:
            ModelError: An unknown key, or a value that is no number or out of range.
        """
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        given: dict[str, Any] = {}
        for key, text in parse_qsl(urlsplit(ref).query, keep_blank_values=True):
            if key not in kinds:
                raise ModelError(f"{ref}: no parameter {key!r}{nearest(key, kinds)}")
            try:
                given[key] = kinds[key](text)
            except ValueError:
                kind = "whole number" if kinds[key] is int else "number"
                raise ModelError(f"{ref}: {key}={text!r}, expected a {kind}") from None
        params = cls(**given)
        for key, least in (("layers", 1), ("hidden", 1), ("vocab", 2), ("context", 2), ("kv", 0), ("eos", -1)):
            if getattr(params, key) < least:
                raise ModelError(f"{ref}: {key}={getattr(params, key)}, expected at least {least}")
        try:
            params.pipeline(1)
        except ConfigError as error:
            raise ModelError(f"{ref}: {error}") from error
        return params

    def pipeline(self, stages: int) -> PipelineCost:
        """The time model of each stage; as many as `costs` tells of, if it does.

        Raises:
            ConfigError: A coefficient is out of range.
        """
        if self.costs:
            return decode_costs(self.costs, "costs")
        return PipelineCost.even(StageCost(a=self.a, b=self.b, c=self.c, d=self.d), stages)


class _Run(NamedTuple):
    """Tokens of one sequence in a step; `sample`: the next token is asked for."""

    seq: int
    start: int
    tokens: int
    sample: bool
    decode: bool


class EmulatedBatch(NamedTuple):
    """What a step runs."""

    number: int
    rows: int
    runs: tuple[_Run, ...]
    refused: tuple[int, ...]


class EmulatedStage(Stage):
    """One stage; which layers it has does not matter."""

    def __init__(self, info: ModelInfo, layers: tuple[int, int], ctx: StageContext) -> None:
        self.name = f"emulated layers {layers[0]}-{layers[1] - 1}"
        params = EmulatedParams.parse(info.ref)
        tokens = info.options.kv_cache_tokens or params.kv or 2 * info.context_length
        self._pages = tokens // info.options.page_size
        self._row_bytes = params.hidden * _ELEMENT_BYTES
        self._vocab, self._eos = params.vocab, params.eos
        costs = params.pipeline(ctx.size).stages
        if len(costs) != ctx.size:
            raise ModelError(f"{info.ref}: costs of {len(costs)} stages for a pipeline of {ctx.size}")
        self._cost = costs[ctx.rank]
        self._first, self._last = layers[0] == 0, layers[1] == info.layers
        self._refused: dict[int, bool] = {}  # of each admitted sequence: whether it asks for what can't be had

    def setup(self, ctx: StageContext) -> int | None:
        """Nothing to load; says how many pages this rank could hold."""
        return self._pages

    def prepare(self, step: Step) -> EmulatedBatch:
        """What runs, from the items alone: tokens and pages do not matter."""
        runs: list[_Run] = []
        for item in step.items:
            if isinstance(item, Chunk):
                runs.append(_Run(item.seq, item.start, item.tokens, item.last, decode=False))
            elif isinstance(item, Decode):
                runs.append(_Run(item.seq, item.position, 1, sample=True, decode=True))
            elif isinstance(item, Admit):
                self._refused[item.seq] = item.sampling.prompt_logprobs is not None
            elif isinstance(item, Release):
                self._refused.pop(item.seq, None)
        refused = tuple(run.seq for run in runs if self._refused.get(run.seq))
        return EmulatedBatch(step.number, step.rows, tuple(runs), refused)

    def forward(self, batch: EmulatedBatch, inputs: Payload) -> Payload:
        """Hands on the step's number; the link is charged for [rows, hidden] of 2-byte elements.

        Raises:
            ProtocolError: The input is another step's.
        """
        if not self._first and int(inputs["hidden"]) != batch.number:
            raise ProtocolError(f"step {batch.number} got the hidden states of step {int(inputs['hidden'])}")
        if self._last:
            return {}
        return {"hidden": torch.tensor(batch.number), LOGICAL_BYTES: batch.rows * self._row_bytes}

    def collect(self, batch: EmulatedBatch, outputs: Payload) -> Sequence[Outcome]:
        """A made-up token for each sequence that asks for one."""
        found: list[Outcome] = []
        for seq in dict.fromkeys(batch.refused):
            error = InvalidRequestError("an emulated model has no prompt log-probabilities; leave prompt_logprobs out")
            found.append(Failed(seq, ErrorInfo.of(error)))
        for run in batch.runs:
            if run.sample and run.seq not in batch.refused:
                token = self._token(run.start + run.tokens)
                found.append(Sampled(run.seq, token, (TokenLogprob(token, -1.0, 1),)))
        return found

    def describe(self, batch: EmulatedBatch) -> str:
        """For traces, like other models: `#7 prefill 1024@2048, #3 decode 1@90`."""
        kinds = ("prefill", "decode")
        return ", ".join(f"#{run.seq} {kinds[run.decode]} {run.tokens}@{run.start}" for run in batch.runs)

    def cost(self, batch: EmulatedBatch) -> float:
        """Seconds, as the emulated device wants them."""
        chunks = tuple((run.start, run.tokens) for run in batch.runs if not run.decode)
        contexts = [run.start for run in batch.runs if run.decode]
        return self._cost.launch_s(MicroBatch(chunks, len(contexts), sum(contexts)))

    def reset(self) -> None:
        """Forget all sequences."""
        self._refused.clear()

    def integrity(self) -> dict[str, int]:
        """Sequences admitted and not released."""
        return {"sequences": len(self._refused)}

    def _token(self, position: int) -> int:
        token = (position * 7919) % self._vocab
        return (token + 1) % self._vocab if token == self._eos else token


class EmulatedFamily:
    """Models named `emulated://...`."""

    name = "emulated"

    def claims(self, ref: str) -> bool:
        """Whether `ref` is such a URI."""
        return ref.startswith("emulated:")

    def inspect(self, ref: str, options: LoadOptions) -> ModelInfo:
        """See `EmulatedParams.parse`.

        Raises:
            ModelError: The URI is wrong, or a longer context is asked for than the model has.
        """
        params = EmulatedParams.parse(ref)
        context = options.context_length or params.context
        if context > params.context:
            raise ModelError(f"context_length={context} is more than the {params.context} tokens of {ref}")
        row_bytes = params.hidden * _ELEMENT_BYTES
        return ModelInfo(
            ref=ref,
            path="",
            family=self.name,
            architecture="Emulated",
            layers=params.layers,
            cuts=tuple(range(1, params.layers)),
            layer_bytes=(0,) * params.layers,
            embedding_bytes=0,
            head_bytes=0,
            kv_bytes_per_token=(row_bytes,) * params.layers,
            hidden_size=params.hidden,
            vocab_size=params.vocab,
            context_length=context,
            eos_token_ids=() if params.eos < 0 else (params.eos,),
            dtype="bfloat16",
            fingerprint="emulated-" + "-".join(map(str, asdict(params).values())),
            options=options,
        )

    def build(self, info: ModelInfo, layers: tuple[int, int], ctx: StageContext) -> EmulatedStage:
        """A stage for these layers."""
        return EmulatedStage(info, layers, ctx)
