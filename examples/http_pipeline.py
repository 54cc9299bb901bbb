"""A pipeline of one's own behind HTTP: what is posted passes through three stages, a process each, several at a time.

Run it: python examples/http_pipeline.py [PORT], then
    curl -H 'Content-Type: application/json' -d '{"text": "a man, a plan"}' http://127.0.0.1:8000/letters
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch

from pipelined import Pipeline
from pipelined.errors import StageError

if TYPE_CHECKING:
    from pipelined.stage import Payload


def read(x: Payload) -> Payload:
    if not x["text"].isascii():
        raise ValueError("only ASCII is counted here")
    return {"codes": torch.tensor(list(x["text"].lower().encode()), dtype=torch.int64)}


def count(x: Payload) -> Payload:
    return {"counts": torch.bincount(x["codes"], minlength=128)}


def pick(x: Payload) -> Payload:
    letters = x["counts"][ord("a") : ord("z") + 1]
    return {"most": chr(ord("a") + int(letters.argmax())), "times": int(letters.max())}


def make_app() -> Any:
    from fastapi import Body, FastAPI, HTTPException

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Pipeline([read, count, pick], workers="process", transport="shm://") as pipe:
            app.state.pipe = pipe
            yield

    app = FastAPI(title="letters", lifespan=lifespan)

    @app.post("/letters")
    async def letters(text: str = Body(embed=True)) -> dict[str, Any]:
        """The commonest letter."""
        try:
            return dict(await app.state.pipe.submit({"text": text}))
        except StageError as error:  # this input failed, and no other
            raise HTTPException(422, error.reason) from error

    return app


async def main(port: str = "8000") -> None:
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(make_app(), port=int(port), log_level="warning"))
    print(f"listening on http://127.0.0.1:{port}", flush=True)
    await server.serve()


if __name__ == "__main__":  # the processes import this file
    asyncio.run(main(*sys.argv[1:]))
