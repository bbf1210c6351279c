"""A rank's records with random values at real sizes, for benches without a checkpoint.

`packed_*` are for the `KERNELS` reading: their experts go from MXFP4 bytes to the kernels' layout
and are never unpacked. `plain_*` hold the same values for the torch readings, with dense experts.
One layer is made at a time, so that beside a rank's weights only one layer lies twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanok3 import packing
from nanok3.config import ModelConfig, Shard
from nanok3.packing import empty_head, empty_layer, put_fields
from nanok3.random_weights import random_shard
from nanok3.reference import mxfp4
from nanok3.weights import Get, LayerWeights, Weights, build_ends, build_layer


def packed_weights(config: ModelConfig, shard: Shard, device: str, seed: int) -> Weights:
    """All layers of a rank in the kernels' layouts."""
    numbers = range(config.num_hidden_layers)
    layers = tuple(packed_layer(config, shard, device, seed, i) for i in numbers)
    return packed_ends(config, shard, device, seed, layers)


def packed_layer(config: ModelConfig, shard: Shard, device: str, seed: int, i: int) -> LayerWeights:
    places = empty_layer(config, shard, i, device)
    fields = random_layer(config, shard, device, torch.bfloat16, seed, i)
    others = put_fields(places.puts, fields)
    return packing.packed_layer(config, (places.packed | others).__getitem__, i)


def packed_ends(
    config: ModelConfig, shard: Shard, device: str, seed: int, layers: tuple[LayerWeights, ...] = ()
) -> Weights:
    """Embedding and head, around these layers."""
    places = empty_head(config, shard, device)
    fields = random_shard(config, shard, device, torch.bfloat16, seed, layers=(), ends=True)
    others = put_fields(places.puts, fields)
    return build_ends(config, (places.packed | others).__getitem__, layers, shard)


def plain_weights(
    config: ModelConfig, shard: Shard, device: str, dtype: torch.dtype, seed: int
) -> Weights:
    """The same values as torch takes them."""
    numbers = range(config.num_hidden_layers)
    layers = tuple(plain_layer(config, shard, device, dtype, seed, i) for i in numbers)
    return plain_ends(config, shard, device, dtype, seed, layers)


def plain_layer(
    config: ModelConfig, shard: Shard, device: str, dtype: torch.dtype, seed: int, i: int
) -> LayerWeights:
    fields = random_layer(config, shard, device, dtype, seed, i)
    return build_layer(config, unpacked(fields, dtype), i)


def plain_ends(
    config: ModelConfig,
    shard: Shard,
    device: str,
    dtype: torch.dtype,
    seed: int,
    layers: tuple[LayerWeights, ...] = (),
) -> Weights:
    fields = random_shard(config, shard, device, dtype, seed, layers=(), ends=True)
    return build_ends(config, fields.__getitem__, layers, shard)


def random_layer(
    config: ModelConfig, shard: Shard, device: str, dtype: torch.dtype, seed: int, i: int
) -> dict[str, Tensor]:
    return random_shard(config, shard, device, dtype, seed, layers=(i,))


def unpacked(fields: dict[str, Tensor], dtype: torch.dtype) -> Get:
    """Fields by name, experts dense; expert by expert, for the steps between are large."""

    def get(name: str) -> Tensor:
        if name in fields:
            return fields[name]
        pairs = zip(fields[f"{name}.packed"], fields[f"{name}.scale"], strict=True)
        return torch.stack([mxfp4.dequantize(*pair, dtype) for pair in pairs])

    return get
