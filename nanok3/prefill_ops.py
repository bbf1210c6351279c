"""The `PREFILL` reading on a GPU: many rows of a request, from the weights that decode uses.

A matrix is unpacked into one shared scratch buffer, as many of its tiles at a time as fit, and
torch multiplies by them: unpacking reads and writes each byte once, for all rows of a chunk. Routed
experts have a kernel of their own that reads their packed tiles. Attention goes over the context
block by block, KDA over the rows, so that memory does not grow with the context (`workspaces.py`
says how much it is). Nothing waits for the device. Ops without a packed weight are decode's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanok3.config import ModelConfig, Shard
from nanok3.kernels.expert_prefill import columns_for, expert_prefill, make_items
from nanok3.kernels.gemv_layout import TILE, Range, unpack_gemv
from nanok3.ops import Ops
from nanok3.packing import Packed, PackedMLA
from nanok3.reference.experts import ExpertWeights
from nanok3.reference.kda import SAFE_EXPONENT, KDAWeights, kda_value
from nanok3.reference.linear import GateUpWeights, LatentUpWeights
from nanok3.reference.numerics import acc, rms_norm, situ
from nanok3.reference.router import route_ref
from nanok3.workspaces import (
    CONTEXT,
    HEADS,
    KDA_ROWS,
    QUERIES,
    SCRATCH,
    WIDE_SCRATCH,
    allocate,
    prefill_spaces,
)


class Prefill:
    """The workspaces, and the ops over them."""

    def __init__(self, config: ModelConfig, shard: Shard, max_rows: int, device: str) -> None:
        spaces = allocate(prefill_spaces(config, shard, max_rows), device)
        self._scratch = spaces["scratch"]
        self._expert_act, self._routed = spaces["expert_act"], spaces["routed"]

    def record(self, others: Ops) -> Ops:
        """others: the ops that read no packed matrix, for any number of rows."""
        return replace(
            others,
            linear=self.linear,
            kda=kda,
            mla=self.mla,
            gate_up=self.gate_up,
            moe_in=self.moe_in,
            route=route_ref,
            experts=self.experts,
            latent_up=self.latent_up,
            lm_head=self.lm_head,
        )

    # ---- products ----

    def linear(self, x: Tensor, weight: Packed, *, out: Tensor) -> None:
        (rows,) = weight.shape.ranges
        self._product(x, weight, rows, out)

    def gate_up(self, x: Tensor, w: GateUpWeights, *, out: Tensor) -> None:
        packed: Any = w.weight
        self.linear(x, packed, out=out)

    def moe_in(self, x: Tensor, w: Packed, *, out: tuple[Tensor, Tensor, Tensor]) -> None:
        for rows, target in zip(w.shape.ranges, out, strict=True):
            self._product(x, w, rows, target)

    def latent_up(self, routed: Tensor, shared: Tensor, w: LatentUpWeights, *, out: Tensor) -> None:
        packed: Any = w.weight
        if w.norm is not None:
            routed = rms_norm(routed, w.norm, w.eps).to(routed.dtype)
        (rows,) = packed.shape.ranges
        self._product(routed, packed, rows, out, shared)

    def lm_head(self, x: Tensor, weight: Packed, rows: Tensor, *, out: Tensor) -> None:
        if len(rows):
            self.linear(x[rows], weight, out=out)

    def _product(
        self, x: Tensor, weight: Packed, rows: Range, out: Tensor, extra: Tensor | None = None
    ) -> None:
        """out = x times the rows of one range, finished as the range says; `extra` is added."""
        column, wide = 0, rows.finish == "f32"
        most = (WIDE_SCRATCH if wide else SCRATCH) // weight.tensor[0].numel()
        for matrix in self._matrices(weight.tensor, rows.first_tile, rows.tiles, most):
            if wide:
                y = linear(acc(x), acc(matrix))
            elif rows.finish == "situ":  # of every 16 columns 8 are gate's, 8 up's
                gate, up = linear(x, matrix).unflatten(-1, (-1, 2, 8)).unbind(-2)
                betas = weight.shape.beta, weight.shape.linear_beta
                y = situ(gate.flatten(-2), up.flatten(-2), *betas)
            else:
                y = linear(x, matrix)
            count = min(y.shape[1], out.shape[1] - column)  # rows that pad a tile have no column
            y, own = y[:, :count], slice(column, column + count)
            out[:, own] = y if extra is None else acc(y) + acc(extra[:, own])
            column += count

    def _matrices(self, packed: Tensor, first: int, count: int, most: int) -> Iterator[Tensor]:
        """Up to `most` tiles as rows [16 n, K] of the scratch, one after the other."""
        for i in range(first, first + count, most):
            yield unpack_gemv(packed[i : min(i + most, first + count)], out=self._scratch)

    # ---- attention ----

    def mla(
        self,
        q: Tensor,
        x: Tensor,
        w: PackedMLA,
        cache: Tensor,
        block_table: Tensor,
        positions: Tensor,
        block_size: int,
        *,
        out: Tensor,
    ) -> None:
        """As `mla_expanded_ref`; the softmax goes over the context with a running largest score."""
        heads, requests = w.absorb.shape.groups, len(block_table)
        q, context = q.unflatten(-1, (heads, -1)), torch.empty_like(out).unflatten(-1, (heads, -1))
        num_rows = len(q) // requests
        for h in range(0, heads, HEADS):
            own = slice(h, min(h + HEADS, heads))
            matrices = self._heads(w, own)
            for i in range(0, len(q), num_rows):
                for first in range(i, i + num_rows, QUERIES):
                    some = slice(first, min(first + QUERIES, i + num_rows))
                    context[some, own] = attend(
                        q[some, own].transpose(0, 1),
                        *matrices,
                        cache,
                        block_table[i // num_rows],
                        positions[some],
                        block_size,
                    ).transpose(0, 1)
        out.copy_(acc(context.flatten(-2)) * torch.sigmoid(acc(x[:, -out.shape[1] :])))

    def _heads(self, w: PackedMLA, own: slice) -> tuple[Tensor, Tensor]:
        """latent -> key [h, L, Dn] and latent -> value [h, Dv, L] of some heads."""
        heads, count = w.absorb.shape.groups, own.stop - own.start
        scratch, matrices = self._scratch, []
        for packed in (w.absorb, w.value):
            tiles = packed.shape.tiles // heads
            rows = unpack_gemv(packed.tensor[own.start * tiles : own.stop * tiles], out=scratch)
            matrices.append(rows.unflatten(0, (count, tiles * TILE)))
            scratch = scratch[rows.numel() :]
        return matrices[0], matrices[1]

    # ---- experts ----

    def experts(
        self, latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, *, out: Tensor
    ) -> None:
        up: Any = w.w13
        down: Any = w.w2
        num_experts, (tokens, top_k) = len(up.tiles), ids.shape
        columns = columns_for(ids.numel(), num_experts)
        items, pairs = make_items(ids, num_experts, columns)
        act, routed = self._expert_act[: len(pairs)], self._routed[: len(pairs)]
        betas = w.beta, w.linear_beta
        expert_prefill(latent, items, pairs // top_k, up, pairs, columns, betas, out=act)
        expert_prefill(act, items, pairs, down, pairs, columns, out=routed)
        total = torch.zeros(tokens, routed.shape[1], dtype=torch.float32, device=routed.device)
        for a in range(top_k):
            total += routed[a::top_k] * weights[:, a : a + 1]
        out.copy_(total)


def attend(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    blocks: Tensor,
    positions: Tensor,
    block_size: int,
) -> Tensor:
    """q [H, T, Dn + Dr] of one request's rows at `positions` [T], key [H, L, Dn], value [H, Dv, L],
    its `blocks` [n] -> [H, T, Dv] in the arithmetic dtype.

    Softmax with a running largest score; every row sees the first cached row, so that of the first
    piece of the context is finite."""
    last = positions.amax()
    top = acc(q.new_full((*q.shape[:2], 1), float("-inf")))
    total, o = torch.zeros_like(top), torch.zeros_like(top)
    piece = CONTEXT * max(1, HEADS // len(q))
    for start in range(0, len(blocks) * block_size, piece):
        end = min(start + piece, len(blocks) * block_size)
        index = torch.arange(start, end, device=q.device)
        rows = cache[blocks[index // block_size] * block_size + index % block_size]  # [S, L + Dr]
        rows.masked_fill_((index > last).unsqueeze(-1), 0.0)  # what lies there is never read
        hidden = index > positions.unsqueeze(-1)  # [T, S]
        new_top, more_total, more_o = attend_some(q, key, value, rows, hidden, top)
        rescale = (top - new_top).exp()
        total, o, top = total * rescale + more_total, o * rescale + more_o, new_top
    return o / total


def attend_some(
    q: Tensor, key: Tensor, value: Tensor, rows: Tensor, hidden: Tensor, top: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A piece of the context: rows [S, L + Dr], hidden [T, S] bool -> the largest score so far
    [H, T, 1], and relative to it the sum of weights [H, T, 1] and of values [H, T, Dv]."""
    heads, rank, nope = key.shape
    latent = rows[:, :rank]
    keys = torch.empty(heads, len(rows), q.shape[-1], dtype=q.dtype, device=q.device)
    keys[..., :nope] = latent @ key
    keys[..., nope:] = rows[:, rank:]
    scores = acc(q @ keys.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)  # [H, T, S]
    del keys
    scores.masked_fill_(hidden, float("-inf"))
    top = torch.maximum(top, scores.amax(-1, keepdim=True))
    weights = scores.sub_(top).exp_()
    return (
        top,
        weights.sum(-1, keepdim=True),
        acc(weights.to(q.dtype) @ (latent @ value.transpose(-1, -2))),
    )


def kda(
    x: Tensor,
    w: KDAWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    out: Tensor,
) -> None:
    """As `kda_chunked_ref`, KDA_ROWS of each request at a time."""
    requests = len(state_slots)
    x, target = (t.unflatten(0, (requests, -1)) for t in (x, out))
    conv, now = conv_state[state_slots], state[state_slots]
    chunked = w.lower_bound >= -SAFE_EXPONENT
    for first in range(0, x.shape[1], KDA_ROWS):
        some = slice(first, first + KDA_ROWS)
        value, conv, now = kda_value(x[:, some].flatten(0, 1), w, conv, now, chunked)
        target[:, some] = value.unflatten(0, (requests, -1)).to(out.dtype)
    conv_state[state_slots], state[state_slots] = conv, now
