"""Tool calls: how a model writes them, whole and while they stream, and how it is made to.

Which way of writing a model has is seen from its chat template:

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    llama3   {"name": ..., "parameters": {...}} and nothing else
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pipelined.errors import InvalidRequestError
from pipelined.llm.text import overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.llm.text import Tokenizer
    from pipelined.serving.protocol import ChatRequest, Tool
    from pipelined.serving.settings import ServerSettings

__all__ = ["ToolPlan", "ToolStream", "described_tools"]

_MARKS: Final = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}
_HERMES_END: Final = "</tool_call>"
_HERMES: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def _parser_of(template: str) -> str:
    for name, mark in _MARKS.items():
        if mark in template:
            return name
    return "llama3"


@dataclass(frozen=True)
class ToolPlan:
    """What one request wants of tools.

    Attributes:
        described: The tools as templates expect them; None: the model is not told of any.
        parser: How calls stand in the text; "": no calls are looked for; "json": the text is a list of calls; "named":
            the text is the arguments of `name`.
        name: The function that must be called.
        constraint: Sampling parameters that make the model keep to it.
    """

    described: list[dict[str, Any]] | None = None
    parser: str = ""
    name: str = ""
    constraint: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def none(cls) -> ToolPlan:
        """No tools."""
        return cls()

    @classmethod
    def of(cls, body: ChatRequest, tokenizer: Tokenizer, settings: ServerSettings) -> ToolPlan:
        """The plan of a request.

        Raises:
            InvalidRequestError: The model's template knows no tools, or what is asked for contradicts itself.
        """
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
            return cls()
        if choice == "none":
            return cls()
        template = body.chat_template or settings.chat_template or tokenizer.chat_template
        if "tools" not in template:
            raise InvalidRequestError(
                "this model's chat template has no place for tools; leave them out", param="tools"
            )
        described = described_tools(body.tools)
        if choice in (None, "auto"):
            parser = settings.tool_call_parser
            return cls(described, _parser_of(template) if parser == "auto" else parser)
        if body.response_format is not None and body.response_format.type != "text":
            raise InvalidRequestError("response_format contradicts a forced tool call", param="response_format")
        if isinstance(choice, str):
            most = {} if body.parallel_tool_calls in (None, True) else {"maxItems": 1}
            schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": [_call(tool) for tool in body.tools]}}
            return cls(described, "json", constraint={"json_schema": json.dumps(schema)})
        name = choice.function.name
        tool = next((tool for tool in body.tools if tool.function.name == name), None)
        if tool is None:
            raise InvalidRequestError(f"tool_choice names {name!r}, which is no tool given", param="tool_choice")
        return cls(described, "named", name, {"json_schema": json.dumps(_parameters(tool))})

    def parse(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """The text beside the calls (None where there is none), and the calls, of a whole answer."""
        if not self.parser:
            return text, []
        if self.parser == "named":
            return None, [_made(self.name, text)]
        before, calls = _parsed(self.parser, text)
        if not calls:
            return text, []
        return before or None, calls

    def stream(self) -> ToolStream:
        """For one continuation that comes piece by piece."""
        return ToolStream(self)


class ToolStream:
    """Separates text from calls while they come. A call is told once it is complete.

    Attributes:
        called: How many calls there were.
    """

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._mark = _MARKS.get(plan.parser, "")
        self._held = ""
        self._in_calls = not self._mark  # the calls are all that is said
        self.called = 0

    def push(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take what comes next.

        Returns:
            Text to show now, and `tool_calls` deltas.
        """
        if not self._plan.parser:
            return text, []
        self._held += text
        shown = "" if self._in_calls else self._before_calls()
        calls: list[dict[str, Any]] = []
        while self._plan.parser == "hermes" and self._in_calls and (cut := self._held.find(_HERMES_END)) >= 0:
            cut += len(_HERMES_END)
            found = _parsed("hermes", self._held[:cut])[1]
            calls += self._told(found)
            shown += "" if found else self._held[:cut]
            self._held = self._held[cut:]
        if last and self._held:
            content, rest = self._plan.parse(self._held)
            calls += self._told(rest)
            # What comes behind a call is more calls, or white space.
            shown += "" if rest or self.called else content or ""
            self._held = ""
        return shown, calls

    def _before_calls(self) -> str:
        """What surely comes before the first call."""
        at = self._held.find(self._mark)
        self._in_calls = at >= 0
        cut = at if at >= 0 else len(self._held) - overlap(self._held, self._mark)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _told(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        numbered = [{"index": self.called + number, **call} for number, call in enumerate(calls)]
        self.called += len(calls)
        return numbered


def described_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """As templates expect them; None where there are none."""
    return [{"type": "function", "function": _described(tool)} for tool in tools] if tools else None


def _described(tool: Tool) -> dict[str, Any]:
    function = tool.function
    return {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _call(tool: Tool) -> dict[str, Any]:
    """The schema of a call of that tool."""
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": _parameters(tool)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _made(name: str, arguments: str) -> dict[str, Any]:
    call_id = f"call_{secrets.token_hex(12)}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _parsed(parser: str, text: str) -> tuple[str, list[dict[str, Any]]]:
    """What comes before the calls, and the calls; none where the text is not written that way."""
    if parser == "hermes":
        before = text.partition(_MARKS["hermes"])[0]
        found = [_loaded(block) for block in _HERMES.findall(text)]
        calls = [call for one in found for call in one]
        return before.rstrip() if calls else text, calls
    if parser == "mistral":
        before, mark, rest = text.partition(_MARKS["mistral"])
        return before, _loaded(rest) if mark else []
    return "", _loaded(text)


def _loaded(text: str) -> list[dict[str, Any]]:
    """Calls from a JSON object or a list of them; none if it is anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return []
        arguments = one.get("arguments", one.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(_made(one["name"], written))
    return calls
