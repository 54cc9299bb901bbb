"""What constrains the text of a request: from its parameters to a grammar, by llguidance, which is imported on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipelined.errors import InvalidRequestError

if TYPE_CHECKING:
    from pipelined.messages import SamplingParams

__all__ = ["check_grammar", "grammar_of", "guidance"]

_JSON: Final = {"whitespace_pattern": r"[ \t\n\r]{0,64}"}
"""As much white space as anybody indents by, but not for ever: a model that loses its thread would never end."""


def guidance() -> Any:
    """The library.

    Raises:
        InvalidRequestError: It is not installed; whoever serves can mend that, not the client, but only this request
            needs it.
    """
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequestError(
            "output that follows a schema or pattern needs llguidance, which is not installed here; "
            "install it with: pip install 'pipelined[serve]'"
        ) from error
    return llguidance


def grammar_of(params: SamplingParams) -> str:
    """The grammar, as llguidance writes it; not checked yet.

    Raises:
        InvalidRequestError: The schema is no JSON object.
    """
    matcher = guidance().LLMatcher
    if params.regex is not None:
        return str(matcher.grammar_from_regex(params.regex))
    try:
        return str(matcher.grammar_from_json_schema(params.json_schema, overrides=_JSON))
    except ValueError as error:
        raise InvalidRequestError(f"the JSON schema is no JSON object: {error}", param="json_schema") from error


def check_grammar(params: SamplingParams) -> None:
    """Refuse a schema or pattern that cannot be followed.

    Raises:
        InvalidRequestError: Says what is wrong with it.
    """
    if not params.constrained:
        return
    wrong = guidance().LLMatcher.validate_grammar(grammar_of(params))
    if wrong and not wrong.startswith("WARNING"):
        kind, param = ("pattern", "regex") if params.regex is not None else ("JSON schema", "json_schema")
        raise InvalidRequestError(f"the {kind} cannot be followed: {' '.join(wrong.split())[:300]}", param=param)
