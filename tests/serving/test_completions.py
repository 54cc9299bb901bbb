from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from serving_tools import Client

from pipelined.messages import SamplingParams
from pipelined.models.toy import reference_tokens

URL = "/v1/completions"


async def test_token_ids_in_and_out(serve: Any) -> None:
    async with serve() as served:
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "return_token_ids": True}
        answer = await served.post(URL, body)
        truth = reference_tokens(served.engine.info, [1, 2, 3], 5)
        assert answer["choices"][0]["token_ids"] == truth
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        assert answer["usage"]["completion_tokens"] == len(truth)
        assert answer["usage"]["prompt_tokens"] == 3
        events = await served.events(URL, body)
        assert [t for event in events for t in event["choices"][0]["token_ids"]] == truth
        assert events[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
        assert len({event["id"] for event in events}) == 1
        assert "usage" not in events[0]


async def test_usage_in_a_stream(serve: Any) -> None:
    async with serve() as served:
        body = {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
        events = await served.events(URL, {**body, "stream_options": {"include_usage": True}})
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["total_tokens"] == 6
        assert all(event["usage"] is None for event in events[:-1])
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await served.events(URL, {**body, "stream_options": options})
        assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


async def test_several_prompts_and_choices(serve: Any) -> None:
    async with serve() as served:
        body = {"prompt": [[1, 2], [3], [4, 5, 6]], "n": 2, "max_tokens": 4, "return_token_ids": True}
        answer = await served.post(URL, body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        for choice in answer["choices"]:
            prompt = body["prompt"][choice["index"] // 2]  # type: ignore[index]
            assert choice["prompt_token_ids"] == prompt
            assert choice["token_ids"] == reference_tokens(served.engine.info, prompt, 4)
        streamed: dict[int, list[int]] = {index: [] for index in range(6)}
        for event in await served.events(URL, body):
            streamed[event["choices"][0]["index"]] += event["choices"][0]["token_ids"]
        assert streamed == {choice["index"]: choice["token_ids"] for choice in answer["choices"]}


async def test_text_streams_as_it_comes_whole(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        body = {"prompt": "Once upon", "max_tokens": 24, "temperature": 1.0, "seed": 3, "n": 2}
        whole = await served.post(URL, body)
        texts = {0: "", 1: ""}
        for event in await served.events(URL, body):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
        assert texts[0] != texts[1]
        direct = await served.engine.complete("Once upon", SamplingParams(max_tokens=24, temperature=1.0, seed=3, n=2))
        assert direct.outputs[0].text == texts[0]


async def test_stop_strings_and_echo(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        body = {"prompt": "Once", "max_tokens": 32, "temperature": 0}
        text = (await served.post(URL, body))["choices"][0]["text"]
        stop = text[5:7]
        stopped = (await served.post(URL, {**body, "stop": stop}))["choices"][0]
        assert stopped["text"] == text[: text.index(stop)]
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
        echoed = await served.post(URL, {**body, "echo": True})
        assert echoed["choices"][0]["text"] == "Once" + text
        pieces = await served.events(URL, {**body, "echo": True})
        assert "".join(event["choices"][0]["text"] for event in pieces) == "Once" + text


async def test_logprobs_of_prompt_and_answer(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        body = {"prompt": "abc", "max_tokens": 2, "temperature": 0, "logprobs": 2, "echo": True}
        logprobs = (await served.post(URL, body))["choices"][0]["logprobs"]
        assert logprobs["tokens"][:3] == ["a", "b", "c"]
        assert logprobs["text_offset"][:4] == [0, 1, 2, 3]
        assert logprobs["token_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        for token, value, top in zip(
            *(logprobs[k][1:] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert top[token] == value
            assert 2 <= len(top) <= 3
        streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
        for event in await served.events(URL, body):
            for name, values in streamed.items():
                values += event["choices"][0]["logprobs"][name]
        assert streamed["tokens"] == logprobs["tokens"]
        assert streamed["text_offset"] == logprobs["text_offset"]
        assert streamed["token_logprobs"] == pytest.approx(logprobs["token_logprobs"], abs=1e-4)


async def test_nothing_but_the_prompts_logprobs(serve: Any, tiny: str) -> None:
    async with serve(tiny) as served:
        body = {"prompt": "abc", "max_tokens": 0, "logprobs": 1, "echo": True}
        answer = await served.post(URL, body)
        assert answer["choices"][0]["text"] == "abc"
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3
        assert answer["usage"]["completion_tokens"] == 0
        refused = await served.post(URL, {**body, "echo": False}, 400)
        assert refused["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": "text"}, None),
        ({"prompt": [997]}, None),
        ({"prompt": [-1]}, None),
        ({"prompt": [10**30]}, None),
        ({"prompt": [1] * 2048}, None),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, None),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": {}}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
)
async def test_what_is_wrong_is_named(serve: Any, change: dict[str, Any], param: str | None) -> None:
    async with serve() as served:
        refused = await served.post(URL, {"prompt": [1], "max_tokens": 2, **change}, 400)
        assert refused["error"]["type"] == "invalid_request_error"
        assert refused["error"]["param"] == param
        refused = await served.post(URL, {"prompt": [1], "max_tokens": 2, "stream": True, **change}, 400)


async def test_unknown_fields_are_ignored(serve: Any) -> None:
    async with serve() as served:
        await served.post(URL, {"prompt": [1], "max_tokens": 1, "a_field_of_tomorrow": {"x": 1}, "user": "me"})


async def test_bodies_that_are_none(serve: Any) -> None:
    async with serve() as served:
        json_type = {"content-type": "application/json"}
        for content in (b"", b"[]", b"5", b'{"prompt', b'"\xff"', b"null", b'{"prompt": ' + b"[" * 100_000):
            response = await served.client.post(URL, content=content, headers=json_type)
            assert response.status_code == 400, (content[:20], response.text)
            assert response.json()["error"]["type"] == "invalid_request_error"
        response = await served.client.post(URL, content='{"prompt": [1]}', headers={"content-type": "text/plain"})
        assert "application/json" in response.json()["error"]["message"]
        body = b'{"prompt": "\\ud800", "max_tokens": 1, "user": "\\ud800"}'
        response = await served.client.post(URL, content=body, headers=json_type)
        assert response.status_code == 400
        response = await served.client.post(URL, content=b'{"model": "\\ud800", "prompt": [1]}', headers=json_type)
        assert response.status_code == 404


async def test_other_models_are_not_served(serve: Any) -> None:
    async with serve(server={"served_model_names": ("small", "alias")}) as served:
        refused = await served.post(URL, {"prompt": [1], "model": "large"}, 404)
        assert refused["error"]["code"] == "model_not_found"
        answer = await served.post(URL, {"prompt": [1], "model": "alias", "max_tokens": 1})
        assert answer["model"] == "alias"
        models = await served.get("/v1/models")
        assert [model["id"] for model in models["data"]] == ["small", "alias"]
        assert (await served.get("/v1/models/alias"))["max_model_len"] == 2048
        await served.get("/v1/models/large", 404)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_request(serve: Any, stream: bool) -> None:
    async with serve() as served:
        body = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "stream": stream, "n": 2}
        client = Client(served.app, URL, body)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.run())
            if stream:
                await client.heard.wait()
            else:
                await served.busy()
            client.leave()
            await task
        await served.at_rest()
        assert "[DONE]" not in client.text


async def test_aborting_by_id(serve: Any) -> None:
    async with serve() as served:
        body = {"prompt": [[1, 2, 3], [4]], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with asyncio.TaskGroup() as group:
            task = group.create_task(
                served.client.post(URL, json=body, headers={"X-Request-Id": "mine"}), name="request"
            )
            await served.busy()
            assert await served.post("/abort", {"request_id": "mine"}) == {"aborted": ["cmpl-mine"]}
            response = await task
        assert response.headers["x-request-id"] == "cmpl-mine"
        ends = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        reasons = [choice["finish_reason"] for event in ends for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["abort", "abort"]
        assert await served.post("/abort", {"request_id": "mine"}) == {"aborted": []}
        await served.post("/abort", {}, 400)


async def test_a_failing_request_hurts_nobody(serve: Any) -> None:
    model = "toy://?layers=4&vocab=997&hidden=4&context=2048&kv=65536&fail_seq_token=13&fail_layer=2"
    async with serve(model) as served:
        failed = await served.post(URL, {"prompt": [13], "max_tokens": 2}, 500)
        assert failed["error"]["type"] == "server_error"
        response = await served.client.post(URL, json={"prompt": [13], "max_tokens": 2, "stream": True})
        assert "not finite" in response.text
        assert response.text.endswith("data: [DONE]\n\n")
        failed = await served.post(URL, {"prompt": [[1], [13]], "max_tokens": 2}, 500)
        await served.post(URL, {"prompt": [12], "max_tokens": 2})
