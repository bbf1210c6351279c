"""AttnRes: the mix against a loop, what is rounded, and the blocks over a whole forward pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compare import check_bf16, check_close, check_equal
from numpy.typing import NDArray
from tiny import tiny_config, tiny_weights
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache
from nanok3.config import ModelConfig
from nanok3.ops import REFERENCE, Ops, stay
from nanok3.reference.attn_res import AttnResWeights, attn_res_ref
from nanok3.step import Buffers, Step, allocate_buffers

F64 = NDArray[np.float64]
EPS = 1e-5
NAN = float("nan")


def mix(sources: list[F64], score: F64) -> F64:
    """One token: softmax over the normalised scores, of the raw sources."""
    a = []
    for v in sources:
        mean_square = sum(x * x for x in v) / len(v)
        a.append(sum(x * s for x, s in zip(v, score, strict=True)) / math.sqrt(mean_square + EPS))
    exps = [math.exp(x - max(a)) for x in a]
    out = np.zeros(len(score))
    for e, v in zip(exps, sources, strict=True):
        out += e / sum(exps) * v
    return out


def rms(x: F64, weight: F64) -> F64:
    return weight * x / math.sqrt(sum(v * v for v in x) / len(x) + EPS)


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def inputs(n: int, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Any]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = AttnResWeights(random(2, width).to(wide), random(3, width).to(dtype), EPS)
    return random(0, rows, width).to(dtype), random(1, n, rows, width).to(dtype), weights


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_mix(dtype: torch.dtype, limit: float, rows: int, n: int, fresh: bool) -> None:
    delta, streams, w = inputs(n, rows, 10, dtype)
    before = streams.clone()
    if fresh:
        streams[-1] = NAN  # a fresh sum does not look at what the last block left
    out = torch.full_like(delta, NAN)
    attn_res_ref(delta, streams, w, fresh, out=out)

    old, d = before.double().numpy(), delta.double().numpy()
    score, norm = w.score.double().numpy(), w.norm.double().numpy()
    for t in range(rows):
        prefix = d[t] if fresh else old[-1, t] + d[t]
        check_close(streams[-1, t], prefix, limit, "running sum")
        expected = rms(mix([*old[:-1, t], prefix], score), norm)
        check_close(out[t], expected, limit, "mix")
    check_equal(streams[:-1], before[:-1], "finished streams")


def test_hand_made_mix() -> None:
    """Scores 0 and ln 3 weigh the two sources 1/4 and 3/4, whatever the sources' size."""
    x = 100.0  # so that the eps is nothing beside the mean square
    embedding, delta = torch.tensor([[[x, x]], [[-3 * x, 3 * x]]], dtype=torch.float64)
    score = torch.tensor([-0.5 * math.log(3), 0.5 * math.log(3)], dtype=torch.float64)
    w = AttnResWeights(score, torch.tensor([2.0, 1.0], dtype=torch.float64), 1e-12)
    streams = torch.stack([embedding, torch.full_like(embedding, NAN)])
    out = torch.full_like(embedding, NAN)
    attn_res_ref(delta, streams, w, True, out=out)
    mixed = [0.25 * x + 0.75 * -3 * x, 0.25 * x + 0.75 * 3 * x]  # -2x, 2.5x
    size = math.sqrt((mixed[0] ** 2 + mixed[1] ** 2) / 2)
    check_close(out, [[2 * mixed[0] / size, mixed[1] / size]], 1e-12)


def test_one_source_is_only_normalised() -> None:
    """The first attention sees the raw embedding, whatever the score row says."""
    delta, streams, w = inputs(1, 3, 10, torch.float32)
    out = torch.full_like(delta, NAN)
    attn_res_ref(delta, streams, replace(w, score=w.score * 1e3), True, out=out)
    check_equal(streams[0], delta)
    d, norm = delta.double().numpy(), w.norm.double().numpy()
    check_close(out, np.stack([rms(row, norm) for row in d]), 1e-6)


def test_bf16_rounds_the_sum_once_and_mixes_what_it_stored() -> None:
    delta, streams, w = inputs(3, 5, 64, torch.bfloat16)
    before = streams.clone()
    out = torch.full_like(delta, NAN)
    attn_res_ref(delta, streams, w, False, out=out)
    prefix = (before[-1].double() + delta.double()).bfloat16()  # of the exact sum
    check_equal(streams[-1], prefix, "running sum")

    sources = torch.cat([before[:-1], prefix.unsqueeze(0)])
    exact = np.stack(
        [
            rms(
                mix(list(sources[:, t].double().numpy()), w.score.double().numpy()),
                w.norm.double().numpy(),
            )
            for t in range(5)
        ]
    )
    # bf16 torch: scores in float32 as published, the mix and its norm in bf16
    f = sources.float()
    a = (f @ w.score) * torch.rsqrt(f.square().mean(-1) + EPS)
    mixed = (torch.softmax(a, 0).unsqueeze(-1) * f).sum(0).bfloat16()
    plain = torch.nn.functional.rms_norm(mixed, (64,), eps=EPS) * w.norm
    check_bf16(out, plain, exact)


