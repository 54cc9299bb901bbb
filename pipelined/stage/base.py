"""The contract of a stage and of a family of models. Knows nothing of ranks, links or schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pipelined.messages import Outcome, Step
    from pipelined.transport.topology import Topology

__all__ = ["LOGICAL_BYTES", "LoadOptions", "ModelFamily", "ModelInfo", "Payload", "Stage", "StageContext"]

Payload = dict[str, Any]
"""What flows between stages for one step: tensors, and builtins that msgspec can encode."""


LOGICAL_BYTES: Final = "__logical_bytes__"
"""Reserved key of a payload that a stage returns: what a simulated link shall charge for all of it, in bytes."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model is loaded and how its KV cache is laid out.

    Attributes:
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        load_format: "auto", or "dummy" (random weights from the configuration, seeded).
        context_length: Longest prompt plus output; None: the model's own.
        trust_remote_code: Run code that comes with the model.
        page_size: Tokens of a KV page.
        kv_cache_tokens: Capacity of the KV cache; None: what fits.
        check_finite: Look for NaN and infinity in what each stage computes.
    """

    dtype: str = "auto"
    load_format: str = "auto"
    context_length: int | None = None
    trust_remote_code: bool = False
    page_size: int = 64
    kv_cache_tokens: int | None = None
    check_finite: bool = True


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model before anything is spawned.

    Attributes:
        ref: As the user named it. path: Where its files are ("" if nowhere yet).
        family: Name of the model family that can build it.
        architecture: For messages and docs.
        layers: How many there are.
        cuts: Legal cuts: layer numbers k such that a stage may end before layer k (1 to layers - 1).
        layer_bytes: Weight bytes of each layer. head_bytes: of the embedding, and of final norm and output head.
        kv_bytes_per_token: KV bytes of one token in each layer.
        hidden_size, vocab_size: Sizes.
        context_length: Longest sequence.
        eos_token_ids: End-of-sequence tokens.
        dtype: Of the weights in memory and of the activations.
        tokenizer: Path or name that the tokenizer is loaded from; "" if the model has none.
        fingerprint: Identifies weights and configuration.
        options: As given.
        heads: Query heads of a layer; 0: unknown. kv_heads: of keys and values, 1 where they are one latent.
        attention_width: Numbers that the attention of a layer multiplies for each pair of tokens, once for the scores
            and once for the values; 0: unknown.
        windows: Of each layer the tokens that it attends to, 0: all; empty: all of all layers.
        active_bytes: Weight bytes of each layer that a token uses, where experts make them fewer; empty: all.
    """

    ref: str
    path: str
    family: str
    architecture: str
    layers: int
    cuts: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    kv_bytes_per_token: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    tokenizer: str = ""
    fingerprint: str = ""
    options: LoadOptions = LoadOptions()
    heads: int = 0
    kv_heads: int = 0
    attention_width: int = 0
    windows: tuple[int, ...] = ()
    active_bytes: tuple[int, ...] = ()


class StageContext(Protocol):
    """What a rank gives to its stage."""

    @property
    def rank(self) -> int:
        """Which rank this is; with one rank a stage also which stage."""
        ...

    @property
    def size(self) -> int:
        """Number of stages."""
        ...

    @property
    def topology(self) -> Topology:
        """Where all ranks are."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where the stage's tensors live."""
        ...

    @property
    def process_group(self) -> Any:
        """Group of this stage's ranks for collectives, None where the stage is a single rank."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new output tensor in the memory that the next link sends from, so that sending it copies nothing.

        May be called in `forward`. The tensor belongs to the step: don't keep it.
        """
        ...


class Stage:
    """One stage of a pipeline. Subclass it, override what is needed; one instance serves one rank.

    `setup`, `forward` and `teardown` run off the event loop, on the device's thread or stream, one at a time and in
    the order of steps. `prepare` and `collect` run on the loop and must be quick (well under 5 ms).
    """

    name: str = "stage"

    def setup(self, ctx: StageContext) -> int | None:
        """Load whatever is needed.

        Returns:
            How many units of capacity (KV pages) this stage could hold; None if it is not limited.
        """
        return None

    def start(self, capacity: int | None) -> None:
        """All ranks are ready and have agreed on `capacity`, the minimum. Off the loop. Allocate here."""

    def prepare(self, step: Step) -> Any:
        """Apply the step's items to host-side state (page tables, sampling state), ahead of its launch.

        Called once for every step, in order, also for steps that turn out void.

        Returns:
            The batch that `forward` and `collect` get. Must not refer to state that a later `prepare` changes.
        """
        return step

    def forward(self, batch: Any, inputs: Payload) -> Payload:
        """Compute. Called for steps with rows, unless the step is void.

        Args:
            batch: What `prepare` returned.
            inputs: What the previous stage (or, at the first, the driver) sent; read-only memory of the transport,
                valid until the outputs have been sent.

        Returns:
            What the next stage gets; at the last stage, what `collect` gets on the host.
        """
        raise NotImplementedError

    def collect(self, batch: Any, outputs: Payload) -> Sequence[Outcome]:
        """At the last stage: turn outputs, on the host and complete, into what the planner must know."""
        return ()

    def describe(self, batch: Any) -> str:
        """A few words for traces: what this batch is."""
        return ""

    def cost(self, batch: Any) -> Any:
        """What an emulated device's time model is asked for this batch; see `EmulatedDevice`."""
        return batch

    def reset(self) -> None:
        """A new epoch begins: forget all requests and cached state, keep weights. Off the loop."""

    def integrity(self) -> Mapping[str, int]:
        """Counts of what is held (pages, slots, ...), for checks when idle; all zero when nothing is owed."""
        return {}

    def stats(self) -> Mapping[str, Any]:
        """Facts worth reporting: layers, bytes, ..."""
        return {}

    def teardown(self) -> None:
        """Let go of everything. Called once if `setup` was called, also after an error."""


class ModelFamily(Protocol):
    """Knows a kind of models. Registered by entry point in the group `pipelined.models`."""

    name: str

    def claims(self, ref: str) -> bool:
        """Whether `ref` is of this family's form, by its looks."""
        ...

    def inspect(self, ref: str, options: LoadOptions) -> ModelInfo:
        """What can be known of the model without loading weights. Runs in the user's process, before spawning.

        Raises:
            ModelError: Unknown, unsupported (with the reason), or files missing or truncated.
        """
        ...

    def build(self, info: ModelInfo, layers: tuple[int, int], ctx: StageContext) -> Stage:
        """A stage for layers `[layers[0], layers[1])`. Runs in the rank; weights are loaded in the stage's `setup`.

        The first stage embeds tokens, the last one samples.
        """
        ...
