"""Routed experts in the latent.

    out[t] = sum_a weights[t, a] * w2[e] @ situ(w1[e] @ z[t], w3[e] @ z[t]),  e = ids[t, a]

The weight comes after w2, the sum is in float32 and is rounded once. Weights are dense here
(MXFP4 is exact in bf16 and wider); w1 and w3 lie stacked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanok3.reference.numerics import acc, situ


@dataclass(frozen=True)
class ExpertWeights:
    w13: Tensor  # [E, 2F, Z], w1 (gate) rows first
    w2: Tensor  # [E, Z, F]
    beta: float
    linear_beta: float


def experts_value(latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights) -> Tensor:
    """latent [T, Z], ids [T, A], weights [T, A] -> [T, Z]; expert by expert, the obvious way."""
    total = torch.zeros_like(acc(latent))
    for expert in ids.unique().tolist():
        rows, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(latent[rows], w.w13[expert]).chunk(2, dim=-1)
        act = situ(gate, up, w.beta, w.linear_beta).to(latent.dtype)
        routed = acc(linear(act, w.w2[expert])) * weights[rows, place].unsqueeze(-1)
        total = total.index_add(0, rows, routed.to(total.dtype))
    return total


def experts_gathered(latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights) -> Tensor:
    """The same for few rows: each row's experts as one batched product, sum in the order of ids."""
    rows, experts = latent.shape[0], ids.shape[1]
    flat = ids.reshape(-1)
    z = latent.repeat_interleave(experts, 0).unsqueeze(-1)  # [T * A, Z, 1]
    gate, up = torch.bmm(w.w13[flat], z).squeeze(-1).chunk(2, dim=-1)
    act = situ(gate, up, w.beta, w.linear_beta).to(latent.dtype)
    routed = acc(torch.bmm(w.w2[flat], act.unsqueeze(-1)).squeeze(-1)).view(rows, experts, -1)
    return (routed * weights.unsqueeze(-1).to(routed.dtype)).sum(1)


def experts_grouped(latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights) -> Tensor:
    """The same for many rows on a GPU in bf16: rows sorted by expert, two grouped products."""
    top_k = ids.shape[1]
    order = ids.reshape(-1).argsort(stable=True)
    source = order // top_k  # [T * A], the row behind each sorted pair
    counts = torch.zeros(w.w13.shape[0], dtype=torch.int32, device=ids.device)
    counts.index_add_(0, ids.reshape(-1), torch.ones_like(ids.reshape(-1), dtype=torch.int32))
    ends = counts.cumsum(0).to(torch.int32)
    gate_up = torch._grouped_mm(latent[source], w.w13.transpose(1, 2), offs=ends)
    gate, up = gate_up.chunk(2, dim=-1)
    act = situ(gate, up, w.beta, w.linear_beta).to(latent.dtype)
    routed = acc(torch._grouped_mm(act, w.w2.transpose(1, 2), offs=ends))
    routed = routed * weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(acc(latent)).index_add(0, source, routed)


FEW_ROWS = 8  # up to here gathering beats the loop on two CPU cores


def experts_ref(
    latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, *, out: Tensor
) -> None:
    few = latent.shape[0] <= FEW_ROWS
    out.copy_((experts_gathered if few else experts_value)(latent, ids, weights, w))


def experts_grouped_ref(
    latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, *, out: Tensor
) -> None:
    out.copy_(experts_grouped(latent[:], ids[:], weights[:], w))
