from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipelined.messages import Admit, Chunk, Decode, Failed, Sampled, SamplingParams, Step, pack_tokens
from pipelined.models.batching import Sequences
from pipelined.models.noise import gumbel, philox
from pipelined.models.sampler import (
    SampleRequest,
    filter_tokens,
    outcomes,
    prompt_outcome,
    rank_tokens,
    sample,
    sample_request,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def request(position: int = 5, choice: int = 0, generated: int = 3, **params: Any) -> SampleRequest:
    more = {name: params.pop(name) for name in ("banned", "prompt_ids", "output_ids") if name in params}
    params.setdefault("seed", 1)
    return SampleRequest(SamplingParams(**params), choice, position, generated, **more)


def logits_of(seed: int, rows: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ---- noise ----


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_answers(counter: Any, key: Any, expected: Any) -> None:
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


def test_gumbel_noise_is_finite_and_has_the_right_moments() -> None:
    noise = gumbel(torch.tensor([7]), torch.tensor([0]), torch.tensor([9]), 200_001)
    assert noise.shape == (1, 200_001)
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.015)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.03)


def test_noise_differs_with_seed_choice_position_and_token() -> None:
    base = (3, 0, 5)
    others = [(4, 0, 5), (3 + 2**40, 0, 5), (3, 1, 5), (3, 0, 6)]
    rows = [gumbel(*(torch.tensor([part]) for part in key), 64)[0] for key in (base, *others)]
    values = torch.stack(rows).flatten().tolist()
    assert len(set(values)) == len(values)


# ---- choosing ----


def test_greedy_is_the_argmax_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, -1.0, 0.0]])
    assert sample(logits, [request(temperature=0)] * 2)["tokens"].tolist() == [1, 0]


