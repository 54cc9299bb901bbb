"""Volumes against the published formulas, and layouts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.planning.communication import moved_bytes
from pipelined.planning.layouts import Layout, layouts

S, H, L, KV = 131072, 4096, 94, 2 * 512  # Qwen3-235B with activations of one byte


def volume(layout: Layout) -> tuple[float, float, float]:
    moved = moved_bytes(layout, S, layers=L, hidden_bytes=H, kv_bytes=KV * L)
    assert moved.total == moved.tp + moved.cp + moved.pp
    return moved.tp, moved.cp, moved.pp


@given(st.sampled_from([2, 4, 8, 32]))
def test_alone_each_is_the_published_formula(size: int) -> None:
    assert volume(Layout(1, tp=size)) == pytest.approx((2 * (size - 1) * (S * H / size) * 2 * L, 0, 0))
    assert volume(Layout(1, cp=size)) == pytest.approx((0, (size - 1) * (S / size * KV) * L, 0))
    assert volume(Layout(size)) == (0, 0, S * H * (size - 1))


def test_large_sizes_come_near_the_published_limits() -> None:
    assert volume(Layout(1, tp=1024))[0] == pytest.approx(4 * S * H * L, rel=1e-2)
    assert volume(Layout(1, cp=1024))[1] == pytest.approx(S * KV * L, rel=1e-2)


def test_pipelines_move_least() -> None:
    assert volume(Layout(8))[2] < volume(Layout(1, cp=8))[1] < volume(Layout(1, tp=8))[0]


@given(st.integers(1, 64))
def test_every_layout_once(devices: int) -> None:
    found = layouts(devices)
    assert len(found) == len(set(found))
    assert found[0] == Layout(devices)
    for layout in found:
        assert layout.devices == devices or layout.runnable
        assert layout.runnable == (layout.tp == layout.cp == 1)
    assert sum(one.devices == devices for one in found) == sum(
        devices % (pp * tp) == 0 for pp in range(1, devices + 1) for tp in range(1, devices + 1)
    )


def test_names() -> None:
    assert [str(one) for one in (Layout(1), Layout(4, 2), Layout(1, 1, 8))] == ["one device", "PP4 TP2", "CP8"]
