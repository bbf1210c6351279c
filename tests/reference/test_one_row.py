"""The forms for one row a request against the plain ones, and that they touch only their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import check_bf16, check_close, check_equal
from tiny import TINY, tiny_weights
from torch import Tensor

from nanok3.reference.experts import experts_value
from nanok3.reference.kda import kda_ref
from nanok3.reference.mla import mla_ref
from nanok3.reference.one_row import experts_one_row, experts_sorted, kda_one_row, mla_one_row
from nanok3.step import widths

LIMIT = {torch.float32: 1e-5, torch.float64: 1e-12}
WIDTHS = widths(TINY)
BLOCK = 4
KDA_LAYER, MLA_LAYER, MOE_LAYER = 0, 3, 1


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(fast: dict[torch.dtype, Tensor], plain: dict[torch.dtype, Tensor], what: str) -> None:
    """Both forms in three dtypes; the plain one in float64 is right."""
    for dtype, limit in LIMIT.items():
        check_close(fast[dtype], plain[torch.float64], limit, f"{what} {dtype}")
    right = plain[torch.float64]
    check_bf16(fast[torch.bfloat16], plain[torch.bfloat16], right, f"{what} bf16")


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("num_reqs", [1, 3])
def test_kda(num_reqs: int) -> None:
    kda = TINY.linear_attn_config
    slots = torch.tensor([4, 1, 3][:num_reqs])
    free = [s for s in range(6) if s not in slots.tolist()]
    outs: dict[str, dict[torch.dtype, Tensor]] = {"fast": {}, "plain": {}}
    states: dict[str, dict[torch.dtype, Tensor]] = {"fast": {}, "plain": {}}
    for dtype in DTYPES:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        w = tiny_weights(TINY, 0, dtype).layers[KDA_LAYER].attn
        x = normal(1, num_reqs, WIDTHS["kda_in"]).bfloat16().to(dtype)
        conv = normal(2, 6, kda.short_conv_kernel_size - 1, 3 * kda.width).bfloat16().to(dtype)
        state = normal(3, 6, kda.num_heads, kda.head_dim, kda.head_dim).float().to(wide)
        conv[free], state[free] = float("nan"), float("nan")
        after = {}
        for form, op in (("fast", kda_one_row), ("plain", kda_ref)):
            conv_state, new_state = conv.clone(), state.clone()
            out = torch.full((num_reqs, WIDTHS["kda_heads"]), float("nan"), dtype=dtype)
            op(x, w, conv_state, new_state, slots, out=out)
            outs[form][dtype], states[form][dtype] = out, new_state[slots]
            check_equal(new_state[free], state[free], "states of others")
            after[form] = conv_state
        check_equal(after["fast"], after["plain"], "inputs of the convolution")
    check(outs["fast"], outs["plain"], "out")
    for dtype in DTYPES:  # the state is wide whatever the activations are
        limit = LIMIT.get(dtype, 1e-5)
        check_close(states["fast"][dtype], states["plain"][dtype], limit, f"state {dtype}")


@pytest.mark.parametrize(
    "positions",
    [[0], [BLOCK - 1], [BLOCK], [9, 0, 3]],  # first token, both sides of a block's end, a batch
)
def test_mla(positions: list[int]) -> None:
    num_reqs, columns = len(positions), max(positions) // BLOCK + 1
    table = 1 + torch.randperm(num_reqs * columns, generator=torch.Generator().manual_seed(0))
    table = table.view(num_reqs, columns)
    outs: dict[str, dict[torch.dtype, Tensor]] = {"fast": {}, "plain": {}}
    for dtype in DTYPES:
        w = tiny_weights(TINY, 0, dtype).layers[MLA_LAYER].attn
        q = normal(1, num_reqs, WIDTHS["q"]).bfloat16().to(dtype)
        x = normal(2, num_reqs, WIDTHS["mla_in"]).bfloat16().to(dtype)
        cache = torch.full(((num_reqs * columns + 1) * BLOCK, TINY.latent_width), float("nan"))
        for request, position in enumerate(positions):
            for p in range(position + 1):  # what no row may see stays NaN
                slot = int(table[request, p // BLOCK]) * BLOCK + p % BLOCK
                cache[slot] = normal(100 * request + p, TINY.latent_width).bfloat16()
        cache = cache.to(dtype)
        for form, op in (("fast", mla_one_row), ("plain", mla_ref)):
            out = torch.full((num_reqs, WIDTHS["mla_heads"]), float("nan"), dtype=dtype)
            op(q, x, w, cache, table, torch.tensor(positions), BLOCK, out=out)
            outs[form][dtype] = out
    check(outs["fast"], outs["plain"], "out")


@pytest.mark.parametrize("op", [experts_one_row, experts_sorted])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_experts(num_rows: int, op: Callable[..., None]) -> None:
    ids = normal(4, num_rows, TINY.num_experts).argsort(-1)[:, : TINY.num_experts_per_token]
    outs: dict[str, dict[torch.dtype, Tensor]] = {"fast": {}, "plain": {}}
    for dtype in DTYPES:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        w = tiny_weights(TINY, 0, dtype).layers[MOE_LAYER].mlp.experts
        latent = normal(5, num_rows, WIDTHS["latent"]).bfloat16().to(dtype)
        weights = normal(6, *ids.shape).sigmoid().float().to(wide)
        out = torch.full((num_rows, WIDTHS["routed"]), float("nan"), dtype=dtype)
        op(latent, ids, weights, w, out=out)
        outs["fast"][dtype] = out
        outs["plain"][dtype] = experts_value(latent, ids, weights, w).to(dtype)
    check(outs["fast"], outs["plain"], "out")


def test_a_bad_row_leaves_the_others_their_bits() -> None:
    """NaN in one request, in any of the three ops, changes no bit of another's row."""
    w = tiny_weights(TINY, 0)
    kda, experts = w.layers[KDA_LAYER].attn, w.layers[MOE_LAYER].mlp.experts
    shapes = TINY.linear_attn_config
    outs = []
    for value in (1.0, float("nan")):
        x, latent = normal(1, 2, WIDTHS["kda_in"]).float(), normal(2, 2, WIDTHS["latent"]).float()
        x[1], latent[1] = value, value
        conv = torch.zeros(3, shapes.short_conv_kernel_size - 1, 3 * shapes.width)
        state = torch.zeros(3, shapes.num_heads, shapes.head_dim, shapes.head_dim)
        heads, routed = torch.empty(2, WIDTHS["kda_heads"]), torch.empty(2, WIDTHS["routed"])
        kda_one_row(x, kda, conv, state, torch.tensor([1, 2]), out=heads)
        ids, weights = torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.full((2, 3), 0.5)
        experts_one_row(latent, ids, weights, experts, out=routed)
        outs.append((heads[0], state[1], routed[0]))
    for ok, beside_nan in zip(*outs, strict=True):
        check_equal(beside_nan, ok)
