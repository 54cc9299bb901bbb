"""Chooses the next tokens from logits. Knows nothing of models, stages or schedules.

The order is: penalties, a grammar's mask and bans on the raw logits, temperature, top-k, top-p over what top-k left
(renormalised), min-p; then the most likely token after adding Gumbel noise, which is a draw from what is left. Tokens
that tie at the boundary of top-k or top-p are all kept. Noise depends on (seed, choice, position) alone and every row
is treated on its own, so that neither the batch nor the layout changes what a sequence gets. Log-probabilities are
those of the raw logits, before penalties, masks, temperature and filters.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipelined.errors import InvalidRequestError, NonFiniteError, PipelinedError
from pipelined.messages import ErrorInfo, Failed, PromptLogprobs, Sampled, TokenLogprob

from .noise import gumbel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipelined.messages import SamplingParams

    from .batching import SequenceState
    from .grammar import Constraint

__all__ = ["SampleRequest", "outcomes", "prompt_outcome", "rank_tokens", "sample", "sample_request"]

_TOP_P_WINDOW = 1024
"""Top-p looks at that many likely tokens first, and sorts the vocabulary only where they are too few."""


@dataclass(frozen=True)
class SampleRequest:
    """How one token is chosen: a snapshot that later steps don't change.

    Attributes:
        sampling, choice: As admitted.
        position: Of the token to choose.
        generated: How many tokens were generated before it.
        banned: Token ids that may not come yet (min_tokens).
        prompt_ids: Distinct token ids of the prompt; empty where no penalty needs them.
        output_ids: Generated tokens, in order; empty where neither a penalty nor a constraint needs them.
        constraint: What says which tokens may come; None: all.
    """

    sampling: SamplingParams
    choice: int
    position: int
    generated: int
    banned: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None

    @property
    def greedy(self) -> bool:
        """No noise."""
        return self.sampling.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether any penalty applies."""
        params = self.sampling
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    @property
    def plain(self) -> bool:
        """The most likely token of the raw logits, and nothing else."""
        special = self.penalised or self.banned or self.constraint is not None
        return self.greedy and not special and self.sampling.logprobs is None


