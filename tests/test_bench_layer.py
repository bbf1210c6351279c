"""What `bench layer` measures: which layers, and which bytes it holds them to."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from nanok3.bench_layer import Case, layer_bytes, layers_of_kind
from nanok3.config import K3


@pytest.mark.parametrize("kind", ("kda", "mla"))
def test_layers_are_moe_layers_of_one_res_block(kind: str) -> None:
    layers = layers_of_kind(K3, kind)
    size = K3.attn_res_block_size
    assert len(layers) >= 2 and len({i // size for i in layers}) == 1
    assert all(K3.is_moe(i) and K3.is_kda(i) == (kind == "kda") for i in layers)
    assert all(i % size for i in layers), "a res_block's first layer starts a stream"


def test_bytes_of_a_layer_at_tp16() -> None:
    """By hand from the shapes: bf16 products, MXFP4 experts, state in and out."""
    heads, c, z, f = 6, 7168, 3584, 192
    bf16 = 2 * (3206 * c + c * 128 * heads + 1048 * c + c * 384 + 448 * z)
    small = 2 * 128 * heads * 128 + 4 * 4 * 3 * 128 * heads + 4 * (896 + 4 * c)  # f_b, conv, ..
    experts = 16 * (3 * f * z) * 17 / 32
    state = 2 * 4 * heads * 128 * 128
    layers = layers_of_kind(K3, "kda")
    found = layer_bytes(K3, Case(layers, 16, 0, 1, 1, 4096), 16.0)
    assert found == pytest.approx(bf16 + small + experts + state, rel=2e-3)


def test_more_experts_are_more_bytes() -> None:
    case = Case(layers_of_kind(K3, "kda"), 16, 0, 1, 8, 4096)
    more = layer_bytes(K3, case, 120.0) - layer_bytes(K3, case, 100.0)
    assert more == pytest.approx(20 * 3 * 192 * 3584 * 17 / 32, rel=1e-6)
