"""`mega.mla` against the reference: a cooperative grid with the role's own ring and counters.

Each layer the CTAs copy their share of mla_in, then do what `ops` does from there to the heads that
o_proj reads. CTAs are few, so that one has several units, or many, so that the context is split.
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
from compare import check_bf16, check_equal
from packed import pack_mla
from torch import Tensor

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from ptx.launch import ARCH, Emulator
from ptx.memory import Fault, buffer_of

from nanok3.dsl import (
    ARCHS,
    address,
    arch_of,
    compile_kernel,
    fence_async,
    float_of,
    launch,
    ld_global_u32,
    ld_shared_u32,
    st_global_u32,
    st_shared_u32,
)
from nanok3.kernels.gemv_layout import pack_gemv
from nanok3.kernels.mega.fields import ENTRIES, entry
from nanok3.kernels.mega.linear import (
    THREADS,
    Linear,
    Rounded,
    partial_bytes,
    x_stride,
)
from nanok3.kernels.mega.mla import MLA
from nanok3.kernels.mega.mla_attend import TILE, Attend
from nanok3.kernels.mega.role import PENDING, SYNC_BYTES, Compute, Loader, Signaller, tagged
from nanok3.kernels.mega.sizes import SLOT_BYTES, WARPS, Sizes
from nanok3.reference.mla import MLAWeights, attend, gather_context, mla_latent_ref, mla_ref

ADDRESSES = (
    *("table", "work", "sync", "positions", "slot_mapping", "block_table", "given", "out"),
)
NUMBERS = ("num_reqs", "num_tokens", "max_blocks", "num_blocks", "num_layers")
WRITTEN = ("cache", "out")


class Layers:
    """given [layers, bytes of mla_in] -> out [layers, SMs, T, H * Dv] bf16: as each CTA has it."""

    def __init__(self, sizes: Sizes, slots: int = 3) -> None:
        self.sizes, self.slots, self.mla = sizes, slots, MLA(sizes)
        self.q_b = Linear(sizes, sizes.products["mla.q_b"])
        scratch = max(
            self.mla.scratch_bytes,
            sizes.pass_rows * self.q_b.stride,
            sizes.pass_rows * x_stride(sizes.mla_width),
        )
        scratch = -(-scratch // 128) * 128
        partial = 2 * partial_bytes(sizes.pass_rows)
        self.areas = {"scratch": 0, "partial": scratch, "small": scratch + partial}
        self.areas["stop"] = scratch + partial + 256
        self.area_bytes = scratch + partial + 256 + 128

    @cute.jit
    def __call__(
        self,
        table: Int64,
        work: Int64,
        sync: Int64,
        positions: Int64,
        slot_mapping: Int64,
        block_table: Int64,
        given: Int64,
        out: Int64,
        num_reqs: Int32,
        num_tokens: Int32,
        max_blocks: Int32,
        num_blocks: Int32,
        num_layers: Int32,
        stream,
    ):
        self.kernel(
            *(table, work, sync, positions, slot_mapping, block_table, given, out),
            *(num_reqs, num_tokens, max_blocks, num_blocks, num_layers),
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
        positions: Int64,
        slot_mapping: Int64,
        block_table: Int64,
        given: Int64,
        out: Int64,
        num_reqs: Int32,
        num_tokens: Int32,
        max_blocks: Int32,
        num_blocks: Int32,
        num_layers: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        smem, slots = SmemAllocator(), self.slots
        barriers = smem.allocate_array(Int64, num_elems=2 * slots + PENDING)
        areas = Int32(smem.allocate(self.area_bytes, byte_alignment=128).toint())
        ring = Int32(smem.allocate(slots * SLOT_BYTES, byte_alignment=128).toint())
        if tid == 0:
            for slot in cutlass.range_constexpr(slots):
                cute.arch.mbarrier_init(barriers + slot, 1)
                cute.arch.mbarrier_init(barriers + slots + slot, WARPS)
            for i in cutlass.range_constexpr(PENDING):
                cute.arch.mbarrier_init(barriers + 2 * slots + i, WARPS)
            st_shared_u32(areas + self.areas["stop"], Uint32(0))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        program = SimpleNamespace(
            **dict(sizes=self.sizes, areas=self.areas, stamps=False),
            limit=1 << 22,
            op_number=lambda _: 0,
        )
        env = dict(table=table, work=work, sync=sync, positions=positions)
        env.update(slot_mapping=slot_mapping, block_table=block_table, num_reqs=num_reqs)
        env.update(num_tokens=num_tokens, max_blocks=max_blocks, num_blocks=num_blocks)
        env.update(areas=areas, ring=ring, barriers=barriers, slots=slots)
        env.update(pending=barriers + 2 * slots, first_signal=Uint32(0))
        warp = cute.arch.make_warp_uniform(tid // 32)
        if warp == WARPS:
            self.load(Loader(program, env), num_layers)
        elif warp == WARPS + 1:
            Signaller(program, env).run()
        else:
            role = Compute(program, env)
            self.compute(role, given, out, num_layers)
            role.fresh()
            role.finish()

    @cute.jit
    def load(self, r, num_layers: Int32):
        r.block_signal[0] = Uint32(0)
        for layer in cutlass.range(num_layers, unroll=1):
            r.prefetch_row(layer)
            r.next_row()
            r.begin_block()
            if const_expr(self.sizes.pass_rows > 1):
                r.signal("mla_in")
            r.signal("q_latent")
            self.q_b.load(r, r.field("mla.q_b"))
            if const_expr(self.sizes.pass_rows > 1):
                r.signal("q")
            self.mla.load(r)
            r.signal("out")
            r.end_block()

    @cute.jit
    def compute(self, r, given: Int64, out: Int64, num_layers: Int32):
        sizes = self.sizes
        words, width = sizes.buffers["mla_in"] // 4, sizes.mla_width
        staged, one_row = r.shared("scratch"), sizes.pass_rows == 1
        r.block_signal[0], r.block_tag[0] = Uint32(0), Uint32(0)
        for layer in cutlass.range(num_layers, unroll=1):
            r.prefetch_row(layer)
            r.next_row()
            r.begin_block()
            tag = r.new_tag("mla_in")
            for i in cutlass.range(r.cta * THREADS + r.tid, words, THREADS * sizes.sms, unroll=1):
                word = ld_global_u32(given + (Int64(layer) * words + Int64(i)) * 4)
                if const_expr(one_row):
                    word = tagged(float_of(word), tag)
                st_global_u32(r.buffer("mla_in") + Int64(i) * 4, word)
            if const_expr(not one_row):
                r.signal("mla_in")
            r.begin("mla_latent")
            self.mla.latent(r)
            r.signal("q_latent")
            r.begin("q_b")
            self.mla.stage_q(r, staged)
            r.bar()
            sink = Rounded(r, "q", self.q_b.product, tag if one_row else None)
            self.q_b.multiply(r, staged, r.num_tokens, sink)
            if const_expr(not one_row):
                r.signal("q")
            r.begin("mla")
            self.mla.compute(r)
            r.begin("o_proj")
            if const_expr(one_row):
                r.bar()  # scratch is free
            else:
                r.wait("mla_heads")
            self.mla.stage(r, staged)
            r.bar()
            to = out + Int64((layer * sizes.sms + r.cta) * r.num_tokens) * (2 * width)
            for i in cutlass.range(r.tid, r.num_tokens * (width // 2), THREADS, unroll=1):
                row, pair = i // (width // 2), i % (width // 2)
                at = staged + row * x_stride(width) + pair * 4
                st_global_u32(to + Int64(i) * 4, ld_shared_u32(at))
            r.signal("out")
            r.wait("out")  # before words are written again, and scratch
            r.end_block()


def arguments() -> tuple[Any, ...]:
    return *(Int64(0) for _ in ADDRESSES), *(Int32(1) for _ in NUMBERS), make_fake_stream()


@functools.cache
def compile_layers(sizes: Sizes, arch: str, slots: int = 3) -> Any:
    return compile_kernel(Layers(sizes, slots), arguments(), arch)


@functools.cache
def sizes_of(name: str, sms: int, pass_rows: int) -> Sizes:
    """Of what MLA does not read, anything that is allowed."""
    own = dict(zip(("hidden", "mla_heads", *DIMS), MODELS[name], strict=True))
    return Sizes(
        **own,
        **dict(sms=sms, pass_rows=pass_rows, kda_heads=1, num_experts=64, top_k=8, latent=64),
        **dict(expert_width=128, shared_width=128, dense_width=0, vocab=64, router_rows=64),
        **dict(latent_rows=64, up_rows=128, router_first=0, latent_first=0, up_first=0),
        **dict(embed_rows=64, embed_first=0, eps=1e-5),
        **dict(beta=1.0, linear_beta=1.0, lower_bound=-5.0, routed_norm=True, renormalize=True),
        **dict(scaling=1.0, softmax_scale=(own["nope_dim"] + own["rope_dim"]) ** -0.5),
    )


DIMS = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "block_size")
MODELS = {  # C, heads, q_rank, L, Dn, Dr, Dv, block size
    "K3 TP16": (7168, 6, 1536, 512, 128, 64, 128, 64),
    "wide": (128, 6, 256, 512, 128, 64, 128, 64),  # K3 TP16 with a narrow x
    "K3 TP4": (7168, 24, 1536, 512, 128, 64, 128, 64),
    "K3": (7168, 96, 1536, 512, 128, 64, 128, 64),
    "golden": (320, 2, 160, 512, 128, 64, 128, 16),
    "mini": (160, 4, 64, 128, 128, 64, 128, 16),
    "small": (128, 3, 64, 128, 32, 16, 32, 5),
    "heads": (128, 18, 32, 128, 32, 16, 16, 7),  # two groups of rows even for one token
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_rows", [1, 8])
def test_mla_compiles(pass_rows: int, arch: str) -> None:
    compile_layers(sizes_of("K3 TP16", 132, pass_rows), arch, 5)


def test_scratch_leaves_the_ring_its_slots() -> None:
    for name in ("K3 TP16", "K3", "mini"):
        assert MLA(sizes_of(name, 132, 1)).scratch_bytes <= 58 << 10
        assert MLA(sizes_of(name, 132, 8)).scratch_bytes <= 72 << 10


# ---- inputs ----


@dataclass
class Layer:
    x: Tensor  # [T, q_a | kv_a | gate] bf16
    q_b: Tensor  # [H * (Dn + Dr), q_rank]
    w: MLAWeights
    cache: Tensor  # [slots, L + Dr], rows of this step not written yet


@dataclass
class Step:
    positions: Tensor
    slot_mapping: Tensor
    table: Tensor  # entries beyond the context point nowhere
    safe_table: Tensor


def step_of(sizes: Sizes, num_queries: int, lengths: tuple[int, ...]) -> Step:
    """Requests whose context ends with this step's rows; of length 0: padding."""
    size, num_reqs = sizes.block_size, len(lengths)
    blocks = max(-(-n // size) for n in lengths) + 1
    order = torch.randperm(num_reqs * blocks + 2, generator=torch.Generator().manual_seed(1))
    safe = order[: num_reqs * blocks].view(num_reqs, blocks)
    table, positions = safe.clone(), []
    for r, n in enumerate(lengths):
        table[r, -(-n // size) :] = 1 << 40
        positions += [p if n else -1 for p in range(n - num_queries, n)]
    at = torch.tensor(positions).clamp(min=-1)
    request = torch.arange(len(positions)) // num_queries
    slots = safe[request, at.clamp(min=0) // size] * size + at % size
    return Step(at, torch.where(at < 0, -1, slots), table, safe)


def layer_of(sizes: Sizes, step: Step, seed: int, poison: float) -> Layer:
    g = torch.Generator().manual_seed(seed)
    s, tokens = sizes, len(step.positions)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * scale).bfloat16()

    size, width = s.block_size, s.kv_rank + s.rope_dim
    cache = torch.full(((step.safe_table.numel() + 2) * size, width), poison).bfloat16()
    for r, row in enumerate(step.positions.view(len(step.table), -1)):
        at = torch.arange(int(row[row >= 0].min()) if (row >= 0).any() else 0)
        slots = step.safe_table[r, at // size] * size + at % size
        cache[slots] = normal(len(at), width)
    key_scale = 2.0 * s.nope_dim**-0.5
    w = MLAWeights(
        1.0 + normal(s.q_rank, scale=0.2),
        1.0 + normal(s.kv_rank, scale=0.2),
        normal(s.mla_heads, s.nope_dim + s.value_dim, s.kv_rank, scale=key_scale),
        s.nope_dim,
        s.eps,
    )
    q_b = normal(s.mla_heads * (s.nope_dim + s.rope_dim), s.q_rank, scale=s.q_rank**-0.5)
    return Layer(normal(tokens, s.mla_in_width, scale=2.0), q_b, w, cache)


def parts_of(x: Tensor, sizes: Sizes) -> Tensor:
    """mla_in [slices, pass_rows, rows] f32 whose sums over the slices are x, in any order; what x
    does not give is NaN."""
    product = sizes.products["mla.in_proj"]
    factors = [(-1) ** s * (s + 1) / 2 for s in range(product.slices - 1)]
    parts = torch.full((product.slices, sizes.pass_rows, product.rows), float("nan"))
    for s, factor in enumerate([*factors, 1 - sum(factors)]):
        parts[s, : x.shape[0], : x.shape[1]] = x.float() * factor
    return parts


# ---- the right answer ----


def reference(sizes: Sizes, layer: Layer, step: Step) -> tuple[Tensor, Tensor]:
    """The ops' references in float32 -> heads [T, H * Dv], cache; padding rows are 0."""
    w = MLAWeights(*(t.float() for t in (layer.w.q_norm, layer.w.kv_norm, layer.w.kv_b)),
                   layer.w.nope_dim, layer.w.eps)  # fmt: skip
    x, cache, real = layer.x.float(), layer.cache.float(), step.positions >= 0
    q_latent = torch.zeros(len(x), sizes.q_rank)
    latent = torch.zeros(int(real.sum()), sizes.q_rank)
    mla_latent_ref(x[real], w, cache, step.slot_mapping[real], out=latent)
    q_latent[real] = latent
    heads = torch.zeros(len(x), sizes.mla_width)
    mla_ref(q_latent @ layer.q_b.float().T, x, w, cache, step.safe_table, step.positions,
            sizes.block_size, out=heads)  # fmt: skip
    return heads.masked_fill(~real.unsqueeze(-1), 0.0), cache


def in_bf16(sizes: Sizes, layer: Layer, step: Step) -> Tensor:
    """What plain torch in bf16 makes of it, op by op, in the latent."""
    s, w, cache = sizes, layer.w, layer.cache.clone()
    real, tokens = step.positions >= 0, len(layer.x)
    latent = torch.zeros(int(real.sum()), s.q_rank).bfloat16()
    mla_latent_ref(layer.x[real], w, cache, step.slot_mapping[real], out=latent)
    q = torch.zeros(tokens, s.mla_heads, s.nope_dim + s.rope_dim).bfloat16()
    q[real] = (latent @ layer.q_b.T).unflatten(1, (s.mla_heads, -1))
    rows, visible = gather_context(cache, step.safe_table, step.positions, s.block_size)
    rows = rows.bfloat16().unsqueeze(1)
    absorbed = torch.einsum("thn,hnl->thl", q[..., : s.nope_dim], w.kv_b[:, : s.nope_dim])
    q = torch.cat([absorbed, q[..., s.nope_dim :]], dim=-1)
    q = q.unflatten(0, (len(rows), -1)).transpose(1, 2)
    scores = q @ rows.transpose(-1, -2) * s.softmax_scale
    weights = attend(scores.float(), visible).nan_to_num(0.0).bfloat16()
    context = weights @ rows[..., : s.kv_rank]  # [R, H, Q, L]
    heads = torch.einsum("rhql,hvl->rqhv", context, w.kv_b[:, s.nope_dim :]).reshape(tokens, -1)
    return heads * torch.sigmoid(layer.x[:, -s.mla_width :])


# ---- running ----

Tensors = dict[str, Tensor]
Launch = Callable[[Sizes, Tensors, list[Tensors], tuple[int, ...]], None]


def fill(table: Tensor, layers: list[Tensors]) -> None:
    for row, fields in zip(table, layers, strict=True):
        for name, tensor in fields.items():
            row[entry(f"mla.{name}")] = tensor.data_ptr()


@pytest.fixture(scope="module")
def on_emulator(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return on_emulator_in(tmp_path_factory.mktemp("ptx"))


def on_emulator_in(folder: Path, edit: Callable[[str], str] = lambda ptx: ptx) -> Launch:
    emulator = Emulator(str(folder), edit)
    compiled = functools.cache(lambda sizes: emulator.compile(Layers(sizes), arguments(), ARCH))

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
            if name.startswith(("mla", "q"))
        ]
        named = [(n, t) for n, t in tensors.items() if n not in ("work", "sync")]
        named += [(f"{n} {i}", t) for i, fields in enumerate(layers) for n, t in fields.items()]
        buffers += [buffer_of(t, n.split()[0] not in WRITTEN, n) for n, t in named]
        buffers.append(buffer_of(tensors["sync"].view(torch.int32), False, "sync"))
        places = [tensors[name].data_ptr() for name in ADDRESSES]
        emulator.run(compiled(sizes), [*places, *numbers], buffers)

    return launch_layers


def on_gpu(sizes: Sizes, tensors: Tensors, layers: list[Tensors], numbers: tuple[int, ...]) -> None:
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    layers_there = [{name: t.cuda() for name, t in fields.items()} for fields in layers]
    table = tensors["table"]
    fill(table, layers_there)
    there["table"] = table.cuda()
    places = [address(there[name]) for name in ADDRESSES]
    launch(compile_layers(sizes, arch_of(0), 5), *places, *numbers)
    tensors["out"].copy_(there["out"])
    for fields, fields_there in zip(layers, layers_there, strict=True):
        fields["cache"].copy_(fields_there["cache"])


def run(
    launch_layers: Launch, sizes: Sizes, layers: list[Layer], step: Step
) -> list[tuple[Tensor, Tensor]]:
    """On copies of the caches -> heads, cache of each layer."""
    fields = []
    for layer in layers:
        packed = pack_mla(layer.w, sizes.rope_dim)
        fields.append(
            {
                **{"q_norm": packed.q_norm, "kv_norm": packed.kv_norm, "q_b": pack_gemv(layer.q_b)},
                **{"absorb": packed.absorb.tensor, "value": packed.value.tensor},
                "cache": layer.cache.clone(),
            }
        )
    tokens, (num_reqs, max_blocks) = len(step.positions), step.table.shape
    out = torch.full((len(layers), sizes.sms, tokens, sizes.mla_width), float("nan")).bfloat16()
    tensors = {
        "table": torch.full((len(layers), ENTRIES), 16),
        "work": torch.full((sizes.work_bytes,), 0xFF, dtype=torch.uint8),
        "sync": torch.zeros(SYNC_BYTES, dtype=torch.uint8),
        "positions": step.positions,
        "slot_mapping": step.slot_mapping,
        "block_table": step.table,
        "given": torch.stack([parts_of(layer.x, sizes) for layer in layers]),
        "out": out,
    }
    num_blocks = len(layers[0].cache) // sizes.block_size
    numbers = (num_reqs, tokens, max_blocks, num_blocks, len(layers))
    launch_layers(sizes, tensors, fields, numbers)
    if launch_layers is not on_gpu and sizes.pass_rows == 1:
        check_tags(sizes, tensors["work"], len(layers) - 1)
    for cta in range(1, sizes.sms):
        check_equal(out[:, cta], out[:, 0], f"heads of CTA {cta}")
    return [(out[i, 0], f["cache"]) for i, f in enumerate(fields)]


def check_tags(sizes: Sizes, work: Tensor, tag: int) -> None:
    """Words of splits without a token are written too: a later step whose tag is the same again
    must not take an older step's for its own."""
    groups, rows = -(-sizes.mla_heads // 16), min(sizes.mla_heads, 16)
    units = max(sizes.sms // groups, 1) * groups
    for name in ("mla_partial", "mla_stats"):
        at = sizes.offsets[name]
        words = work[at : at + sizes.buffers[name]].view(torch.int32).view(sizes.mla_units, 16, -1)
        if groups == 1:
            tags = words[:units, :rows] & 0xFF
            check_equal(tags, torch.full_like(tags, tag), f"tags of {name}")


def check(
    launch_layers: Launch, name: str, sms: int, num_queries: int, lengths: tuple[int, ...],
    count: int = 1, poison: float = float("nan"),
) -> None:  # fmt: skip
    tokens = num_queries * len(lengths)
    sizes = sizes_of(name, sms, 1 if tokens == 1 else 8)
    step = step_of(sizes, num_queries, lengths)
    layers = [layer_of(sizes, step, 7 + i, poison) for i in range(count)]
    padding = step.positions < 0
    for layer, (heads, cache) in zip(layers, run(launch_layers, sizes, layers, step), strict=True):
        right, right_cache = reference(sizes, layer, step)
        if not padding.all():
            in_torch = in_bf16(sizes, layer, step)
            check_bf16(heads[~padding], in_torch[~padding], right[~padding], "heads")
        check_equal(heads[padding].abs(), torch.zeros_like(heads[padding]), "padding")
        written = torch.zeros(len(cache), dtype=torch.bool)
        written[step.slot_mapping[~padding]] = True
        check_equal(cache[~written], layer.cache[~written], "other cache rows")
        kept = layer.cache.clone()
        latent = torch.zeros(int((~padding).sum()), sizes.q_rank).bfloat16()
        mla_latent_ref(layer.x[~padding], layer.w, kept, step.slot_mapping[~padding], out=latent)
        if not padding.all():
            check_bf16(cache[written], kept[written], right_cache[written], "cache rows")


# model, SMs, rows of a request, contexts (0: a padding request): around the borders of slots (24),
# tiles (48) and blocks; one token; several tiles a split; several units a CTA; a request of 3 and
# of 8 rows, whose first rows may be before its first token
CASES = [
    ("small", 3, 1, (1,)),
    ("small", 3, 1, (25,)),
    ("small", 3, 1, (49,)),
    ("small", 3, 1, (0,)),
    ("small", 3, 1, (3 * TILE + 30,)),
    ("small", 4, 3, (50,)),
    ("small", 4, 8, (24,)),
    ("small", 4, 8, (5,)),
    ("small", 4, 1, (130, 1, 0, 48, 96, 23, 24, 25)),
    ("small", 4, 2, (26, 100, 49, 2)),
    ("heads", 3, 1, (60,)),
    ("heads", 3, 8, (60,)),
    ("wide", 3, 1, (60,)),
]


@pytest.mark.parametrize("name, sms, num_queries, lengths", CASES)
def test_mla_on_emulator(
    on_emulator: Launch, name: str, sms: int, num_queries: int, lengths: tuple[int, ...]
) -> None:
    check(on_emulator, name, sms, num_queries, lengths)


def test_layers_share_their_buffers(on_emulator: Launch) -> None:
    check(on_emulator, "small", 3, 1, (90,), count=3)
    check(on_emulator, "small", 4, 4, (60, 10), count=2)


def test_the_cache_row_must_be_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_layers = on_emulator_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Attend, "await_rows", lambda self, r: fence_async())
        with pytest.raises(Fault, match="no signal"):
            check(launch_layers, "small", 3, 1, (TILE + 1,))


def test_a_fence_must_precede_the_copy(tmp_path: Path) -> None:
    launch_layers = on_emulator_in(
        tmp_path, lambda ptx: ptx.replace("fence.proxy.async.global;", "")
    )
    with pytest.raises(Fault, match=r"fence\.proxy\.async"):
        check(launch_layers, "small", 3, 1, (TILE + 1,))


# the tests on a GPU: a context of one split each, of several tiles, long; windows; many heads
ON_GPU = [
    ("K3 TP16", 1, (1,)),
    ("K3 TP16", 1, (4096,)),
    ("K3 TP16", 1, (131072 - 5,)),
    ("K3 TP16", 8, (5000,)),
    ("K3 TP16", 1, (4000, 1, 0, 48, 96, 2300, 24, 25)),
    ("K3", 1, (100,)),
    ("K3 TP4", 4, (300, 63)),
    ("mini", 1, (100,)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name, num_queries, lengths", ON_GPU)
def test_mla_on_gpu(name: str, num_queries: int, lengths: tuple[int, ...]) -> None:
    check(on_gpu, name, 132, num_queries, lengths, count=1 if max(lengths) > 100_000 else 2)
