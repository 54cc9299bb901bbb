from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.errors import ModelError
from pipelined.messages import (
    Admit,
    Chunk,
    Decode,
    Failed,
    Item,
    Outcome,
    PromptLogprobs,
    Release,
    Sampled,
    SamplingParams,
    Step,
    pack_tokens,
)
from pipelined.models.toy import ToyFamily, ToyStage, reference_tokens
from pipelined.stage import LoadOptions
from pipelined.transport.topology import Topology

SMALL = "toy://?layers=4&vocab=61&hidden=4&context=512&kv=512"
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@dataclass
class Context:
    rank: int
    size: int
    process_group: Any = None
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def topology(self) -> Topology:
        return Topology(self.size)

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), -1, dtype=dtype)


class Chain:
    """The stages of a toy, fed by hand with steps; the driver owns the pages."""

    def __init__(self, ref: str, cuts: tuple[int, ...] = (), page_size: int = 4) -> None:
        self.page_size = page_size
        info = ToyFamily().inspect(ref, LoadOptions(page_size=page_size))
        bounds = (0, *cuts, info.layers)
        self.stages: list[ToyStage] = []
        for rank, layers in enumerate(pairwise(bounds)):
            ctx = Context(rank, len(bounds) - 1)
            self.stages.append(ToyFamily().build(info, layers, ctx))
            capacity = self.stages[-1].setup(ctx)
            self.stages[-1].start(capacity)
        self.number = 0

    def step(self, *items: Item) -> list[Outcome]:
        rows = sum(i.tokens if isinstance(i, Chunk) else isinstance(i, Decode) for i in items)
        step = Step(0, self.number, rows, items)
        self.number += 1
        batches = [stage.prepare(step) for stage in self.stages]
        if not rows:
            return []
        payload: dict[str, Any] = {}
        for stage, batch in zip(self.stages, batches, strict=True):
            assert batch is not None
            payload = stage.forward(batch, payload)
        assert batches[-1] is not None
        return list(self.stages[-1].collect(batches[-1], payload))


def admit(seq: int, tokens: list[int], sampling: SamplingParams = GREEDY, **more: Any) -> Admit:
    return Admit(seq, pack_tokens(tokens), more.pop("prompt_tokens", len(tokens)), sampling, **more)


def tokens_of(outcomes: list[Outcome]) -> dict[int, int]:
    return {o.seq: o.token for o in outcomes if isinstance(o, Sampled)}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2**32))
