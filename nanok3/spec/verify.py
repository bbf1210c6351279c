"""Which drafts stand, and the token after them: two acceptance rules as pure functions.

Q + 1 target distributions P_0 .. P_m follow an anchor and m drafts d_1 .. d_m, each drawn from
Q_0 .. Q_{m-1}. Either rule leaves exactly the target's law, whatever the drafts' is:

standard   h_i = min(1, P_{i-1}(d_i) / Q_{i-1}(d_i));  tau = drafts before the first i with
           u_i >= h_i;  next ~ P_m if tau = m, else (P_tau - Q_tau)+ normalised
block      rho_0 = 1;  rho_i = min(1, rho_{i-1} P_{i-1}(d_i) / Q_{i-1}(d_i))
           Z_i = sum (rho_i P_i - Q_i)+;  h_i = Z_i / (Z_i + 1 - rho_i), h_m = rho_m
           tau = the last i with u_i < h_i (0 if none);  next ~ P_m if tau = m, else
           (rho_tau P_tau - Q_tau)+ normalised

Block verification (Sun et al., arXiv 2403.10444) never accepts less. A greedy row's distribution is
one-hot, and then both rules accept a draft where it is the likeliest id and emit the likeliest id
after it: greedy decoding is no case of its own. Drafts that were taken by argmax have one-hot Q.

R requests, K drafts, V ids; a request's m may be less than K: `lengths`. Uniform numbers come from
the caller, independent of those that drew the drafts and of one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanok3.sampling import draw

Rule = Literal["standard", "block"]


@dataclass(frozen=True)
class Verified:
    num_accepted: Tensor  # [R] i64
    next_ids: Tensor  # [R] i64, -1 where the target has no distribution to draw from


@dataclass(frozen=True)
class Chances:
    """What the uniforms are compared with, and the factor of what remains after each row."""

    stand: Tensor  # [R, K] f64, h; 0 past a request's drafts
    rho: Tensor  # [R, K + 1] f64, 1 everywhere under the standard rule


def chances(target: Tensor, draft: Tensor, ids: Tensor, lengths: Tensor, rule: Rule) -> Chances:
    """target [R, K + 1, V] f64, draft [R, K, V] f64, ids [R, K] i64, lengths [R] -> h, rho."""
    num_reqs, num_drafts = ids.shape
    index = torch.arange(num_drafts, device=ids.device)
    real = index < lengths[:, None]  # [R, K]
    chosen = ids.masked_fill(~real, 0).unsqueeze(-1)
    p = target[:, :-1].gather(-1, chosen).squeeze(-1)  # [R, K], P_{i-1}(d_i)
    q = draft.gather(-1, chosen).squeeze(-1)
    ratio = torch.where(q > 0, p / q.clamp(min=torch.finfo(q.dtype).tiny), 0.0)
    ratio = ratio.masked_fill(~real, 0.0)
    one = torch.ones(num_reqs, 1, dtype=p.dtype, device=p.device)
    if rule == "standard":
        return Chances(ratio.clamp(max=1), one.expand(-1, num_drafts + 1))
    rho = [one[:, 0]]
    for i in range(num_drafts):
        rho.append((rho[-1] * ratio[:, i]).clamp(max=1))
    rhos = torch.stack(rho, dim=1)  # [R, K + 1]
    after = rhos[:, 1:]  # rho_1 .. rho_K
    left = (after[:, :-1, None] * target[:, 1:-1] - draft[:, 1:]).clamp(min=0).sum(-1)  # Z_1..
    bottom = left + 1 - after[:, :-1]
    stand = torch.where(bottom > 0, left / bottom.masked_fill(bottom <= 0, 1), 1.0)
    stand = torch.cat([stand, after[:, -1:]], dim=1)
    last = index == lengths[:, None] - 1
    return Chances(torch.where(last, after, stand).masked_fill(~real, 0.0), rhos)


def num_standing(stand: Tensor, uniforms: Tensor, rule: Rule) -> Tensor:
    """h [R, K], u [R, K] in [0, 1) -> tau [R]."""
    passed = uniforms < stand
    if rule == "standard":
        return passed.long().cumprod(-1).sum(-1)
    place = torch.arange(1, stand.shape[1] + 1, device=stand.device)
    return (passed * place).amax(-1) if stand.shape[1] else place.new_zeros(len(stand))


def remainder(
    target: Tensor, draft: Tensor, rho: Tensor, num_accepted: Tensor, lengths: Tensor
) -> Tensor:
    """[R, V] f64, weights of the next id: what the draft at tau left of the target, or P_m."""
    pick = num_accepted[:, None, None]
    p = target.gather(1, pick.expand(-1, 1, target.shape[-1])).squeeze(1)
    if not draft.shape[1]:
        return p
    within = pick.clamp(max=draft.shape[1] - 1)
    q = draft.gather(1, within.expand(-1, 1, draft.shape[-1])).squeeze(1)
    rejected = (num_accepted < lengths)[:, None]
    scaled = rho.gather(1, num_accepted[:, None]) * p
    return torch.where(rejected, (scaled - q).clamp(min=0), p)


def verify(
    target: Tensor,
    draft: Tensor,
    ids: Tensor,
    lengths: Tensor,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
    rule: Rule = "block",
) -> Verified:
    """Drafts `ids` [R, K], the first lengths[r] of which were verified, drawn from `draft`
    [R, K, V], against `target` [R, K + 1, V], both f64; uniforms [R, K] and [R] in [0, 1)."""
    odds = chances(target, draft, ids, lengths, rule)
    num_accepted = num_standing(odds.stand, accept_uniforms, rule)
    weights = remainder(target, draft, odds.rho, num_accepted, lengths)
    # Rounding may leave nothing of a distribution that all but equals its draft: then it is P.
    pick = num_accepted[:, None, None].expand(-1, 1, target.shape[-1])
    whole = target.gather(1, pick).squeeze(1)
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, whole)
    return Verified(num_accepted, draw(weights, next_uniforms))
