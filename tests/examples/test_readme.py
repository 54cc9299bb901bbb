"""The README's programs run as they stand there, and its commands exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipelined.cli.main import main

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = sorted(set(re.findall(r"`(pipelined bench [^`]+)`", README)))
PRINTED = (("model", " Paris"), ("own stages", "{'n': 41}\n{'n': 1}\n{'n': 3}\n{'n': 5}\n"), ("virtual", "3600.0\n"))


def test_all_programs_are_tested():
    assert len(PROGRAMS) == len(PRINTED)
    assert len(COMMANDS) >= 8


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(len(PRINTED)), ids=[name for name, _ in PRINTED])
def test_program(number, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[number])
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PRINTED[number][1])


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command, monkeypatch):
    """Its arguments are those that the command line knows; measuring itself takes too long here."""
    arguments = shlex.split(command.replace("[", "").replace("]", ""))[1:]
    module = f"pipelined.cli.bench_{arguments[1]}"
    ran = []
    __import__(module)
    monkeypatch.setattr(f"{module}.run", lambda parsed: ran.append(parsed) or 0)
    assert main(arguments) == 0
    assert len(ran) == 1
