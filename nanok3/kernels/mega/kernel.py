"""The persistent kernel: one launch for layers, or for a whole step with embedding and head.

A CTA an SM, cooperative, so that all run at once: WARPS compute warps and one loader warp trace the
same texts (functions of a record of ops), once for each kind of layer, inside a loop over layers;
one more warp passes on their signals.

    embedding or the caller's delta -> [attention sub-layer -> MLP sub-layer] x layers -> logits or
    the caller's delta

Bytes    the layers' weights once, for up to 8 rows; `nanok3.count` says how many.
Waits    an op waits for the signals, or the words, of the buffers that it reads (`role`, `ops`).
Archs    sm_90a, sm_100a, sm_103a; sm_90a has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import compile_kernel, ld_relaxed_u32, st_relaxed_u32, st_shared_u32
from nanok3.kernels.mega import fields
from nanok3.kernels.mega.attn_res import AttnRes
from nanok3.kernels.mega.experts import Experts
from nanok3.kernels.mega.kda import KDA
from nanok3.kernels.mega.linear import Linear, partial_bytes, x_stride
from nanok3.kernels.mega.mla import MLA
from nanok3.kernels.mega.ops import ComputeOps, LoadOps
from nanok3.kernels.mega.role import LIMIT, NEXT_SIGNAL, NEXT_TAG, PENDING, Signaller
from nanok3.kernels.mega.route import Route
from nanok3.kernels.mega.sizes import (
    PASS,
    RESERVED_BYTES,
    SHARED_BYTES,
    SLOT_BYTES,
    TILE,
    WARPS,
    Sizes,
)

THREADS = 32 * (WARPS + 2)
Text = Callable[[Any], None]

# The kernel's parameters: addresses, then numbers.
ADDRESSES = (
    *("table", "work", "sync", "embed_table", "input_ids", "positions", "slot_mapping"),
    *("block_table", "state_slots", "streams", "delta", "router_logits", "latent", "topk_ids"),
    *("topk_weights", "logits", "stamps"),
    *("taps", "record_qkv", "record_log_decay", "record_key", "record_value"),
)
NUMBERS = (
    "num_layers",
    "num_tokens",
    "num_reqs",
    "max_blocks",
    "num_blocks",
    "logits_stride",
    "stream_stride",
    "tap_stride",
    "record_slots",
    "record_rows",
)


def units_of(sizes: Sizes, recorded: bool) -> dict[str, Any]:
    """What stands behind ops that are more than a product, with what they need in shared memory."""
    return {
        "kda": KDA(sizes, recorded),
        "mla": MLA(sizes),
        "route": Route(sizes),
        "experts": Experts(sizes),
    }


def start(role):
    role.start()


def stop(role):
    role.stop()


class Program:
    """Everything that is known when the kernel is compiled."""

    def __init__(
        self,
        sizes: Sizes,
        texts: dict[str, Text],
        *,
        whole: bool,
        recorded: bool = False,
        tapped: bool = False,
        stamps: bool = False,
        limit: int = LIMIT,
    ) -> None:
        """texts: "kda", "mla", "moe", "dense" and "head", as far as there are such layers; whole:
        with embedding and head, else layers only, from and to the caller's delta; recorded:
        the text records KDA's rows; tapped: it taps streams; stamps: with clocks of each op, for a
        trace; limit: looks after which a wait gives up."""
        assert not recorded or sizes.pass_rows > 1, "rows are recorded in steps of several"
        self.sizes, self.texts, self.whole = sizes, texts, whole
        self.recorded, self.tapped = recorded, tapped
        self.stamps, self.limit = stamps, limit
        self.op_names: list[str] = []
        self.signals: dict[str, list[str]] = {}  # of each block, when traced: buffers in order
        self.attn_res = AttnRes(sizes)
        self.products = {name: Linear(sizes, p) for name, p in sizes.products.items()}
        self.units = units_of(sizes, recorded)
        own = sizes.own_tiles * sizes.pass_rows * TILE * 4
        widest = max(p.part_width for name, p in sizes.products.items() if p.k == sizes.hidden)
        up_stage = x_stride(sizes.products["latent_up"].part_width) + 2 * sizes.latent
        areas = {
            "delta": own,
            "shared": own,
            "current": own,
            "prefix": own,
            "stop": 4,  # set when the compute warps are done
            "score": sizes.own_tiles * TILE * 4,
            "mix": PASS * 8,
            "small": max(4 * WARPS * PASS, sizes.own_tiles * sizes.pass_rows * 16),
            "norm": 2 * widest,
            "routed": self.units["route"].table_bytes,
            "partial": 2 * partial_bytes(sizes.pass_rows),
            "scratch": max(
                *(p.stride * sizes.pass_rows for p in self.products.values()),
                *(unit.scratch_bytes for unit in self.units.values()),
                up_stage if sizes.is_words("routed") else 0,
            ),
        }
        self.areas, at = {}, 0
        for name, size in areas.items():
            self.areas[name] = at
            at += -(-size // 128) * 128
        self.area_bytes = at
        self.slots = (SHARED_BYTES - RESERVED_BYTES - at) // SLOT_BYTES
        assert self.slots >= 3, f"{at} bytes of shared memory besides the ring"

    def op_number(self, name: str) -> int:
        if name not in self.op_names:
            self.op_names.append(name)
        return self.op_names.index(name)


class Mega:
    """The launch."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cute.jit
    def __call__(
        self,
        table: Int64,
        work: Int64,
        sync: Int64,
        embed_table: Int64,
        input_ids: Int64,
        positions: Int64,
        slot_mapping: Int64,
        block_table: Int64,
        state_slots: Int64,
        streams: Int64,
        delta: Int64,
        router_logits: Int64,
        latent: Int64,
        topk_ids: Int64,
        topk_weights: Int64,
        logits: Int64,
        stamps: Int64,
        taps: Int64,
        record_qkv: Int64,
        record_log_decay: Int64,
        record_key: Int64,
        record_value: Int64,
        num_layers: Int32,
        num_tokens: Int32,
        num_reqs: Int32,
        max_blocks: Int32,
        num_blocks: Int32,
        logits_stride: Int32,
        stream_stride: Int32,
        tap_stride: Int32,
        record_slots: Int32,
        record_rows: Int32,
        stream,
    ):
        self.kernel(
            *(table, work, sync, embed_table, input_ids, positions, slot_mapping, block_table),
            *(state_slots, streams, delta, router_logits, latent, topk_ids, topk_weights),
            *(logits, stamps, taps, record_qkv, record_log_decay, record_key, record_value),
            *(
                num_layers,
                num_tokens,
                num_reqs,
                max_blocks,
                num_blocks,
                logits_stride,
                stream_stride,
            ),
            *(tap_stride, record_slots, record_rows),
        ).launch(
            grid=(self.program.sizes.sms, 1, 1),
            block=(THREADS, 1, 1),
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
        embed_table: Int64,
        input_ids: Int64,
        positions: Int64,
        slot_mapping: Int64,
        block_table: Int64,
        state_slots: Int64,
        streams: Int64,
        delta: Int64,
        router_logits: Int64,
        latent: Int64,
        topk_ids: Int64,
        topk_weights: Int64,
        logits: Int64,
        stamps: Int64,
        taps: Int64,
        record_qkv: Int64,
        record_log_decay: Int64,
        record_key: Int64,
        record_value: Int64,
        num_layers: Int32,
        num_tokens: Int32,
        num_reqs: Int32,
        max_blocks: Int32,
        num_blocks: Int32,
        logits_stride: Int32,
        stream_stride: Int32,
        tap_stride: Int32,
        record_slots: Int32,
        record_rows: Int32,
    ):
        program = self.program
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, num_elems=2 * program.slots + 1 + PENDING)
        areas = Int32(smem.allocate(program.area_bytes, byte_alignment=128).toint())
        ring = Int32(smem.allocate(program.slots * SLOT_BYTES, byte_alignment=128).toint())
        if tid == 0:
            for slot in cutlass.range_constexpr(program.slots):
                cute.arch.mbarrier_init(barriers + slot, 1)
                cute.arch.mbarrier_init(barriers + program.slots + slot, WARPS)
            cute.arch.mbarrier_init(barriers + 2 * program.slots, 1)
            for i in cutlass.range_constexpr(PENDING):
                cute.arch.mbarrier_init(barriers + 2 * program.slots + 1 + i, WARPS)
            st_shared_u32(areas + program.areas["stop"], Uint32(0))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # written by CTA 0 of this launch only after it has heard of all others
        first_signal = ld_relaxed_u32(sync + NEXT_SIGNAL)
        first_tag = ld_relaxed_u32(sync + NEXT_TAG)
        env = {
            **dict(
                zip(
                    ADDRESSES,
                    (
                        table,
                        work,
                        sync,
                        embed_table,
                        input_ids,
                        positions,
                        slot_mapping,
                        block_table,
                        state_slots,
                        streams,
                        delta,
                        router_logits,
                        latent,
                        topk_ids,
                        topk_weights,
                        logits,
                        stamps,
                        *(taps, record_qkv, record_log_decay, record_key, record_value),
                    ),
                    strict=True,
                )
            ),
            **dict(
                zip(
                    NUMBERS,
                    (
                        num_layers,
                        num_tokens,
                        num_reqs,
                        max_blocks,
                        num_blocks,
                        logits_stride,
                        stream_stride,
                        *(tap_stride, record_slots, record_rows),
                    ),
                    strict=True,
                )
            ),
            "barriers": barriers,
            "areas": areas,
            "ring": ring,
            "slots": program.slots,
            "routed": barriers + 2 * program.slots,
            "pending": barriers + 2 * program.slots + 1,
            "first_signal": first_signal,
            "first_tag": first_tag,
        }
        if warp == WARPS:
            self.run(LoadOps(program, env), num_layers)
        elif warp == WARPS + 1:
            Signaller(program, env).run()
        else:
            role = ComputeOps(program, env)
            self.run(role, num_layers)
            role.finish()
            if (role.cta == 0) & (tid == 0):
                st_relaxed_u32(sync + NEXT_SIGNAL, role.block_signal[0])
                st_relaxed_u32(sync + NEXT_TAG, role.block_tag[0])

    @cute.jit
    def run(self, role, num_layers: Int32):
        program = self.program
        role.block_signal[0] = role.first_signal
        role.block_tag[0] = role.first_tag
        role.prefetch_row(Int32(0))
        role.next_row()
        self.block(role, start)
        for layer in cutlass.range(num_layers, unroll=1):
            self.layer(role, layer)
        if const_expr(program.whole):
            self.block(role, program.texts["head"])
        else:
            self.block(role, stop)

    def layer(self, role, layer):
        role.prefetch_row(layer + 1)  # the last one is the head's
        kind = role.number("kind")
        self.choose(role, kind & fields.KDA, "kda", "mla")
        self.choose(role, kind & fields.MOE, "moe", "dense")
        role.next_row()

    @cute.jit
    def choose(self, role, yes: Int32, first: cutlass.Constexpr, second: cutlass.Constexpr):
        """One of two texts; only one where the model has no layer of the other kind."""
        texts = self.program.texts
        if const_expr(first not in texts):
            self.block(role, texts[second], second)
        elif const_expr(second not in texts):
            self.block(role, texts[first], first)
        else:
            if yes != 0:
                self.block(role, texts[first], first)
            else:
                self.block(role, texts[second], second)

    def block(self, role, text: Text, name: str = ""):
        role.begin_block()
        text(role)
        assert len(role.last) == role.signals, "a buffer is signalled once a block"
        signals = self.program.signals.setdefault(name or text.__name__, list(role.last))
        assert signals == list(role.last), "the roles disagree about signals"
        role.end_block()


def compile_mega(program: Program, arch: str) -> Any:
    args = (*(Int64(0) for _ in ADDRESSES), *(Int32(1) for _ in NUMBERS), make_fake_stream())
    return compile_kernel(Mega(program), args, arch)
