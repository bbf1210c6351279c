"""Embedding rows: `out[t] = table[ids[t]]`, unscaled."""

from __future__ import annotations

from torch import Tensor


def embed_ref(ids: Tensor, table: Tensor, *, out: Tensor) -> None:
    """ids [T] int, table [V, C] -> out [T, C]."""
    out.copy_(table[ids])
