"""Stages driven by steps, as a rank would: tokens out equal the uncut model's; faults hurt nobody else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipelined.errors import CapacityError, ProtocolError
from pipelined.messages import (
    Admit,
    Chunk,
    Decode,
    Failed,
    PromptLogprobs,
    Release,
    Sampled,
    SamplingParams,
    Step,
    pack_tokens,
)
from pipelined.models.hf import HuggingFaceFamily
from pipelined.models.hf_stage import HuggingFaceStage
from pipelined.stage import LoadOptions
from pipelined.transport import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.messages import Item, Outcome
    from pipelined.stage import ModelInfo

PAGE = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Context:
    """A `StageContext` that keeps what was asked of it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.topology = Topology(size)
        self.torch_device = torch.device("cpu")
        self.process_group = None
        self.leases: list[torch.Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.leases.append(torch.empty(tuple(shape), dtype=dtype))
        return self.leases[-1]


class Chain:
    """All stages of a model in a row, with the pages of a scheduler that never frees."""

    def __init__(self, info: ModelInfo, cuts: tuple[int, ...] = (2,)) -> None:
        edges = (0, *cuts, info.layers)
        size = len(edges) - 1
        self.contexts = [Context(rank, size) for rank in range(size)]
        self.stages = [HuggingFaceFamily().build(info, (edges[c.rank], edges[c.rank + 1]), c) for c in self.contexts]
        capacity = min(stage.setup(context) or 0 for stage, context in zip(self.stages, self.contexts, strict=True))
        for stage in self.stages:
            stage.start(capacity)
        self.capacity = capacity
        self.number = 0
        self.pages = 0

    def take(self, count: int) -> tuple[int, ...]:
        self.pages += count
        return tuple(range(self.pages - count, self.pages))

    def step(self, *items: Item, rows: int) -> Sequence[Outcome]:
        step = Step(0, self.number, rows, tuple(items))
        self.number += 1
        payload: dict[str, Any] = {}
        batch: Any = None
        for stage in self.stages:
            batch = stage.prepare(step)
            if rows:
                payload = stage.forward(batch, payload)
        return self.stages[-1].collect(batch, payload) if rows else ()

    def generate(self, prompts: list[list[int]], chunk: int, sampling: SamplingParams = GREEDY) -> list[list[int]]:
        for seq, prompt in enumerate(prompts):
            self.step(Admit(seq, pack_tokens(prompt), len(prompt), sampling), rows=0)
        answers: list[list[int]] = [[] for _ in prompts]
        done, held = [0] * len(prompts), [0] * len(prompts)
        while any(len(answer) < sampling.max_tokens for answer in answers):
            items: list[Item] = []
            rows = 0
            for seq, prompt in enumerate(prompts):
                if len(answers[seq]) == sampling.max_tokens:
                    continue
                tokens = min(chunk, len(prompt) - done[seq]) if done[seq] < len(prompt) else 1
                need = -(-(done[seq] + tokens) // PAGE) - held[seq]
                pages, held[seq] = self.take(need), held[seq] + need
                if done[seq] < len(prompt):
                    items.append(Chunk(seq, done[seq], tokens, pages, last=done[seq] + tokens == len(prompt)))
                else:
                    items.append(Decode(seq, done[seq], answers[seq][-1], pages))
                done[seq] += tokens
                rows += tokens
            for outcome in self.step(*items, rows=rows):
                assert isinstance(outcome, Sampled)
                answers[outcome.seq].append(outcome.token)
        self.step(*(Release(seq) for seq in range(len(prompts))), rows=0)
        return answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    made = LlamaForCausalLM(config).eval().requires_grad_(False)
    path = tmp_path_factory.mktemp("model")
    made.save_pretrained(path)
    return made, path


def inspect(path: Path, **options: Any) -> ModelInfo:
    wanted = LoadOptions(dtype="float32", page_size=PAGE, **({"kv_cache_tokens": 512} | options))
    return HuggingFaceFamily().inspect(str(path), wanted)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


PROMPTS = [[5, 17, 33, 4, 60, 8, 9, 71, 12, 13, 14, 44, 7], [3], [20, 21, 22, 23, 24]]


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3), (1, 2, 3)], ids=lambda cuts: f"P={len(cuts) + 1}")
@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_generates_what_the_uncut_model_does(model: tuple[Any, Path], cuts: tuple[int, ...], chunk: int) -> None:
    chain = Chain(inspect(model[1]), cuts)
    assert chain.capacity == 512 // PAGE
    assert chain.generate(PROMPTS, chunk) == [greedy(model[0], prompt, 8) for prompt in PROMPTS]
    for stage in chain.stages:
        assert not any(stage.integrity().values())


def test_a_cached_prefix_is_used(model: tuple[Any, Path]) -> None:
    chain = Chain(inspect(model[1]))
    prompt = PROMPTS[0]
    pages = chain.take(2)
    first = chain.step(
        Admit(0, pack_tokens(prompt), len(prompt), GREEDY), Chunk(0, 0, len(prompt), pages, last=True), rows=len(prompt)
    )
    admit = Admit(1, pack_tokens(prompt), len(prompt), GREEDY, cached_tokens=PAGE, pages=pages[:1])
    rest = len(prompt) - PAGE
    second = chain.step(Release(0), admit, Chunk(1, PAGE, rest, chain.take(1), last=True), rows=rest)
    assert [o.token for o in first if isinstance(o, Sampled)] == [o.token for o in second if isinstance(o, Sampled)]


