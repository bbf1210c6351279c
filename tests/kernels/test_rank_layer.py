"""A rank's layers through the text with the `KERNELS` reading, against the torch reading.

Packed from random MXFP4 bytes, run alone: its own columns are right, its peers' stay.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare import check_bf16, check_equal
from torch import Tensor

pytest.importorskip("cutlass")
from ptx.launch import Emulator

from nanok3 import model
from nanok3.cache import Cache, allocate_cache
from nanok3.config import Shard, load_config
from nanok3.kernel_ops import Kernels
from nanok3.ops import REFERENCE, Ops
from nanok3.random_weights import random_shard
from nanok3.rank_weights import packed_ends, packed_layer, plain_ends, plain_layer, unpacked
from nanok3.step import Buffers, Step, allocate_buffers
from nanok3.weights import LayerWeights, Weights, build_ends, build_layer

MINI = load_config(Path(__file__).parents[2] / "nanok3" / "models" / "k3_mini")
SHARD, SEED, TOKENS, BLOCK = Shard(1, 2), 5, 3, 64
KDA_DENSE, KDA_MOE, MLA_MOE = 0, 1, 3
BF16, F32 = torch.bfloat16, torch.float32


def step_of(device: str) -> Step:
    """Three requests of one row; the last one's second block is its context's last."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, device=device)

    return Step(
        input_ids=ints(5, MINI.vocab_size - 1, MINI.vocab_size // 2),
        positions=ints(0, 9, 70),
        slot_mapping=ints(BLOCK, 2 * BLOCK + 9, 4 * BLOCK + 6),
        block_table=ints(1, 0, 2, 0, 3, 4).view(TOKENS, 2),
        state_slots=ints(3, 1, 2),
        logit_rows=torch.arange(TOKENS, device=device),
        block_size=BLOCK,
    )


def state_of(dtype: torch.dtype, device: str) -> tuple[Cache, Buffers]:
    """The same random values in every dtype, in all that a step may find."""
    generator = torch.Generator().manual_seed(7)
    cache = allocate_cache(MINI, TOKENS + 1, 5, BLOCK, dtype, device, SHARD)
    buf = allocate_buffers(MINI, TOKENS, TOKENS, dtype, device, SHARD)
    for tensor in (*vars(cache).values(), *vars(buf).values()):
        if tensor.is_floating_point():
            value = torch.randn(tensor.shape, generator=generator).bfloat16()
            tensor.copy_(value)
    return cache, buf


def run(
    i: int, layer: LayerWeights, ends: Weights, dtype: torch.dtype, ops: Ops, device: str
) -> dict[str, Tensor]:
    cache, buf = state_of(dtype, device)
    step = step_of(device)
    model.one_layer(MINI, i, layer, cache, step, buf, ops)
    found = {"delta": buf.delta.clone(), "shared": buf.shared_part.clone()}
    found |= {f"stream {n}": stream.clone() for n, stream in enumerate(buf.streams)}
    if i == MLA_MOE:
        row = MINI.mla_layer_ids.index(i)
        found["latent"] = cache.latent[row, step.slot_mapping].clone()
    ops.embed(step.input_ids, ends.embed, out=buf.delta_sum)
    found["embed"] = buf.delta_sum.clone()
    model.head(ends, buf.streams, step, buf, ops)
    found["logits"] = buf.logits.clone()
    return found


def check_layer(i: int, device: str) -> None:
    fields = random_shard(MINI, SHARD, device, BF16, SEED, layers=(i,), ends=True)
    wide = {
        name: value.float() if value.is_floating_point() else value
        for name, value in fields.items()
    }
    get = unpacked(wide, F32)
    right = run(
        i, build_layer(MINI, get, i), build_ends(MINI, get, (), SHARD), F32, REFERENCE, device
    )
    plain = plain_layer(MINI, SHARD, device, BF16, SEED, i)
    plain_end = plain_ends(MINI, SHARD, device, BF16, SEED)
    yardstick = run(i, plain, plain_end, BF16, REFERENCE, device)
    kernels = Kernels(MINI, TOKENS, device, SHARD).record()
    packed = packed_layer(MINI, SHARD, device, SEED, i)
    got = run(i, packed, packed_ends(MINI, SHARD, device, SEED), BF16, kernels, device)
    for name, value in got.items():
        check_bf16(value.bfloat16(), yardstick[name].bfloat16(), right[name], f"layer {i}: {name}")
    own = SHARD.slice(MINI.vocab_size)
    others = replace(SHARD, rank=0).slice(MINI.vocab_size)
    assert got["logits"][:, own].isfinite().all()
    check_equal(got["logits"][:, others], yardstick["logits"][:, others], "a peer's logits")


@pytest.mark.parametrize("i", [KDA_DENSE, KDA_MOE, MLA_MOE])
def test_a_rank_s_layer_on_emulator(emulated: Emulator, i: int) -> None:
    check_layer(i, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("i", [KDA_DENSE, KDA_MOE, MLA_MOE])
def test_a_rank_s_layer(i: int) -> None:
    check_layer(i, "cuda")
