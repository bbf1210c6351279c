"""Layers of routing and routed experts alone, for `test_experts`: a cooperative grid with both
roles, the ring and the role's own counters, on the emulator or on a GPU.
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
from compare import check_equal
from torch import Tensor

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from ptx.launch import ARCH, Emulator
from ptx.memory import buffer_of

from kernels.expert_cases import Matrices
from nanok3.dsl import (
    address,
    arch_of,
    compile_kernel,
    launch,
    ld_global_u32,
    ld_shared_u32,
    st_global_u32,
    st_shared_u32,
)
from nanok3.kernels.expert_down import pack_expert_down
from nanok3.kernels.expert_up import pack_expert_up
from nanok3.kernels.mega.experts import Experts
from nanok3.kernels.mega.fields import ENTRIES, entry
from nanok3.kernels.mega.linear import THREADS, partial_bytes
from nanok3.kernels.mega.role import (
    PENDING,
    SYNC_BYTES,
    Compute,
    Frozen,
    Loader,
    Signaller,
    bf16_pair,
)
from nanok3.kernels.mega.route import Route
from nanok3.kernels.mega.sizes import PASS, SLOT_BYTES, WARPS, Sizes

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
            block=(THREADS + 64, 1, 1),
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
            "stop": 4,
        }
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = at
            at += -(-size // 128) * 128
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, num_elems=2 * SLOTS + 1 + PENDING)
        areas = Int32(smem.allocate(at, byte_alignment=128).toint())
        ring = Int32(smem.allocate(SLOTS * SLOT_BYTES, byte_alignment=128).toint())
        if tid == 0:
            for slot in cutlass.range_constexpr(SLOTS):
                cute.arch.mbarrier_init(barriers + slot, 1)
                cute.arch.mbarrier_init(barriers + SLOTS + slot, WARPS)
            cute.arch.mbarrier_init(barriers + 2 * SLOTS, 1)
            for i in cutlass.range_constexpr(PENDING):
                cute.arch.mbarrier_init(barriers + 2 * SLOTS + 1 + i, WARPS)
            st_shared_u32(areas + places["stop"], Uint32(0))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        program = SimpleNamespace(
            sizes=self.sizes,
            areas=places,
            op_number=lambda _: 0,
            stamps=False,
            limit=1 << 22,
            slots=SLOTS,
        )
        env = dict(table=table, work=work, sync=sync, router_logits=router_logits, latent=latent)
        env.update(topk_ids=topk_ids, topk_weights=topk_weights)
        env.update(num_tokens=num_tokens, num_reqs=num_tokens, areas=areas, ring=ring)
        env.update(barriers=barriers, slots=SLOTS, routed=barriers + 2 * SLOTS)
        env.update(pending=barriers + 2 * SLOTS + 1, first_signal=Uint32(0))
        warp = cute.arch.make_warp_uniform(tid // 32)
        if warp == WARPS:
            self.load(Loader(program, env), num_layers)
        elif warp == WARPS + 1:
            Signaller(program, env).run()
        else:
            role = Compute(program, env)
            self.compute(role, given, tables, out, num_layers)
            role.fresh()
            role.finish()

    @cute.jit
    def load(self, r, num_layers: Int32):
        r.block_signal[0] = Uint32(0)
        for layer in cutlass.range(num_layers, unroll=1):
            r.prefetch_row(layer)
            r.next_row()
            r.begin_block()
            r.signal("moe_in")
            r.fresh()
            self.experts.load(r)
            r.signal("out")
            r.signal("layer")
            r.end_block()

    @cute.jit
    def compute(self, r, given: Int64, tables: Int64, out: Int64, num_layers: Int32):
        words = self.sizes.buffers["moe_in"] // 4
        table_words = self.route.table_bytes // 4
        r.block_signal[0], r.block_tag[0] = Uint32(0), Uint32(0)
        for layer in cutlass.range(num_layers, unroll=1):
            r.prefetch_row(layer)
            r.next_row()
            r.begin_block()
            self.route.ahead(r)
            step = THREADS * self.sizes.sms
            for i in cutlass.range(r.cta * THREADS + r.tid, words, step, unroll=1):
                word = ld_global_u32(given + (Int64(layer) * words + Int64(i)) * 4)
                st_global_u32(r.buffer("moe_in") + Int64(i) * 4, word)
            r.signal("moe_in")
            r.begin("route")
            r.wait("moe_in")
            self.route.compute(r, lambda: self.experts.ahead(r))
            self.experts.compute(r)
            r.signal("out")
            r.wait("out")
            to = tables + Int64((layer * self.sizes.sms + r.cta) * table_words) * 4
            for i in cutlass.range(r.tid, table_words, THREADS, unroll=1):
                st_global_u32(to + Int64(i) * 4, ld_shared_u32(r.shared("routed") + i * 4))
            half = r.num_tokens * (self.sizes.latent // 2)
            for i in cutlass.range(r.cta * THREADS + r.tid, half, step, unroll=1):
                word = ld_global_u32(r.buffer("routed") + Int64(i) * 4)
                if const_expr(self.sizes.pass_rows == 1):
                    at = r.buffer("routed") + Int64(i) * 8
                    word = bf16_pair(ld_global_u32(at), ld_global_u32(at + 4))
                st_global_u32(out + (Int64(layer) * half + Int64(i)) * 4, word)
            r.signal("layer")
            r.wait("layer")  # before words are written again
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
    "ties": Case(1, 80, 16, 32, 32, (0, 80), (0, 32)),
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
        **dict(up_first=0, embed_rows=64, embed_first=0, block_size=64, eps=1e-5),
        **dict(beta=1.5, linear_beta=2.5, lower_bound=-5.0, routed_norm=True),
        **dict(renormalize=c.renormalize, scaling=2.5, softmax_scale=1.0),
    )


# ---- a launch ----

Tensors = dict[str, Tensor]
Launch = Callable[[Sizes, Tensors, list[Tensors], tuple[int, ...]], None]


def fill(table: Tensor, layers: list[Tensors]) -> None:
    for row, fields in zip(table, layers, strict=True):
        for name, tensor in fields.items():
            row[entry(f"moe.{name}")] = tensor.data_ptr()


def emulated(folder: Path) -> Launch:
    """A launch on the emulator, which leaves its PTX in a folder."""
    emulator = Emulator(str(folder))
    arguments = (*(Int64(0) for _ in ADDRESSES), *(Int32(1) for _ in range(2)), make_fake_stream())
    compiled = functools.cache(lambda sizes: emulator.compile(Layers(sizes), arguments, ARCH))

    def launch_layers(
        sizes: Sizes, tensors: Tensors, layers: list[Tensors], numbers: tuple[int, ...]
    ) -> None:
        fill(tensors["table"], layers)
        work = tensors["work"]
        buffers = [
            buffer_of(
                work[at : at + sizes.buffers[name]], False, name, unordered=sizes.is_words(name)
            )
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
