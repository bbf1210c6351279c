"""Embedding rows:  out[t] = table[ids[t] - first_id], unscaled

Shapes   ids [T] i64, table [V, C] bf16 -> out [T, C] bf16. C (a multiple of 8) static; T >= 1, V
         and first_id are read at launch. An id without a row (of another rank, or padding) gives
         zeros.
Bytes    4 T C + 8 T. T = 8, C = 7168: 0.23 MB, 0.05 us at 4.64 TB/s.
Grid     a CTA a token, each thread copies pieces of 16 bytes.
Waits    ids: the grid dependency; the table is constant, but which row is not known before.
Signals  launch_dependents at once.
Aliases  none.
Archs    sm_90a, sm_100a, sm_103a.
Rounding none: rows are copied bit by bit.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from nanok3.dsl import (
    address,
    arch_of,
    compile_kernel,
    launch,
    ld_global_i64,
    st_global_u32x4,
)
from nanok3.kernels.rms_norm import PIECE, Pieces, load_pieces, piece_of
from nanok3.reference.embed import EmbedWeights
from nanok3.reference.embed import embed_ref as embed_ref

# ---- device ----


class Embed:
    def __init__(self, width: int):
        assert width % PIECE == 0, f"{width} columns"
        self.width, self.pieces = width, Pieces(width // PIECE)

    @cute.jit
    def __call__(
        self,
        ids: Int64,
        table: Int64,
        first_id: Int64,
        num_ids: Int64,
        out: Int64,
        num_tokens: Int32,
        stream,
    ):
        self.kernel(ids, table, first_id, num_ids, out).launch(
            grid=(num_tokens, 1, 1),
            block=(self.pieces.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ids: Int64, table: Int64, first_id: Int64, num_ids: Int64, out: Int64):
        cute.arch.griddepcontrol_launch_dependents()
        token, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        pieces = self.pieces
        cute.arch.griddepcontrol_wait()
        local = ld_global_i64(ids + Int64(token) * 8) - first_id
        known = Int32((local >= 0) & (local < num_ids))
        # a thread of an id without a row has no piece of the row: it loads nothing and holds zeros
        first = tid * known + pieces.count * (1 - known)
        row = load_pieces(table + local * (2 * self.width), first, pieces)
        target = out + Int64(token) * (2 * self.width)
        for i in cutlass.range_constexpr(pieces.per_thread):
            piece = i * pieces.threads + tid
            if piece < pieces.count:
                st_global_u32x4(target + Int64(piece * 16), piece_of(row, i))


# ---- host ----


@functools.cache
def compile_embed(width: int, arch: str):
    args = (Int64(0), Int64(0), Int64(0), Int64(1), Int64(0), Int32(1), make_fake_stream())
    return compile_kernel(Embed(width), args, arch)


def embed(ids: torch.Tensor, w: EmbedWeights, *, out: torch.Tensor) -> None:
    """ids [T] i64, table [V, C] bf16 -> out [T, C] bf16."""
    table, (tokens, width) = w.table, out.shape
    assert tokens >= 1 and ids.shape == (tokens,) and ids.dtype == torch.int64
    assert table.shape[1] == width and table.dtype == out.dtype == torch.bfloat16
    assert all(t.is_contiguous() for t in (ids, table, out))
    kernel = compile_embed(width, arch_of(out.device.index))
    launch(
        kernel,
        address(ids),
        address(table),
        w.first_id,
        table.shape[0],
        address(out),
        tokens,
    )
