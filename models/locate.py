"""From what a user calls a model to where its files are."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipelined.errors import MissingDependencyError, ModelError

from .gguf import converted, smollm2_gguf

if TYPE_CHECKING:
    from pipelined.stage import LoadOptions

__all__ = ["locate"]

_ALIASES: Final = {"smollm2": smollm2_gguf}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT_S: Final = 5.0
_WANTED: Final = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def locate(ref: str, options: LoadOptions) -> Path:
    """The directory of a model; with `load_format="dummy"` perhaps just its configuration, a `.json` file.

    A GGUF file is converted if it has not been yet; a hub id is downloaded if it has not been yet.

    Raises:
        ModelError: There is no such model: says what was tried and what would be right.
        MissingDependencyError: The package behind an alias, or a library, is not installed.
    """
    dummy = options.load_format == "dummy"
    if ref in _ALIASES:
        return converted(_ALIASES[ref]())
    path = _path(ref)
    if path.suffix == ".gguf" and path.is_file():
        return converted(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is no model directory: it holds no config.json{_gguf_hint(path)}")
        return path.resolve()
    if path.is_file():
        if path.suffix == ".json" and dummy:
            return path.resolve()
        hint = "; a configuration alone needs --load-format dummy" if path.suffix == ".json" else ""
        raise ModelError(f"{path} is neither a directory nor a .gguf file{hint}")
    if path.suffix in (".gguf", ".json"):
        raise ModelError(f"{path}: no such file")
    return _from_hub(ref, dummy=dummy, trust_remote_code=options.trust_remote_code)


def _path(ref: str) -> Path:
    try:
        path = Path(ref).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:  # too long, not permitted, no such home
        raise _unknown(ref[:80], f"it cannot be looked for ({error})"[:200]) from error
    return path


def _gguf_hint(path: Path) -> str:
    found = sorted(path.glob("*.gguf"))
    return f"; to use its GGUF file, name it: {found[0]}" if found else ""


def _from_hub(ref: str, *, dummy: bool, trust_remote_code: bool) -> Path:
    if not _HUB_ID.fullmatch(ref) or ".." in ref:
        raise _unknown(ref, "it is no hub id either")
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"downloading {ref}", "pip install huggingface_hub") from error
    wanted = [pattern for pattern in _WANTED if not (dummy and pattern == "*.safetensors")]
    if trust_remote_code:
        wanted.append("*.py")
    try:
        # HF_HUB_OFFLINE, HF_HOME and tokens are honoured by the library
        folder = snapshot_download(ref, allow_patterns=wanted, etag_timeout=_HUB_TIMEOUT_S)
    except (OSError, ValueError) as error:  # every error of the hub's, and of the network, is one of these
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _unknown(ref, f"the hub did not give it ({reason})") from error
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise _unknown(ref, "what the hub has of that name holds no config.json")
    return path


def _unknown(ref: str, tried: str) -> ModelError:
    close = get_close_matches(ref, _ALIASES, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ModelError(
        f"unknown model {ref!r}{hint}: there is no such directory or file, and {tried}; expected a directory with "
        f"config.json and safetensors, a .gguf file, a hub id (owner/name), or an alias ({', '.join(_ALIASES)})"
    )
