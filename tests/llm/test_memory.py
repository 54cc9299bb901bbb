"""What the ranks need is known before any of them loads."""

from __future__ import annotations

import msgspec
import pytest

from pipelined.errors import CapacityError
from pipelined.llm import AsyncLLM, memory
from pipelined.llm.memory import PROCESS_BYTES, available_bytes, memory_need
from pipelined.stage import LoadOptions, ModelInfo

GIB = 1 << 30

INFO = ModelInfo(
    ref="m",
    path="/m",
    family="hf",
    architecture="M",
    layers=4,
    cuts=(1, 2, 3),
    layer_bytes=(GIB, GIB, 2 * GIB, 2 * GIB),
    embedding_bytes=3 * GIB,
    head_bytes=4 * GIB,
    kv_bytes_per_token=(1 << 20,) * 4,
    hidden_size=8,
    vocab_size=8,
    context_length=64,
    eos_token_ids=(),
    dtype="float32",
    options=LoadOptions(kv_cache_tokens=1024),
)


def test_each_stage_counts_its_own() -> None:
    need = memory_need(INFO, [(0, 2), (2, 4)], processes=True)
    assert need.weight_bytes == (5 * GIB, 8 * GIB)
    assert need.kv_bytes == (2 * GIB, 2 * GIB)
    assert need.total_bytes == 17 * GIB + 2 * PROCESS_BYTES
    assert memory_need(INFO, [(0, 4)], processes=False).total_bytes == 17 * GIB
    page = msgspec.structs.replace(INFO, options=LoadOptions(page_size=64))
    assert sum(memory_need(page, [(0, 4)], processes=False).kv_bytes) == 256 << 20


def test_what_does_not_fit_is_told() -> None:
    need = memory_need(INFO, [(0, 2), (2, 4)], processes=False)
    need.check(17 * GIB)
    with pytest.raises(CapacityError, match=r"17,408 MiB are needed .*stage 1: weights 8,192 MiB, KV cache 2,048 MiB"):
        need.check(17 * GIB - 1)


def test_there_is_some_memory() -> None:
    free_bytes = available_bytes()
    assert free_bytes is not None
    assert free_bytes > 1 << 20


async def test_nothing_starts_that_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 20)
    llm = AsyncLLM("toy://?layers=2", workers="task", pp_size=2)
    async with llm:  # too small to look
        pass
    llm.info = msgspec.structs.replace(llm.info, layer_bytes=(GIB, GIB))
    with pytest.raises(CapacityError, match="does not fit"):
        async with llm:
            pass
    assert llm.state.name == "stopped"