def sample_request(state: SequenceState, constraint: Constraint | None = None) -> SampleRequest:
    """For the token after all that `state` knows; to be made right after the step is applied."""
    params = state.sampling
    position = len(state.tokens)
    generated = position - state.prompt_tokens
    repeats = params.repetition_penalty != 1
    counts = repeats or params.presence_penalty != 0 or params.frequency_penalty != 0
    return SampleRequest(
        sampling=params,
        choice=state.choice,
        position=position,
        generated=generated,
        banned=(*state.eos, *params.stop_token_ids) if generated < params.min_tokens else (),
        prompt_ids=state.prompt_ids() if repeats else (),
        output_ids=state.generated if counts or constraint is not None else (),
        constraint=constraint,
    )


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> dict[str, torch.Tensor]:
    """Choose a token for each row.

    Args:
        logits: Floating point [n, vocab]; not changed.
        requests: One a row.

    Returns:
        `tokens` int64 [n]; `finite` bool [n]: False where the row held NaN, +inf or only -inf, and its token means
        nothing. If any request wants log-probabilities, of those rows, in order, also what `rank_tokens` returns.
    """
    logits = logits.float()
    finite = torch.isfinite(logits.amax(-1))  # NaN wins every comparison of amax
    if all(request.plain for request in requests):
        return {"tokens": logits.argmax(-1), "finite": finite}
    scores = torch.where(finite[:, None], logits, 0.0)
    for row, request in enumerate(requests):
        _adjust(scores[row], request)
    tokens = scores.argmax(-1)
    drawn = [row for row, request in enumerate(requests) if not request.greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw(scores[rows], [requests[row] for row in drawn])
    output = {"tokens": tokens, "finite": finite}
    asked = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
    if asked:
        rows = torch.tensor(asked, device=logits.device)
        most = max(requests[row].sampling.logprobs or 0 for row in asked)
        output |= rank_tokens(logits[rows], tokens[rows], most)
    return output


def rank_tokens(logits: torch.Tensor, chosen: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """Log-probabilities of the chosen token and of the `k` most likely ones in each row.

    Args:
        logits: Raw, floating point [n, vocab].
        chosen: int64 [n].
        k: How many besides the chosen one; at most the vocabulary counts.

    Returns:
        `logprob_ids` int64 [n, 1 + k] and `logprobs` float32 [n, 1 + k], both with the chosen one first, then the most
        likely in falling order; `logprob_ranks` int64 [n]: how many are more likely than the chosen one, plus 1.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    of_chosen = logprobs.gather(-1, chosen[:, None])
    top = logprobs.topk(min(k, logits.shape[-1]), dim=-1)
    return {
        "logprob_ids": torch.cat([chosen[:, None], top.indices], dim=-1),
        "logprobs": torch.cat([of_chosen, top.values], dim=-1),
        "logprob_ranks": (logprobs > of_chosen).sum(-1) + 1,
    }


def outcomes(
    seqs: Sequence[int],
    requests: Sequence[SampleRequest],
    output: Mapping[str, torch.Tensor],
    *,
    rank: int | None = None,
) -> list[Sampled | Failed]:
    """What to report of `sample`'s output, once on the host: a token a sequence, or why there is none."""
    asked = [request.sampling.logprobs for request in requests]
    entries = iter(_entries(output, [k for k in asked if k is not None]) if "logprobs" in output else [])
    found: list[Sampled | Failed] = []
    rows = zip(seqs, asked, output["tokens"].tolist(), output["finite"].tolist(), strict=True)
    for request, (seq, k, token, finite) in zip(requests, rows, strict=True):
        logprobs = () if k is None else next(entries)
        if request.constraint is not None and request.constraint.error:
            error: PipelinedError = InvalidRequestError(request.constraint.error)
            found.append(Failed(seq, ErrorInfo.of(error)))
        elif finite:
            found.append(Sampled(seq, token, logprobs))
        else:
            error = NonFiniteError("the logits of the next token hold NaN or infinity", rank=rank)
            found.append(Failed(seq, ErrorInfo.of(error)))
    return found


def prompt_outcome(seq: int, start: int, k: int, output: Mapping[str, torch.Tensor]) -> PromptLogprobs:
    """What to report of `rank_tokens`' output, on the host, for the prompt tokens from position `start` on."""
    return PromptLogprobs(seq, start, tuple(_entries(output, [k] * len(output["logprob_ranks"]))))


def _entries(output: Mapping[str, torch.Tensor], ks: Sequence[int]) -> list[tuple[TokenLogprob, ...]]:
    columns = (output[name].tolist() for name in ("logprob_ids", "logprobs", "logprob_ranks"))
    return [
        (TokenLogprob(ids[0], values[0], rank), *map(TokenLogprob, ids[1 : k + 1], values[1 : k + 1], range(1, k + 1)))
        for k, ids, values, rank in zip(ks, *columns, strict=True)
    ]


def _adjust(scores: torch.Tensor, request: SampleRequest) -> None:
    """Apply penalties, the constraint and bans to one row [vocab], in place."""
    params, device = request.sampling, scores.device
    vocab_size = len(scores)
    if params.repetition_penalty != 1:
        seen = sorted({token for token in (*request.prompt_ids, *request.output_ids) if 0 <= token < vocab_size})
        ids = torch.tensor(seen, dtype=torch.int64, device=device)
        old = scores[ids]
        scores[ids] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(token for token in request.output_ids if 0 <= token < vocab_size)
        ids = torch.tensor(list(counts), dtype=torch.int64, device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        scores[ids] -= params.frequency_penalty * times + params.presence_penalty
    allowed = request.constraint.allowed(request.output_ids) if request.constraint is not None else None
    if allowed is not None:
        allowed = allowed.to(device)
        scores.masked_fill_(~allowed, -math.inf)
    banned = [token for token in request.banned if 0 <= token < vocab_size]
    if banned and allowed is not None:  # where the grammar wants the end, it ends
        rest = allowed.clone()
        rest[torch.tensor(banned, device=device)] = False
        banned = banned if bool(rest.any()) else []
    if banned:
        scores[torch.tensor(banned, device=device)] = -math.inf


def _draw(scores: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """Draw a token for each row of adjusted, finite scores [n, vocab]."""
    params = [request.sampling for request in requests]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    def counts(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=scores.device)

    # shifted before the division, so that a tiny temperature cannot overflow to infinity minus infinity
    logits = (scores.double() - scores.amax(-1, keepdim=True)) / column([p.temperature for p in params])
    keep = filter_tokens(logits, [p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params])
    seeds, choices = counts([p.seed or 0 for p in params]), counts([request.choice for request in requests])
    positions = counts([request.position for request in requests])
    noisy = logits + gumbel(seeds, choices, positions, logits.shape[-1])
    return torch.where(keep, noisy, -math.inf).argmax(-1)


def filter_tokens(
    logits: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
) -> torch.Tensor:
    """Which tokens stay.

    Args:
        logits: float64 [n, vocab], scaled by the temperature, the largest of each row at 0.
        top_k: One a row, as in `SamplingParams`.
        top_p: Likewise.
        min_p: Likewise.

    Returns:
        bool [n, vocab], at least one True in each row.
    """
    vocab_size = logits.shape[-1]
    keep = torch.ones_like(logits, dtype=torch.bool)
    ks = [k if 0 < k < vocab_size else vocab_size for k in top_k]
    limited = [row for row, k in enumerate(ks) if k < vocab_size]
    if limited:
        rows = torch.tensor(limited, device=logits.device)
        last = torch.tensor([ks[row] - 1 for row in limited], device=logits.device)[:, None]
        best = logits[rows].topk(max(ks[row] for row in limited), dim=-1).values
        keep[rows] = logits[rows] >= best.gather(-1, last)
    limited = [row for row, p in enumerate(top_p) if p < 1]
    if limited:
        rows = torch.tensor(limited, device=logits.device)
        left = torch.where(keep[rows], logits[rows], -math.inf)
        shares = torch.tensor([top_p[row] for row in limited], dtype=torch.float64, device=logits.device)
        keep[rows] &= _nucleus(torch.softmax(left, dim=-1), shares[:, None])
    if any(min_p):
        floor = torch.tensor(
            [math.log(p) if p else -math.inf for p in min_p], dtype=torch.float64, device=logits.device
        )
        keep &= logits >= floor[:, None]
    return keep


def _nucleus(probs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Tokens of the smallest set of likely ones whose probabilities [n, vocab] sum to at least `shares` [n, 1]."""
    best = probs.topk(min(_TOP_P_WINDOW, probs.shape[-1]), dim=-1).values
    sums = best.cumsum(-1)
    if bool((sums[:, -1:] < shares).any()):
        best = probs.sort(dim=-1, descending=True).values
        sums = best.cumsum(-1)
    needed = (sums < shares).sum(-1, keepdim=True).clamp_(max=best.shape[-1] - 1)
    return probs >= best.gather(-1, needed)
