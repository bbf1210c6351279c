"""What a draft reads of a layer: the running sum with the pending delta, as a row of its own.

    out = stream + delta                                              (`reference/attn_res.tap_ref`)

Shapes   stream, delta [T, C] bf16 -> out [T, C] bf16, whose rows may lie apart. C, a multiple of 8,
         is static; T >= 1 is read at launch.
Bytes    6 T C. T = 8, C = 7168: 0.3 MB; what it takes is latency.
Grid     a CTA for a row and 1024 of its columns; a thread 8 columns.
Waits    all: the grid dependency.
Signals  launch_dependents at once.
Aliases  nothing overlaps.
Archs    sm_90a, sm_100a, sm_103a.
Rounding one sum in float32, to bf16: the bits of `attn_res`'s p.
"""

from __future__ import annotations

import functools

import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from nanok3.dsl import (
    address,
    arch_of,
    bf16_high,
    bf16_low,
    compile_kernel,
    launch,
    ld_global_u32x4,
    pack_bf16,
    st_global_u32x4,
)
from nanok3.reference.attn_res import tap_ref as tap_ref

THREADS = 128


# ---- device ----


class Tap:
    def __init__(self, width: int):
        assert width % 8 == 0
        self.width, self.pieces = width, width // 8

    @cute.jit
    def __call__(
        self, stream_at: Int64, delta: Int64, out: Int64, out_row: Int32, tokens: Int32, stream
    ):
        self.kernel(stream_at, delta, out, out_row).launch(
            grid=(-(-self.pieces // THREADS), tokens, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, stream_at: Int64, delta: Int64, out: Int64, out_row: Int32):
        cute.arch.griddepcontrol_launch_dependents()
        part, token, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        piece = part * THREADS + tid
        cute.arch.griddepcontrol_wait()
        if piece < self.pieces:
            at = Int64(token) * (2 * self.width) + Int64(piece * 16)
            pairs = zip(ld_global_u32x4(stream_at + at), ld_global_u32x4(delta + at), strict=True)
            sums = [
                pack_bf16(bf16_low(s) + bf16_low(d), bf16_high(s) + bf16_high(d)) for s, d in pairs
            ]
            to = out + (Int64(token) * Int64(out_row) + Int64(piece * 8)) * 2
            st_global_u32x4(to, sums)


# ---- host ----


@functools.cache
def compile_tap(width: int, arch: str):
    args = (Int64(0), Int64(0), Int64(0), Int32(1), Int32(1), make_fake_stream())
    return compile_kernel(Tap(width), args, arch)


def tap(delta: torch.Tensor, streams: torch.Tensor, *, out: torch.Tensor) -> None:
    """delta [T, C] bf16, streams n x [T, C] bf16 -> out [T, C] bf16."""
    stream = streams[-1]
    assert delta.shape == stream.shape == out.shape and len(delta) >= 1
    assert all(t.dtype == torch.bfloat16 and t.data_ptr() % 16 == 0 for t in (delta, stream, out))
    assert delta.is_contiguous() and stream.is_contiguous()
    assert out.stride(1) == 1 and out.stride(0) % 8 == 0
    launch(
        compile_tap(delta.shape[1], arch_of(delta.device.index)),
        *(address(t) for t in (stream, delta, out)),
        *(out.stride(0), len(delta)),
    )
