"""KDA for rows that may be rolled back: the state is read, and what would move it is recorded.

A row moves the state by S <- exp(g) S + a b', with a b' = (beta k) e' of `kda.py`. So a step whose
last rows may turn out wrong leaves the state of before alone and notes g, a, b and the inputs of
the convolution of each row; once it is known how many rows stand, they are applied:

    replay   row by row, as `kda_ref` does: the same bits
    fold     S prod_j exp(g_j) + sum_j (a_j prod_{l > j} exp(g_l)) b_j', one product for all rows

b holds what the delta rule read of the state, so applying needs no look at the state's content. The
window of the convolution goes on by the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.reference.kda import (
    SAFE_EXPONENT,
    KDARows,
    KDAWeights,
    gated_norm,
    kda_rows,
    recurrence_rows,
)
from nanok3.reference.numerics import acc


@dataclass(frozen=True)
class KDARecords:
    """Of one layer, or with a leading axis of all; a request's are at its state slot."""

    qkv: Tensor  # [slots, Q, channels], inputs of the convolution
    log_decay: Tensor  # [slots, Q, H, Dk] f32, g
    key: Tensor  # [slots, Q, H, Dk] f32, a
    value: Tensor  # [slots, Q, H, Dv] f32, b: only a b' is the same in every reading
    first: int = 0  # rows of this step that are recorded already

    def layer(self, index: int) -> KDARecords:
        return KDARecords(
            self.qkv[index], self.log_decay[index], self.key[index], self.value[index], self.first
        )


# conv_state, state, records, slots [R], counts [R]: those rows of each request stand
Commit = Callable[[Tensor, Tensor, KDARecords, Tensor, Tensor], None]


