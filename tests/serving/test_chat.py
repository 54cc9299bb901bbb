from __future__ import annotations

from typing import Any

import pytest

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def test_an_answer_whole_and_in_pieces(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        body = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
        answer = await served.post(URL, body)
        assert answer["object"] == "chat.completion"
        message = answer["choices"][0]["message"]
        assert message["role"] == "assistant"
        completed = await served.post(
            "/v1/completions", {"prompt": "<|user|>Hello<|assistant|>", "max_tokens": 12, "temperature": 0}
        )
        assert message["content"] == completed["choices"][0]["text"]
        events = await served.events(URL, {**body, "stream_options": {"include_usage": True}})
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        told = [event["choices"][0] for event in events if event["choices"]]
        assert "".join(choice["delta"].get("content", "") for choice in told) == message["content"]
        assert told[-1]["finish_reason"] == answer["choices"][0]["finish_reason"]
        assert events[-1]["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_choices_and_logprobs(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        body = {"messages": HELLO, "max_completion_tokens": 3, "n": 2, "seed": 1, "logprobs": True, "top_logprobs": 2}
        answer = await served.post(URL, body)
        for choice in answer["choices"]:
            content = choice["logprobs"]["content"]
            assert len(content) == 3
            for entry in content:
                assert len(entry["top_logprobs"]) == 2
                assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
                if entry["bytes"] is not None:
                    assert bytes(entry["bytes"]).decode() == entry["token"]
        streamed: dict[int, list[Any]] = {0: [], 1: []}
        for event in await served.events(URL, body):
            choice = event["choices"][0]
            if choice["logprobs"]:
                streamed[choice["index"]] += [entry["token"] for entry in choice["logprobs"]["content"]]
        for choice in answer["choices"]:
            assert streamed[choice["index"]] == [entry["token"] for entry in choice["logprobs"]["content"]]


async def test_messages_in_every_form(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"at": "x"}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]
        tokens = (await served.post("/tokenize", {"messages": messages}))["tokens"]
        text = (await served.post("/detokenize", {"tokens": tokens}))["prompt"]
        assert text == (
            '<|system|>Be brief.<|user|>Weather?<|assistant|><tool_call>{"name": "w", "arguments": {"at": "x"}}'
            "</tool_call><|tool|>sunny<|assistant|>"
        )
        answer = await served.post(URL, {"messages": messages, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        body = {"messages": [*HELLO, {"role": "assistant", "content": "I am"}], "continue_final_message": True}
        await served.post(URL, {**body, "max_tokens": 1, "chat_template_kwargs": {"unheard_of": 1}})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"chat_template": "{{ broken"}, None),
        ({"chat_template": "{% for x in range(10) %}"}, None),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_what_is_wrong_is_named(serve: Any, tiny: str, change: dict[str, Any], param: str | None) -> None:
    async with serve(tiny, server={"trust_request_chat_template": True}) as served:
        refused = await served.post(URL, {"messages": HELLO, "max_tokens": 2, **change}, 400)
        assert refused["error"]["param"] == param


async def test_templates_of_requests_are_taken_where_they_are_trusted(serve: Any, tiny: str) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "chat_template": "{{ messages[0]['content'] }}!"}
    async with serve(tiny) as served:
        assert (await served.post(URL, body, 400))["error"]["param"] == "chat_template"
    async with serve(tiny, server={"trust_request_chat_template": True}) as served:
        assert (await served.post(URL, body))["usage"]["prompt_tokens"] == len("Hello!")


async def test_models_without_a_tokenizer_cannot_chat(serve: Any) -> None:
    async with serve() as served:
        refused = await served.post(URL, {"messages": HELLO}, 400)
        assert "chat template" in refused["error"]["message"]
        await served.post("/tokenize", {"prompt": "x"}, 400)


async def test_tokenize_and_back(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        found = await served.post("/tokenize", {"prompt": "grüße", "return_token_strs": True})
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 7
        assert found["max_model_len"] == 1024
        assert await served.post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "grüße"}
        await served.post("/tokenize", {}, 400)
        await served.post("/tokenize", {"prompt": "x", "messages": HELLO}, 400)
        for tokens in ([264], [-1], [2**63], [10**30]):
            assert (await served.post("/detokenize", {"tokens": tokens}, 400))["error"]["param"] == "tokens"
