"""What can be known of a Hugging Face model from its configuration and the headers of its weight files."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pipelined.errors import ConfigError, ModelError
from pipelined.stage import ModelInfo

from .checkpoint import read_checkpoint
from .locate import locate
from .shapes import active_elements, shapes
from .support import supported, text_config

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pipelined.stage import LoadOptions

__all__ = ["inspect_model", "load_config"]

DTYPES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of weights and activations, with their sizes in bytes."""

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_EMBEDDING = re.compile(r"embed|wte|wpe|embd")
_NUMBER = re.compile(r"\.(\d+)\.")


def load_config(info: ModelInfo) -> Any:
    """The transformers configuration of a model that was inspected.

    Raises:
        ModelError: It cannot be read, or is of a kind that transformers does not know.
    """
    return _read_config(info.path, info.options)


def inspect_model(ref: str, options: LoadOptions, family: str) -> ModelInfo:
    """See `ModelFamily.inspect`.

    Raises:
        ConfigError: An option has an impossible value.
        ModelError: Unknown, unsupported, or files are missing or damaged.
    """
    _check_options(options)
    path = locate(ref, options)
    config = _read_config(str(path), options)
    text = text_config(config)
    architecture = _architecture(config, options)
    supported(config)
    _refuse_quantised(config)
    layers = text.num_hidden_layers
    weights = _dummy_weights(config, path) if options.load_format == "dummy" else _stored_weights(path)
    dtype = _dtype(options, config, weights)
    _check_layers(path, weights, layers)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    sizes = _Sizes.of(weights.elements, layers, DTYPES[dtype], tied=tied)
    active = _Sizes.of(dict(active_elements(weights.elements, text)), layers, DTYPES[dtype], tied=tied)
    shape = shapes(text, layers)
    return ModelInfo(
        ref=ref,
        path=str(path),
        family=family,
        architecture=architecture,
        layers=layers,
        cuts=tuple(range(1, layers)),  # models that share state between layers are refused by `supported`
        layer_bytes=sizes.layers,
        embedding_bytes=sizes.embedding,
        head_bytes=sizes.head,
        kv_bytes_per_token=_kv_bytes_per_token(text, layers, DTYPES[dtype]),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        context_length=_context_length(ref, text, options),
        eos_token_ids=_eos_token_ids(path, text),
        dtype=dtype,
        tokenizer=str(path) if any((path / name).is_file() for name in _TOKENIZER_FILES) else "",
        fingerprint=_fingerprint(config, weights, dtype),
        options=options,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        attention_width=shape.attention_width,
        windows=shape.windows,
        active_bytes=active.layers if active.layers != sizes.layers else (),
    )


@dataclass(frozen=True)
class _Weights:
    """Names and numbers of elements; `dtype` of most of them; what tells them from others."""

    elements: dict[str, int]
    dtype: str | None
    fingerprint: str


@dataclass(frozen=True)
class _Sizes:
    """Weight bytes in memory."""

    layers: tuple[int, ...]
    embedding: int
    head: int

    @classmethod
    def of(cls, elements: dict[str, int], layers: int, element_bytes: int, *, tied: bool) -> _Sizes:
        """Sort tensors by name.

        Layers beyond the last one (drafts for multi-token prediction) are not loaded and don't count. A tied head is
        counted, as the last stage holds a copy of the embedding.
        """
        each, embedding, head = [0] * layers, 0, 0
        for name, count in elements.items():
            layer = _layer_of(name)
            if layer is not None:
                if layer < layers:
                    each[layer] += count
            elif _EMBEDDING.search(name) and "head" not in name and "embed_out" not in name:
                embedding += count
            elif tied and "head" in name:
                continue
            else:
                head += count
        head += embedding if tied else 0
        return cls(tuple(count * element_bytes for count in each), embedding * element_bytes, head * element_bytes)


def _layer_of(name: str) -> int | None:
    """The first number in a tensor's name."""
    number = _NUMBER.search(name)
    return int(number[1]) if number else None


def _check_layers(path: Path, weights: _Weights, layers: int) -> None:
    found = {_layer_of(name) for name in weights.elements}
    without = [layer for layer in range(layers) if layer not in found]
    if without:
        raise ModelError(
            f"{path}: the configuration has {layers} layers, but there are no weights of layer {without[0]}"
        )


