"""Requests made up from our own OpenAPI docs: no answer is a server error, and errors have one shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from processes import ServerProcess, server_process

schemathesis = pytest.importorskip("schemathesis")

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

EXAMPLES = 40


@pytest.fixture(scope="module")
def tiny_server(tiny: str) -> Iterator[ServerProcess]:
    words = ("--pp", "2", "--workers", "task", "--context-length", "64", "--page-size", "4", "--threads-per-rank", "1")
    with server_process(tiny, *words, "--chunked-prefill-size", "32", "--profile-dir", tiny + "/profiles") as found:
        yield found


@pytest.fixture(scope="module")
def documented(tiny_server: ServerProcess) -> Any:
    return schemathesis.openapi.from_url(tiny_server.url + "/openapi.json")


def checked(case: Any, statuses: dict[str, set[int]]) -> None:
    response = case.call(timeout=60)
    statuses[case.operation.path].add(response.status_code)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()) == {"error"}, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_no_request_is_a_server_error(documented: Any) -> None:
    operations = [found.ok() for found in documented.get_all_operations()]
    assert len(operations) >= 13
    statuses: dict[str, set[int]] = {operation.path: set() for operation in operations}
    for operation in operations:
        examples = EXAMPLES if operation.method == "post" else 5
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            try:
                cases = operation.as_strategy(generation_mode=mode)
                run = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
                run(given(case=cases)(lambda case: checked(case, statuses)))()
            except Unsatisfiable:
                assert mode is schemathesis.GenerationMode.NEGATIVE  # nothing can be wrong where nothing is sent
    generating = [statuses["/v1/completions"], statuses["/v1/chat/completions"]]
    assert all(400 in seen for seen in generating), statuses
    assert any(200 in seen for seen in generating), statuses


def test_it_is_well_after_all_that(tiny_server: ServerProcess) -> None:
    import httpx2

    assert httpx2.get(tiny_server.url + "/health_generate", timeout=60).status_code == 200
    assert httpx2.get(tiny_server.url + "/server_info", timeout=60).json()["requests"]["inside"] == 0
    assert not [line for line in tiny_server.log if "Traceback" in line]
