"""Options from a YAML file: each as it would stand on the command line, which wins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.errors import ConfigError, MissingDependencyError, nearest

if TYPE_CHECKING:
    import argparse

__all__ = ["with_config_file"]


def with_config_file(arguments: argparse.Namespace, command: str) -> argparse.Namespace:
    """The arguments again, with those of the file named by `--config` before what was given.

    Args:
        arguments: As parsed; `parser` is the command's own, `argv` everything that was given.
        command: Its name.

    Raises:
        ConfigError: The file cannot be read, or names what is no option.
    """
    if not arguments.config:
        return arguments
    given = list(arguments.argv)
    from_file = _options(arguments.config, _read(arguments.config))
    parser: argparse.ArgumentParser = arguments.parser
    known = {name for action in parser._actions for name in action.option_strings}
    for word in from_file:
        option = word.partition("=")[0]
        if option not in known or option == "--config":
            names = [name.removeprefix("--") for name in known]
            wrong = option.removeprefix("--")
            raise ConfigError(f"{arguments.config}: unknown option {wrong!r}{nearest(wrong, names)}")
    return parser.parse_args([*from_file, *given[given.index(command) + 1 :]])


def _read(name: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("--config", "pip install 'pipelined[serve]'") from error
    try:
        found = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {name!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration {name!r} is no YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"the configuration {name!r} is no mapping; expected lines such as `pp-size: 2`")
    return found


def _options(name: str, found: dict[str, Any]) -> list[str]:
    """As words of a command line."""
    words: list[str] = []
    for key, value in found.items():
        option = "--" + str(key).replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            words.append(option)
        elif isinstance(value, list) and all(isinstance(one, int) for one in value):
            words.append(f"{option}={','.join(map(str, value))}")
        elif isinstance(value, list) and all(isinstance(one, str) for one in value):
            words += [f"{option}={one}" for one in value]
        elif isinstance(value, str | int | float):
            words.append(f"{option}={value}")
        else:
            raise ConfigError(f"{name}: {key} is of a kind that no option takes; expected a text, a number or a list")
    return words
