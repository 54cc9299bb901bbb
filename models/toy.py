"""A deterministic integer language model that shows every mistake of the runtime as wrong tokens.

Its next token depends on every token before it, through paged KV of its own: each layer stores a vector per token in a
slot-addressed array and mixes into a position the stored vectors of all positions before it, weighted by position, in
exact integer arithmetic. A wrong page, a missing chunk, stale KV, swapped rows or a lost hidden state change what comes
out; chunking, batching and cutting don't. It is greedy, needs no transformers, and costs microseconds a token.

A model is named by a URI, all parts optional::

    toy://?layers=8&vocab=997&hidden=8&context=4096&kv=65536&eos=7&seed=1
    toy://?fail_seq_token=13&fail_layer=2      a prompt with token 13 fails at layer 2, alone
    toy://?raise_token=13&raise_layer=2        the stage with layer 2 raises: the whole step is void
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipelined.errors import ModelError, NonFiniteError
from pipelined.messages import ErrorInfo, Failed, PromptLogprobs, Sampled, TokenLogprob
from pipelined.stage import ModelInfo, Stage

from .batching import Batch, Segment, Sequences
from .toy_params import ToyParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pipelined.messages import Outcome, Step
    from pipelined.stage import LoadOptions, Payload, StageContext

    IntArray = npt.NDArray[np.int64]

__all__ = ["ToyBatch", "ToyFamily", "ToyParams", "ToyStage", "reference_tokens"]

MODULUS = 1_048_573
"""Prime below 2**20: a weighted sum over 2**23 positions is exact in int64."""

_JUNK = -7


def _mix(*parts: int) -> int:
    """A number in [1, MODULUS) that looks random; equal on every machine."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = ((state ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 29
    return 1 + state % (MODULUS - 1)


def _column(params: ToyParams, kind: int, layer: int = 0) -> list[int]:
    return [_mix(params.seed, kind, layer, index) for index in range(params.hidden)]


def _allowed(token: int, vocab: int, banned: frozenset[int]) -> int:
    """`token`, or the next one that is not banned (where any is left)."""
    for offset in range(min(vocab, len(banned) + 1)):
        if (token + offset) % vocab not in banned:
            return (token + offset) % vocab
    return token


