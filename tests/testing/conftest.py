from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# Tests import the broken stages by the name of their module.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _broken_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken transports are named as `module:Class`, here and in child processes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
