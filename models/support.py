"""Which transformers architectures can be sliced, and why others cannot. Reads configurations only; loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipelined.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["REFUSED", "supported", "text_config"]

_NO_INTERFACE = "computes attention in code of its own, so that its cache cannot be paged"
_RECURRENT = "keeps recurrent (linear attention, convolution or state space) state per sequence besides keys and values"
_INDEXER = "selects keys with a sparse indexer that has a cache of its own"
_PER_LAYER = "feeds per-layer embeddings or shared keys and values into its layers, which would have to cross the cut"

REFUSED: Final[Mapping[str, str]] = {
    "bamba": _RECURRENT,
    "bloom": _NO_INTERFACE,
    "deepseek_v32": _INDEXER,
    "falcon": _NO_INTERFACE,
    "falcon_h1": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "gemma3n": _PER_LAYER,
    "gemma3n_text": _PER_LAYER,
    "gemma4": _PER_LAYER,
    "gemma4_text": _PER_LAYER,
    "glm_moe_dsa": _INDEXER,
    "granitemoehybrid": _RECURRENT,
    "jamba": _RECURRENT,
    "kimi_linear": _RECURRENT,
    "lfm2": _RECURRENT,
    "lfm2_moe": _RECURRENT,
    "longcat_flash": "has two attentions in each of its layers",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "minimax": _RECURRENT,
    "mpt": _NO_INTERFACE,
    "nemotron_h": _RECURRENT,
    "opt": "numbers positions by a mask of its own",
    "qwen3_5": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "rwkv": _RECURRENT,
    "xlstm": _RECURRENT,
    "zamba": _RECURRENT,
    "zamba2": _RECURRENT,
}
"""Refused by model type; others are refused by what their configuration says (see `supported`)."""

_PLAIN_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_VARYING_ROPE: Final = frozenset({"dynamic", "longrope"})


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def supported(config: Any) -> None:
    """Whether a model of this configuration can be sliced.

    Raises:
        ModelError: No; says why.
    """
    for reason in _reasons(config):
        raise ModelError(f"{config.model_type} models are not supported: the architecture {reason}")


def _reasons(config: Any) -> Iterator[str]:
    text = text_config(config)
    for kind in (config.model_type, text.model_type):
        if kind in REFUSED:
            yield REFUSED[kind]
    if getattr(config, "is_encoder_decoder", False):
        yield "has an encoder; only decoders are"
    if text is not config:
        yield "is a multi-modal wrapper; only its text model alone would be"
    other = sorted({*(getattr(text, "layer_types", None) or ())} - _PLAIN_LAYERS)
    if other:
        yield f"has layers of type {', '.join(map(repr, other))}, which keep state besides keys and values"
    if getattr(text, "hidden_size_per_layer_input", 0) or getattr(text, "num_kv_shared_layers", 0):
        yield _PER_LAYER
    if getattr(text, "index_topk", None):
        yield _INDEXER
    if getattr(text, "alibi", False):
        yield "adds a linear bias (ALiBi) to its attention scores"
    varying = sorted(set(_rope_types(text)) & _VARYING_ROPE)
    if varying:
        yield f"uses {varying[0]} position embeddings, which change with the longest sequence of a batch"


def _rope_types(config: Any) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type") or part.get("type")
        if isinstance(kind, str):
            yield kind
