"""Headless Chromium, spoken to over two pipes in its DevTools protocol: no driver, no package."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ANSWER_S = 60.0


def chromium() -> str:
    """Its path; skips the test where there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium here; install one, or set CHROMIUM to its path")
    return found


class Browser:
    """One page. `problems` is whatever it complained about."""

    def __init__(self, reader: asyncio.StreamReader, writer: Any) -> None:
        self._reader = reader
        self._write = writer
        self._numbers = itertools.count(1)
        self._owed: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self.problems: list[str] = []

    async def listen(self) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    self._owed.pop(message["id"]).set_result(message)
                elif message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                    self.problems.append(json.dumps(message["params"])[:500])

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        owed = self._owed[number] = asyncio.get_running_loop().create_future()
        self._write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(ANSWER_S):
            answer = await owed
        assert "error" not in answer, answer
        return answer["result"]

    async def attach(self) -> None:
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def look(self, width: int, height: int, *, scale: float = 1, dark: bool = False, phone: bool = False) -> None:
        """The window, and what its user prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def value(self, script: str) -> Any:
        """Of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until the expression is true; while the page is not there yet, it may fail."""
        patient = f"(() => {{ try {{ return {script} }} catch {{ return false }} }})()"
        async with asyncio.timeout(ANSWER_S):
            while not await self.value(patient):  # noqa: ASYNC110 - a page has no event for it
                await asyncio.sleep(0.1)

    async def picture(self, path: Path) -> None:
        """Of the whole page."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        data = base64.b64decode(shot["data"])
        await asyncio.to_thread(path.write_bytes, data)


@asynccontextmanager
async def browser(profile: Path) -> Any:
    """A browser with a profile of its own; ended at the end."""
    command = [
        chromium(),
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars"),
    ]
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    shell = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", shell, "bash", *command),
        pass_fds=(to_read, from_write),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=64 * 2**20)
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_read, "rb"))
    writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_write, "wb"))
    page = Browser(reader, writing.write)
    try:
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(page.listen())
            await page.attach()
            yield page
            listening.cancel()
    finally:
        pipe.close()
        writing.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
