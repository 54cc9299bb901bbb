from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelined.messages import Admit, Chunk, Decode, Failed, Outcome, Sampled, SamplingParams, Step, pack_tokens
from pipelined.models import gguf
from pipelined.models.hf import HuggingFaceFamily
from pipelined.stage import LoadOptions, ModelInfo, Stage
from pipelined.transport.topology import Topology

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "dtype": "float32",
}
PAGE = 16


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
        return torch.empty(tuple(shape), dtype=dtype)


class Chain:
    """The stages of a model, fed by hand."""

    def __init__(self, info: ModelInfo, cuts: tuple[int, ...] = ()) -> None:
        bounds = (0, *cuts, info.layers)
        self.stages: list[Stage] = []
        for rank, layers in enumerate(pairwise(bounds)):
            ctx = Context(rank, len(bounds) - 1)
            stage = HuggingFaceFamily().build(info, layers, ctx)
            stage.setup(ctx)
            stage.start(64)
            self.stages.append(stage)
        self.number = 0

    def step(self, *items: Any) -> list[Outcome]:
        rows = sum(i.tokens if isinstance(i, Chunk) else isinstance(i, Decode) for i in items)
        step = Step(0, self.number, rows, items)
        self.number += 1
        batches = [stage.prepare(step) for stage in self.stages]
        payload: dict[str, Any] = {}
        for stage, batch in zip(self.stages, batches, strict=True):
            payload = stage.forward(batch, payload)
        return list(self.stages[-1].collect(batches[-1], payload))

    def generate(self, prompt: list[int], n: int, sampling: SamplingParams, chunk: int = 16) -> list[int]:
        seq, pages = self.number, iter(range(64))
        held, tokens, found = 0, list(prompt), []
        items: list[Any] = [Admit(seq, pack_tokens(prompt), len(prompt), sampling)]
        for start in range(0, len(prompt), chunk):
            count = min(chunk, len(prompt) - start)
            new = tuple(next(pages) for _ in range(-(-(start + count) // PAGE) - held))
            held += len(new)
            items.append(Chunk(seq, start, count, new, last=start + count == len(prompt)))
            found, items = self.step(*items), []
        while True:
            (outcome,) = found
            assert isinstance(outcome, Sampled), outcome
            tokens.append(outcome.token)
            if len(tokens) == len(prompt) + n:
                return tokens[len(prompt) :]
            new = (next(pages),) if len(tokens) > held * PAGE else ()
            held += len(new)
            found = self.step(Decode(seq, len(tokens) - 1, tokens[-1], new))


def dummy(tmp_path: Path, **config: Any) -> ModelInfo:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    return HuggingFaceFamily().inspect(str(tmp_path), LoadOptions(load_format="dummy", page_size=PAGE))


def test_claims_everything_that_is_no_uri() -> None:
    family = HuggingFaceFamily()
    assert all(family.claims(ref) for ref in ("smollm2", "owner/name", "/some/where", "x.gguf"))
    assert not any(family.claims(ref) for ref in ("toy://?layers=2", "toy:", "s3://x", ""))


def test_every_sampling_setting_gives_the_same_in_any_cut_and_chunking(tmp_path: Path) -> None:
    info = dummy(tmp_path)
    prompt = [(7 * index) % 97 for index in range(40)]
    settings = (
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.3, seed=11),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=12, repetition_penalty=1.2, presence_penalty=0.3),
    )
    whole, halves = Chain(info), Chain(info, (1, 2))
    answers = []
    for sampling in settings:
        answers.append(whole.generate(prompt, 8, sampling, chunk=40))
        assert halves.generate(prompt, 8, sampling, chunk=16) == answers[-1]
        assert whole.generate(prompt, 8, sampling, chunk=7) == answers[-1]
    assert len({tuple(answer) for answer in answers}) == 3


def test_a_saved_checkpoint_is_loaded_by_stages(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    reference = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "architectures"})).eval()
    reference.save_pretrained(str(tmp_path))
    info = HuggingFaceFamily().inspect(str(tmp_path), LoadOptions(page_size=PAGE))
    prompt = [(5 * index) % 97 for index in range(20)]
    got = Chain(info, (1,)).generate(prompt, 6, SamplingParams(temperature=0))
    tokens = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert got == tokens[20:]


def test_sizes_said_before_loading_are_those_in_memory(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
    kinds: list[dict[str, Any]] = [
        {},
        {"tie_word_embeddings": True},
        {"model_type": "gemma2", "head_dim": 16, "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "deepseek_v3", "first_k_dense_replace": 9, "num_key_value_heads": 4, **latent},
        {"model_type": "deepseek_v2", "first_k_dense_replace": 9, "num_key_value_heads": 4, **latent},
    ]
    for config in kinds:
        info = dummy(tmp_path, **config)
        chain = Chain(info, (1,))
        chain.generate([1, 2, 3], 1, SamplingParams(temperature=0))
        weights = [stage.stats()["weight_bytes"] for stage in chain.stages]
        layers = info.layer_bytes
        expected = [layers[0] + info.embedding_bytes, sum(layers[1:]) + info.head_bytes]
        assert weights == pytest.approx(expected, abs=4 * info.hidden_size), config  # every stage has the final norm
        pools = [stage._cache.pool for stage in chain.stages]  # type: ignore[attr-defined]
        kv = [pool.size_bytes for pool in pools]
        per_token = info.kv_bytes_per_token
        assert kv == [per_token[0] * pools[0].slots, sum(per_token[1:]) * pools[1].slots], config


def test_a_sequence_with_infinite_weights_fails_alone_and_names_the_rank(tmp_path: Path) -> None:
    chain = Chain(dummy(tmp_path), (1, 2))
    embedding = chain.stages[0]._sliced.model.get_input_embeddings()  # type: ignore[attr-defined]
    with torch.no_grad():
        embedding.weight[13] = float("nan")
    sampling = SamplingParams(temperature=0)
    outcomes = chain.step(
        Admit(0, pack_tokens([1, 13]), 2, sampling),
        Admit(1, pack_tokens([1, 12]), 2, sampling),
        Chunk(0, 0, 2, (0,), last=True),
        Chunk(1, 0, 2, (1,), last=True),
    )
    by_seq = {outcome.seq: outcome for outcome in outcomes}
    failed = by_seq[0]
    assert isinstance(failed, Failed)
    assert (failed.error.kind, failed.error.rank) == ("NonFiniteError", 0)
    assert isinstance(by_seq[1], Sampled)


def answer(info: ModelInfo, cuts: tuple[int, ...], question: str, n: int = 12) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(info.tokenizer)
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = Chain(info, cuts).generate(prompt, n, SamplingParams(temperature=0))
    end = next((index for index, token in enumerate(tokens) if token in info.eos_token_ids), n)
    return str(tokenizer.decode(tokens[:end]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_is_converted_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("PIPELINED_CACHE", str(tmp_path))
    path = gguf.smollm2_gguf()
    link = tmp_path / "copy.gguf"
    shutil.copy(path, link)
    info = HuggingFaceFamily().inspect(str(link), LoadOptions(page_size=PAGE))
    began = time.monotonic()
    same = HuggingFaceFamily().inspect(str(link), LoadOptions(page_size=PAGE))
    assert time.monotonic() - began < 5
    assert (same, info.layers, info.context_length, info.eos_token_ids) == (info, 30, 8192, (2,))
    reply = answer(info, (14,), "What is the capital of France?")
    assert "Paris" in reply
