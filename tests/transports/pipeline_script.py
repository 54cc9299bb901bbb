"""A pipeline of processes over a transport, as a script of a user's would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import asyncio, sys, torch
from pipelined.pipeline import Pipeline

class Add:
    def __init__(self, amount):
        self.amount = amount

    def forward(self, x):
        return {"t": x["t"] + self.amount}

async def main():
    async with Pipeline([Add(1.0), Add(10.0)], workers="process", transport=sys.argv[1]) as pipeline:
        inputs = [{"t": torch.full((300_000,), float(n))} for n in range(6)]
        outputs = [output async for output in pipeline.stream(inputs)]
    assert [output["t"].eq(n + 11.0).all().item() for n, output in enumerate(outputs)] == [True] * 6

if __name__ == "__main__":
    asyncio.run(main())
    print("as it should be")
"""


def run_pipeline(uri: str, directory: Path) -> None:
    """Two ranks; the outputs are checked in the script."""
    script = directory / "script.py"
    script.write_text(_SCRIPT)
    ended = subprocess.run([sys.executable, str(script), uri], capture_output=True, text=True, timeout=110, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "as it should be"), ended.stderr
