"""The stage that runs a slice of a transformers model: steps in, hidden states through, tokens out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipelined.errors import CapacityError, NonFiniteError, ProtocolError
from pipelined.messages import ErrorInfo, Failed
from pipelined.stage import Stage

from .batching import Batch, Sequences
from .grammar import Constraints
from .paged_kv import KvPool, PagedCache, Ragged
from .sampler import SampleRequest, outcomes, prompt_outcome, rank_tokens, sample, sample_request
from .slicing import Sliced, causal_class, load_slice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipelined.messages import Outcome, Step
    from pipelined.stage import ModelInfo, Payload, StageContext

    from .batching import Segment

__all__ = ["HuggingFaceStage", "StageBatch"]

MOST_KV_TOKENS = 262_144
"""Capacity where none is asked for, however much memory there is."""

_PROMPT = "prompt_logprobs"


@dataclass(frozen=True)
class _Sampled:
    """A token to choose: from which row, for which sequence, how."""

    row: int
    seq: int
    request: SampleRequest


@dataclass(frozen=True)
class _Prompt:
    """Prompt tokens to score: rows [row, row + len(targets)) predict `targets`, at positions from `start` on."""

    row: int
    seq: int
    start: int
    k: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class StageBatch:
    """A `Batch` with all that `forward` and `collect` need; nothing in it changes later."""

    batch: Batch
    ragged: Ragged
    token_ids: torch.Tensor | None  # [rows] int64, at the first stage
    sampled: tuple[_Sampled, ...] = ()
    prompts: tuple[_Prompt, ...] = ()

    @property
    def wanted_rows(self) -> torch.Tensor:
        """Rows whose logits are needed, those to sample first: [n] int64."""
        rows = [item.row for item in self.sampled]
        for prompt in self.prompts:
            rows.extend(range(prompt.row, prompt.row + len(prompt.targets)))
        return torch.tensor(rows, dtype=torch.int64)


class HuggingFaceStage(Stage):
    """Layers `[layers[0], layers[1])` of a model that transformers knows."""

    def __init__(self, info: ModelInfo, layers: tuple[int, int], ctx: StageContext) -> None:
        self.name = f"{info.architecture} layers {layers[0]}-{layers[1] - 1}"
        self._info = info
        self._layers = layers
        self._ctx = ctx
        self._page_size = info.options.page_size
        self._sequences = Sequences(self._page_size)
        self._constraints = Constraints(info)
        self._cache = PagedCache()
        self._sliced: Sliced | None = None
        self._pages = 0

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self._layers[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples."""
        return self._layers[1] == self._info.layers

    def setup(self, ctx: StageContext) -> int | None:
        """Load this stage's own weights.

        Returns:
            How many KV pages it could hold.

        Raises:
            ModelError: Weights are missing or damaged.
            CapacityError: Not even one page fits, or fewer tokens than were asked for.
        """
        from .loading import load_config

        info, options = self._info, self._info.options
        config = load_config(info)
        self._sliced = load_slice(
            causal_class(config, info.path, trust_remote_code=options.trust_remote_code),
            config,
            self._layers,
            self._cache,
            path=None if options.load_format == "dummy" else info.path,
            dtype=getattr(torch, info.dtype),
            trust_remote_code=options.trust_remote_code,
        )
        self._pages = self._kv_tokens() // self._page_size
        if self._pages < 1:
            raise CapacityError(
                f"{self.name}: the KV cache would hold {self._kv_tokens()} tokens, less than one page of "
                f"{self._page_size}; free memory, use more stages or set a smaller page size"
            )
        return self._pages

    def start(self, capacity: int | None) -> None:
        """Address space for `capacity` pages; memory is taken as they are first written."""
        pages = self._pages if capacity is None else capacity
        self._cache.pool = KvPool(pages * self._page_size)

    def prepare(self, step: Step) -> StageBatch | None:
        """Apply the step; see `Sequences.apply`."""
        batch = self._sequences.apply(step)
        self._constraints.keep(self._sequences.states)
        if batch is None:
            return None
        tokens = None
        if self.is_first:
            tokens = torch.tensor([token for segment in batch.segments for token in segment.token_ids])
        sampled, prompts = self._wanted(batch.segments) if self.is_last else ((), ())
        return StageBatch(batch, Ragged(batch.segments), tokens, sampled, prompts)

    def forward(self, batch: StageBatch, inputs: Payload) -> Payload:
        """Run the slice.

        Args:
            batch: From `prepare`.
            inputs: `hidden` [rows, hidden] but for the first stage; perhaps `faults`.

        Returns:
            `hidden`; at the last stage what `sample` gives. Both with `faults`, a list of [seq, rank, message], for
            the sequences that got NaN or infinity on this stage or one before.

        Raises:
            ProtocolError: The hidden states received don't fit the batch.
        """
        assert self._sliced is not None, "setup() comes before forward()"
        received = None if self.is_first else self._received(batch, inputs)
        faults: list[list[Any]] = list(inputs.get("faults", ()))
        self._cache.begin(batch.ragged)
        if self.is_last:
            outputs = self._last(self._sliced, batch, received, faults)
        else:
            with torch.inference_mode():
                hidden = self._sliced.hidden(batch.token_ids, received, batch.ragged.positions)
                bad = self._faults(batch.batch, hidden, faults)
            # Made outside inference mode: whoever sends it may write to it later.
            into = self._ctx.empty(tuple(hidden.shape), hidden.dtype)
            into.copy_(hidden)
            if bad is not None:
                into[bad] = 0.0  # reported once: what follows stays finite
            outputs = {"hidden": into}
        return outputs | {"faults": faults} if faults else outputs

    def collect(self, batch: StageBatch, outputs: Payload) -> Sequence[Outcome]:
        """`Failed` for each faulty sequence; for the others prompt log-probabilities and tokens."""
        found: list[Outcome] = []
        failed: set[int] = set()
        for seq, rank, message in outputs.get("faults", ()):
            if seq not in failed:
                found.append(Failed(seq, self._failure(message, rank, batch)))
            failed.add(seq)
        for index, prompt in enumerate(batch.prompts):
            if prompt.seq not in failed:
                part = {name: outputs[f"{_PROMPT}.{index}.{name}"] for name in _RANKED}
                found.append(prompt_outcome(prompt.seq, prompt.start, prompt.k, part))
        if batch.sampled:
            seqs = [item.seq for item in batch.sampled]
            chosen = outcomes(seqs, [item.request for item in batch.sampled], outputs, rank=self._ctx.rank)
            for outcome in chosen:
                if outcome.seq in failed:
                    continue
                if isinstance(outcome, Failed) and outcome.error.kind == NonFiniteError.__name__:
                    outcome = Failed(outcome.seq, self._failure("NaN or infinity in its logits", None, batch))
                found.append(outcome)
        return found

    def describe(self, batch: StageBatch | None) -> str:
        """See `Batch.describe`."""
        return "" if batch is None else batch.batch.describe()

    def cost(self, batch: StageBatch | None) -> list[tuple[int, int]]:
        """(prefix, tokens) of each segment."""
        return [] if batch is None else [(segment.start, segment.length) for segment in batch.batch.segments]

    def reset(self) -> None:
        """Forget all sequences. What the KV memory holds is overwritten before it is read."""
        self._sequences.reset()
        self._constraints.keep(())

    def integrity(self) -> dict[str, int]:
        """As `Sequences.integrity`."""
        return self._sequences.integrity()

    def stats(self) -> Mapping[str, Any]:
        """Sizes and names."""
        return {
            "architecture": self._info.architecture,
            "layers": list(self._layers),
            "weight_bytes": self._sliced.weight_bytes if self._sliced else 0,
            "kv_bytes": self._kv_bytes_per_token * self._cache.pool.slots,
            "kv_tokens": self._cache.pool.slots,
            "dtype": self._info.dtype,
        }

    def teardown(self) -> None:
        """Let go of weights and KV memory."""
        self._sliced = None
        self._cache = PagedCache()
        self._sequences.reset()

    @property
    def _kv_bytes_per_token(self) -> int:
        return sum(self._info.kv_bytes_per_token[slice(*self._layers)])

    def _kv_tokens(self) -> int:
        """What is asked for if it fits; otherwise what this stage's share of half the free memory holds."""
        asked = self._info.options.kv_cache_tokens
        free_bytes = _available_bytes()
        if asked is not None:
            needed = asked * self._kv_bytes_per_token
            if needed > free_bytes:
                raise CapacityError(
                    f"{self.name}: a KV cache of {asked} tokens takes {needed >> 20} MiB, {free_bytes >> 20} MiB are "
                    "free; ask for fewer tokens or use more stages"
                )
            return asked
        share_bytes = free_bytes // 2 // self._ctx.size
        return min(MOST_KV_TOKENS, share_bytes // max(1, self._kv_bytes_per_token))

    def _wanted(self, segments: Sequence[Segment]) -> tuple[tuple[_Sampled, ...], tuple[_Prompt, ...]]:
        sampled: list[_Sampled] = []
        prompts: list[_Prompt] = []
        row = 0
        for segment in segments:
            state = self._sequences.states.get(segment.seq)  # None: released by the same step
            if segment.sample and state is not None:
                constraint = self._constraints.of(segment.seq, state.sampling)
                request = sample_request(state, constraint)
                sampled.append(_Sampled(row + segment.length - 1, segment.seq, request))
            if segment.prompt_logprobs is not None:
                prompts.append(
                    _Prompt(row, segment.seq, segment.start + 1, segment.prompt_logprobs, segment.prompt_targets)
                )
            row += segment.length
        return tuple(sampled), tuple(prompts)

    def _received(self, batch: StageBatch, inputs: Payload) -> torch.Tensor:
        hidden = inputs.get("hidden")
        expected = (batch.batch.rows, self._info.hidden_size)
        got = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else None
        if got != expected:
            raise ProtocolError(
                f"{self.name}: step {batch.batch.number} needs hidden states of shape {expected}, received {got}"
            )
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def _last(
        self, sliced: Sliced, batch: StageBatch, received: torch.Tensor | None, faults: list[list[Any]]
    ) -> Payload:
        with torch.inference_mode():
            rows = batch.wanted_rows
            logits, normed = sliced.logits(batch.token_ids, received, batch.ragged.positions, rows)
            self._faults(batch.batch, normed, faults)
            outputs: Payload = {}
            at = len(batch.sampled)
            if at:
                outputs |= sample(logits[:at], [item.request for item in batch.sampled])
            for index, prompt in enumerate(batch.prompts):
                part = logits[at : at + len(prompt.targets)]
                ranked = rank_tokens(part, torch.tensor(prompt.targets), prompt.k)
                outputs |= {f"{_PROMPT}.{index}.{name}": tensor for name, tensor in ranked.items()}
                at += len(prompt.targets)
        return {name: tensor.clone() for name, tensor in outputs.items()}  # ordinary tensors again

    def _faults(self, batch: Batch, values: torch.Tensor, faults: list[list[Any]]) -> torch.Tensor | None:
        """Add the sequences that have NaN or infinity in `values` [rows, hidden] to `faults`.

        Returns:
            Which rows have any, bool [rows]; None if none has.
        """
        # One pass in the usual case: NaN and infinity survive a sum.
        if not self._info.options.check_finite or bool(torch.isfinite(values.sum(dtype=torch.float32))):
            return None
        bad = ~torch.isfinite(values).all(-1)
        known = {seq for seq, _, _ in faults}
        row = 0
        for segment in batch.segments:
            hit = bad[row : row + segment.length].nonzero()
            if len(hit) and segment.seq not in known:
                position = segment.start + int(hit[0])
                message = f"NaN or infinity after layer {self._layers[1] - 1} at position {position}"
                faults.append([segment.seq, self._ctx.rank, message])
            row += segment.length
        return bad if bool(bad.any()) else None

    def _failure(self, message: str, rank: int | None, batch: StageBatch) -> ErrorInfo:
        where = self._ctx.rank if rank is None else rank
        stage = self.name if where == self._ctx.rank else None
        return ErrorInfo.of(NonFiniteError(message, rank=where, stage=stage, step=batch.batch.number))


_RANKED = ("logprob_ids", "logprobs", "logprob_ranks")


def _available_bytes() -> int:
    """Memory that could be taken without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
