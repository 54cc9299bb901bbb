from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from browser import browser, chromium

from pipelined.serving.dashboard import page

BODY = {"prompt": list(range(1, 200)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}


async def test_the_page_needs_nothing_else(serve: Any) -> None:
    async with serve() as served:
        response = await served.client.get("/dashboard")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "%%" not in response.text
        assert not re.search(r"https?://|//cdn|@import|\bsrc=", response.text)
        assert "prefers-color-scheme: dark" in response.text
        assert 'name="viewport"' in response.text


def test_the_script_writes_no_markup() -> None:
    text, _ = page()
    assert "innerHTML" not in text
    assert "document.write" not in text


async def test_tells_what_goes_on(serve: Any) -> None:
    async with serve() as served:
        await served.state.feed.refresh(0.0)
        await served.post("/v1/completions", BODY)
        await served.state.feed.refresh(0.0)
        data = await served.get("/dashboard/data?window_s=30")
        assert data["state"]["name"] == "ready"
        assert data["totals"]["generation_tokens"] == 8
        assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
        assert data["requests"]["live"] == 0
        (last,) = data["requests"]["finished"]
        assert (last["reason"], last["tokens"], last["prompt_tokens"]) == ("length", 8, 199)
        assert data["latency"]["ttft_s"][0] == last["ttft_s"]
        assert data["pages"]["pages"] > 0
        line = data["timeline"]
        wall_s = line["to_s"] - line["from_s"]
        for rank in line["ranks"]:
            assert len(rank["items"]) % 7 == 0
            assert abs(sum(rank["items"][::7]) / 1e9 - wall_s) < 1e-3
            assert abs(sum(rank["spent_s"].values()) - wall_s) < 1e-3
            assert rank["spent_s"]["busy"] > 0


async def test_after_a_pause_the_timeline_begins_anew(serve: Any) -> None:
    async with serve() as served:
        feed = served.state.feed
        await feed.refresh(0.0)
        await served.post("/v1/completions", BODY)
        await feed.refresh(0.0)
        feed._skip(served.engine.now())
        await served.post("/v1/completions", BODY)
        await feed.refresh(0.0)
        line = (await served.get("/dashboard/data"))["timeline"]
        assert line["from_s"] > 0
        for rank in line["ranks"]:
            assert abs(sum(rank["items"][::7]) / 1e9 - (line["to_s"] - line["from_s"])) < 1e-3


async def test_progress_of_a_prefill_is_seen(serve: Any) -> None:
    async with serve() as served:
        seen: list[tuple[int, int]] = []
        served.state.tally.on_progress = lambda watched: seen.append((watched.prefill_done, watched.prefill_total))
        await served.post("/v1/completions", BODY)
        assert len(seen) >= 2
        assert seen == sorted(seen)
        assert seen[-1] == (199, 199)


async def test_its_data_is_bounded(serve: Any) -> None:
    from pipelined.serving.metrics_requests import Watched

    async with serve() as served:
        for number in range(1000):
            served.state.tally.live[str(number)] = Watched(f"{number}" * 100, 10, 1, 0.0, 10)
        response = await served.client.get("/dashboard/data")
        served.state.tally.live.clear()
        assert response.json()["requests"]["live"] == 1000
        assert len(response.content) < 100_000
        await served.get("/dashboard/data?window_s=1e9", 400)


@pytest.mark.slow
async def test_in_a_browser(serve: Any, tmp_path: Path) -> None:
    chromium()
    async with serve(max_running_requests=4) as served:
        bound = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(served.app, log_config=None, lifespan="off"))
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve([bound]))
            async with browser(tmp_path / "profile") as page:
                await page.call("Page.navigate", url=f"http://127.0.0.1:{bound.getsockname()[1]}/dashboard")
                await page.until("document.getElementById('state').textContent === 'ready'")
                await served.post("/v1/completions", BODY, headers={"X-Request-Id": "<b>odd"})
                await served.post("/v1/completions", BODY, headers={"X-Request-Id": "seen-7"})
                await page.until("document.getElementById('finished').textContent.includes('seen-7')")
                assert await page.value("document.querySelectorAll('#shares tbody tr').length") == 2
                for name, look in {
                    "light": {"width": 1280, "height": 900},
                    "dark": {"width": 1280, "height": 900, "dark": True},
                    "phone": {"width": 390, "height": 844, "phone": True, "dark": True},
                }.items():
                    await page.look(**look)
                    await page.until(f"innerWidth === {look['width']}")
                    assert await page.value("document.documentElement.scrollWidth") == look["width"], name
                    await page.picture(tmp_path / f"{name}.png")
                    background = await page.value("getComputedStyle(document.body).backgroundColor")
                    red = int(re.findall(r"\d+", background)[0])
                    assert (red < 60) == ("dark" in look)
                assert page.problems == []
            server.should_exit = True
