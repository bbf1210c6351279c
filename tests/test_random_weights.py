"""Random shards: the table's shapes, values of the right size, the same where ranks share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from compare import check_equal
from session import Session
from tiny import tiny_config
from torch import Tensor

from nanok3.config import K3, WHOLE, ModelConfig, Shard
from nanok3.ops import DECODE, PREFILL
from nanok3.random_weights import random_shard
from nanok3.reference import mxfp4
from nanok3.weight_table import table
from nanok3.weights import build

SPLITS = tiny_config(num_heads=4, num_attention_heads=4, moe_intermediate_size=128)
BF16 = torch.bfloat16


def test_shapes_and_dtypes_are_the_tables() -> None:
    shard = Shard(1, 4)
    values = random_shard(SPLITS, shard, "cpu", BF16, 0)
    for field in table(SPLITS, shard):
        if field.kind != "experts":
            value = values.pop(field.name)
            assert tuple(value.shape) == field.shape and value.dtype == field.dtype(BF16)
            assert value.isfinite().all()
            continue
        packed, scale = values.pop(f"{field.name}.packed"), values.pop(f"{field.name}.scale")
        assert packed.dtype == scale.dtype == torch.uint8
        assert tuple(mxfp4.dequantize(packed, scale, BF16).shape) == field.shape
    assert not values


def test_a_layer_alone_is_the_same() -> None:
    values = random_shard(SPLITS, Shard(2, 4), "cpu", BF16, 7)
    alone = random_shard(SPLITS, Shard(2, 4), "cpu", BF16, 7, layers=[3, 4])
    assert alone.keys() == {n for n in values if n.startswith(("layers.3.", "layers.4."))}
    for name, value in alone.items():
        check_equal(value, values[name], name)
    other = random_shard(SPLITS, Shard(2, 4), "cpu", BF16, 8, layers=[3])
    assert not torch.equal(other["layers.3.q_b"], alone["layers.3.q_b"])


def test_ranks_have_in_common_what_is_replicated() -> None:
    """In a KDA layer's in_proj that is f_a, 16 rows between the gate's and b's."""
    first, second = (random_shard(SPLITS, Shard(r, 4), "cpu", BF16, 0, [0, 3]) for r in (0, 1))
    for name in ("3.moe.bias", "3.moe.norm", "3.attn.kv_norm", "0.attn_res.score", "0.attn.o_norm"):
        check_equal(first[f"layers.{name}"], second[f"layers.{name}"], name)
    a, b = first["layers.0.in_proj"], second["layers.0.in_proj"]
    assert a.shape == (4 * 16 + 16 + 1, 64)
    same = (a == b).all(dim=1)
    assert same[64:80].all() and not same[:64].any() and not same[80]
    for name in ("0.o_proj", "3.q_b", "0.attn.dt_bias", "3.moe.w2.packed", "3.moe.w13.packed"):
        assert not torch.equal(first[f"layers.{name}"], second[f"layers.{name}"]), name


def test_sizes_of_the_values_of_k3() -> None:
    """1 / sqrt(inputs), the inputs of all ranks together: few experts, for the memory's sake."""
    config = replace(K3, num_experts=32)
    values = random_shard(config, Shard(5, 32), "cpu", BF16, 1, layers=[0, 3])
    few = (2 * 93) ** -0.5  # where the outputs of all layers add up
    expected = {
        "layers.0.in_proj": 7168**-0.5,
        "layers.0.o_proj": few * 12288**-0.5,
        "layers.0.dense.down": few * 33792**-0.5,
        "layers.3.q_b": 1536**-0.5,
        "layers.3.moe.latent_down": 7168**-0.5,
        "layers.3.moe.latent_up": few * 3584**-0.5,
    }
    for name, std in expected.items():
        assert values[name].float().std().item() == pytest.approx(std, rel=0.05), name
    for name, inputs in (("w13", 3584), ("w2", 3072)):
        packed, scale = (values[f"layers.3.moe.{name}.{half}"] for half in ("packed", "scale"))
        assert len(scale.unique()) == 3 and scale.min() > 100 and scale.max() < 127
        rms = mxfp4.dequantize(packed, scale, torch.float32).pow(2).mean().sqrt().item()
        assert 0.7 < rms * math.sqrt(inputs) < 1.42, "to the next power of two"


def unpacked(
    config: ModelConfig, values: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    for field in table(config):
        if field.kind == "experts":
            halves = (values[f"{field.name}.{half}"] for half in ("packed", "scale"))
            values[field.name] = mxfp4.dequantize(*halves, dtype)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_93_layers_stay_finite(dtype: torch.dtype) -> None:
    linear = K3.linear_attn_config
    config = tiny_config(
        num_hidden_layers=93,
        attn_res_block_size=12,
        kda_layers=linear.kda_layers,
        full_attn_layers=linear.full_attn_layers,
    )
    values = unpacked(config, random_shard(config, WHOLE, "cpu", dtype, 3), dtype)
    session = Session(config, build(config, values.__getitem__), dtype)
    logits = torch.cat([session.feed([list(range(20))], PREFILL), session.feed([[9]], DECODE)], 1)
    assert logits.isfinite().all()
    assert 0.2 < logits.std() < 5
    assert all(state.abs().max() < 1e3 for state in session.cached())
