"""What configurations say of the work in a layer."""

from __future__ import annotations

from types import SimpleNamespace

from pipelined.models.shapes import Shapes, active_elements, shapes


def text(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**{"num_attention_heads": 8, "hidden_size": 64, **fields})


def test_heads_and_width() -> None:
    assert shapes(text(), 2) == Shapes(8, 8, 64, ())
    assert shapes(text(num_key_value_heads=2, head_dim=16), 2) == Shapes(8, 2, 128, ())
    assert shapes(text(num_key_value_heads=[4, 2]), 2).kv_heads == 2


def test_one_latent_instead_of_heads() -> None:
    latent = text(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert shapes(latent, 2) == Shapes(8, 1, 8 * 160, ())


def test_windows() -> None:
    kinds = ["sliding_attention", "full_attention"]
    assert shapes(text(layer_types=kinds, sliding_window=512), 2).windows == (512, 0)
    assert shapes(text(layer_types=kinds, sliding_window=None), 2).windows == ()
    assert shapes(text(layer_types=["full_attention"] * 2, sliding_window=512), 2).windows == ()
    assert shapes(text(sliding_window=512), 2).windows == ()  # such a configuration may not use it at all
    assert shapes(text(layer_types=["chunked_attention"], attention_chunk_size=99), 1).windows == (99,)


def test_of_routed_experts_some_are_used() -> None:
    elements = {
        "model.layers.0.mlp.experts.gate_up_proj": 800,
        "model.layers.0.mlp.shared_experts.up_proj": 50,
        "model.layers.0.self_attn.q_proj.weight": 30,
    }
    used = dict(active_elements(elements, text(num_local_experts=16, num_experts_per_tok=2)))
    assert list(used.values()) == [100, 50, 30]
    assert dict(active_elements(elements, text())) == elements