def _check_options(options: LoadOptions) -> None:
    rules = {
        "dtype": (options.dtype == "auto" or options.dtype in DTYPES, f"auto, {', '.join(DTYPES)}"),
        "load_format": (options.load_format in ("auto", "dummy"), "auto or dummy"),
        "context_length": (options.context_length is None or options.context_length >= 1, "1 or more"),
        "page_size": (options.page_size >= 1, "1 or more"),
        "kv_cache_tokens": (options.kv_cache_tokens is None or options.kv_cache_tokens >= 1, "1 or more"),
    }
    for name, (fits, expected) in rules.items():
        if not fits:
            raise ConfigError(f"{name}={getattr(options, name)!r}: expected {expected}")


def _read_config(path: str, options: LoadOptions) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ModelError(f"the configuration of {path} cannot be read: {reason}") from error


def _architecture(config: Any, options: LoadOptions) -> str:
    """Name of the `...ForCausalLM` class, without importing it."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if remote and options.trust_remote_code:
        return str(remote).rsplit(".", 1)[-1]
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if known is None:
        hint = "; its code comes with the model: pass --trust-remote-code to run it" if remote else ""
        raise ModelError(f"{config.model_type} is not a causal language model that transformers knows{hint}")
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ModelError(f"{known} is an encoder by training; only decoders are supported")
    return str(known)


def _refuse_quantised(config: Any) -> None:
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method", "an unknown method") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"the weights are quantised ({method}), which is not supported; use a checkpoint in float32, bfloat16 or "
            "float16, or a .gguf file"
        )


def _stored_weights(path: Path) -> _Weights:
    checkpoint = read_checkpoint(path)
    elements = {name: entry.elements for name, entry in checkpoint.tensors.items()}
    return _Weights(elements, checkpoint.dtype, checkpoint.fingerprint)


def _dummy_weights(config: Any, path: Path) -> _Weights:
    """What the model would hold, found by making it without memory."""
    import torch

    from .slicing import causal_class

    model_class = causal_class(config, str(path), trust_remote_code=True)
    with torch.device("meta"):
        model = model_class(type(config).from_dict(config.to_dict()))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    elements = {name: tensor.numel() for name, tensor in model.state_dict().items() if name not in tied}
    return _Weights(elements, None, "dummy")


def _dtype(options: LoadOptions, config: Any, weights: _Weights) -> str:
    if options.dtype != "auto":
        return options.dtype
    named = getattr(config, "dtype", None)
    found = str(named).removeprefix("torch.") if named is not None else weights.dtype or "float32"
    if found not in DTYPES:
        raise ModelError(f"the checkpoint is of type {found}, which is not supported: choose one with --dtype")
    return found


def _kv_bytes_per_token(text: Any, layers: int, element_bytes: int) -> tuple[int, ...]:
    latent = getattr(text, "kv_lora_rank", None)
    if latent:  # multi-head latent attention keeps the latent and the rotary part of the key
        return ((latent + text.qk_rope_head_dim) * element_bytes,) * layers
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    each = groups if isinstance(groups, list | tuple) else [groups] * layers
    return tuple(2 * count * width * element_bytes for count in each)


def _context_length(ref: str, text: Any, options: LoadOptions) -> int:
    found = [getattr(text, name, None) for name in _LENGTHS]
    longest = next((length for length in found if isinstance(length, int) and length > 0), None)
    asked = options.context_length
    if longest is None and asked is None:
        raise ModelError(f"the configuration of {ref} names no context length: give one with --context-length")
    if longest is not None and asked is not None and asked > longest:
        raise ModelError(f"context_length={asked} is more than the {longest} tokens that {ref} was made for")
    return asked if asked is not None else int(longest or 0)


def _eos_token_ids(path: Path, text: Any) -> tuple[int, ...]:
    """Those for generating, if the model names any; otherwise the configuration's."""
    generation = path / "generation_config.json"
    named: Any = None
    if generation.is_file():
        try:
            named = json.loads(generation.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{generation} is damaged: {error}") from error
    if named is None:
        named = getattr(text, "eos_token_id", None)
    ids: Iterable[Any] = named if isinstance(named, list | tuple) else [named]
    return tuple(dict.fromkeys(token for token in ids if isinstance(token, int)))


def _fingerprint(config: Any, weights: _Weights, dtype: str) -> str:
    settings = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    settings.pop("transformers_version", None)
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(f"{text}\0{weights.fingerprint}\0{dtype}".encode()).hexdigest()[:32]
