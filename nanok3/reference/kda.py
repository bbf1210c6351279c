"""KDA, Kimi's delta attention, for the rows of each request in order.

    q, k, v = silu(conv(rows));  q, k l2-normalised (eps 1e-6 on the sum), q scaled by Dk^-0.5
    g       = lower_bound * sigmoid(exp(A_log) (f_a @ f_b.T + dt_bias))       log-decay, [H, Dk]
    beta    = sigmoid(b)                                                      [H]
    S       = exp(g) S;  e = v - S' k;  S = S + beta k e';  o = S' q          S [Dk, Dv], float32
    out     = o / sqrt(mean(o^2) + eps) * o_norm * sigmoid(gate)              per head

Rows lie as [R, Q]: Q rows of each of R requests. `kda_ref` walks them one by one (decode, strict
prefill); `kda_chunked_ref` gives the same in chunks (prefill, training). Both read the state of
`state_slots[r]` and leave there the state after the last row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from nanok3.reference.numerics import acc

L2_EPS = 1e-6
CHUNK = 64
SAFE_EXPONENT = 80.0  # e^80 = 5.5e34; times 128 channels it stays a float32


@dataclass(frozen=True)
class KDAWeights:
    conv: Tensor  # [2 H Dk + H Dv, taps] f32; q, k, v channels, the last tap is the current row
    f_b: Tensor  # [H Dk, F]
    A_log: Tensor  # [H] f32
    dt_bias: Tensor  # [H Dk] f32
    o_norm: Tensor  # [Dv] f32
    lower_bound: float
    eps: float


@dataclass(frozen=True)
class KDARows:
    """What the recurrence reads, in the arithmetic dtype."""

    q: Tensor  # [R, H, Q, Dk], normalised and scaled
    k: Tensor  # [R, H, Q, Dk], normalised
    v: Tensor  # [R, H, Q, Dv]
    log_decay: Tensor  # [R, H, Q, Dk]
    beta: Tensor  # [R, H, Q]


def l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def kda_rows(x: Tensor, w: KDAWeights, conv_state: Tensor) -> tuple[KDARows, Tensor, Tensor]:
    """Convolution and gates.

    x [R, Q, q|k|v|gate|f_a|b], conv_state [R, taps - 1, channels] (inputs before this step's rows)
    -> rows, gate [R, Q, H, Dv], new conv_state.
    """
    heads, value_dim = w.A_log.shape[0], w.o_norm.shape[0]
    key_width, value_width = w.dt_bias.shape[0], heads * value_dim
    taps, num_rows = w.conv.shape[1], x.shape[1]
    channels = 2 * key_width + value_width
    qkv, gate, f_a, b = x.split([channels, value_width, w.f_b.shape[1], heads], dim=-1)

    window = torch.cat([conv_state, qkv], dim=1)  # [R, taps - 1 + Q, channels]
    weight = w.conv.to(acc(x).dtype)
    mixed = acc(window[:, :num_rows]) * weight[:, 0]
    for tap in range(1, taps):
        mixed = mixed + acc(window[:, tap : tap + num_rows]) * weight[:, tap]
    q, k, v = acc(silu(mixed).to(x.dtype)).split([key_width, key_width, value_width], dim=-1)

    def by_head(y: Tensor) -> Tensor:  # [R, Q, H * D] -> [R, H, Q, D]
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    f = acc(linear(f_a, w.f_b)) + w.dt_bias.to(q.dtype)
    rate = w.A_log.to(q.dtype).exp()[:, None, None]
    rows = KDARows(
        q=l2_normalize(by_head(q)) * (key_width // heads) ** -0.5,
        k=l2_normalize(by_head(k)),
        v=by_head(v),
        log_decay=w.lower_bound * torch.sigmoid(rate * by_head(f)),
        beta=torch.sigmoid(acc(b)).transpose(1, 2),
    )
    return rows, gate.unflatten(-1, (heads, value_dim)), window[:, num_rows:]


def recurrence(rows: KDARows, state: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule row by row: state [R, H, Dk, Dv] -> (o [R, H, Q, Dv], state)."""
    return recurrence_rows(rows, state)[:2]


def recurrence_rows(rows: KDARows, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same and each row's e, [R, H, Q, Dv]."""
    outputs, errors = [], []
    for i in range(rows.q.shape[2]):
        q, k, v = rows.q[:, :, i], rows.k[:, :, i], rows.v[:, :, i]  # [R, H, D]
        state = state * rows.log_decay[:, :, i].exp().unsqueeze(-1)
        error = v - (k.unsqueeze(-2) @ state).squeeze(-2)
        state = state + (rows.beta[:, :, i, None] * k).unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2))
        errors.append(error)
    return torch.stack(outputs, dim=2), state, torch.stack(errors, dim=2)


def sub_chunk(lower_bound: float) -> int:
    """Rows over which exp(-G) cannot overflow: a log-decay is never below `lower_bound`."""
    assert lower_bound >= -SAFE_EXPONENT, "decay too strong for the chunked form; walk the rows"
    size = 16
    while size * -lower_bound > SAFE_EXPONENT:
        size //= 2
    return size


