"""The reading of a draft on a GPU: products through `gemv`, norms and embeddings through kernels.

`draft_kernels` makes the record of ops, over weights that `draft_packing.py` has packed. Attention
over the draft's cache, SiLU and the confidence head are torch; attention reads the whole block
table, since a captured graph cannot know how long a request is. All of it may be captured. Imports
the kernels, and with them CuTe DSL: nothing on a CPU path imports this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import linear, silu

from nanok3.kernels.embed import embed
from nanok3.kernels.gemv import gemv
from nanok3.kernels.rms_norm import rms_norm
from nanok3.packing import Packed
from nanok3.reference.draft import MarkovWeights, confidence_ref
from nanok3.reference.draft_attention import draft_attention_ref, keep_ref
from nanok3.reference.numerics import acc
from nanok3.spec.draft import DraftOps

FEW_ROWS = 64  # up to which `gemv` multiplies; it reads the weights once for every 8


def draft_kernels(many_rows: Callable[..., None]) -> DraftOps:
    """many_rows: `linear` from a packed weight, for the rows of a prompt (`prefill_ops.py`)."""

    def product(x: Tensor, weight: Any, *, out: Tensor) -> None:
        if not isinstance(weight, Packed):
            out.copy_(linear(x.to(out.dtype), weight.to(out.dtype)))
        elif len(x) > FEW_ROWS:
            many_rows(x, weight, out=out)
        else:
            gemv(x, weight.tensor, weight.shape, out=out)

    def add_norm(
        delta: Tensor, stream: Tensor, weight: Tensor, eps: float, fresh: bool, *, out: Tensor
    ) -> None:
        stream.copy_(delta if fresh else acc(stream) + acc(delta))
        rms_norm(stream, weight, eps, out=out)

    def silu_up(x: Tensor, weight: Any, *, out: Tensor) -> None:
        both = x.new_empty(len(x), 2 * out.shape[1])
        product(x, weight, out=both)
        gate, up = both.chunk(2, dim=-1)
        out.copy_(silu(acc(gate)) * acc(up))

    def lm_head(x: Tensor, weight: Any, rows: Tensor, *, out: Tensor) -> None:
        assert len(rows) == len(x), "all rows of a window have logits"
        product(x, weight, out=out)

    def markov(logits: Tensor, w: MarkovWeights, previous: Tensor, *, out: Tensor) -> None:
        product(w.w1[previous], w.w2, out=out)
        out.add_(logits)

    return DraftOps(
        embed=embed,
        linear=product,
        norm=rms_norm,
        add_norm=add_norm,
        keep=keep_ref,
        attention=draft_attention_ref,
        silu_up=silu_up,
        lm_head=lm_head,
        markov=markov,
        confidence=confidence_ref,
    )