def test_draws_follow_the_distribution() -> None:
    """Chi-square with 7 degrees of freedom stays below 29.9 with probability 0.9999."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    draws, temperature = 20_000, 0.8
    expected = torch.softmax(logits.double() / temperature, -1) * draws
    for vary in ("position", "choice", "seed"):
        requests = [request(temperature=temperature, **{vary: number}) for number in range(draws)]
        tokens = sample(logits.expand(draws, -1), requests)["tokens"]
        observed = torch.bincount(tokens, minlength=8).double()
        assert float(((observed - expected) ** 2 / expected).sum()) < 29.9, vary


def test_draws_at_successive_positions_are_independent() -> None:
    """Pairs of successive draws from four equal tokens: chi-square with 15 degrees of freedom, 0.9999 at 44."""
    draws = 20_000
    tokens = sample(torch.zeros(draws, 4), [request(position=p) for p in range(draws)])["tokens"].tolist()
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    expected = draws / 2 / 16
    assert sum((pairs[a, b] - expected) ** 2 / expected for a in range(4) for b in range(4)) < 44


def test_draws_with_filters_follow_the_renormalised_distribution() -> None:
    logits, draws = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])), 10_000
    requests = [request(position=p, top_p=0.85) for p in range(draws)]
    observed = torch.bincount(sample(logits.expand(draws, -1), requests)["tokens"], minlength=5).double()
    assert observed[3:].sum() == 0
    expected = torch.tensor([4 / 9, 3 / 9, 2 / 9]).double() * draws
    assert float(((observed[:3] - expected) ** 2 / expected).sum()) < 18.4


def naive_keep(logits: np.ndarray[Any, Any], top_k: int, top_p: float, min_p: float) -> set[int] | None:
    """The definitions, one token at a time. None where rounding may decide."""
    close = False
    kept = sorted(range(len(logits)), key=lambda token: -logits[token])
    if 0 < top_k < len(kept):
        kept = [token for token in kept if logits[token] >= logits[kept[top_k - 1]]]
    probs = np.exp(logits - logits.max())
    if top_p < 1:
        total, sum_, nucleus = probs[kept].sum(), 0.0, []
        for token in kept:
            nucleus.append(token)
            sum_ += probs[token]
            if sum_ >= top_p * total:
                break
        sums = (sum_ / total, (sum_ - probs[nucleus[-1]]) / total)
        close = any(abs(each - top_p) < 1e-9 for each in sums)
        kept = [token for token in kept if probs[token] >= probs[nucleus[-1]]]
    close = close or any(abs(probs[token] - min_p) < 1e-12 for token in kept if probs[token] < 1)
    return None if close else {token for token in kept if probs[token] >= min_p}


FILTERS = st.tuples(
    st.sampled_from([-1, 0, 1, 2, 3, 7, 100]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(-40, 40), min_size=12, max_size=12), FILTERS), min_size=1, max_size=4))
def test_filters_keep_what_their_definitions_say(rows: list[tuple[list[int], tuple[int, float, float]]]) -> None:
    logits = torch.tensor([numbers for numbers, _ in rows]).double() / 5
    logits -= logits.amax(-1, keepdim=True)
    top_k, top_p, min_p = zip(*(filters for _, filters in rows), strict=True)
    keep = filter_tokens(logits, top_k, top_p, min_p)
    for row, (_, filters) in enumerate(rows):
        expected = naive_keep(logits[row].numpy(), *filters)
        assert expected in (None, set(keep[row].nonzero().flatten().tolist()))
        assert keep[row].any()


def test_a_nucleus_wider_than_the_window_is_found_too() -> None:
    logits = logits_of(3, 2, 5000, scale=0.1).double()
    logits -= logits.amax(-1, keepdim=True)
    keep = filter_tokens(logits, [-1, -1], [0.9, 0.05], [0, 0])
    for row, share in enumerate((0.9, 0.05)):
        assert set(keep[row].nonzero().flatten().tolist()) == naive_keep(logits[row].numpy(), -1, share, 0)
    assert keep[0].sum() > 1024 > keep[1].sum()


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-9, 0.7, 1.0, 5.0]),
        "top_k": st.sampled_from([-1, 1, 5, 40]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(0, 2**63 - 1),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(deadline=None, max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**20), st.data())
def test_neither_the_batch_nor_its_order_changes_what_a_row_gets(
    params: list[dict[str, Any]], seed: int, data: st.DataObject
) -> None:
    dice, vocab = random.Random(seed), 3001
    requests = [
        request(
            position=dice.randrange(1000),
            choice=dice.randrange(3),
            prompt_ids=tuple(dice.choices(range(vocab), k=5)),
            output_ids=tuple(dice.choices(range(9), k=5)),
            **each,
        )
        for each in params
    ]
    logits = logits_of(seed, len(requests), vocab)
    together = outcomes(range(len(requests)), requests, sample(logits, requests))
    order = data.draw(st.permutations(range(len(requests))))
    shuffled = [requests[row] for row in order]
    again = outcomes(order, shuffled, sample(logits[list(order)], shuffled))
    assert sorted(again, key=lambda outcome: outcome.seq) == together
    for row, each in enumerate(requests):
        assert outcomes([row], [each], sample(logits[row : row + 1], [each])) == [together[row]]


def test_a_seed_gives_the_same_tokens_and_choices_differ() -> None:
    logits = torch.zeros(64, 500)
    by_choice = [sample(logits, [request(position=p, choice=c) for p in range(64)])["tokens"].tolist() for c in (0, 1)]
    assert by_choice[0] == sample(logits, [request(position=p) for p in range(64)])["tokens"].tolist()
    assert sum(a == b for a, b in zip(*by_choice, strict=True)) < 5


def test_a_tiny_temperature_is_greedy() -> None:
    logits = logits_of(1, 8, 100)
    requests = [request(temperature=5e-324, position=p) for p in range(8)]
    assert torch.equal(sample(logits, requests)["tokens"], logits.argmax(-1))


def test_the_logits_are_not_changed() -> None:
    logits = logits_of(2, 3, 50)
    before = logits.clone()
    sample(logits, [request(banned=(1,), repetition_penalty=2.0, prompt_ids=(3,), top_p=0.5)] * 3)
    assert torch.equal(logits, before)


# ---- penalties and bans ----


def naive_scores(row: list[float], asked: SampleRequest) -> list[float]:
    params, scores = asked.sampling, [*row]
    for token in {*asked.prompt_ids, *asked.output_ids}:
        repetition = params.repetition_penalty
        scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    for token, count in Counter(asked.output_ids).items():
        scores[token] -= params.presence_penalty + count * params.frequency_penalty
    return scores


@settings(deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=6, max_size=6),
    st.lists(st.integers(0, 5)),
    st.lists(st.integers(0, 5)),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([-1.25, 0.0, 1.25]),
    st.sampled_from([-0.75, 0.0, 0.75]),
)
def test_penalties_are_what_their_definitions_say(
    row: list[int], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    asked = request(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        prompt_ids=tuple(set(prompt)),
        output_ids=tuple(output),
    )
    expected = naive_scores([float(number) for number in row], asked)
    best = sorted(expected)[-1]
    assume(sum(abs(score - best) < 1e-5 for score in expected) == 1)
    assert sample(torch.tensor([row]).float(), [asked])["tokens"].item() == expected.index(best)


def test_banned_tokens_never_come_and_ids_beyond_the_vocabulary_are_ignored() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    asked = request(temperature=0, banned=(0, 99), presence_penalty=1.0, output_ids=(77,), prompt_ids=(88,))
    assert sample(logits, [asked])["tokens"].item() == 1
    draws = [request(position=p, banned=(0,)) for p in range(200)]
    assert set(sample(logits.expand(200, -1), draws)["tokens"].tolist()) == {1, 2}


# ---- snapshots ----


def test_requests_are_snapshots_of_the_sequence() -> None:
    sequences = Sequences(4)
    params = SamplingParams(min_tokens=2, stop_token_ids=(8,), repetition_penalty=1.2, seed=5)
    admitted = Admit(1, pack_tokens([4, 4, 5]), 3, params, choice=2, eos=(0,))
    sequences.apply(Step(0, 0, 3, (admitted, Chunk(1, 0, 3, (0,), last=True))))
    first = sample_request(sequences.states[1])
    sequences.apply(Step(0, 1, 1, (Decode(1, 3, 9),)))
    sequences.apply(Step(0, 2, 1, (Decode(1, 4, 7, (1,)),)))
    later = sample_request(sequences.states[1])
    assert (first.position, first.generated, first.choice, first.banned) == (3, 0, 2, (0, 8))
    assert (set(first.prompt_ids), first.output_ids) == ({4, 5}, ())
    assert (later.position, later.generated, later.banned, later.output_ids) == (5, 2, (), (9, 7))


def test_resuming_after_a_preemption_asks_for_the_same() -> None:
    plain, resumed = Sequences(4), Sequences(4)
    params = SamplingParams(seed=5, min_tokens=3, presence_penalty=1.0)
    plain.apply(Step(0, 0, 2, (Admit(1, pack_tokens([4, 5]), 2, params, eos=(0,)), Chunk(1, 0, 2, (0,), last=True))))
    plain.apply(Step(0, 1, 1, (Decode(1, 2, 6),)))
    admitted = Admit(9, pack_tokens([4, 5, 6]), 2, params, eos=(0,))
    resumed.apply(Step(0, 0, 3, (admitted, Chunk(9, 0, 3, (0,), last=True))))
    assert sample_request(plain.states[1]) == sample_request(resumed.states[9])


# ---- log-probabilities ----


def test_logprobs_are_of_the_raw_distribution_with_ranks() -> None:
    logits = logits_of(5, 3, 40)
    requests = [
        request(temperature=0, logprobs=2, banned=(int(logits[0].argmax()),)),
        request(temperature=0),
        request(temperature=0.5, logprobs=0),
    ]
    found = outcomes([7, 8, 9], requests, sample(logits, requests))
    raw = torch.log_softmax(logits, -1)
    first, second, third = found
    assert isinstance(first, Sampled)
    assert isinstance(second, Sampled)
    assert isinstance(third, Sampled)
    order = raw[0].argsort(descending=True).tolist()
    assert [entry.token for entry in first.logprobs] == [order[1], order[0], order[1]]
    assert [entry.rank for entry in first.logprobs] == [2, 1, 2]
    assert [entry.logprob for entry in first.logprobs] == pytest.approx(raw[0][[order[1], *order[:2]]].tolist())
    assert second.logprobs == ()
    assert [entry.token for entry in third.logprobs] == [third.token]


def test_prompt_logprobs() -> None:
    logits, targets = logits_of(6, 4, 30), torch.tensor([3, 9, 27, 0])
    found = prompt_outcome(5, 11, 2, rank_tokens(logits, targets, 2))
    raw = torch.log_softmax(logits, -1)
    assert (found.seq, found.start) == (5, 11)
    for row, entries in enumerate(found.entries):
        token = int(targets[row])
        assert entries[0].token == token
        assert entries[0].logprob == pytest.approx(float(raw[row, token]))
        assert entries[0].rank == 1 + int((raw[row] > raw[row, token]).sum())
        assert [entry.token for entry in entries[1:]] == raw[row].argsort(descending=True)[:2].tolist()
    assert len(rank_tokens(logits, targets, 99)["logprob_ids"][0]) == 31


# ---- bad rows ----


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_p": 0.5, "logprobs": 1}])
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = logits_of(7, 3, 20)
    requests = [request(**params) for _ in range(3)]
    expected = outcomes([1, 2, 3], requests, sample(logits, requests))
    logits[1, 4] = bad
    found = outcomes([1, 2, 3], requests, sample(logits, requests), rank=6)
    assert (found[0], found[2]) == (expected[0], expected[2])
    failed = found[1]
    assert isinstance(failed, Failed)
    assert (failed.seq, failed.error.kind, failed.error.rank) == (2, "NonFiniteError", 6)


def test_masked_tokens_are_no_error_but_nothing_but_masked_tokens_is() -> None:
    logits = torch.tensor([[-math.inf, 1.0], [-math.inf, -math.inf]])
    for params in ({"temperature": 0}, {"temperature": 1.0}):
        output = sample(logits, [request(**params)] * 2)
        assert output["finite"].tolist() == [True, False]
        assert output["tokens"][0].item() == 1


def test_no_rows() -> None:
    assert outcomes([], [], sample(torch.empty(0, 5), [])) == []
