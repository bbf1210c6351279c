"""The three costly ops where each request has one row, on a CPU: nothing large is copied.

`kda_ref`, `mla_ref` and `experts_ref` gather states, contexts and expert weights into batches; here
the rows are walked and each reads its own in place, with the same formula. For a batch of a few
requests that is twice as fast. The walk reads slot numbers on the host, so a GPU gains nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanok3.reference.experts import ExpertWeights
from nanok3.reference.kda import KDAWeights, gated_norm, kda_rows
from nanok3.reference.mla import MLAWeights, gate_of, gated
from nanok3.reference.numerics import acc, situ


def kda_one_row(
    x: Tensor,
    w: KDAWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    out: Tensor,
) -> None:
    """As `kda_ref`, for x [R, q|k|v|gate|f_a|b]."""
    rows, gate, new_conv_state = kda_rows(x.unsqueeze(1), w, conv_state[state_slots])
    decay = rows.log_decay.exp().transpose(-1, -2)  # [R, H, Dk, 1]
    beta_k = (rows.beta.unsqueeze(-1) * rows.k).transpose(-1, -2)  # [R, H, Dk, 1]
    outputs = []
    for i, slot in enumerate(state_slots.tolist()):
        s = state[slot]  # [H, Dk, Dv], written in place
        s.mul_(decay[i])
        error = rows.v[i] - rows.k[i] @ s  # [H, 1, Dv]
        s.addcmul_(beta_k[i], error)
        outputs.append((rows.q[i] @ s).transpose(0, 1))  # [1, H, Dv]
    out.copy_(gated_norm(torch.stack(outputs).to(x.dtype), gate, w))
    conv_state[state_slots] = new_conv_state


def mla_one_row(
    q: Tensor,
    x: Tensor,
    w: MLAWeights,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    out: Tensor,
) -> None:
    """As `mla_ref`, for q [R, H * (Dn + Dr)]: a row sees all that its request has cached."""
    rank = w.kv_norm.shape[0]
    heads = acc(q).unflatten(-1, (w.kv_b.shape[0], -1))  # [R, H, Dn + Dr]
    heads = heads * heads.shape[-1] ** -0.5
    kv_b = w.kv_b.to(heads.dtype)
    key, value = kv_b[:, : w.nope_dim], kv_b[:, w.nope_dim :]
    q_latent = torch.einsum("rhn,hnl->rhl", heads[..., : w.nope_dim], key)
    q_latent = torch.cat([q_latent, heads[..., w.nope_dim :]], dim=-1)  # [R, H, L + Dr]
    blocks = cache.unflatten(0, (-1, block_size))  # [B, block_size, L + Dr]
    contexts = []
    for i, position in enumerate(positions.tolist()):
        used = block_table[i, : position // block_size + 1]
        rows = acc(blocks.index_select(0, used).flatten(0, 1)[: position + 1])  # [S, L + Dr]
        contexts.append(torch.softmax(q_latent[i] @ rows.T, dim=-1) @ rows[:, :rank])  # [H, L]
    o = torch.einsum("rhl,hvl->rhv", torch.stack(contexts), value)
    out.copy_(gated(o.unsqueeze(2), gate_of(x, w), q.dtype))


def experts_one_row(
    latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, *, out: Tensor
) -> None:
    """As `experts_ref`: each row with each of its experts, the sum in the order of `ids`."""
    num_rows, top_k = ids.shape
    experts = ids.flatten().tolist()
    gate_up = [linear(latent[i // top_k], w.w13[e]) for i, e in enumerate(experts)]
    gate, up = torch.stack(gate_up).chunk(2, dim=-1)  # [T * A, F]
    act = situ(gate, up, w.beta, w.linear_beta).to(latent.dtype)
    routed = acc(torch.stack([linear(act[i], w.w2[e]) for i, e in enumerate(experts)]))
    routed = routed.view(num_rows, top_k, -1) * weights.unsqueeze(-1).to(routed.dtype)
    out.copy_(routed.sum(1))


def experts_sorted(
    latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, *, out: Tensor
) -> None:
    """As `experts_ref`, for a few rows of each request: rows that share an expert share its
    products. The sum over a row's experts is in their order of ids."""
    num_rows, top_k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    experts = flat[order].tolist()
    x = latent[order // top_k]
    gate_up = x.new_empty(len(experts), w.w13.shape[1])
    begins = [i for i, e in enumerate(experts) if i == 0 or experts[i - 1] != e]
    spans = list(zip(begins, [*begins[1:], len(experts)], strict=True))
    for begin, end in spans:
        torch.mm(x[begin:end], w.w13[experts[begin]].T, out=gate_up[begin:end])
    gate, up = gate_up.chunk(2, dim=-1)  # [T * A, F]
    act = situ(gate, up, w.beta, w.linear_beta).to(latent.dtype)
    routed = x.new_empty(len(experts), w.w2.shape[1])
    for begin, end in spans:
        torch.mm(act[begin:end], w.w2[experts[begin]].T, out=routed[begin:end])
    by_row = torch.empty_like(acc(routed))
    by_row[order] = acc(routed) * weights.flatten()[order].unsqueeze(-1).to(by_row.dtype)
    out.copy_(by_row.view(num_rows, top_k, -1).sum(1))
