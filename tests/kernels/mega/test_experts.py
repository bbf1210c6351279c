"""`mega.route` and `mega.experts` against the reference, in layers of nothing else.

Each layer the CTAs copy their share of moe_in, route, and run the experts; every CTA's tables are
judged. Some layers in a row: the tables, the phase of `routed` and the ring are used again.
"""

from __future__ import annotations

import functools

import pytest
import torch
from compare import check_bf16, check_close, check_equal
from torch import Tensor

pytest.importorskip("cutlass")
from kernels.expert_cases import Matrices, random_matrices
from kernels.mega.moe_layers import (
    CASES,
    Launch,
    Layer,
    Routed,
    compile_layers,
    emulated,
    on_gpu,
    run,
    sizes_of,
)
from nanok3.dsl import ARCHS
from nanok3.kernels.mega.experts import Experts
from nanok3.kernels.mega.route import Route
from nanok3.kernels.mega.sizes import PASS, WARPS, Sizes
from nanok3.reference.experts import ExpertWeights, experts_value
from nanok3.reference.router import RouterWeights, route_value


@pytest.fixture(scope="module")
def on_emulator(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return emulated(tmp_path_factory.mktemp("ptx"))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_rows", [1, 8])
def test_experts_compile(pass_rows: int, arch: str) -> None:
    compile_layers(sizes_of("k3 tp16", pass_rows), arch)


def test_scratch_leaves_the_ring_its_slots() -> None:
    for name in ("k3 tp16", "k3 tp8"):
        for unit in (Route, Experts):
            assert unit(sizes_of(name, 1)).scratch_bytes <= 24 << 10
            assert unit(sizes_of(name, 8)).scratch_bytes <= 58 << 10


@pytest.mark.parametrize("name", CASES)
def test_every_block_is_dealt_to_a_warp(name: str) -> None:
    for rows in (1, PASS):
        unit = Experts(sizes_of(name, rows))
        assert unit.down.part_blocks * unit.down.num_parts == unit.down.blocks
        assert sum(unit.up.chunks) == unit.up.blocks
        assert all(chunk <= unit.up.steps * WARPS for chunk in unit.up.chunks)


# ---- the judge ----


def experts_of(layer: Layer, routed: Routed, dtype: torch.dtype, sizes: Sizes) -> Tensor:
    """[T, Z], with dense weights of the experts in use only."""
    used, ids = routed.ids.unique(return_inverse=True)
    dense = [torch.stack([m.of(e, dtype) for e in used.tolist()]) for m in (layer.w13, layer.w2)]
    w = ExpertWeights(dense[0], dense[1], sizes.beta, sizes.linear_beta)
    return experts_value(layer.latent.to(dtype), ids, routed.weights, w)


def check_routing(sizes: Sizes, layer: Layer, routed: Routed, exact: bool = False) -> None:
    w = RouterWeights(layer.bias, sizes.top_k, 1, 1, sizes.renormalize, sizes.scaling)
    ids, _ = route_value(layer.logits, w)
    scores = torch.sigmoid(layer.logits)
    pick = scores + layer.bias
    if exact:
        check_equal(routed.ids, ids, "ids")
    gap = (pick.gather(1, routed.ids) - pick.gather(1, ids)).abs()
    if not exact:
        assert float(gap.max()) < 1e-6
    weights = scores.gather(1, routed.ids)
    if sizes.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if weights.isfinite().all():
        check_close(routed.weights, weights * sizes.scaling, 2e-6, "weights")


@functools.cache
def matrices(name: str, seed: int) -> tuple[Matrices, Matrices]:
    c = CASES[name]
    torch.manual_seed(seed)
    device = "cuda" if c.sms > 100 else "cpu"
    w13 = random_matrices(c.experts, 2 * c.width, c.latent, device)
    w2 = random_matrices(c.experts, c.latent, c.width, device)
    return w13, w2


def layers_of(name: str, tokens: int, count: int) -> list[Layer]:
    """Numbers with few bits, so that sums of parts are exact. Ranks' columns that are not our own
    are the same in all layers."""
    c, made = CASES[name], []
    sizes = sizes_of(name, PASS)
    for i in range(count):
        w13, w2 = matrices(name, i if c.sms < 100 else 0)
        torch.manual_seed(100 * tokens + i)
        logits = (torch.randn(tokens, c.experts) * 512).round() / 256
        latent = torch.randn(tokens, c.latent).bfloat16()
        if made:
            rows, columns = made[0].logits.clone(), made[0].latent.clone()
            own = slice(sizes.router_first, sizes.router_first + sizes.router_rows)
            rows[:, own] = logits[:, own]
            own = slice(sizes.latent_first, sizes.latent_first + sizes.latent_rows)
            columns[:, own] = latent[:, own]
            logits, latent = rows, columns
        made.append(Layer(logits, latent, torch.randn(c.experts), w13, w2))
    return made


def check_layers(launch_layers: Launch, name: str, tokens: int, count: int) -> None:
    sizes = sizes_of(name, 1 if tokens == 1 else PASS)
    layers = layers_of(name, tokens, count)
    for i, (layer, (routed, out)) in enumerate(
        zip(layers, run(launch_layers, sizes, layers), strict=True)
    ):
        check_routing(sizes, layer, routed)
        there = layer.w13.packed.device
        moved = Layer(
            layer.logits, layer.latent.to(there), layer.bias.to(there), layer.w13, layer.w2
        )
        at = Routed(routed.experts, routed.ids.to(there), routed.weights.to(there))
        bf16 = experts_of(moved, at, torch.bfloat16, sizes)
        right = experts_of(moved, at, torch.float32, sizes)
        check_bf16(out, bf16.bfloat16().cpu(), right.cpu(), f"{name}, {tokens} rows, layer {i}")


# both kinds of pass; what takes long once
SLOW = {"part": 3, "wide": 1, "router all": 1, "router": 3}
SMALL = [
    (name, tokens)
    for name in ("mini", "golden", "odd", "deep", "seven", *SLOW)
    for tokens in (1, 3)
    if SLOW.get(name, tokens) == tokens
]


@pytest.mark.parametrize("name, tokens", SMALL)
def test_experts_on_emulator(on_emulator: Launch, name: str, tokens: int) -> None:
    check_layers(on_emulator, name, tokens, 1)


# ring slots, tables and the phase of `routed` are used again
@pytest.mark.parametrize("name, tokens, count", [("odd", 1, 3), ("odd", 8, 2), ("golden", 2, 3)])
def test_layers_on_emulator(on_emulator: Launch, name: str, tokens: int, count: int) -> None:
    check_layers(on_emulator, name, tokens, count)


def odd_logits(experts: int) -> tuple[Tensor, Tensor]:
    """Rows [7, E] of ties, NaN and infinite values, and such a bias."""
    torch.manual_seed(1)
    logits = torch.randint(-3, 4, (7, experts)).float()
    bias = torch.zeros(experts)
    bias[3], bias[4] = float("inf"), -float("inf")
    logits[0] = float("nan")
    logits[1, 77] = float("nan")
    logits[2] = float("inf")
    logits[3, ::2] = -float("inf")
    logits[3, 1::2] = float("nan")
    logits[4] = -200.0
    return logits, bias


def check_odd_logits(launch_layers: Launch, name: str, rows: slice) -> None:
    """Ids are exact; a row with NaN has NaN weights."""
    sizes = sizes_of(name, 1 if rows.stop - rows.start == 1 else PASS)
    logits, bias = odd_logits(sizes.num_experts)
    latent = torch.randn(logits.shape[0], sizes.latent).bfloat16()
    layer = Layer(logits[rows], latent[rows], bias, *matrices(name, 0))
    ((routed, out),) = run(launch_layers, sizes, [layer])
    check_routing(sizes, layer, routed, exact=True)
    bad = torch.tensor([0, 1, 3])
    for i, row in enumerate(range(rows.start, rows.stop)):
        assert bool(routed.weights[i].isnan().all()) == bool((bad == row).any()), row
        assert bool(out[i].isnan().all()) == bool((bad == row).any()), row


def test_odd_logits_on_emulator(on_emulator: Launch) -> None:
    check_odd_logits(on_emulator, "ties", slice(0, 4))
    for row in (1, 5):
        check_odd_logits(on_emulator, "ties", slice(row, row + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("name", ["k3 tp16", "k3 tp8", "golden", "odd"])
def test_experts_match_ref(name: str, tokens: int) -> None:
    check_layers(on_gpu, name, tokens, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ties", "router all"])
def test_odd_logits_match_ref(name: str) -> None:
    check_odd_logits(on_gpu, name, slice(0, 7))
    for row in range(7):
        check_odd_logits(on_gpu, name, slice(row, row + 1))