def reference_tokens(
    model: ModelInfo | ToyParams | str,
    prompt: Sequence[int],
    n: int,
    *,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """What the toy answers: at most `n` tokens, the last of which may be the end-of-sequence or stop token.

    Written on its own, token by token in plain integers, as the truth to compare the stages with.
    """
    ref = model.ref if isinstance(model, ModelInfo) else model
    params = ToyParams.parse(ref) if isinstance(ref, str) else ref
    width, total = range(params.hidden), MODULUS
    embed, place = _column(params, 1), _column(params, 2)
    layers = [[_column(params, kind, layer) for kind in (4, 5, 6, 7)] for layer in range(params.layers)]
    slopes = [_mix(params.seed, 8, layer) for layer in range(params.layers)]
    head = _column(params, 3)
    sums = [[0] * params.hidden for _ in range(params.layers)]
    stops = frozenset(stop_token_ids) | (frozenset() if ignore_eos else frozenset(params.eos))
    answer: list[int] = []
    queue, position = list(prompt), 0
    while True:
        token = queue[position]
        h = [(token * embed[j] + (position + 1) * place[j]) % total for j in width]
        for layer, (key, offset, gain, mix) in enumerate(layers):
            weight = (slopes[layer] * (position + 1)) % total
            for j in width:
                sums[layer][j] += weight * ((h[j] * key[j] + offset[j]) % total)
            h = [(h[j] * h[j] + gain[j] * (sums[layer][j] % total) + mix[j] * h[j - 1] + layer) % total for j in width]
        position += 1
        if position < len(queue):
            continue
        token = sum(h[j] * head[j] for j in width) % total % params.vocab
        token = _allowed(token, params.vocab, stops if len(answer) < min_tokens else frozenset())
        answer.append(token)
        if len(answer) == n or token in stops:
            return answer
        queue.append(token)


@dataclass(frozen=True)
class ToyBatch:
    """A `Batch`, which of its sequences fail here, and what may not be sampled.

    Attributes:
        batch: What to run.
        failing: Sequences with `fail_seq_token` in the part of the prompt that has been run.
        raising: Whether `raise_token` is among its prompt tokens.
        banned: For each sampled segment, tokens that may not come yet (min_tokens).
        logprobs: For each sampled segment, as in `SamplingParams`.
    """

    batch: Batch
    failing: tuple[int, ...]
    raising: bool
    banned: tuple[frozenset[int], ...]
    logprobs: tuple[int | None, ...]

    @property
    def sampled(self) -> list[Segment]:
        """Segments that ask for a token."""
        return [segment for segment in self.batch.segments if segment.sample]


class ToyStage(Stage):
    """Layers `[layers[0], layers[1])` of the toy."""

    def __init__(self, info: ModelInfo, layers: tuple[int, int], ctx: StageContext) -> None:
        self.name = f"toy layers {layers[0]}-{layers[1] - 1}"
        self._params = params = ToyParams.parse(info.ref)
        self._page_size = info.options.page_size
        self._first, self._end = layers
        self._rank = ctx.rank
        self._ctx = ctx
        tokens = info.options.kv_cache_tokens or params.kv[min(ctx.rank, len(params.kv) - 1)]
        self._pages = tokens // self._page_size
        self._sequences = Sequences(self._page_size)
        self._failing: set[int] = set()
        self._kv: IntArray = np.empty((0, 0, 0), np.int64)
        self._embed, self._place, self._head = (_array(_column(params, kind)) for kind in (1, 2, 3))
        self._weights = [[_array(_column(params, kind, layer)) for kind in (4, 5, 6, 7)] for layer in range(*layers)]
        self._slopes = [_mix(params.seed, 8, layer) for layer in range(*layers)]

    def setup(self, ctx: StageContext) -> int | None:
        """Nothing to load; says how many pages this rank could hold."""
        return self._pages

    def start(self, capacity: int | None) -> None:
        """Allocate KV for `capacity` pages, filled with junk."""
        pages = self._pages if capacity is None else capacity
        shape = (self._end - self._first, pages * self._page_size, self._params.hidden)
        self._kv = np.full(shape, _JUNK, np.int64)

    def prepare(self, step: Step) -> ToyBatch | None:
        """Apply the step; see `Sequences.apply`."""
        batch = self._sequences.apply(step)
        states, params = self._sequences.states, self._params
        self._failing &= states.keys()
        raising = False
        sampled: list[tuple[frozenset[int], int | None]] = []
        for segment in batch.segments if batch else ():
            state = states.get(segment.seq)
            if state is None:  # released by the same step: it runs to no end
                sampled += [(frozenset(), None)] * segment.sample
                continue
            prompt = segment.token_ids[: max(0, state.prompt_tokens - segment.start)]
            if params.fail_seq_token in prompt:
                self._failing.add(segment.seq)
            raising = raising or params.raise_token in prompt
            if segment.sample:
                early = len(state.tokens) - state.prompt_tokens < state.sampling.min_tokens
                stops = frozenset((*state.eos, *state.sampling.stop_token_ids)) if early else frozenset()
                sampled.append((stops, state.sampling.logprobs))
        if batch is None:
            return None
        failing = tuple(segment.seq for segment in batch.segments if segment.seq in self._failing)
        banned, logprobs = tuple(each for each, _ in sampled), tuple(each for _, each in sampled)
        return ToyBatch(batch, failing, raising, banned, logprobs)

    def forward(self, batch: ToyBatch, inputs: Payload) -> Payload:
        """`hidden`: int64 [rows, hidden]; at the last stage `tokens`: int64 [sampled segments]."""
        if batch.raising and self._first <= self._params.raise_layer < self._end:
            raise RuntimeError(f"token {self._params.raise_token} makes layer {self._params.raise_layer} raise")
        hidden = self._embedded(batch.batch) if self._first == 0 else inputs["hidden"].numpy()
        for index in range(self._end - self._first):
            hidden = self._layer(index, hidden, batch.batch.segments)
        outputs: Payload = {}
        faults = list(inputs.get("faults", ()))
        if self._first <= self._params.fail_layer < self._end:
            message = f"token {self._params.fail_seq_token} makes layer {self._params.fail_layer} not finite"
            faults += [[seq, self._rank, message] for seq in batch.failing]
        if faults:
            outputs["faults"] = faults
        if self._end == self._params.layers:
            outputs["tokens"] = torch.from_numpy(self._tokens(batch, hidden))
        else:
            outputs["hidden"] = self._ctx.empty(hidden.shape, torch.int64)
            outputs["hidden"].copy_(torch.from_numpy(hidden))
        return outputs

    def collect(self, batch: ToyBatch, outputs: Payload) -> Sequence[Outcome]:
        """`Failed` for each fault, then what was sampled, with made-up log-probabilities where asked for."""
        found: list[Outcome] = []
        failed = set()
        for seq, rank, message in outputs.get("faults", ()):
            if seq not in failed:
                found.append(Failed(seq, ErrorInfo.of(NonFiniteError(message, rank=rank))))
            failed.add(seq)
        for segment in batch.batch.segments:
            if segment.prompt_logprobs is not None and segment.seq not in failed:
                entries = tuple(self._logprobs(token, segment.prompt_logprobs) for token in segment.prompt_targets)
                found.append(PromptLogprobs(segment.seq, segment.start + 1, entries))
        for segment, token, asked in zip(batch.sampled, outputs["tokens"].tolist(), batch.logprobs, strict=True):
            if segment.seq not in failed:
                found.append(Sampled(segment.seq, token, () if asked is None else self._logprobs(token, asked)))
        return found

    def describe(self, batch: ToyBatch | None) -> str:
        """See `Batch.describe`."""
        return "" if batch is None else batch.batch.describe()

    def cost(self, batch: ToyBatch | None) -> list[tuple[int, int]]:
        """(prefix, tokens) of each segment."""
        return [] if batch is None else [(segment.start, segment.length) for segment in batch.batch.segments]

    def reset(self) -> None:
        """Forget all sequences; what the KV held is junk from now on."""
        self._sequences.reset()
        self._failing.clear()
        self._kv.fill(_JUNK)

    def integrity(self) -> dict[str, int]:
        """As `Sequences.integrity`."""
        return self._sequences.integrity()

    def _embedded(self, batch: Batch) -> IntArray:
        tokens = _array([token for segment in batch.segments for token in segment.token_ids])
        places = _array([place + 1 for segment in batch.segments for place in range(segment.start, segment.end)])
        return (tokens[:, None] * self._embed + places[:, None] * self._place) % MODULUS

    def _layer(self, index: int, hidden: IntArray, segments: tuple[Segment, ...]) -> IntArray:
        key, offset, gain, mix = self._weights[index]
        stored: IntArray = (hidden * key + offset) % MODULUS
        kv, slope, row = self._kv[index], self._slopes[index], 0
        sums = np.empty_like(stored)
        for segment in segments:
            weights = slope * np.arange(1, segment.end + 1) % MODULUS
            part = slice(row, row + segment.length)
            _write(kv, segment, stored[part])
            np.cumsum(weights[segment.start :, None] * stored[part], axis=0, out=sums[part])
            sums[part] += _weighted(kv, segment, weights)
            row += segment.length
        sums %= MODULUS
        hidden = hidden * hidden + gain * sums + mix * np.roll(hidden, 1, axis=1) + self._first + index
        return hidden % MODULUS

    def _tokens(self, batch: ToyBatch, hidden: IntArray) -> IntArray:
        ends = np.cumsum([segment.length for segment in batch.batch.segments]) - 1
        rows = ends[[segment.sample for segment in batch.batch.segments]]
        tokens = (hidden[rows] @ self._head) % MODULUS % self._params.vocab
        pairs = zip(tokens.tolist(), batch.banned, strict=True)
        return _array([_allowed(token, self._params.vocab, banned) for token, banned in pairs])

    def _logprobs(self, token: int, k: int) -> tuple[TokenLogprob, ...]:
        likely = [
            TokenLogprob((token + place) % self._params.vocab, -(place + 1) / 16, place + 1) for place in range(k)
        ]
        return (TokenLogprob(token, -1 / 16, 1), *likely)


class ToyFamily:
    """Models named `toy://...`."""

    name = "toy"

    def claims(self, ref: str) -> bool:
        """Whether `ref` is a toy's URI."""
        return ref.startswith("toy:")

    def inspect(self, ref: str, options: LoadOptions) -> ModelInfo:
        """See `ToyParams.parse`.

        Raises:
            ModelError: The URI is wrong, or a longer context is asked for than the model has.
        """
        params = ToyParams.parse(ref)
        context = options.context_length or params.context
        if context > params.context:
            raise ModelError(f"context_length={context} is more than the {params.context} tokens of {ref}")
        weight_bytes = 8 * params.hidden
        return ModelInfo(
            ref=ref,
            path="",
            family=self.name,
            architecture="Toy",
            layers=params.layers,
            cuts=tuple(range(1, params.layers)),
            layer_bytes=(4 * weight_bytes,) * params.layers,
            embedding_bytes=2 * weight_bytes,
            head_bytes=weight_bytes,
            kv_bytes_per_token=(weight_bytes,) * params.layers,
            hidden_size=params.hidden,
            vocab_size=params.vocab,
            context_length=context,
            eos_token_ids=params.eos,
            dtype="int64",
            fingerprint=f"toy-{params.seed}-{params.layers}-{params.vocab}-{params.hidden}",
            options=options,
        )

    def build(self, info: ModelInfo, layers: tuple[int, int], ctx: StageContext) -> ToyStage:
        """A stage for these layers."""
        return ToyStage(info, layers, ctx)


def _array(numbers: Sequence[int]) -> IntArray:
    return np.array(numbers, dtype=np.int64)


def _write(kv: IntArray, segment: Segment, stored: IntArray) -> None:
    """Store the segment's rows at the slots of positions [start, end)."""
    position = 0
    for first, count in segment.runs:
        skip = max(0, segment.start - position)
        if skip < count:
            row = position + skip - segment.start
            kv[first + skip : first + count] = stored[row : row + count - skip]
        position += count


def _weighted(kv: IntArray, segment: Segment, weights: IntArray) -> IntArray:
    """Sum over the positions before the segment of weight times what their slots hold."""
    total = np.zeros(kv.shape[1], np.int64)
    position = 0
    for first, count in segment.runs:
        count = min(count, segment.start - position)
        if count <= 0:
            break
        total += weights[position : position + count] @ kv[first : first + count]
        position += count
    return total
