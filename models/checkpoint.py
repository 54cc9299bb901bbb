"""Reads what a safetensors checkpoint holds without loading it, and finds out whether it is whole."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from pipelined.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Checkpoint", "TensorEntry", "read_checkpoint"]

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_FLOATS: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INTEGERS: Final = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
_LONGEST_HEADER_BYTES: Final = 100_000_000
_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a shard. `dtype` as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers."""
        return prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """What the shards of a model hold.

    Attributes:
        tensors: By name.
        dtype: The floating-point type of most numbers, as torch names it.
        fingerprint: Hash of all headers, sizes, and of samples of the weights.
    """

    tensors: Mapping[str, TensorEntry]
    dtype: str
    fingerprint: str


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of all shards.

    Raises:
        ModelError: There is no checkpoint, a shard is missing, truncated or damaged, a tensor is not where the index
            says, or the numbers are of a type that cannot be loaded. Names the file.
    """
    index = _index(directory)
    shards = sorted(set(index.values())) if index is not None else [SINGLE]
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(f"{directory}: {len(missing)} of {len(shards)} weight files are missing: {shown}")
    tensors: dict[str, TensorEntry] = {}
    digest = hashlib.sha256()
    for name in shards:
        held = _read_shard(directory / name, digest)
        lost = [tensor for tensor, shard in (index or {}).items() if shard == name and tensor not in held]
        if lost:
            raise ModelError(f"{directory / name}: the index says it holds {lost[0]!r}, which it does not")
        tensors |= held
    return Checkpoint(tensors, _main_dtype(directory, tensors), digest.hexdigest())


def _index(directory: Path) -> dict[str, str] | None:
    """Shard of each tensor; None where a single file holds all (it comes first, as for transformers)."""
    if (directory / SINGLE).exists():
        return None
    path = directory / INDEX
    if not path.exists():
        other = sorted(entry.name for entry in directory.glob("*.bin")) + sorted(
            entry.name for entry in directory.glob("*.gguf")
        )
        hint = f"; {other[0]} is not in that format" if other else ""
        raise ModelError(
            f"{directory} holds no weights: expected {SINGLE} or {INDEX}{hint} "
            "(random weights from the configuration alone: --load-format dummy)"
        )
    try:
        index = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is damaged: {error!r}") from error
    if not isinstance(index, dict) or not index or not all(_plain_name(name) for name in index.values()):
        raise ModelError(f"{path} is damaged: its weight_map must name a file in this folder for each tensor")
    return index


def _plain_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and os.path.basename(name) == name


def _read_shard(path: Path, digest: Any) -> dict[str, TensorEntry]:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
        header_bytes = int.from_bytes(start, "little")
        if len(start) < 8 or header_bytes > _LONGEST_HEADER_BYTES:
            raise ModelError(f"{path} is not a safetensors file ({size_bytes} bytes)")
        if 8 + header_bytes > size_bytes:
            raise ModelError(_truncated(path, size_bytes, f"at least {8 + header_bytes}"))
        raw = file.read(header_bytes)
        held, data_bytes = _parse_header(path, raw)
        expected = 8 + header_bytes + data_bytes
        if size_bytes < expected:
            raise ModelError(_truncated(path, size_bytes, str(expected)))
        if size_bytes > expected:
            raise ModelError(f"{path} is damaged: {size_bytes} bytes, its header describes {expected}")
        digest.update(raw)
        # Headers of two fine-tunings are alike; a few kilobytes of the weights are not.
        for sample in range(_SAMPLES):
            file.seek(8 + header_bytes + data_bytes * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return held


def _truncated(path: Path, size_bytes: int, expected: str) -> str:
    return f"{path} is truncated: {size_bytes} of {expected} bytes; download it again"


def _parse_header(path: Path, raw: bytes) -> tuple[dict[str, TensorEntry], int]:
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        held = {name: TensorEntry(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        data_bytes = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{path} is damaged: its header cannot be read ({error!r})") from error
    return held, data_bytes


def _main_dtype(directory: Path, tensors: Mapping[str, TensorEntry]) -> str:
    counts: dict[str, int] = {}
    for name, entry in tensors.items():
        if entry.dtype in _FLOATS:
            counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.elements
        elif entry.dtype not in _INTEGERS:
            raise ModelError(
                f"{directory}: {name} is of type {entry.dtype}, which cannot be loaded; expected one of "
                f"{', '.join(_FLOATS)}"
            )
    if not counts:
        raise ModelError(f"{directory}: the weight files hold no floating-point tensors")
    return _FLOATS[max(counts, key=lambda dtype: counts[dtype])]
