from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.chunking import ChunkPolicy, DynamicChunks, Load, Runtime
from pipelined.costs import LiveCosts, PipelineCost, StageCost
from pipelined.errors import ConfigError


def cut(policy: ChunkPolicy, tokens: int, prefix: int = 0) -> list[int]:
    sizes, end = [], prefix + tokens
    while prefix < end:
        budget = policy.micro_batch(Load(prompts=1))
        sizes.append(budget.offer(prefix, end - prefix))
        budget.spend(prefix, sizes[-1])
        prefix += sizes[-1]
    return sizes


@given(
    st.integers(1, 300).map(lambda n: 64 * n),
    st.floats(0, 1),
    st.integers(1, 1 << 18),
    st.sampled_from([16, 64, 128]),
    st.floats(1e-12, 1e-7),
    st.floats(1e-7, 1e-3),
)
def test_sizes_follow_the_rule(first: int, smoothing: float, tokens: int, page: int, a: float, b: float) -> None:
    policy = DynamicChunks(first, Runtime(a, b), smoothing=smoothing, page_size=page)
    sizes, step = cut(policy, tokens), max(page, 64)
    assert sum(sizes) == tokens
    prefix = 0
    for size in sizes[:-1]:
        assert size % step == 0
        assert max(step, first // 4 // step * step) <= size <= max(first, step)
        goal = first + smoothing * (Runtime(a, b).size(prefix, first) - first)
        assert size in (int(goal) // step * step, max(step, first // 4 // step * step))
        prefix += size
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)


def test_the_solution_is_one() -> None:
    runtime = Runtime(3e-9, 5e-5)
    whole = lambda n: 3e-9 * n * n + 5e-5 * n  # noqa: E731
    x = runtime.size(100_000, 8192)
    assert whole(100_000 + x) - whole(100_000) == pytest.approx(whole(8192))
    assert Runtime(0, 1).size(5000, 100) == 100


def test_smoothing_zero_is_fixed() -> None:
    assert cut(DynamicChunks(1024, Runtime(1e-8, 1e-5), smoothing=0), 5000) == [1024] * 4 + [904]


def test_the_published_chunks_of_kimi_come_out() -> None:
    """Strict (smoothing 1), no floor, and the prefix costs of the published stage model counted: exactly the list.

    The plain rule knows run times of whole prompts only, not what a chunk pays for its prefix: without that term,
    sizes come out 3 to 14 % larger, and one chunk fewer.
    """
    published = [32768, 16192, 12416, 10368, 9088, 8192, 7488, 6912, 6464, 6080, 5760, 5504, 3840]
    model = {"quadratic": 3.25e-7, "linear": 6.03e-3}
    strict = DynamicChunks(32768, Runtime(**model, prefix=5.39e-4), smoothing=1, least_share=0)
    assert cut(strict, 131072) == published
    plain = cut(DynamicChunks(32768, Runtime(**model), smoothing=1, least_share=0), 131072)
    assert plain == [32768, 16640, 12864, 10880, 9600, 8704, 8000, 7424, 6976, 6592, 6272, 4352]
    assert cut(DynamicChunks(32768, Runtime(**model)), 131072)[-2:] == [
        13120,
        3456,
    ]  # as documented: 0.75, at least C/4


def test_run_times_are_fitted_to_whole_prompts() -> None:
    lengths = [1024 * n for n in range(1, 33)]
    found = Runtime.fit(lengths, [0.02 + 4e-5 * n + 3e-9 * n * n for n in lengths])
    assert found.quadratic == pytest.approx(3e-9)
    assert found.linear == pytest.approx(4e-5)
    assert Runtime.of(PipelineCost((StageCost(1e-9, 1e-6, 0), StageCost(2e-9, 1e-6, 9))), 512) == Runtime(2e-9, 1e-6)
    with pytest.raises(ConfigError, match="3 or more"):
        Runtime.fit([1, 2, 2], [1, 2, 2])
    with pytest.raises(ConfigError, match="do not grow"):
        Runtime.fit([1000, 2000, 3000], [3, 2, 1])


def test_it_takes_what_is_known_at_the_time() -> None:
    live = LiveCosts(2)
    policy = DynamicChunks(8192, live)
    before = policy.size(100_000)
    assert 2048 <= before < 8192
    for rank in range(2):
        for size in (512, 1024, 2048, 4096):
            for start in (0, 8192):
                live.observe(rank, cost_s := _work(start, size), StageCost(0.0, 1e-4, 0.001).launch_s(cost_s))
    assert policy.size(100_000) > before


def test_a_micro_batch_is_shared() -> None:
    budget = DynamicChunks(4096, Runtime(1e-9, 1e-5)).micro_batch(Load(prompts=2))
    assert budget.offer(0, 9000) == 4096
    assert budget.offer(0, 1000) == 1000
    budget.spend(0, 1000)
    assert budget.offer(64, 9000) == 3096


@pytest.mark.parametrize("settings", [{"chunked_prefill_size": 0}, {"smoothing": 1.1}, {"smoothing": -0.1}])
def test_nonsense_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        DynamicChunks(**{"chunked_prefill_size": 64, "runtime": Runtime(0, 1), **settings})  # type: ignore[arg-type]


def _work(start: int, size: int):  # type: ignore[no-untyped-def]
    from pipelined.costs import MicroBatch

    return MicroBatch(((start, size),))