def test_any_chunking_batching_and_cut_gives_the_reference(data: st.DataObject, seed: int) -> None:
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, 3)))))
    chain = Chain(SMALL, cuts)
    prompts = data.draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), min_size=1, max_size=4))
    dice = random.Random(seed)
    free = dice.sample(range(128), 128)
    known = [list(prompt) for prompt in prompts]
    done, pages = [0] * len(prompts), [0] * len(prompts)
    chain.step(*[admit(seq, prompt) for seq, prompt in enumerate(prompts)])
    while any(len(known[s]) < len(prompts[s]) + 4 for s in range(len(prompts))):
        items: list[Item] = []
        for seq in dice.sample(range(len(prompts)), len(prompts)):
            left = len(prompts[seq]) - done[seq]
            count = dice.randint(0, left) if left > 0 else 1
            if count == 0 or len(known[seq]) >= len(prompts[seq]) + 4:
                continue
            need = -(-(done[seq] + count) // 4) - pages[seq]
            new = tuple(free.pop() for _ in range(need))
            if left > 0:
                items.append(Chunk(seq, done[seq], count, new, last=count == left))
            else:
                items.append(Decode(seq, done[seq], known[seq][-1], new))
            done[seq], pages[seq] = done[seq] + count, pages[seq] + need
        for seq, token in tokens_of(chain.step(*items)).items():
            known[seq].append(token)
    for prompt, got in zip(prompts, known, strict=True):
        assert got[len(prompt) :] == reference_tokens(SMALL, prompt, 4)


@given(st.lists(st.integers(0, 60), min_size=2, max_size=30), st.data())
def test_every_prompt_token_and_its_place_matters(prompt: list[int], data: st.DataObject) -> None:
    """Over four tokens of 61 each, equal answers to two prompts would be a coincidence of about 1 in 10**7."""
    where = data.draw(st.integers(0, len(prompt) - 1))
    changed = [*prompt]
    changed[where] = (changed[where] + data.draw(st.integers(1, 60))) % 61
    assert reference_tokens(SMALL, prompt, 5) != reference_tokens(SMALL, changed, 5)
    swapped = [prompt[1], prompt[0], *prompt[2:]]
    if swapped != prompt:
        assert reference_tokens(SMALL, prompt, 5) != reference_tokens(SMALL, swapped, 5)


def answer(chain: Chain, seq: int, first: list[Outcome], position: int, pages: dict[int, int], n: int = 4) -> list[int]:
    tokens = [tokens_of(first)[seq]]
    while len(tokens) < n:
        new = (pages[position],) if position in pages else ()
        tokens.append(tokens_of(chain.step(Decode(seq, position, tokens[-1], new)))[seq])
        position += 1
    return tokens


def test_a_shared_cached_prefix_gives_the_reference_and_a_wrong_or_stale_page_does_not() -> None:
    prompt, chain = [5, 9, 13, 2, 44, 8, 7, 1, 3], Chain(SMALL, (2,))
    chain.step(admit(0, prompt), Chunk(0, 0, 9, (4, 9, 2), last=True), Release(0))
    expected = reference_tokens(SMALL, prompt, 4)
    good = chain.step(admit(1, prompt, cached_tokens=8, pages=(4, 9)), Chunk(1, 8, 1, (3,), last=True))
    assert answer(chain, 1, good, 9, {12: 30}) == expected
    swapped = chain.step(admit(2, prompt, cached_tokens=8, pages=(9, 4)), Chunk(2, 8, 1, (5,), last=True))
    assert answer(chain, 2, swapped, 9, {12: 31}) != expected
    never_written = chain.step(admit(3, prompt, cached_tokens=8, pages=(4, 50)), Chunk(3, 8, 1, (6,), last=True))
    assert answer(chain, 3, never_written, 9, {12: 32}) != expected
    chain.step(admit(4, [1, 2, 3]), Chunk(4, 0, 3, (9,), last=True))
    overwritten = chain.step(admit(5, prompt, cached_tokens=8, pages=(4, 9)), Chunk(5, 8, 1, (7,), last=True))
    assert answer(chain, 5, overwritten, 9, {12: 33}) != expected


def test_resuming_from_prompt_and_generated_tokens_goes_on_alike() -> None:
    prompt = [1, 2, 3, 4, 5]
    expected = reference_tokens(SMALL, prompt, 6)
    chain = Chain(SMALL, (1, 3))
    resumed = chain.step(admit(0, prompt + expected[:3], prompt_tokens=5), Chunk(0, 0, 8, (1, 2), last=True))
    assert answer(chain, 0, resumed, 8, {8: 3}, n=3) == expected[3:]


def test_end_of_sequence_waits_for_min_tokens() -> None:
    prompt = [3, 1, 4, 1, 5]
    eos = reference_tokens(SMALL, prompt, 3)[2]
    ref = f"{SMALL}&eos={eos}"
    assert reference_tokens(ref, prompt, 10)[-1] == eos
    assert len(reference_tokens(ref, prompt, 10)) == 3
    assert len(reference_tokens(ref, prompt, 10, ignore_eos=True)) == 10
    expected = reference_tokens(ref, prompt, 6, min_tokens=4)
    assert eos not in expected[:4]
    chain = Chain(ref)
    sampling = SamplingParams(temperature=0, min_tokens=4)
    first = chain.step(admit(0, prompt, sampling, eos=(eos,)), Chunk(0, 0, 5, (0, 1), last=True))
    assert answer(chain, 0, first, 5, {8: 2}, n=len(expected)) == expected


def test_a_failing_sequence_fails_alone_with_the_rank_of_its_layer() -> None:
    chain = Chain(f"{SMALL}&fail_seq_token=13&fail_layer=2", (1, 2))
    outcomes = chain.step(
        admit(0, [1, 13, 2]), admit(1, [1, 12, 2]), Chunk(0, 0, 3, (0,), last=True), Chunk(1, 0, 3, (1,), last=True)
    )
    failed, fine = outcomes
    assert isinstance(failed, Failed)
    assert (failed.seq, failed.error.kind, failed.error.rank) == (0, "NonFiniteError", 2)
    assert tokens_of([fine]) == {1: reference_tokens(SMALL, [1, 12, 2], 1)[0]}
    again = chain.step(Decode(0, 3, 5), Decode(1, 3, 5))
    assert [type(o) for o in again] == [Failed, Sampled]


def test_a_raising_token_raises_at_its_layer_only() -> None:
    chain = Chain(f"{SMALL}&raise_token=13&raise_layer=3", (2,))
    step = Step(0, 0, 2, (admit(0, [13, 1]), Chunk(0, 0, 2, (0,), last=True)))
    first, second = (stage.prepare(step) for stage in chain.stages)
    assert first is not None
    assert second is not None
    hidden = chain.stages[0].forward(first, {})
    with pytest.raises(RuntimeError, match="token 13 makes layer 3 raise"):
        chain.stages[1].forward(second, hidden)


def test_logprobs_are_given_where_asked_for() -> None:
    chain = Chain(SMALL)
    sampling = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1)
    outcomes = chain.step(admit(0, [1, 2, 3], sampling), Chunk(0, 0, 3, (0,), last=True))
    prompt, sampled = outcomes
    assert isinstance(prompt, PromptLogprobs)
    assert (prompt.start, [entry[0].token for entry in prompt.entries]) == (1, [2, 3])
    assert isinstance(sampled, Sampled)
    assert len(sampled.logprobs) == 3
    assert sampled.logprobs[0].token == sampled.token


