"""Embedding rows: `out[t] = table[ids[t] - first_id]`, unscaled; zero where there is no row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class EmbedWeights:
    table: Tensor  # [V, C], the rows of one rank
    first_id: int  # whose row is the first


def embed_ref(ids: Tensor, w: EmbedWeights, *, out: Tensor) -> None:
    """ids [T] int -> out [T, C]; the sum over ranks has every row."""
    local, count = ids - w.first_id, w.table.shape[0]
    elsewhere = ((local < 0) | (local >= count)).unsqueeze(-1)
    out.copy_(w.table[local.clamp(0, count - 1)].masked_fill(elsewhere, 0.0))
