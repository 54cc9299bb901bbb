"""Cuts a transformers model at layer boundaries, at run time, without code for any architecture.

The model's own class is subclassed, keeps its name and module, and is cut when it is made: layers outside the slice let
hidden states through, the last of them before the slice brings in what was received, the first after it keeps what will
be sent. The list of layers keeps its length, so that layer numbers, layer types and position embeddings stay right, and
`from_pretrained` does the rest: it loads the weights that are left, fuses experts and ties embeddings.
"""

from __future__ import annotations

import inspect
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from pipelined.errors import ModelError

from .attention import CACHE_ATTRIBUTE, NAME, register
from .packed import pack_linears
from .support import supported, text_config

if TYPE_CHECKING:
    from .paged_kv import PagedCache

__all__ = ["Sliced", "causal_class", "legal_cuts", "load_slice", "supported"]

_LOADING = threading.Lock()
"""While it loads, transformers changes the process's default dtype and more; ranks may be threads of one process."""


@dataclass
class _Port:
    """Where a slice's hidden states come in and go out; shared by its stub layers. [1, rows, hidden] each."""

    received: torch.Tensor | None = None
    captured: torch.Tensor | None = None
    normed: torch.Tensor | None = None


class _Through(nn.Module):
    """Stands for a layer of another stage."""

    def __init__(self, original: nn.Module, port: _Port, role: str) -> None:
        super().__init__()
        for name, value in vars(original).items():  # trunks ask layers for their type
            if not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)
        self._port = port
        self._role = role

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The same, or what was received; keeps it where the slice ends."""
        if self._role == "inject":
            assert self._port.received is not None
            return self._port.received
        if self._role == "capture":
            self._port.captured = hidden_states
        return hidden_states


class _NoEmbedding(nn.Module):
    """Stands for the embedding on later stages: gives something of the right shape and type, which is not used."""

    def __init__(self, port: _Port) -> None:
        super().__init__()
        self._port = port

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What was received."""
        assert self._port.received is not None
        return self._port.received

    @property
    def weight(self) -> torch.Tensor:
        """For trunks that ask where the embedding lives."""
        return torch.empty(0)


class _NoHead(nn.Module):
    """Stands for the output head on earlier stages; never called."""


