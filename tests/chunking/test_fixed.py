from __future__ import annotations

import pytest

from pipelined.chunking import FixedChunks, Load, make_policy
from pipelined.errors import ConfigError


def test_a_micro_batch_takes_its_size_from_one_prompt_or_several() -> None:
    budget = FixedChunks(100).micro_batch(Load(decodes=7))
    assert budget.offer(0, 1000) == 100
    budget.spend(0, 60)
    assert budget.offer(512, 1000) == 40
    assert budget.offer(0, 5) == 5
    budget.spend(0, 40)
    assert budget.offer(0, 5) == 0


def test_policies_by_name() -> None:
    assert repr(make_policy("fixed", chunked_prefill_size=64)) == "<FixedChunks 64>"
    with pytest.raises(ConfigError, match="did you mean 'fixed'"):
        make_policy("fixd", chunked_prefill_size=64)
    with pytest.raises(ConfigError, match="expected 1 token or more"):
        make_policy("fixed", chunked_prefill_size=0)
