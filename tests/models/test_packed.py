"""Packed linear layers are linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipelined.models.packed import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


class Model(nn.Module):
    def __init__(self, *, bias: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 24, dtype=dtype)
        self.wide = nn.Linear(24, 70, bias=bias, dtype=dtype)
        self.narrow = nn.Linear(70, 24, bias=bias, dtype=dtype)
        self.head = nn.Linear(24, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.narrow(self.wide(self.embed(ids)).relu()))
        return out


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 40), (2, 3, 5), (0,), (1, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_equal_to_plain_ones(shape: tuple[int, ...], bias: bool) -> None:
    plain, packed = Model(bias=bias), Model(bias=bias)
    pack_linears(packed)
    ids = torch.randint(0, 50, shape)
    torch.testing.assert_close(packed(ids), plain(ids), atol=1e-5, rtol=1e-5)
    assert [type(part) for part in (packed.wide, packed.narrow, packed.head)] == [PackedLinear] * 3
    assert not packed.embed.weight.is_mkldnn


def test_what_cannot_be_packed_stays() -> None:
    model = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float64), Own(4, 4)])
    pack_linears(model)
    assert not any(isinstance(part, PackedLinear) for part in model)


def test_shared_weights_are_packed_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 6)])
    model[1].weight = model[0].weight
    pack_linears(model)
    assert model[0].weight is model[1].weight
    assert model[0].weight.is_mkldnn


class Own(nn.Linear):
    """Somebody's own kind: it may read its weight."""
