"""A draft's matrices in the layout of `gemv`, for a GPU; on "meta" nothing is allocated.

The target's embedding and head, which a draft may share, are packed already. A matrix whose width
is no multiple of a block's stays as it is, and torch multiplies by it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from nanok3.kernels.gemv_layout import BLOCK, Shape, choose_split, pack_gemv
from nanok3.packing import Packed
from nanok3.spec.draft_weights import DraftLayer, DraftWeights


def pack_draft(w: DraftWeights) -> DraftWeights:
    """bf16 matrices that a draft multiplies by."""
    head: Any = w.lm_head
    head = head if isinstance(head, Packed) else pack_matrix(head, "f32")
    return replace(
        w,
        lm_head=head,
        context_proj=pack_matrix(w.context_proj),
        layers=tuple(pack_layer(layer) for layer in w.layers),
        markov=replace(w.markov, w2=pack_matrix(w.markov.w2, "f32")),
    )


def pack_layer(layer: DraftLayer) -> DraftLayer:
    return replace(
        layer,
        q_a=None if layer.q_a is None else pack_matrix(layer.q_a),
        q=pack_matrix(layer.q),
        kv=pack_matrix(layer.kv),
        o_proj=pack_matrix(layer.o_proj),
        gate_up=pack_matrix(layer.gate_up),
        down=pack_matrix(layer.down),
    )


def pack_matrix(weight: Tensor, finish: str = "bf16") -> Any:
    rows, k = weight.shape
    if k % BLOCK:
        return weight
    shape = Shape(rows=rows, k=k, x_width=k, finish=finish, split=choose_split(rows, k))
    return Packed(pack_gemv(weight), shape)
