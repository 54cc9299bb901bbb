"""The family of models that transformers knows: local directories, GGUF files, hub ids and aliases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .loading import inspect_model

if TYPE_CHECKING:
    from pipelined.stage import LoadOptions, ModelInfo, Stage, StageContext

__all__ = ["HuggingFaceFamily"]


class HuggingFaceFamily:
    """Any decoder-only model of transformers that can be sliced; see `ModelFamily`."""

    name = "hf"

    def claims(self, ref: str) -> bool:
        """Whatever is not another family's URI."""
        return bool(ref) and "://" not in ref and not ref.startswith("toy:")

    def inspect(self, ref: str, options: LoadOptions) -> ModelInfo:
        """See `inspect_model`. Loads no weights; may download or convert them first.

        Raises:
            ModelError: Unknown, unsupported, or files are missing or damaged.
        """
        return inspect_model(ref, options, self.name)

    def build(self, info: ModelInfo, layers: tuple[int, int], ctx: StageContext) -> Stage:
        """A stage for these layers; weights are loaded in its `setup`."""
        from .hf_stage import HuggingFaceStage

        return HuggingFaceStage(info, layers, ctx)