def apply_rows(state: Tensor, log_decay: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """state [..., H, Dk, Dv] after rows [..., n, H, D], one after another."""
    for j in range(log_decay.shape[-3]):
        state = state * log_decay[..., j, :, :].exp().unsqueeze(-1)
        state = state + key[..., j, :, :].unsqueeze(-1) * value[..., j, :, :].unsqueeze(-2)
    return state


def fold_rows(state: Tensor, log_decay: Tensor, key: Tensor, value: Tensor) -> None:
    """The same at once and in place, for state [layers, H, Dk, Dv]; rounded otherwise."""
    decay = log_decay.exp()
    later = decay.flip(-3).cumprod(-3).flip(-3)  # [..., n, H, Dk], product from row j on
    after = torch.cat([later[..., 1:, :, :], torch.ones_like(decay[..., :1, :, :])], dim=-3)
    left = (key * after).movedim(-3, -1)  # [..., H, Dk, n]
    right = value.movedim(-3, -2)  # [..., H, n, Dv]
    for i, own in enumerate(state):
        own.mul_(later[i, 0].unsqueeze(-1)).baddbmm_(left[i], right[i])


def commit_ref(
    conv_state: Tensor,
    state: Tensor,
    records: KDARecords,
    slots: Sequence[int],
    counts: Sequence[int],
    fold: bool,
) -> None:
    """All layers' conv_state [layers, slots, taps - 1, channels] and state [layers, slots, H, Dk,
    Dv], after the first counts[r] recorded rows of the request at slots[r]."""
    for slot, count in zip(slots, counts, strict=True):
        if not count:
            continue
        rows = (t[:, slot, :count] for t in (records.log_decay, records.key, records.value))
        if fold:
            fold_rows(state[:, slot], *rows)
        else:
            state[:, slot] = apply_rows(state[:, slot], *rows)
        window = torch.cat([conv_state[:, slot], records.qkv[:, slot, :count]], dim=1)
        conv_state[:, slot] = window[:, count:]


def commit_masked(
    conv_state: Tensor, state: Tensor, records: KDARecords, slots: Tensor, counts: Tensor
) -> None:
    """`commit_ref` that folds, for slots [R] and counts [R] on a device: it waits for nothing, and
    what is recorded of rows that do not stand is never used."""
    num_rows, taps = records.log_decay.shape[2], conv_state.shape[2]
    index = torch.arange(num_rows, device=counts.device)
    falls = (index >= counts[:, None])[..., None, None]  # [R, Q, 1, 1]
    places = counts[:, None] + torch.arange(taps, device=counts.device)  # [R, taps - 1]
    for i in range(len(state)):
        decay = records.log_decay[i][slots].masked_fill(falls, 0.0).exp()  # [R, Q, H, Dk]
        key = records.key[i][slots].masked_fill(falls, 0.0)
        value = records.value[i][slots].masked_fill(falls, 0.0)
        later = decay.flip(1).cumprod(1).flip(1)
        after = torch.cat([later[:, 1:], torch.ones_like(later[:, :1])], dim=1)
        added = (key * after).permute(0, 2, 3, 1) @ value.transpose(1, 2)  # [R, H, Dk, Dv]
        state[i][slots] = state[i][slots] * later[:, 0].unsqueeze(-1) + added
        window = torch.cat([conv_state[i][slots], records.qkv[i][slots]], dim=1)
        chosen = places.unsqueeze(-1).expand(-1, -1, window.shape[-1])
        conv_state[i][slots] = window.gather(1, chosen)


def few_rows(rows: KDARows, state: Tensor, lower_bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """The delta rule of a few rows as products: state [R, H, Dk, Dv] -> o [R, H, Q, Dv], state,
    beta e [R, H, Q, Dv].

    `kda.chunked_recurrence` with one base for all rows: as many at a time as exp(-G) allows.
    """
    height = max(1, int(SAFE_EXPONENT / -lower_bound))
    outputs, updates = [], []
    for begin in range(0, rows.q.shape[2], height):
        part = slice(begin, begin + height)
        q, k, v = rows.q[:, :, part], rows.k[:, :, part], rows.v[:, :, part]
        beta = rows.beta[:, :, part, None]
        total = rows.log_decay[:, :, part].cumsum(-2)  # G, inclusive  [R, H, C, Dk]
        decay = total.exp()
        decayed_q, decayed_k = q * decay, k * decay
        undone_k = (k * (-total).exp()).transpose(-1, -2)
        k_k, q_k = decayed_k @ undone_k, decayed_q @ undone_k  # [R, H, C, C]
        u = torch.linalg.solve_triangular(
            (beta * k_k).tril(-1),
            beta * (v - decayed_k @ state),
            upper=False,
            unitriangular=True,
        )
        outputs.append(decayed_q @ state + q_k.tril() @ u)
        updates.append(u)
        last = total[..., -1:, :]
        k_to_end = (k * (last - total).exp()).transpose(-1, -2)
        state = last.exp().transpose(-1, -2) * state + k_to_end @ u
    return torch.cat(outputs, dim=2), state, torch.cat(updates, dim=2)


def _recorded(
    x: Tensor,
    w: KDAWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    records: KDARecords,
    out: Tensor,
    as_products: bool,
) -> None:
    first, taps = records.first, w.conv.shape[1]
    x = x.unflatten(0, (len(state_slots), -1))  # [R, Q, width]
    channels = conv_state.shape[-1]
    before = torch.cat([conv_state[state_slots], records.qkv[state_slots, :first]], dim=1)
    rows, gate, _ = kda_rows(x, w, before[:, before.shape[1] - (taps - 1) :])
    start = acc(state[state_slots])
    if first:
        seen = (t[state_slots, :first] for t in (records.log_decay, records.key, records.value))
        start = apply_rows(start, *seen)
    if as_products:
        o, _, value = few_rows(rows, start, w.lower_bound)
        key = rows.k
    else:
        o, _, value = recurrence_rows(rows, start)
        key = rows.beta.unsqueeze(-1) * rows.k
    place = slice(first, first + x.shape[1])
    records.qkv[state_slots, place] = x[..., :channels].to(records.qkv.dtype)
    records.log_decay[state_slots, place] = rows.log_decay.transpose(1, 2)
    records.key[state_slots, place] = key.transpose(1, 2)
    records.value[state_slots, place] = value.transpose(1, 2)
    out.copy_(gated_norm(o.transpose(1, 2).to(x.dtype), gate, w))


def kda_recorded_ref(
    x: Tensor,
    w: KDAWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    records: KDARecords,
    *,
    out: Tensor,
) -> None:
    """As `kda_ref`, but conv_state and state are only read and the rows go to `records`, after the
    `records.first` that are there."""
    _recorded(x, w, conv_state, state, state_slots, records, out, as_products=False)


def kda_recorded_few(
    x: Tensor,
    w: KDAWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    records: KDARecords,
    *,
    out: Tensor,
) -> None:
    """The same as products of a few rows at once, where no log-decay is too strong for that; then
    a is k and b is beta e."""
    as_products = w.lower_bound >= -SAFE_EXPONENT
    _recorded(x, w, conv_state, state, state_slots, records, out, as_products)


def allocate_records(
    num_layers: int,
    num_slots: int,
    num_rows: int,
    conv_state: Tensor,
    state: Tensor,
) -> KDARecords:
    """For steps of `num_rows` rows, like the cache's tensors in dtype, device and heads."""
    heads, key_dim, value_dim = state.shape[-3:]
    shape = num_layers, num_slots, num_rows

    def empty(like: Tensor, *width: int) -> Tensor:
        return torch.empty(*shape, *width, dtype=like.dtype, device=like.device)

    return KDARecords(
        qkv=empty(conv_state, conv_state.shape[-1]),
        log_decay=empty(state, heads, key_dim),
        key=empty(state, heads, key_dim),
        value=empty(state, heads, value_dim),
    )
