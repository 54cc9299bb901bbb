"""Our transports keep the contract."""

from __future__ import annotations

import pytest

from pipelined.errors import MissingDependencyError
from pipelined.testing import CHECKS, run_check
from pipelined.testing.check import Check
from pipelined.testing.world import transport_from
from pipelined.transport import installed

SCHEMES = ("memory", "shm", "zmq", "tcp")
FAST = [check for check in CHECKS if "processes" not in check.needs]
WITH_CHILDREN = [check for check in CHECKS if "processes" in check.needs]


def _conforms(scheme: str, check: Check, *, quick: bool) -> None:
    if scheme not in installed():
        pytest.skip(f"{scheme} is not registered")
    try:
        capabilities = transport_from(f"{scheme}://").capabilities
    except MissingDependencyError as error:
        pytest.skip(str(error))
    result = run_check(check, f"{scheme}://", capabilities=capabilities, quick=quick)
    if result.outcome == "skip":
        pytest.skip(result.reason)
    assert result.outcome == "pass", result.reason


@pytest.mark.parametrize("check", FAST, ids=lambda check: f"{check.rule}-{check.name}")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quickly(scheme: str, check: Check) -> None:
    _conforms(scheme, check, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("check", WITH_CHILDREN, ids=lambda check: f"{check.rule}-{check.name}")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_with_child_processes(scheme: str, check: Check) -> None:
    _conforms(scheme, check, quick=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", FAST, ids=lambda check: f"{check.rule}-{check.name}")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_full(scheme: str, check: Check) -> None:
    _conforms(scheme, check, quick=False)
