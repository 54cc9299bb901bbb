"""What a slice loads, and what it says if it cannot."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from pipelined.errors import ModelError
from pipelined.models.batching import Segment
from pipelined.models.paged_kv import KvPool, PagedCache, Ragged
from pipelined.models.slicing import Sliced, causal_class, legal_cuts, load_slice

LAYERS = 3


def config(*, tied: bool = False) -> Any:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


def load(
    layers: tuple[int, int], path: Path | None, *, tied: bool = False, dtype: torch.dtype = torch.float32
) -> Sliced:
    cache = PagedCache()
    cache.pool = KvPool(64)
    where = None if path is None else str(path)
    return load_slice(LlamaForCausalLM, config(tied=tied), layers, cache, path=where, dtype=dtype)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    return tmp_path


@torch.inference_mode()
def forward(slices: list[Sliced], tokens: list[int]) -> torch.Tensor:
    ragged = Ragged([Segment(0, 0, tuple(tokens), ((8, len(tokens)),), sample=True)])
    hidden: torch.Tensor | None = None
    for part in slices:
        part.cache.begin(ragged)
        ids = torch.tensor(tokens) if part.is_first else None
        if part.is_last:
            return part.logits(ids, hidden, ragged.positions, torch.arange(len(tokens)))[0]
        hidden = part.hidden(ids, hidden, ragged.positions)
    raise AssertionError("no last slice")


def test_loads_only_its_own_weights(saved: Path) -> None:
    whole, parts = load((0, 3), saved), [load(layers, saved) for layers in ((0, 1), (1, 2), (2, 3))]
    final_norm = 2 * 32 * 4  # the two slices before the last keep a norm that they do not need
    assert sum(part.weight_bytes for part in parts) == whole.weight_bytes + final_norm
    names = [set(part.model.state_dict()) for part in parts]
    assert {name for name in names[1] if "layers" in name} == {name for name in names[1] if "layers.1." in name}
    assert "lm_head.weight" not in names[0] | names[1]
    assert "model.embed_tokens.weight" not in names[1] | names[2]


def test_a_tied_head_is_loaded_once_on_each_end(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(tied=True)).eval()
    model.save_pretrained(tmp_path)
    first, last = load((0, 1), tmp_path, tied=True), load((1, 3), tmp_path, tied=True)
    assert last.model.model.embed_tokens.weight.numel() == 0  # only the head's own copy is kept
    assert first.weight_bytes + last.weight_bytes == load((0, 3), tmp_path, tied=True).weight_bytes + (64 + 1) * 32 * 4
    with torch.inference_mode():
        want = model(torch.tensor([[5, 9, 2]])).logits[0]
    torch.testing.assert_close(forward([first, last], [5, 9, 2]), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_dummy_weights_are_the_same_for_every_cut(tied: bool) -> None:
    whole = forward([load((0, 3), None, tied=tied)], [5, 9, 2])
    cut = forward([load(layers, None, tied=tied) for layers in ((0, 1), (1, 3))], [5, 9, 2])
    torch.testing.assert_close(cut, whole, atol=0, rtol=0)
    assert whole.std() > 0


def test_dtype_is_that_of_weights_and_activations(saved: Path) -> None:
    part = load((0, 1), saved, dtype=torch.bfloat16)
    part.cache.begin(Ragged([Segment(0, 0, (1, 2), ((0, 2),), sample=False)]))
    with torch.inference_mode():
        hidden = part.hidden(torch.tensor([1, 2]), None, torch.arange(2))
    assert hidden.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in part.model.parameters()} == {torch.bfloat16}


def test_slices_load_at_the_same_time_in_one_process(saved: Path) -> None:
    jobs = [((0, 1), torch.bfloat16), ((1, 2), torch.float32), ((2, 3), torch.float16), ((0, 3), torch.float32)] * 3
    with ThreadPoolExecutor(len(jobs)) as pool:
        parts = list(pool.map(lambda job: load(job[0], saved, dtype=job[1]), jobs))
    for part, (_, dtype) in zip(parts, jobs, strict=True):
        assert {parameter.dtype for parameter in part.model.parameters()} == {dtype}
    assert torch.get_default_dtype() == torch.float32


def test_missing_weights_are_named(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    load((0, 1), saved)  # not this slice's business
    with pytest.raises(ModelError, match=r"missing.*layers\.1\.mlp\.up_proj\.weight"):
        load((1, 2), saved)


def test_weights_of_a_wrong_shape_are_refused(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(47, 32)
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj"):
        load((1, 2), saved)


def test_truncated_weights_are_refused(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load"):
        load((0, 3), saved)


def test_every_boundary_is_a_legal_cut() -> None:
    assert legal_cuts(config()) == (1, 2)


def test_class_of_a_configuration() -> None:
    assert causal_class(config(), "") is LlamaForCausalLM
    assert causal_class(GPT2Config(), "").__name__ == "GPT2LMHeadModel"


def test_repr_is_short(saved: Path) -> None:
    assert repr(load((1, 3), saved)) == "<Sliced LlamaForCausalLM layers 1..3 of 3>"
