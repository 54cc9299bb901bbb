"""Every architecture of docs/models.md: a tiny random model, cut, equals the uncut one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pipelined.errors import ModelError
from pipelined.models.batching import Segment
from pipelined.models.paged_kv import KvPool, PagedCache, Ragged
from pipelined.models.slicing import Sliced, load_slice, supported
from pipelined.models.support import REFUSED

PAGE = 8
VOCAB = 96
LAYERS = 4
DECODES = 8
PROMPTS = (37, 5, 18)

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
ALTERNATE = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}


def _without(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names)


@dataclass(frozen=True)
class Architecture:
    """Name of the `...Config` and `...ForCausalLM` classes, and what the tiny configuration says besides `BASE`."""

    name: str
    more: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.name

    def make(self) -> Any:
        cls = getattr(transformers, self.config or f"{self.name}Config")
        values = {key: value for key, value in (BASE | self.more).items() if value is not None}
        return cls(**values)


ARCHITECTURES = [
    Architecture("Llama"),
    Architecture("Llama", {"tie_word_embeddings": True}, label="Llama tied"),
    Architecture(
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        label="Llama 3 rope",
    ),
    Architecture("Qwen2", {"tie_word_embeddings": True}),
    Architecture(
        "Qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8}, label="Qwen2 window"
    ),
    Architecture("Qwen3", {"tie_word_embeddings": True}),
    Architecture("Qwen3Moe", MOE),
    Architecture("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
    Architecture("DeepseekV3", MOE | MLA),
    Architecture("DeepseekV2", MOE | MLA | {"q_lora_rank": None, "topk_method": "greedy"}),
    Architecture("Gemma", {"tie_word_embeddings": True}),
    Architecture("Gemma2", ALTERNATE | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    Architecture("Gemma3", ALTERNATE | {"query_pre_attn_scalar": 16}, config="Gemma3TextConfig"),
    Architecture("GptOss", MOE | ALTERNATE),
    Architecture("Mistral", {"sliding_window": 12}),
    Architecture("Ministral", {"sliding_window": 12}),
    Architecture("Mixtral", MOE | {"sliding_window": 12}),
    Architecture("Phi3", {"sliding_window": 12}),
    Architecture("Phi", {"partial_rotary_factor": 0.5}),
    Architecture("Glm"),
    Architecture("Glm4"),
    Architecture("Glm4Moe", MOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    Architecture("Granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.3, "logits_scaling": 8.0}),
    Architecture("GraniteMoe", MOE | {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    Architecture("Olmo"),
    Architecture("Olmo2"),
    Architecture("Olmo3", {"sliding_window": 8}),
    Architecture("Olmoe", MOE),
    Architecture("Cohere", {"logit_scale": 0.25}),
    Architecture("Cohere2", {"logit_scale": 0.25, "sliding_window": 8}),
    Architecture("Starcoder2", {"sliding_window": 12}),
    Architecture("StableLm"),
    Architecture("GPTNeoX"),
    Architecture("GPT2", {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 256}),
    Architecture("GPTJ", {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    Architecture(
        "Llama4",
        MOE
        | {
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0, 1, 0],
            "floor_scale": 8,
            "interleave_moe_layer_step": 2,
        },
        config="Llama4TextConfig",
    ),
    Architecture("SmolLM3", {"no_rope_layer_interval": 2}),
    Architecture("Exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}),
    Architecture("Nemotron"),
    Architecture("Seed", config="SeedOssConfig", label="SeedOss"),
    Architecture("HunYuanDenseV1"),
    Architecture("HunYuanMoEV1", MOE | {"moe_topk": [2] * 4, "num_shared_expert": [1] * 4}),
    Architecture("Ernie4_5"),
    Architecture("Arcee"),
    Architecture("Dots1", MOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    Architecture("MiniMaxM2", MOE),
    Architecture("PhiMoE", config="PhimoeConfig", more=MOE, label="PhiMoE"),
    Architecture("Helium"),
    Architecture("Bitnet", config="BitNetConfig", label="BitNet"),
    Architecture("Apertus"),
    Architecture("Glm4MoeLite", MOE | MLA),
    Architecture("Minicpm3", MLA, config="MiniCPM3Config"),
    Architecture("Persimmon"),
    Architecture("Jais2"),
    Architecture("VaultGemma", ALTERNATE),
    Architecture("CodeGen", {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
]
CLASSES = {
    "Bitnet": "BitNetForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Minicpm3": "MiniCPM3ForCausalLM",
    "PhiMoE": "PhimoeForCausalLM",
    "Seed": "SeedOssForCausalLM",
}


def model_class(architecture: Architecture) -> Any:
    return getattr(transformers, CLASSES.get(architecture.name, f"{architecture.name}ForCausalLM"))


def uncut(architecture: Architecture, path: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = architecture.make()
    config._attn_implementation = "eager"
    model = model_class(architecture)(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases, norms and sinks that start at a constant would hide mistakes
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return model, config


def load(architecture: Architecture, config: Any, path: Path, cuts: tuple[int, ...]) -> list[Sliced]:
    slices = []
    for layers in itertools.pairwise((0, *cuts, LAYERS)):
        cache = PagedCache()
        cache.pool = KvPool(64 * PAGE)
        slices.append(load_slice(model_class(architecture), config, layers, cache, path=str(path), dtype=torch.float32))
    return slices


class Sequence:
    """A sequence that is run chunk by chunk, then token by token; its pages lie scattered, some side by side."""

    def __init__(self, number: int, tokens: list[int], pages: list[int]) -> None:
        self.number, self.tokens, self.pages = number, tokens, pages
        self.prompt = len(tokens)
        self.done = 0
        self.logits: list[torch.Tensor] = []

    def next(self, chunk: int) -> Segment:
        end = min(self.done + chunk, len(self.tokens))
        runs: list[tuple[int, int]] = []
        for at in range(0, end, PAGE):
            slot, size = self.pages[at // PAGE] * PAGE, min(PAGE, end - at)
            if runs and sum(runs[-1]) == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((slot, size))
        return Segment(self.number, self.done, tuple(self.tokens[self.done : end]), tuple(runs), sample=True)

    def took(self, logits: torch.Tensor) -> None:
        self.done += len(logits)
        self.logits.append(logits)
        if self.done == len(self.tokens) and self.done < self.prompt + DECODES:
            self.tokens.append(int(logits[-1].argmax()))


@torch.inference_mode()
def run(slices: list[Sliced], sequences: list[Sequence], chunk: int) -> None:
    while unfinished := [s for s in sequences if s.done < len(s.tokens)]:
        segments = [sequence.next(chunk) for sequence in unfinished]
        ragged = Ragged(segments)
        tokens = torch.tensor([token for segment in segments for token in segment.token_ids])
        hidden: torch.Tensor | None = None
        for part in slices:
            part.cache.begin(ragged)
            ids = tokens if part.is_first else None
            if part.is_last:
                logits, _ = part.logits(ids, hidden, ragged.positions, torch.arange(len(tokens)))
            else:
                before = hidden.clone() if hidden is not None else None
                hidden, received = part.hidden(ids, hidden, ragged.positions), hidden
                assert before is None or torch.equal(before, received), "a stage wrote into what it received"
        for sequence, some in zip(unfinished, logits.split([s.length for s in segments]), strict=True):
            sequence.took(some)


def sequences() -> list[Sequence]:
    generator = torch.Generator().manual_seed(7)
    pages = torch.randperm(32, generator=generator).tolist()
    pages = [page for pair in pages for page in (2 * pair, 2 * pair + 1)]
    made = []
    for number, length in enumerate(PROMPTS):
        count = -(-(length + DECODES) // PAGE)
        taken, pages = pages[:count], pages[count:]
        tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        made.append(Sequence(number, tokens, taken))
    return made


def compare(model: Any, done: list[Sequence]) -> None:
    for sequence in done:
        assert len(sequence.tokens) == sequence.prompt + DECODES
        got = torch.cat(sequence.logits)
        with torch.inference_mode():
            want = model(torch.tensor([sequence.tokens]), use_cache=False).logits[0]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        greedy = want[sequence.prompt - 1 : -1].argmax(-1).tolist()
        assert sequence.tokens[sequence.prompt :] == greedy


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_cut_equals_uncut(architecture: Architecture, tmp_path: Path) -> None:
    model, config = uncut(architecture, tmp_path)
    supported(config)
    done = sequences()
    run(load(architecture, config, tmp_path, (1, 3)), done, chunk=16)
    compare(model, done)


CUTS = [(), (2,), (1, 2), (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"P={len(cuts) + 1}")
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_every_cut_and_chunk_size(architecture: Architecture, cuts: tuple[int, ...], tmp_path: Path) -> None:
    model, config = uncut(architecture, tmp_path)
    slices = load(architecture, config, tmp_path, cuts)
    for chunk in (1, 7, 16, 64):
        done = sequences()
        run(slices, done, chunk)
        compare(model, done)


REFUSALS = [
    ("Phi3", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ("Llama", {"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
    ("Qwen3Next", {}, "recurrent"),
    ("Gemma3nText", {}, "per-layer embeddings"),
    ("Gemma4Text", {}, "per-layer embeddings"),
    ("Falcon", {}, "code of its own"),
    ("Bloom", {}, "code of its own"),
    ("Mpt", {}, "code of its own"),
    ("Mamba2", {}, "recurrent"),
    ("Jamba", {}, "recurrent"),
    ("Lfm2", {}, "recurrent"),
    ("DeepseekV32", {}, "indexer"),
    ("T5", {}, "encoder"),
    ("Bart", {}, "encoder"),
    ("Gemma3", {}, "multi-modal"),
    ("Llama4", {}, "multi-modal"),
    ("OPT", {}, "mask of its own"),
    ("LongcatFlash", {}, "two attentions"),
]


@pytest.mark.parametrize(("name", "settings", "reason"), REFUSALS, ids=[name for name, _, _ in REFUSALS])
def test_refused_by_name_with_the_reason(name: str, settings: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, f"{name}Config")()
    for key, value in settings.items():
        setattr(config, key, value)
    with pytest.raises(ModelError, match=reason):
        supported(config)


def test_docs_list_every_architecture_tested() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    names = {model_class(architecture).__name__ for architecture in ARCHITECTURES}
    assert not sorted(name for name in names if f"`{name}`" not in text)
    assert not sorted(name for name in REFUSED if f"`{name}`" not in text)