def test_many_small_deltas_are_rounded_one_by_one() -> None:
    """256 + 1 is 256 in bf16: a running sum kept in float32 would reach 264."""
    w = AttnResWeights(torch.zeros(4), torch.ones(4).bfloat16(), EPS)
    streams = torch.full((1, 1, 4), 256.0).bfloat16()
    one, out = torch.ones(1, 4).bfloat16(), torch.empty(1, 4).bfloat16()
    for _ in range(8):
        attn_res_ref(one, streams, w, False, out=out)
    check_equal(streams, torch.full((1, 1, 4), 256.0).bfloat16())


# ---- the blocks over a whole forward ----


def stand_ins(matrices: Tensor, buf: Buffers, seen: list[int]) -> Ops:
    """The model's ops with every sub-layer replaced by tanh(matrix @ x): only AttnRes is real."""
    calls = iter(matrices)

    def nothing(*args: Any, out: Any) -> None:
        pass

    def sub_layer(out: Tensor) -> None:
        out.copy_(torch.tanh(buf.x @ next(calls).T))

    def linear(x: Tensor, weight: Tensor, *, out: Tensor) -> None:
        if out is buf.delta_sum:
            sub_layer(out)

    def latent_up(*args: Any, out: Tensor) -> None:
        sub_layer(out)

    def attn_res(delta: Any, streams: Any, w: Any, fresh: bool, *, out: Any) -> None:
        seen.append(len(streams))
        attn_res_ref(delta, streams, w, fresh, out=out)

    def lm_head(x: Tensor, *args: Any, out: Tensor) -> None:
        pass

    return Ops(
        embed=REFERENCE.embed,
        attn_res=attn_res,
        linear=linear,
        kda=nothing,
        kda_recorded=nothing,
        mla_latent=nothing,
        mla=nothing,
        gate_up=nothing,
        moe_in=nothing,
        route=nothing,
        experts=nothing,
        tap=nothing,
        latent_up=latent_up,
        lm_head=lm_head,
        all_reduce=stay,
        all_gather=stay,
        reduce_moe=stay,
    )


def forward_with_lists(
    config: ModelConfig, x0: F64, w: Any, matrices: F64
) -> tuple[F64, list[int]]:
    """kimi-k3.md 2.3 as it is written there, for one token: snapshots B and a prefix sum p."""
    calls = iter(matrices)
    seen = []
    snapshots: list[F64] = []
    p = x0

    def mixed(res: AttnResWeights) -> F64:
        seen.append(len(snapshots) + 1)
        x = mix([*snapshots, p], res.score.numpy()) if snapshots else p
        return rms(x, res.norm.numpy())

    for i in range(config.num_hidden_layers):
        x = mixed(w.layers[i].attn_res)
        start = i % config.attn_res_block_size == 0
        if start:
            snapshots.append(p)
        y = np.tanh(next(calls) @ x)
        p = y if start else p + y
        x = mixed(w.layers[i].mlp_res)
        p = p + np.tanh(next(calls) @ x)
    return mixed(w.output_res), seen


# one block; a partial last block; blocks of one; the layer count a multiple; K3's own
@pytest.mark.parametrize("layers, block", [(3, 12), (7, 3), (4, 1), (6, 3), (93, 12)])
def test_blocks_over_a_whole_forward(layers: int, block: int) -> None:
    full = tuple(i for i in range(1, layers + 1) if i % 4 == 0 or i == layers)
    config = tiny_config(
        num_hidden_layers=layers,
        attn_res_block_size=block,
        full_attn_layers=full,
        kda_layers=tuple(i for i in range(1, layers + 1) if i not in full),
        hidden_size=8,
        num_experts=2,
        num_experts_per_token=1,
        moe_intermediate_size=32,
    )
    w = tiny_weights(config, 0, torch.float64)
    matrices = random(5, 2 * layers, 8, 8, scale=0.5)
    buf = allocate_buffers(config, 2, 1, torch.float64, "cpu")
    for name in vars(buf):
        getattr(buf, name).fill_(NAN if getattr(buf, name).is_floating_point() else -1)
    ids = torch.tensor([5, 9])
    none = torch.empty(0, dtype=torch.int64)
    step = Step(ids, none, none, none, none, none, 1)
    empty = [torch.empty(0)] * layers
    seen: list[int] = []
    cache: Any = Cache(conv_state=empty, state=empty, latent=empty)  # type: ignore[arg-type]
    model.forward(config, w, cache, step, buf, stand_ins(matrices, buf, seen))

    for t, token in enumerate(ids):
        expected, lists_seen = forward_with_lists(
            config, w.embed.table[token].numpy(), w, matrices.numpy()
        )
        check_close(buf.x[t], expected, 1e-12, f"token {t}")
        assert seen == lists_seen
    attention, mlp = seen[0:-1:2], seen[1::2]
    assert attention == [math.ceil(i / block) + 1 for i in range(layers)]
    assert mlp == [i // block + 2 for i in range(layers)]