def test_logprobs_are_the_models(model: tuple[Any, Path]) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
    chain, prompt = Chain(inspect(model[1])), PROMPTS[0]
    chain.step(Admit(0, pack_tokens(prompt), len(prompt), sampling), rows=0)
    found = [*chain.step(Chunk(0, 0, 8, chain.take(1)), rows=8)]
    found += chain.step(Chunk(0, 8, len(prompt) - 8, chain.take(1), last=True), rows=len(prompt) - 8)
    with torch.inference_mode():
        want = model[0](torch.tensor([prompt])).logits[0].log_softmax(-1)
    scored = [outcome for outcome in found if isinstance(outcome, PromptLogprobs)]
    assert [outcome.start for outcome in scored] == [1, 9]
    entries = [entry for outcome in scored for entry in outcome.entries]
    assert [entry[0].token for entry in entries] == prompt[1:]
    for at, entry in enumerate(entries):
        assert math.isclose(entry[0].logprob, want[at, prompt[at + 1]], abs_tol=1e-4)
        assert entry[1].token == int(want[at].argmax())
    sampled = found[-1]
    assert isinstance(sampled, Sampled)
    assert math.isclose(sampled.logprobs[0].logprob, want[-1].max(), abs_tol=1e-4)
    assert len(sampled.logprobs) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_not_finite_fails_its_sequence_alone(model: tuple[Any, Path], rank: int) -> None:
    chain = Chain(inspect(model[1]), (2,))
    stage = chain.stages[rank]
    assert isinstance(stage, HuggingFaceStage)
    poisoned = 7  # token that only the first prompt holds

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, 12] = torch.nan  # its row
        return output

    layer = stage._sliced.model.model.layers[1 + 2 * rank]  # type: ignore[union-attr]
    layer.mlp.register_forward_hook(poison)
    items: list[Item] = []
    for seq, prompt in enumerate(PROMPTS):
        items.append(Admit(seq, pack_tokens(prompt), len(prompt), GREEDY))
    for seq, prompt in enumerate(PROMPTS):
        items.append(Chunk(seq, 0, len(prompt), chain.take(-(-len(prompt) // PAGE)), last=True))
    assert PROMPTS[0][12] == poisoned
    outcomes = {outcome.seq: outcome for outcome in chain.step(*items, rows=sum(map(len, PROMPTS)))}
    failed = outcomes[0]
    assert isinstance(failed, Failed)
    assert failed.error.kind == "NonFiniteError"
    assert (failed.error.rank, failed.error.step) == (rank, 0)
    assert "position 12" in failed.error.message
    for seq in (1, 2):
        assert outcomes[seq] == Sampled(seq, greedy(model[0], PROMPTS[seq], 1)[0])


def test_hidden_states_lie_in_memory_that_is_sent_from(model: tuple[Any, Path]) -> None:
    chain = Chain(inspect(model[1]), (2,))
    step = Step(0, 0, 2, (Admit(0, pack_tokens([4, 5]), 2, GREEDY), Chunk(0, 0, 2, chain.take(1), last=True)))
    first = chain.stages[0]
    hidden = first.forward(first.prepare(step), {})["hidden"]
    assert hidden.data_ptr() == chain.contexts[0].leases[0].data_ptr()
    assert tuple(hidden.shape) == (2, 32)
    hidden.fill_(0.0)  # an ordinary tensor, that a device may poison


@pytest.mark.parametrize("payload", [{}, {"hidden": torch.zeros(3, 32)}, {"hidden": torch.zeros(2, 31)}])
def test_hidden_states_that_do_not_fit_are_refused(model: tuple[Any, Path], payload: dict[str, Any]) -> None:
    chain = Chain(inspect(model[1]), (2,))
    step = Step(0, 0, 2, (Admit(0, pack_tokens([4, 5]), 2, GREEDY), Chunk(0, 0, 2, (0,), last=True)))
    last = chain.stages[1]
    with pytest.raises(ProtocolError, match="needs hidden states of shape"):
        last.forward(last.prepare(step), payload)


def test_reset_forgets_sequences_and_keeps_weights(model: tuple[Any, Path]) -> None:
    chain = Chain(inspect(model[1]))
    want = chain.generate(PROMPTS, 8)
    chain.step(Admit(9, pack_tokens([4]), 1, GREEDY), rows=0)
    for stage in chain.stages:
        stage.reset()
        assert not any(stage.integrity().values())
    chain.pages = 0
    assert chain.generate(PROMPTS, 8) == want


def test_capacity(model: tuple[Any, Path]) -> None:
    with pytest.raises(CapacityError, match="less than one page"):
        Chain(inspect(model[1], kv_cache_tokens=PAGE - 1))
    with pytest.raises(CapacityError, match="are free"):
        Chain(inspect(model[1], kv_cache_tokens=1 << 50))
    assert 0 < Chain(inspect(model[1], kv_cache_tokens=None)).capacity <= 262_144 // PAGE


def test_stats_and_teardown(model: tuple[Any, Path]) -> None:
    chain = Chain(inspect(model[1]))
    stats = chain.stages[1].stats()
    assert stats["layers"] == [2, 4]
    assert stats["kv_bytes"] == 512 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, dim, bytes
    assert stats["weight_bytes"] > 0
    for stage in chain.stages:
        stage.teardown()


def test_dummy_weights_give_the_same_tokens_however_cut(model: tuple[Any, Path]) -> None:
    info = inspect(model[1], load_format="dummy")
    assert Chain(info, ()).generate(PROMPTS, 8) == Chain(info, (1, 2)).generate(PROMPTS, 3)