def test_capacity_follows_the_options_and_may_differ_by_rank() -> None:
    info = ToyFamily().inspect("toy://?layers=2&kv=128,64", LoadOptions(page_size=16))
    assert [ToyStage(info, (r, r + 1), Context(r, 2)).setup(Context(r, 2)) for r in (0, 1)] == [8, 4]
    info = ToyFamily().inspect("toy://", LoadOptions(page_size=16, kv_cache_tokens=320))
    assert ToyStage(info, (0, 8), Context(0, 1)).setup(Context(0, 1)) == 20


def test_cost_integrity_and_reset() -> None:
    chain = Chain(SMALL)
    (stage,) = chain.stages
    batch = stage.prepare(Step(0, 0, 3, (admit(0, [1, 2, 3, 4]), Chunk(0, 0, 3, (0,)))))
    assert stage.cost(batch) == [(0, 3)]
    assert stage.cost(stage.prepare(Step(0, 1, 0, ()))) == []
    assert stage.integrity() == {"sequences": 1, "pages": 1}
    stage.reset()
    assert stage.integrity() == {"sequences": 0, "pages": 0}


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("toy://?layer=3", "no parameter 'layer'; did you mean 'layers'"),
        ("toy://?layers=x", "layers='x', expected a whole number"),
        ("toy://?layers=0", "layers=0, expected at least 1"),
        ("toy://?kv=", "kv=0, expected at least 1"),
    ],
)
def test_a_wrong_uri_is_a_model_error(ref: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ToyFamily().inspect(ref, LoadOptions())


def test_context_beyond_the_model_is_refused() -> None:
    family = ToyFamily()
    assert family.claims("toy://")
    assert not family.claims("smollm2")
    assert family.inspect("toy://?context=100", LoadOptions(context_length=50)).context_length == 50
    with pytest.raises(ModelError, match="context_length=200 is more than the 100 tokens"):
        family.inspect("toy://?context=100", LoadOptions(context_length=200))