def chunked_recurrence(
    rows: KDARows, state: Tensor, lower_bound: float, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same in chunks of C rows: a triangular solve replaces the walk.

    exp(-G) is only formed relative to the start of a sub-chunk, so that nothing overflows.
    """
    num_rows, sub = rows.q.shape[2], sub_chunk(lower_bound)
    padding = -num_rows % chunk

    def chunks(x: Tensor) -> Tensor:  # [R, H, Q, D] -> [R, H, n, C, D]; padded rows change nothing
        return pad(x, (0, 0, 0, padding)).unflatten(2, (-1, chunk))

    q, k, v, log_decay = chunks(rows.q), chunks(rows.k), chunks(rows.v), chunks(rows.log_decay)
    beta = chunks(rows.beta.unsqueeze(-1))  # [R, H, n, C, 1]
    total = log_decay.cumsum(-2)  # G, inclusive  [R, H, n, C, Dk]

    # Decay between rows i >= j of a chunk, as exp(G_i - base) * exp(base - G_j) with the base at
    # the start of i's sub-chunk.
    subs = chunk // sub
    base = pad(total[..., sub - 1 :: sub, :][..., : subs - 1, :], (0, 0, 1, 0))  # [.., subs, Dk]
    left = (total.unflatten(-2, (subs, sub)) - base.unsqueeze(-2)).exp()  # [.., subs, sub, Dk]
    sub_of = torch.arange(chunk, device=q.device) // sub
    later = sub_of > torch.arange(subs, device=q.device).unsqueeze(-1)  # [subs, C]
    exponent = base.unsqueeze(-2) - total.unsqueeze(-3)  # [.., subs, C, Dk]
    right = exponent.masked_fill(later.unsqueeze(-1), float("-inf")).exp() * k.unsqueeze(-3)
    right = right.transpose(-1, -2)  # [.., subs, Dk, C]
    k_k = ((k.unflatten(-2, (subs, sub)) * left) @ right).flatten(-3, -2)  # [.., C, C]
    q_k = ((q.unflatten(-2, (subs, sub)) * left) @ right).flatten(-3, -2).tril()

    # (I + A) [U_v | W] = beta [v | k exp(G)]: forward substitution, never a product of powers.
    decayed_k, decayed_q = k * total.exp(), q * total.exp()
    right_side = beta * torch.cat([v, decayed_k], dim=-1)
    solved = torch.linalg.solve_triangular(
        (beta * k_k).tril(-1), right_side, upper=False, unitriangular=True
    )
    u_v, w_k = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = total[..., -1:, :]  # [.., 1, Dk]
    k_to_end = (k * (last - total).exp()).transpose(-1, -2)  # [.., Dk, C]
    end_decay = last.exp().transpose(-1, -2)  # [.., Dk, 1]

    outputs = []
    for c in range(q.shape[2]):
        u = u_v[:, :, c] - w_k[:, :, c] @ state
        outputs.append(decayed_q[:, :, c] @ state + q_k[:, :, c] @ u)
        state = end_decay[:, :, c] * state + k_to_end[:, :, c] @ u
    return torch.cat(outputs, dim=2)[:, :, :num_rows], state


def gated_norm(o: Tensor, gate: Tensor, w: KDAWeights) -> Tensor:
    """o [R, Q, H, Dv] (rounded), gate [R, Q, H, Dv] -> [R * Q, H * Dv]."""
    o = acc(o)
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + w.eps) * w.o_norm.to(o.dtype)
    return (o * torch.sigmoid(acc(gate))).flatten(-2).flatten(0, 1)


def kda_value(
    x: Tensor, w: KDAWeights, conv_state: Tensor, state: Tensor, chunked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [R * Q, width], conv_state [R, taps - 1, channels], state [R, H, Dk, Dv]
    -> (out [R * Q, H * Dv], new conv_state, new state)."""
    x = x.unflatten(0, (state.shape[0], -1))
    rows, gate, conv_state = kda_rows(x, w, conv_state)
    if chunked:
        o, state = chunked_recurrence(rows, acc(state), w.lower_bound)
    else:
        o, state = recurrence(rows, acc(state))
    return gated_norm(o.transpose(1, 2).to(x.dtype), gate, w), conv_state, state


def kda_ref(
    x: Tensor,
    w: KDAWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    out: Tensor,
) -> None:
    """conv_state [slots, taps - 1, channels] and state [slots, H, Dk, Dv] f32 are read and written
    at state_slots [R]; x [R * Q, q|k|v|gate|f_a|b] -> out [R * Q, H * Dv]."""
    _kda(x, w, conv_state, state, state_slots, out, chunked=False)


def kda_chunked_ref(
    x: Tensor,
    w: KDAWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    out: Tensor,
) -> None:
    """Where a log-decay may be too strong for chunks, this walks the rows as well."""
    chunked = w.lower_bound >= -SAFE_EXPONENT
    _kda(x, w, conv_state, state, state_slots, out, chunked)


def _kda(
    x: Tensor,
    w: KDAWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    out: Tensor,
    chunked: bool,
) -> None:
    value = kda_value(x[:], w, conv_state[state_slots], state[state_slots], chunked)
    out.copy_(value[0])
    conv_state[state_slots], state[state_slots] = value[1], value[2].to(state.dtype)
