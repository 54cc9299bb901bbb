"""A transport from a package of its own: built, installed beside us, found by entry point, held to the contract."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "transport-plugin"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _run(*command: str, paths: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if paths is None else os.environ | {"PYTHONPATH": str(paths)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of the plug-in was installed."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    wheel = (*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    built = _run(*wheel)
    assert built.returncode == 0, built.stderr
    (made,) = folder.glob("*.whl")
    put = _run(*pip, "install", "--no-deps", "--target", str(folder / "site"), str(made))
    assert put.returncode == 0, put.stderr
    return folder / "site"


def _pipelined(installed: Path, *arguments: str) -> tuple[int, Any, str]:
    done = _run(sys.executable, "-m", "pipelined", *arguments, "--json", paths=installed)
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


def test_it_is_listed(installed: Path) -> None:
    code, rows, said = _pipelined(installed, "transports")
    assert code == 0, said
    (row,) = [row for row in rows if row["scheme"] == "unix"]
    assert row["from"] == "pipelined-unix"
    assert row["capabilities"]["processes"]


def test_it_keeps_the_contract(installed: Path) -> None:
    code, found, said = _pipelined(installed, "transports", "check", "unix://", "--quick")
    assert found is not None, said
    assert [result for result in found["results"] if result["outcome"] == "fail"] == []
    assert code == 0
    skipped = {result["name"] for result in found["results"] if result["outcome"] == "skip"}
    assert skipped == {"a_lease_is_written_in_place", "leases_never_sent_come_back", "a_missing_library_is_named"}


def test_a_pipeline_runs_over_it(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from pipelined.pipeline import Pipeline\n"
        "def double(x): return {'t': x['t'] * 2}\n"
        "if __name__ == '__main__':\n"
        "    import asyncio\n"
        "    async def main():\n"
        "        async with Pipeline([double, double], workers='process', transport='unix://') as pipe:\n"
        "            inputs = ({'t': torch.full((9,), n)} for n in range(5))\n"
        "            print([int(y['t'].sum()) async for y in pipe.stream(inputs)])\n"
        "    asyncio.run(main())\n"
    )
    done = _run(sys.executable, str(program), paths=installed)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [36 * n for n in range(5)]
