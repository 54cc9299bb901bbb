"""Output that follows a schema, and tool calls, through the whole server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pipelined.errors import RankLostError
from pipelined.serving.protocol import ChatRequest, Tool
from pipelined.serving.settings import ServerSettings
from pipelined.serving.tools import ToolPlan

pytest.importorskip("llguidance")

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}}},
]


def follows(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    assert set(found) == {"unit", "days"}
    assert found["unit"] in ("celsius", "kelvin")
    assert 1 <= found["days"] <= 9
    return found


async def test_answers_follow_their_schema(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        body = {"messages": HELLO, "max_tokens": 900, "temperature": 1, "seed": 1, "response_format": FORMAT, "n": 3}
        for choice in (await served.post(URL, body))["choices"]:
            assert choice["finish_reason"] == "stop"
            follows(choice["message"]["content"])
        text = "".join(
            event["choices"][0]["delta"].get("content", "") for event in await served.events(URL, {**body, "n": 1})
        )
        follows(text)
        completion = {"prompt": "x", "max_tokens": 900, "temperature": 0, "response_format": FORMAT}
        follows((await served.post("/v1/completions", completion))["choices"][0]["text"])
        pattern = {"prompt": "x", "max_tokens": 900, "temperature": 0, "regex": "[0-9]{2}:[0-9]{2}"}
        text = (await served.post("/v1/completions", pattern))["choices"][0]["text"]
        assert re.fullmatch(pattern["regex"], text)  # type: ignore[call-overload]


async def test_a_loss_in_the_middle_changes_nothing(serve: Any, tiny: str) -> None:
    async with serve(tiny, recover=True) as served:
        body = {"messages": HELLO, "max_tokens": 900, "temperature": 1, "seed": 2, "response_format": FORMAT}
        whole = (await served.post(URL, body))["choices"][0]["message"]["content"]
        number, lost = 0, False
        generate = served.engine.generate

        async def disturbed(*args: Any, **more: Any) -> Any:
            nonlocal number, lost
            async for output in generate(*args, **more):
                number += 1
                if number == 8 and not lost:
                    lost = True
                    served.engine.lose(RankLostError("for the test", rank=1))
                yield output

        served.engine.generate = disturbed
        assert (await served.post(URL, body))["choices"][0]["message"]["content"] == whole
        assert lost
        assert served.engine.state.restarts == 1


async def test_a_tool_that_must_be_called(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        choice = {"type": "function", "function": {"name": "weather"}}
        body = {"messages": HELLO, "max_tokens": 900, "temperature": 0, "tools": TOOLS, "tool_choice": choice}
        answer = (await served.post(URL, body))["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        follows(call["function"]["arguments"])
        assert answer["message"]["content"] is None
        events = await served.events(URL, body)
        deltas = [one for event in events for one in event["choices"][0]["delta"].get("tool_calls", [])]
        assert [delta["function"] for delta in deltas] == [call["function"]]
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_some_tool_must_be_called(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        body = {"messages": HELLO, "max_tokens": 900, "temperature": 1, "seed": 5, "tools": TOOLS}
        body |= {"tool_choice": "required", "parallel_tool_calls": False}
        (call,) = (await served.post(URL, body))["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] in ("weather", "time")
        json.loads(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}}, "json_schema"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"response_format": FORMAT, "regex": "a"}, "regex"),
        ({"regex": "("}, "regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}, "response_format"),
        ({"tools": TOOLS, "chat_template": "{{ messages }}"}, "tools"),
    ],
)
async def test_what_is_wrong_is_named(serve: Any, tiny: str, change: dict[str, Any], param: str) -> None:
    async with serve(tiny, server={"trust_request_chat_template": True}) as served:
        refused = await served.post(URL, {"messages": HELLO, "max_tokens": 5, **change}, 400)
        assert refused["error"]["param"] == param


async def test_models_without_a_tokenizer_follow_nothing(serve: Any) -> None:
    async with serve() as served:
        refused = await served.post("/v1/completions", {"prompt": [1], "regex": "a"}, 400)
        assert "no tokenizer" in refused["error"]["message"]


class Named:
    def __init__(self, template: str) -> None:
        self.chat_template = template


def plan(template: str, **more: Any) -> ToolPlan:
    body = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=[Tool(**tool) for tool in TOOLS], **more)
    return ToolPlan.of(body, Named("tools " + template), ServerSettings())  # type: ignore[arg-type]


CALL = '{"name": "weather", "arguments": {"days": 2}}'


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        ("<tool_call>", f"Well. <tool_call>\n{CALL}\n</tool_call>", "Well.", 1),
        ("<tool_call>", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", None, 2),
        ("<tool_call>", f"<tool_call>{CALL}", None, 1),
        ("<tool_call>", "no <tool_ call", "no <tool_ call", 0),
        ("<tool_call>", "<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", 0),
        ("[TOOL_CALLS]", f"So [TOOL_CALLS][{CALL}, {CALL}]", "So ", 2),
        ("[TOOL_CALLS]", "nothing", "nothing", 0),
        ("parameters", '{"name": "weather", "parameters": {"days": 2}}', None, 1),
        ("parameters", "It is sunny.", "It is sunny.", 0),
        ("parameters", '{"a": 1}', '{"a": 1}', 0),
    ],
)
def test_calls_are_found_whole_and_in_pieces(template: str, text: str, content: str | None, calls: int) -> None:
    tools = plan(template)
    whole = tools.parse(text)
    assert whole[0] == content
    assert len(whole[1]) == calls
    for call in whole[1]:
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"days": 2})
    for size in (1, 3, 1000):
        stream = tools.stream()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = [stream.push(piece, last=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
        shown = "".join(said for said, _ in found)
        told = [call for _, some in found for call in some]
        assert shown.strip() == (content or "").strip()
        assert [call["index"] for call in told] == list(range(calls))
        assert [call["function"] for call in told] == [call["function"] for call in whole[1]]


def test_tools_may_be_ignored() -> None:
    assert plan("<tool_call>", tool_choice="none").described is None
    assert plan("<tool_call>", tool_choice="auto").parser == "hermes"
