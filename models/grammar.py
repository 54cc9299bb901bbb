"""Keeps the output of a sequence to its grammar: which tokens may come next. Knows nothing of logits.

A matcher is a function of the tokens generated so far: it is made when first needed and follows what it has not seen.
So a sequence that is computed again, here or on another rank, goes on as if nothing had happened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipelined.errors import InvalidRequestError
from pipelined.stage import grammar_of, guidance

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipelined.messages import SamplingParams
    from pipelined.stage import ModelInfo

__all__ = ["Constraint", "Constraints"]


class Constraint:
    """Of one sequence.

    Attributes:
        error: Why it cannot be followed any further; "" while it can.
    """

    def __init__(self, params: SamplingParams, owner: Constraints) -> None:
        self.error = ""
        self._params = params
        self._owner = owner
        self._matcher: Any = None
        self._seen = 0

    def allowed(self, generated: Sequence[int]) -> torch.Tensor | None:
        """Which tokens may follow these: bool [vocab]; None once `error` says why it is not known."""
        if self._matcher is None and not self.error:
            try:
                self._matcher = self._owner.matcher(self._params)
            except InvalidRequestError as error:
                self.error = str(error)
        if self.error:
            return None
        new = list(generated[self._seen :])
        self._seen = len(generated)
        if new and not self._matcher.consume_tokens(new):
            self.error = f"the output left its grammar: {self._matcher.get_error() or new}"
            return None
        mask = self._owner.mask_of(self._matcher)
        if self._matcher.is_error():
            self.error = f"the grammar cannot be followed: {' '.join(self._matcher.get_error().split())[:300]}"
            return None
        return mask


class Constraints:
    """Of all the sequences of a stage that have one, by sequence."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._tokenizer: Any = None
        self._held: dict[int, Constraint] = {}

    def of(self, seq: int, params: SamplingParams) -> Constraint | None:
        """A sequence's own, the same each time; None where it has none."""
        if not params.constrained:
            return None
        if seq not in self._held:
            self._held[seq] = Constraint(params, self)
        return self._held[seq]

    def keep(self, seqs: Iterable[int]) -> None:
        """Forget those of all other sequences."""
        if self._held:
            alive = set(seqs)
            self._held = {seq: held for seq, held in self._held.items() if seq in alive}

    def matcher(self, params: SamplingParams) -> Any:
        """A fresh one.

        Raises:
            InvalidRequestError: The grammar is none, or the model's tokenizer cannot be used for it.
        """
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._info)
        matcher = guidance().LLMatcher(self._tokenizer, grammar_of(params), log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar cannot be followed: {matcher.get_error()}")
        return matcher

    def mask_of(self, matcher: Any) -> torch.Tensor:
        """Which tokens may come next: bool [vocab]."""
        vocab_size = self._info.vocab_size
        bits = np.zeros((vocab_size + 31) // 32, np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        mask = np.unpackbits(bits.view(np.uint8), bitorder="little", count=vocab_size)
        return torch.from_numpy(mask.astype(np.bool_))


def _tokenizer(info: ModelInfo) -> Any:
    """The model's tokenizer as llguidance wants it: about a second, once a stage."""
    guidance()
    from llguidance.hf import from_tokenizer
    from transformers import AutoTokenizer

    ref, extra = info.tokenizer, {}
    if ref.endswith(".gguf"):
        ref, extra = str(Path(ref).parent), {"gguf_file": Path(ref).name}
    inner = AutoTokenizer.from_pretrained(ref, trust_remote_code=info.options.trust_remote_code, **extra)
    try:
        return from_tokenizer(inner, n_vocab=info.vocab_size, eos_token=list(info.eos_token_ids) or None)
    except ValueError as error:
        raise InvalidRequestError(f"this model's tokenizer cannot be used with a grammar: {error}") from error
