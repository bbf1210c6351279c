"""Layers of k3-mini through the text with a GPU's `PREFILL` reading, many rows of a request."""

from __future__ import annotations

import pytest
import torch
from compare import check_bf16, check_equal
from torch import Tensor

pytest.importorskip("cutlass")
from ptx.launch import Emulator

from kernels.test_rank_layer import KDA_DENSE, KDA_MOE, MINI, MLA_MOE, SEED
from nanok3 import model
from nanok3.cache import allocate_cache
from nanok3.config import WHOLE
from nanok3.kernel_ops import Kernels
from nanok3.ops import REFERENCE, Ops
from nanok3.prefill_ops import Prefill
from nanok3.random_weights import random_shard
from nanok3.rank_weights import packed_layer, plain_layer, unpacked
from nanok3.step import Step, allocate_buffers
from nanok3.weights import LayerWeights, build_layer

BLOCK, ROWS, LAST = 64, 11, 70  # rows at positions 60 .. 70, in two blocks
BF16, F32 = torch.bfloat16, torch.float32


def run(
    i: int, layer: LayerWeights, dtype: torch.dtype, ops: Ops, device: str
) -> dict[str, Tensor]:
    """From the same random values in every dtype; latents after the rows are never written."""
    generator = torch.Generator().manual_seed(7)
    cache = allocate_cache(MINI, 3, 4, BLOCK, dtype, device)
    buf = allocate_buffers(MINI, ROWS, ROWS, dtype, device)
    for tensor in (*vars(cache).values(), *vars(buf).values()):
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator).bfloat16())
    positions = torch.arange(LAST + 1 - ROWS, LAST + 1, device=device)
    table = torch.tensor([[3, 1]], device=device)
    slots = table[0][positions // BLOCK] * BLOCK + positions % BLOCK
    cache.latent[:, BLOCK + LAST % BLOCK + 1 : 2 * BLOCK] = float("nan")
    step = Step(
        input_ids=torch.arange(ROWS, device=device),
        positions=positions,
        slot_mapping=slots,
        block_table=table,
        state_slots=torch.tensor([2], device=device),
        logit_rows=torch.arange(0, device=device),
        block_size=BLOCK,
    )
    model.one_layer(MINI, i, layer, cache, step, buf, ops)
    found = {"delta": buf.delta} | {f"stream {n}": s for n, s in enumerate(buf.streams)}
    if MINI.is_kda(i):
        row = MINI.kda_layer_ids.index(i)
        return found | {"state": cache.state[row, 2], "conv_state": cache.conv_state[row, 2]}
    row = MINI.mla_layer_ids.index(i)
    return found | {"latent": cache.latent[row, slots]}


def check_layer(i: int, device: str) -> None:
    fields = random_shard(MINI, WHOLE, device, BF16, SEED, layers=(i,))
    wide = {n: v.float() if v.is_floating_point() else v for n, v in fields.items()}
    right = run(i, build_layer(MINI, unpacked(wide, F32), i), F32, REFERENCE, device)
    plain = plain_layer(MINI, WHOLE, device, BF16, SEED, i)
    yardstick = run(i, plain, BF16, REFERENCE, device)
    kernels = Kernels(MINI, 1, device).record()  # decode's workspaces: fewer rows than these
    ops = Prefill(MINI, WHOLE, ROWS, device).record(kernels)
    got = run(i, packed_layer(MINI, WHOLE, device, SEED, i), BF16, ops, device)
    for name, value in got.items():
        check_bf16(value.bfloat16(), yardstick[name].bfloat16(), right[name], f"{i}: {name}")
    if i == KDA_DENSE:  # the first layer's input is no product
        check_equal(got["stream 0"], yardstick["stream 0"])


@pytest.mark.parametrize("i", [KDA_DENSE, KDA_MOE, MLA_MOE])
def test_a_layer_s_prefill_on_emulator(emulated: Emulator, i: int) -> None:
    check_layer(i, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("i", [KDA_DENSE, KDA_MOE, MLA_MOE])
def test_a_layer_s_prefill(i: int) -> None:
    check_layer(i, "cuda")
