"""Top-k routing: sigmoid scores, a bias for the choice only, weights from the unbiased scores.

    s    = sigmoid(logits)                            in float32, logits = x @ gate.T (moe_in)
    pick = s + bias; with expert groups, all but the topk_group best groups (by the sum of their two
           largest pick) are set to -inf
    ids  = the num_experts_per_token largest pick; ties go to the lower id
    w    = s[ids], divided by their sum + 1e-20 if renormalised, times the scaling factor

A row with NaN still gets distinct ids in range; its weights are NaN, and the row is refused at its
logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.reference.numerics import acc


@dataclass(frozen=True)
class RouterWeights:
    bias: Tensor  # [E] f32
    top_k: int
    num_groups: int
    topk_groups: int
    renormalize: bool
    scaling: float


def largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest, value down, index up: torch.topk leaves ties open."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]


def route_value(logits: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
    """logits [T, E] f32 -> (ids [T, A] i64, weights [T, A])."""
    scores = torch.sigmoid(acc(logits))  # [T, E]
    pick = scores + w.bias.to(scores.dtype)
    if w.num_groups > 1:
        grouped = pick.unflatten(-1, (w.num_groups, -1))  # [T, G, E / G]
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(-1, largest(group_scores, w.topk_groups), True)
        pick = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = largest(pick, w.top_k)
    weights = scores.gather(-1, ids)
    if w.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * w.scaling


def route_ref(logits: Tensor, w: RouterWeights, *, out: tuple[Tensor, Tensor]) -> None:
    """logits [T, E] -> out: ids [T, A] int, weights [T, A] f32."""
    ids, weights = route_value(logits, w)
    out[0].copy_(ids)
    out[1].copy_(weights)
