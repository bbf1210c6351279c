"""`mega.route` and `mega.experts` against the reference: a cooperative grid with both roles, the
ring and the role's own counters.

Each layer the CTAs copy their share of moe_in, route, and run the experts; every CTA's tables are
judged. Some layers in a row: the tables, the phase of `routed` and the ring are used again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import check_bf16, check_close, check_equal
from torch import Tensor

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from ptx.launch import ARCH, Emulator
from ptx.memory import buffer_of

from kernels.expert_cases import Matrices, random_matrices
from nanok3.dsl import (
    ARCHS,
    address,
    arch_of,
    compile_kernel,
    launch,
    ld_global_u32,
    ld_shared_u32,
    st_global_u32,
)
from nanok3.kernels.expert_down import pack_expert_down
from nanok3.kernels.expert_up import pack_expert_up
from nanok3.kernels.mega.experts import Experts
from nanok3.kernels.mega.fields import ENTRIES, entry
from nanok3.kernels.mega.linear import THREADS, partial_bytes
from nanok3.kernels.mega.role import SYNC_BYTES, Compute, Frozen, Loader
from nanok3.kernels.mega.route import Route
from nanok3.kernels.mega.sizes import PASS, SLOT_BYTES, WARPS, Sizes
from nanok3.reference.experts import ExpertWeights, experts_value
from nanok3.reference.router import RouterWeights, route_value

SLOTS = 3
FIELDS = ("bias", "w13", "w2")
OUTS = ("topk_ids", "topk_weights", "tables", "out")
ADDRESSES = ("table", "work", "sync", "router_logits", "latent", "given", *OUTS)


class Layers(Frozen):
    """given [layers, bytes of moe_in], router_logits [T, E] f32, latent [T, Z] bf16 -> tables
    [layers, SMs, bytes], out [layers, T, Z] bf16."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.route, self.experts = sizes, Route(sizes), Experts(sizes)

    @cute.jit
    def __call__(
        self,
        table: Int64,
        work: Int64,
        sync: Int64,
        router_logits: Int64,
        latent: Int64,
        given: Int64,
        topk_ids: Int64,
        topk_weights: Int64,
        tables: Int64,
        out: Int64,
        num_tokens: Int32,
        num_layers: Int32,
        stream,
    ):
        self.kernel(
            *(table, work, sync, router_logits, latent, given, topk_ids, topk_weights),
            *(tables, out, num_tokens, num_layers),
        ).launch(
            grid=(self.sizes.sms, 1, 1),
            block=(THREADS + 32, 1, 1),
            stream=stream,
            cooperative=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        table: Int64,
        work: Int64,
        sync: Int64,
        router_logits: Int64,
        latent: Int64,
        given: Int64,
        topk_ids: Int64,
        topk_weights: Int64,
        tables: Int64,
        out: Int64,
        num_tokens: Int32,
        num_layers: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        scratch = max(self.route.scratch_bytes, self.experts.scratch_bytes)
        sizes = {
            "scratch": scratch,
            "routed": self.route.table_bytes,
            "partial": 2 * partial_bytes(self.sizes.pass_rows),
        }
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = at
            at += -(-size // 128) * 128
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, num_elems=2 * SLOTS + 1)
        areas = Int32(smem.allocate(at, byte_alignment=128).toint())
        ring = Int32(smem.allocate(SLOTS * SLOT_BYTES, byte_alignment=128).toint())
        if tid == 0:
            for slot in cutlass.range_constexpr(SLOTS):
                cute.arch.mbarrier_init(barriers + slot, 1)
                cute.arch.mbarrier_init(barriers + SLOTS + slot, WARPS)
            cute.arch.mbarrier_init(barriers + 2 * SLOTS, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        program = SimpleNamespace(
            sizes=self.sizes,
            areas=places,
            op_number=lambda _: 0,
            waits=True,
            stamps=False,
            limit=1 << 22,
            slots=SLOTS,
        )
        env = dict(table=table, work=work, sync=sync, router_logits=router_logits, latent=latent)
        env.update(topk_ids=topk_ids, topk_weights=topk_weights)
        env.update(num_tokens=num_tokens, num_reqs=num_tokens, areas=areas, ring=ring)
        env.update(barriers=barriers, slots=SLOTS, routed=barriers + 2 * SLOTS)
        warp = cute.arch.make_warp_uniform(tid // 32)
        if warp == WARPS:
            self.load(Loader(program, env), num_layers)
        else:
            self.compute(Compute(program, env), given, tables, out, num_layers)

    @cute.jit
    def load(self, r, num_layers: Int32):
        r.block_signal[0] = Uint32(0)
        for layer in cutlass.range(num_layers, unroll=1):
            r.prefetch_row(layer)
            r.next_row()
            r.begin_block("moe")
            r.signal("moe_in")
            r.fresh()
            self.experts.load(r)
            r.end_block()

    @cute.jit
    def compute(self, r, given: Int64, tables: Int64, out: Int64, num_layers: Int32):
        words = self.sizes.buffers["moe_in"] // 4
        table_words = self.route.table_bytes // 4
        r.block_signal[0] = Uint32(0)
        for layer in cutlass.range(num_layers, unroll=1):
            r.prefetch_row(layer)
            r.next_row()
            r.begin_block("moe")
            self.route.ahead(r)
            step = THREADS * self.sizes.sms
            for i in cutlass.range(r.cta * THREADS + r.tid, words, step, unroll=1):
                word = ld_global_u32(given + (Int64(layer) * words + Int64(i)) * 4)
                st_global_u32(r.buffer("moe_in") + Int64(i) * 4, word)
            r.signal("moe_in")
            r.begin("route")
            r.wait("moe_in")
            self.route.compute(r)
            r.bar()
            r.begin("experts")
            self.experts.compute(r)
            r.wait("routed")
            to = tables + Int64((layer * self.sizes.sms + r.cta) * table_words) * 4
            for i in cutlass.range(r.tid, table_words, THREADS, unroll=1):
                st_global_u32(to + Int64(i) * 4, ld_shared_u32(r.shared("routed") + i * 4))
            half = r.num_tokens * (self.sizes.latent // 2)
            for i in cutlass.range(r.cta * THREADS + r.tid, half, step, unroll=1):
                word = ld_global_u32(r.buffer("routed") + Int64(i) * 4)
                st_global_u32(out + (Int64(layer) * half + Int64(i)) * 4, word)
            r.bar()
            r.end_block()


@functools.cache
def compile_layers(sizes: Sizes, arch: str) -> Any:
    args = (*(Int64(0) for _ in ADDRESSES), *(Int32(1) for _ in range(2)), make_fake_stream())
    return compile_kernel(Layers(sizes), args, arch)


@dataclass(frozen=True)
class Case:
    sms: int
    experts: int
    top_k: int
    latent: int
    width: int
    router: tuple[int, int]  # this rank's rows: first, how many
    columns: tuple[int, int]  # of the latent
    hidden: int = 320
    shared_width: int = 32
    renormalize: bool = True


CASES = {
    "k3 tp16": Case(132, 896, 16, 3584, 192, (56, 56), (224, 224), 7168, 192),
    "k3 tp8": Case(132, 896, 16, 3584, 384, (112, 112), (448, 448), 7168, 384),
    "mini": Case(3, 64, 8, 64, 128, (0, 64), (0, 64), 160, 128),
    "golden": Case(3, 32, 6, 160, 64, (0, 32), (0, 160)),
    # parts of ranks that do not begin at a piece or a chunk; F of an odd number of blocks
    "odd": Case(5, 45, 3, 96, 96, (7, 30), (12, 20), renormalize=False),
    "part": Case(2, 24, 2, 3584, 32, (8, 8), (224, 224)),  # whole steps of gate and up
    "wide": Case(3, 12, 2, 3648, 32, (0, 12), (0, 8)),  # two ring slots an item
    "deep": Case(4, 6, 2, 64, 384, (0, 6), (0, 64)),  # two parts of F
    "seven": Case(4, 1, 1, 32, 224, (0, 1), (0, 32)),  # seven parts of F, one expert
    "ties": Case(1, 90, 16, 32, 32, (0, 90), (0, 32)),
    "router": Case(1, 896, 16, 32, 32, (56, 56), (0, 32)),
    "router all": Case(1, 1000, 32, 32, 32, (0, 1000), (0, 32)),
}


def sizes_of(name: str, pass_rows: int) -> Sizes:
    c = CASES[name]
    return Sizes(
        **dict(sms=c.sms, pass_rows=pass_rows, hidden=c.hidden, kda_heads=1, mla_heads=1),
        **dict(q_rank=64, kv_rank=128, nope_dim=128, rope_dim=64, value_dim=128),
        **dict(num_experts=c.experts, top_k=c.top_k, latent=c.latent, expert_width=c.width),
        **dict(shared_width=c.shared_width, dense_width=0, vocab=64),
        **dict(router_rows=c.router[1], latent_rows=c.columns[1], up_rows=c.hidden),
        **dict(router_first=c.router[0], latent_first=c.columns[0]),
        **dict(up_first=0, embed_rows=64, embed_first=0, most_blocks=1, block_size=64, eps=1e-5),
        **dict(beta=1.5, linear_beta=2.5, lower_bound=-5.0, routed_norm=True),
        **dict(renormalize=c.renormalize, scaling=2.5, softmax_scale=1.0),
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_rows", [1, 8])
def test_experts_compile(pass_rows: int, arch: str) -> None:
    compile_layers(sizes_of("k3 tp16", pass_rows), arch)


def test_scratch_leaves_the_ring_its_slots() -> None:
    for name in ("k3 tp16", "k3 tp8"):
        for unit in (Route, Experts):
            assert unit(sizes_of(name, 1)).scratch_bytes <= 16 << 10
            assert unit(sizes_of(name, 8)).scratch_bytes <= 58 << 10


@pytest.mark.parametrize("name", CASES)
def test_tiles_and_pairs_are_dealt_once(name: str) -> None:
    for rows in (1, PASS):
        unit = Experts(sizes_of(name, rows))
        blocks = [b for first, second in unit.down.pairs() for b in {first, second}]
        assert sorted(blocks) == list(range(unit.down.part_blocks))
        for chunk in unit.up.chunks:
            warps = [w // 4 * 8 + w % 4 + half * 4 for w in range(WARPS) for half in (0, 1)]
            dealt = {b + i * 2 * WARPS for b in warps for i in range(unit.up.steps)}
            assert dealt >= set(range(chunk)) and len(warps) == len(set(warps))


# ---- a launch ----

Tensors = dict[str, Tensor]
Launch = Callable[[Sizes, Tensors, list[Tensors], tuple[int, ...]], None]


def fill(table: Tensor, layers: list[Tensors]) -> None:
    for row, fields in zip(table, layers, strict=True):
        for name, tensor in fields.items():
            row[entry(f"moe.{name}")] = tensor.data_ptr()


@pytest.fixture(scope="module")
def on_emulator(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    emulator = Emulator(str(tmp_path_factory.mktemp("ptx")))
    arguments = (*(Int64(0) for _ in ADDRESSES), *(Int32(1) for _ in range(2)), make_fake_stream())
    compiled = functools.cache(lambda sizes: emulator.compile(Layers(sizes), arguments, ARCH))

    def launch_layers(
        sizes: Sizes, tensors: Tensors, layers: list[Tensors], numbers: tuple[int, ...]
    ) -> None:
        fill(tensors["table"], layers)
        work = tensors["work"]
        buffers = [
            buffer_of(work[at : at + sizes.buffers[name]], False, name)
            for name, at in sizes.offsets.items()
            if name in ("moe_in", "expert_act", "routed")
        ]
        named = [(n, t) for n, t in tensors.items() if n not in ("work", "sync")]
        named += [(f"{n} {i}", t) for i, fields in enumerate(layers) for n, t in fields.items()]
        buffers += [buffer_of(t, n not in OUTS, n) for n, t in named]
        buffers.append(buffer_of(tensors["sync"].view(torch.int32), False, "sync"))
        places = [tensors[name].data_ptr() for name in ADDRESSES]
        emulator.run(compiled(sizes), [*places, *numbers], buffers)

    return launch_layers


def on_gpu(sizes: Sizes, tensors: Tensors, layers: list[Tensors], numbers: tuple[int, ...]) -> None:
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    layers_there = [{name: t.cuda() for name, t in fields.items()} for fields in layers]
    fill(tensors["table"], layers_there)
    there["table"] = tensors["table"].cuda()
    places = [address(there[name]) for name in ADDRESSES]
    launch(compile_layers(sizes, arch_of(0)), *places, *numbers)
    for name in OUTS:
        tensors[name].copy_(there[name])


@dataclass(frozen=True)
class Routed:
    """The tables of a layer, as every CTA has them."""

    experts: Tensor  # [n]
    ids: Tensor  # [T, A], by place
    weights: Tensor  # [T, A]


def read_tables(sizes: Sizes, words: Tensor, tokens: int) -> Routed:
    """words [SMs, table words] i32."""
    t = Route(sizes).tables
    count = int(words[0, t.total // 4])
    parts = {"experts": count, "where": count * PASS, "weight": count * PASS}
    experts, where, weight = (
        words[:, getattr(t, name) // 4 :][:, :n].contiguous() for name, n in parts.items()
    )
    for cta in range(1, sizes.sms):
        assert int(words[cta, t.total // 4]) == count
        for name, part in (("experts", experts), ("where", where), ("weight", weight)):
            check_equal(part[cta], part[0], f"{name} of CTA {cta}")
    assert experts[0].tolist() == sorted(set(experts[0].tolist()))
    where, weight = where[0].view(-1, PASS), weight[0].view(torch.float32).view(-1, PASS)
    ids = torch.full((tokens, sizes.top_k), -1)
    weights = torch.full((tokens, sizes.top_k), -1.0)
    assert (where[:, tokens:] == -1).all() and (weight[where == -1] == 0).all()
    assert (where.max(1).values >= 0).all(), "an expert that no row has"
    for index, row in (where >= 0).nonzero().tolist():
        place = int(where[index, row])
        assert ids[row, place] == -1
        ids[row, place], weights[row, place] = experts[0, index], weight[index, row]
    assert (ids >= 0).all() and (ids < sizes.num_experts).all()
    return Routed(experts[0], ids, weights)


@dataclass(frozen=True)
class Layer:
    logits: Tensor  # [T, E] f32
    latent: Tensor  # [T, Z] bf16
    bias: Tensor  # [E] f32
    w13: Matrices
    w2: Matrices


def split(x: Tensor, slices: int) -> list[Tensor]:
    """f32 parts whose sum is x, exactly if x has few bits."""
    factors = [0.5 * (-1) ** s * (s + 1) for s in range(slices - 1)]
    return [x * f for f in (*factors, 1 - sum(factors))]


def parts_of(layer: Layer, sizes: Sizes, foreign: bool = True) -> Tensor:
    """moe_in [slices, pass_rows, rows]; what nobody may use is NaN."""
    product, tokens = sizes.products["moe_in"], layer.logits.shape[0]
    parts = torch.full((product.slices, sizes.pass_rows, product.rows), float("nan"))
    logits = layer.logits[:, sizes.router_first :][:, : sizes.router_rows]
    latent = layer.latent[:, sizes.latent_first :][:, : sizes.latent_rows].float()
    first = sizes.router_tiles * 16
    for s, (a, b) in enumerate(
        zip(split(logits, product.slices), split(latent, product.slices), strict=True)
    ):
        parts[s, :tokens, : logits.shape[1]] = a
        parts[s, :tokens, first : first + latent.shape[1]] = b
    return parts


def run(launch_layers: Launch, sizes: Sizes, layers: list[Layer]) -> list[tuple[Routed, Tensor]]:
    """-> the tables and out of each layer. The ranks' other columns are the first layer's."""
    tokens, count = layers[0].latent.shape[0], len(layers)
    packed: dict[int, Tensors] = {}
    for layer in layers:
        packed.setdefault(
            id(layer.w13),
            {
                "w13": pack_expert_up(layer.w13.packed, layer.w13.scale).tiles,
                "w2": pack_expert_down(layer.w2.packed, layer.w2.scale).tiles,
            },
        )
    logits, latent = layers[0].logits.clone(), layers[0].latent.clone()
    own_experts = slice(sizes.router_first, sizes.router_first + sizes.router_rows)
    own_columns = slice(sizes.latent_first, sizes.latent_first + sizes.latent_rows)
    logits[:, own_experts], latent[:, own_columns] = float("nan"), float("nan")
    table_words = Route(sizes).table_bytes // 4
    tensors = {
        "table": torch.full((count, ENTRIES), 16),
        "work": torch.full((sizes.work_bytes,), 0xFF, dtype=torch.uint8),
        "sync": torch.zeros(SYNC_BYTES, dtype=torch.uint8),
        "router_logits": logits,
        "latent": latent,
        "given": torch.stack([parts_of(layer, sizes) for layer in layers]),
        "topk_ids": torch.full((tokens, sizes.top_k), -1),
        "topk_weights": torch.full((tokens, sizes.top_k), -1.0),
        "tables": torch.full((count, sizes.sms, table_words), -7, dtype=torch.int32),
        "out": torch.full((count, tokens, sizes.latent), float("nan")).bfloat16(),
    }
    fields = [{"bias": layer.bias, **packed[id(layer.w13)]} for layer in layers]
    launch_layers(sizes, tensors, fields, (tokens, count))
    made = [
        (read_tables(sizes, tables, tokens), out)
        for tables, out in zip(tensors["tables"], tensors["out"], strict=True)
    ]
    check_equal(tensors["topk_ids"], made[-1][0].ids, "topk_ids")
    check_equal(tensors["topk_weights"], made[-1][0].weights, "topk_weights")
    return made


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


SMALL = [name for name in CASES if CASES[name].sms < 100 and name != "ties"]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", SMALL)
def test_experts_on_emulator(on_emulator: Launch, name: str, tokens: int) -> None:
    check_layers(on_emulator, name, tokens, 1)


# both kinds of pass; ring slots, tables and the phase of `routed` are used again
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
    check_odd_logits(on_emulator, "ties", slice(0, 7))
    for row in (0, 1, 5):
        check_odd_logits(on_emulator, "ties", slice(row, row + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("name", CASES)
def test_experts_match_ref(name: str, tokens: int) -> None:
    check_layers(on_gpu, name, tokens, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ties", "router all"])
def test_odd_logits_match_ref(name: str) -> None:
    check_odd_logits(on_gpu, name, slice(0, 7))
    for row in range(7):
        check_odd_logits(on_gpu, name, slice(row, row + 1))