class Sliced:
    """Layers [first, end) of a model, loaded. Use `load_slice`.

    Attributes:
        model: The cut model, in evaluation mode.
        cache: Its paged cache.
        weight_bytes: Bytes of its weights as they were loaded; tied ones count once.
    """

    def __init__(self, model: Any, layers: tuple[int, int], port: _Port, cache: PagedCache) -> None:
        self.model = model
        self.layers = layers
        self.cache = cache
        self._port = port
        self._trunk, modules = _anatomy(model)
        self._count = len(modules)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        if self.is_last:
            self._trunk.register_forward_hook(self._keep_normed)
        for layer in modules[layers[0] : layers[1]]:
            for module in layer.modules():
                setattr(module, CACHE_ATTRIBUTE, cache)
        tied = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
        self.weight_bytes = sum(tied.values())

    def __repr__(self) -> str:
        return f"<Sliced {type(self.model).__name__} layers {self.layers[0]}..{self.layers[1]} of {self._count}>"

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.layers[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output head."""
        return self.layers[1] == self._count

    def hidden(
        self, token_ids: torch.Tensor | None, received: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run a slice that is not the last on the batch that the cache has begun.

        Args:
            token_ids: [rows] int64, at the first slice.
            received: [rows, hidden], at the others; only read.
            positions: [rows] int64.

        Returns:
            [rows, hidden] after its last layer.
        """
        self._trunk(**self._arguments(token_ids, received, positions))
        captured = self._port.captured
        self._forget()
        assert captured is not None
        return captured[0]

    def logits(
        self,
        token_ids: torch.Tensor | None,
        received: torch.Tensor | None,
        positions: torch.Tensor,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the last slice.

        Args:
            token_ids: As for `hidden`.
            received: As for `hidden`.
            positions: As for `hidden`.
            rows: [n] int64, the rows whose logits are wanted.

        Returns:
            Logits [n, vocabulary], and the normalised hidden states [rows, hidden].
        """
        arguments = self._arguments(token_ids, received, positions)
        if self._keeps_rows:
            logits = self.model(**arguments, logits_to_keep=rows).logits[0]
        else:
            logits = self.model(**arguments).logits[0].index_select(0, rows)
        normed = self._port.normed
        self._forget()
        assert normed is not None
        return logits, normed[0]

    def _arguments(
        self, token_ids: torch.Tensor | None, received: torch.Tensor | None, positions: torch.Tensor
    ) -> dict[str, Any]:
        if token_ids is None:
            assert received is not None
            self._port.received = received.unsqueeze(0)
            token_ids = positions  # not looked at, as the embedding is a stub
        return {
            "input_ids": token_ids.unsqueeze(0),
            "position_ids": positions.unsqueeze(0),
            "cache": self.cache,
            "use_cache": True,
        }

    def _keep_normed(self, module: nn.Module, args: Any, output: Any) -> None:
        self._port.normed = output.last_hidden_state

    def _forget(self) -> None:
        self._port.received = self._port.captured = self._port.normed = None
        wanted, seen = self.layers[1] - self.layers[0], self.cache.updates
        if seen != wanted:
            raise ModelError(
                f"{type(self.model).__name__} used its cache {seen} times for {wanted} layers: this architecture "
                "shares or skips key-value state and cannot be sliced"
            )


def legal_cuts(config: Any) -> tuple[int, ...]:
    """Layer numbers before which a stage may end. Every boundary, as models that share state are refused."""
    return tuple(range(1, text_config(config).num_hidden_layers))


def load_slice(
    model_class: type[Any],
    config: Any,
    layers: tuple[int, int],
    cache: PagedCache,
    *,
    path: str | None,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> Sliced:
    """Make layers [layers[0], layers[1]) of a model and load their weights.

    Args:
        model_class: The `...ForCausalLM` class.
        config: Its configuration.
        layers: The slice. The first one embeds, the last one has the output head.
        cache: The stage's paged cache.
        path: Directory with the weights; None: random ones, the same for every way to cut.
        dtype: Of weights and activations.
        trust_remote_code: As for transformers.

    Raises:
        ModelError: Unsupported, or weights are missing.
    """
    supported(config)
    register()
    port = _Port()
    cut = _subclass(model_class, layers, port)
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": NAME,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # reported below, by name
    }
    if path is not None:
        options |= {"local_files_only": True, "use_safetensors": True, "trust_remote_code": trust_remote_code}
    try:
        with _LOADING:
            if path is None:
                options["state_dict"] = _dummy_weights(cut, config, dtype)
            model, loaded = _without_bars(cut, path, options)
    except ModelError:
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelError(f"cannot load {model_class.__name__} from {path or 'random weights'}: {error}") from error
    wrong = sorted(loaded["missing_keys"]) + sorted(str(key) for key in loaded["mismatched_keys"])
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise ModelError(f"{path}: weights are missing or of a wrong shape: {shown}")
    model.requires_grad_(False)
    sliced = Sliced(model, layers, port, cache)
    if layers[0] > 0 and model.get_output_embeddings() is not None:
        # A tied head needed the embedding for loading; from here on it has the weight alone.
        model.set_input_embeddings(_NoEmbedding(port))
    pack_linears(model)
    return sliced


def _without_bars(cut: type[Any], path: str | None, options: dict[str, Any]) -> Any:
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return cut.from_pretrained(path, **options)
    finally:
        if bars:
            logging.enable_progress_bar()


def _subclass(model_class: type[Any], layers: tuple[int, int], port: _Port) -> type[Any]:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        count = text_config(config).num_hidden_layers
        if layers[1] < count:  # no output head here to tie to
            config.tie_word_embeddings = False
        model_class.__init__(self, config, *args, **kwargs)
        _cut(self, layers, port)

    body = {
        "__init__": __init__,
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
        "_keys_to_ignore_on_load_unexpected": [".*"],  # those of the other stages
    }
    return type(model_class.__name__, (model_class,), body)


def _cut(model: Any, layers: tuple[int, int], port: _Port) -> None:
    first, end = layers
    _, modules = _anatomy(model)
    for index in [*range(first), *range(end, len(modules))]:
        role = "inject" if index == first - 1 else "capture" if index == end else "through"
        modules[index] = _Through(modules[index], port, role)
    if end < len(modules):
        model.set_output_embeddings(_NoHead())
    if first > 0:
        if end == len(modules) and getattr(model.config, "tie_word_embeddings", False):
            # The head is the embedding: its weight stays, its work is not done here.
            embedding = model.get_input_embeddings()
            embedding.forward = _NoEmbedding(port).forward
        else:
            model.set_input_embeddings(_NoEmbedding(port))


def _anatomy(model: Any) -> tuple[Any, nn.ModuleList]:
    """The part of the model below its output head, and the list of layers in it.

    Raises:
        ModelError: There is not exactly one list of as many modules as there are layers.
    """
    count = text_config(model.config).num_hidden_layers
    found = [
        (trunk, part)
        for trunk in model.children()
        for part in trunk.modules()
        if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if len(found) != 1:
        name = type(model).__name__
        raise ModelError(f"{name} has {len(found)} lists of {count} layers, expected one: it cannot be sliced")
    return found[0]


def _dummy_weights(cut: type[Any], config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights for the slice, each from a seed of its own name, so that every cut gets the same."""
    with torch.device("meta"):
        model = cut(_copy_of(config))
    # A tied head takes the embedding's weight, whichever of the two a stage uses.
    names = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return {name: _dummy(name, names[name], dtype) for name in names.keys() - model.all_tied_weights_keys.keys()}


def _copy_of(config: Any) -> Any:
    copied = type(config).from_dict(config.to_dict())
    copied._attn_implementation = NAME
    return copied


def _dummy(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) == 1 and "norm" in name:
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape).normal_(0.0, 0.02, generator=generator).to(dtype)


def causal_class(config: Any, path: str, *, trust_remote_code: bool = False) -> type[Any]:
    """The `...ForCausalLM` class of a configuration.

    Raises:
        ModelError: transformers has none for it, and remote code is absent or not trusted.
    """
    remote = getattr(config, "auto_map", {}).get("AutoModelForCausalLM") if hasattr(config, "auto_map") else None
    if remote and trust_remote_code:
        found: type[Any] = get_class_from_dynamic_module(remote, path)
        return found
    if type(config) not in AutoModelForCausalLM._model_mapping:
        hint = "; its code comes with the model: pass --trust-remote-code to run it" if remote else ""
        raise ModelError(f"{config.model_type} is not a causal language model that transformers knows{hint}")
    found = AutoModelForCausalLM._model_mapping[type(config)]
    return found
