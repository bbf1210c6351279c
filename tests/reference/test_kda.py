"""KDA against a loop over tokens and heads in float64: outputs, states and convolution windows.

The loop is kimi-k3.md 2.4 as it is written there. Chunked and recurrent forms must agree with it
for any length, any cut of a sequence into calls, and as strong a decay as the config may ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from compare import check_bf16, check_close, check_equal
from numpy.typing import NDArray
from torch import Tensor

from nanok3.reference.kda import (
    KDAWeights,
    kda_chunked_ref,
    kda_ref,
)
from nanok3.reference.one_row import kda_one_row

F64 = NDArray[np.float64]
Op = Callable[..., None]
BOTH: list[Op] = [kda_ref, kda_chunked_ref]
HEADS, DK, DV, RANK, TAPS = 3, 8, 12, 5, 4  # key and value sizes differ: a transposed state shows
CHANNELS = 2 * HEADS * DK + HEADS * DV
WIDTH = CHANNELS + HEADS * DV + RANK + HEADS
LIMIT = {torch.float32: 2e-5, torch.float64: 1e-11}


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def kda_weights(dtype: torch.dtype, lower_bound: float = -5.0) -> KDAWeights:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return KDAWeights(
        conv=random(0, CHANNELS, TAPS, scale=0.5).to(wide),
        f_b=random(1, HEADS * DK, RANK).to(dtype),
        A_log=torch.tensor([-1.0, 0.2, 1.5]).to(wide),
        dt_bias=random(2, HEADS * DK, scale=2.0).to(wide),
        o_norm=1 + random(3, DV, scale=0.2).to(wide),
        lower_bound=lower_bound,
        eps=1e-5,
    )


@dataclass
class Loop:
    """One request, token by token; `state` and `window` are what is kept."""

    w: KDAWeights
    state: F64  # [H, Dk, Dv]
    window: list[F64]  # the last taps - 1 inputs of the convolution, oldest first

    @classmethod
    def start(cls, w: KDAWeights) -> Loop:
        empty = [np.zeros(CHANNELS) for _ in range(TAPS - 1)]
        return cls(w, np.zeros((HEADS, DK, DV)), empty)

    def token(self, x: F64) -> F64:
        w = self.w
        conv, f_b, A_log, dt_bias, o_norm = (
            t.double().numpy() for t in (w.conv, w.f_b, w.A_log, w.dt_bias, w.o_norm)
        )
        qkv, gate, f_a, b = np.split(x, np.cumsum([CHANNELS, HEADS * DV, RANK]))
        inputs = [*self.window, qkv]  # [taps, channels], the current token last
        self.window = inputs[1:]
        mixed = np.zeros(CHANNELS)
        for tap in range(TAPS):
            mixed += conv[:, tap] * inputs[tap]
        mixed = mixed / (1 + np.exp(-mixed))  # silu
        f = f_b @ f_a
        out = []
        for h in range(HEADS):
            q = mixed[h * DK : (h + 1) * DK]
            k = mixed[HEADS * DK + h * DK : HEADS * DK + (h + 1) * DK]
            v = mixed[2 * HEADS * DK + h * DV : 2 * HEADS * DK + (h + 1) * DV]
            q = q / math.sqrt(sum(q * q) + 1e-6) * DK**-0.5  # the eps is on the sum
            k = k / math.sqrt(sum(k * k) + 1e-6)
            s = self.state[h].copy()
            for d in range(DK):
                z = math.exp(A_log[h]) * (f[h * DK + d] + dt_bias[h * DK + d])
                s[d] *= math.exp(w.lower_bound * 0.5 * (1 + math.tanh(z / 2)))  # sigmoid
            beta = 1 / (1 + math.exp(-b[h]))
            error = v - s.T @ k  # from the decayed state
            s = s + beta * np.outer(k, error)
            self.state[h] = s
            o = s.T @ q  # the token sees itself
            o = o / math.sqrt(sum(o * o) / DV + w.eps) * o_norm
            out.append(o / (1 + np.exp(-gate[h * DV : (h + 1) * DV])))
        return np.concatenate(out)


class Cached:
    """Slots of the op's caches; those nobody uses hold NaN."""

    def __init__(self, dtype: torch.dtype, slots: list[int], num_slots: int = 5) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.slots = torch.tensor(slots)
        self.conv_state = torch.full((num_slots, TAPS - 1, CHANNELS), float("nan"), dtype=dtype)
        self.state = torch.full((num_slots, HEADS, DK, DV), float("nan"), dtype=wide)
        self.conv_state[self.slots] = 0
        self.state[self.slots] = 0

    def call(self, op: Op, x: Tensor, w: KDAWeights) -> Tensor:
        """x [R, Q, width] -> [R, Q, H * Dv]."""
        out = torch.full((x.shape[0] * x.shape[1], HEADS * DV), float("nan"), dtype=x.dtype)
        op(x.flatten(0, 1), w, self.conv_state, self.state, self.slots, out=out)
        return out.unflatten(0, x.shape[:2])

    def check(self, loops: list[Loop], limit: float) -> None:
        for slot, loop in zip(self.slots, loops, strict=True):
            check_close(self.state[slot], loop.state, limit, "state")
            check_close(self.conv_state[slot], np.stack(loop.window), 0.0, "convolution window")
        unused = [s for s in range(len(self.state)) if s not in self.slots.tolist()]
        assert self.state[unused].isnan().all() and self.conv_state[unused].isnan().all()


def inputs(num_reqs: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    return random(7, num_reqs, num_rows, WIDTH).to(dtype)


def run_loops(loops: list[Loop], x: Tensor) -> F64:
    rows = x.double().numpy()
    return np.stack([[loop.token(row) for row in r] for loop, r in zip(loops, rows, strict=True)])


# one row; up to the taps; around sub-chunks of 16 and chunks of 64; two chunks and a bit
@pytest.mark.parametrize("length", [1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("dtype", list(LIMIT))
def test_lengths(dtype: torch.dtype, op: Op, length: int) -> None:
    w, x = kda_weights(dtype), inputs(1, length, dtype)
    cached, loops = Cached(dtype, [2]), [Loop.start(w)]
    got = cached.call(op, x, w)
    check_close(got, run_loops(loops, x), LIMIT[dtype], "output")
    cached.check(loops, LIMIT[dtype])


@pytest.mark.parametrize(
    "cuts",
    [
        [1] * 9,
        [64, 1, 1],  # a prompt of one chunk, then decoding
        [1, 64, 5],
        [3, 1, 2, 70, 1],  # shorter than the convolution's reach
        [63, 2, 65],
        [128, 2],
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_any_cut_and_either_form_hands_over_to_the_other(cuts: list[int], first: int) -> None:
    w, x = kda_weights(torch.float64), inputs(2, sum(cuts), torch.float64)
    cached, loops = Cached(torch.float64, [4, 1]), [Loop.start(w), Loop.start(w)]
    start = 0
    for i, count in enumerate(cuts):
        piece = x[:, start : start + count]
        got = cached.call(BOTH[(first + i) % 2], piece, w)
        check_close(got, run_loops(loops, piece), 1e-11, f"rows from {start}")
        cached.check(loops, 1e-11)
        start += count


@pytest.mark.parametrize("dtype", list(LIMIT))
def test_one_row_of_each_request(dtype: torch.dtype) -> None:
    """The decode form after a prompt of 3 rows, for requests in slots of no order."""
    w, x = kda_weights(dtype), inputs(3, 12, dtype)
    cached, loops = Cached(dtype, [4, 0, 2]), [Loop.start(w) for _ in range(3)]
    cached.call(kda_chunked_ref, x[:, :3], w)
    run_loops(loops, x[:, :3])
    for t in range(3, 12):
        row = x[:, t : t + 1]
        got = cached.call(kda_one_row, row, w)
        check_close(got, run_loops(loops, row), LIMIT[dtype], f"row {t}")
        cached.check(loops, LIMIT[dtype])


def test_the_snapshot_of_a_longer_prompt_is_the_state_after_its_chunks() -> None:
    """130 tokens cached after 128: a call of 128 leaves the same as the walk does at that token."""
    w, x = kda_weights(torch.float32), inputs(1, 130, torch.float32)
    walked, chunked = Cached(torch.float32, [1]), Cached(torch.float32, [1])
    walked.call(kda_ref, x[:, :128], w)
    chunked.call(kda_chunked_ref, x[:, :128], w)
    check_close(chunked.state[1], walked.state[1], 1e-5)
    tails = [c.call(kda_ref, x[:, 128:], w) for c in (walked, chunked)]
    check_close(tails[1], tails[0], 1e-5)


@pytest.mark.parametrize("op", BOTH)
def test_requests_do_not_touch_each_other(op: Op) -> None:
    w, x = kda_weights(torch.float64), inputs(3, 20, torch.float64)
    x[1] = float("nan")
    cached = Cached(torch.float64, [3, 0, 2])
    got = cached.call(op, x, w)
    for r in (0, 2):
        loops = [Loop.start(w)]
        check_close(got[r : r + 1], run_loops(loops, x[r : r + 1]), 1e-11, f"request {r}")
        check_close(cached.state[cached.slots[r]], loops[0].state, 1e-11)
    assert got[1].isnan().all()


@pytest.mark.parametrize("op", BOTH)
def test_rows_near_zero_are_normalised_with_the_eps_on_the_sum(op: Op) -> None:
    """Inputs of 1e-3 make the squares of q and k sum to about the eps."""
    w, x = kda_weights(torch.float64), inputs(1, 20, torch.float64)
    x[..., : 2 * HEADS * DK] *= 1e-3
    cached, loops = Cached(torch.float64, [1]), [Loop.start(w)]
    check_close(cached.call(op, x, w), run_loops(loops, x), 1e-11)
    cached.check(loops, 1e-11)


@pytest.mark.parametrize("op", BOTH)
def test_beta_of_zero_and_one(op: Op) -> None:
    """A b_proj of -80 writes nothing, of +80 replaces what is stored under the key."""
    w, x = kda_weights(torch.float32), inputs(1, 70, torch.float32)
    x[:, ::2, -HEADS:], x[:, 1::2, -HEADS:] = 80.0, -80.0
    cached, loops = Cached(torch.float32, [1]), [Loop.start(w)]
    check_close(cached.call(op, x, w), run_loops(loops, x), 2e-5)
    cached.check(loops, 2e-5)
    x[..., -HEADS:] = -80.0
    closed = Cached(torch.float32, [1])
    closed.call(op, x, w)
    assert closed.state[1].abs().max() < 1e-30


@pytest.mark.parametrize("op", BOTH)
def test_bf16(op: Op) -> None:
    """Rows, convolution output and o are rounded to bf16 and nothing else; the state is float32."""
    # many rows: the norm makes much of a few rows with a tiny o, and one of them is luck
    w, x = kda_weights(torch.bfloat16), inputs(4, 80, torch.bfloat16)
    cached, loops = Cached(torch.bfloat16, [1, 2, 4, 3]), [Loop.start(w) for _ in range(4)]
    got = cached.call(op, x, w)
    exact = run_loops(loops, x)
    check_bf16(got, bf16_torch(x, w), exact)
    for slot, loop in zip(cached.slots, loops, strict=True):
        check_equal(cached.conv_state[slot], torch.from_numpy(np.stack(loop.window)).bfloat16())
        check_close(cached.state[slot], loop.state, 2e-2, "state")  # v is bf16: 2^-8 and some sums


def bf16_torch(x: Tensor, w: KDAWeights) -> Tensor:
    """Plain torch on bf16 activations with the recurrence in float32, as published."""
    qkv, gate, f_a, b = x.split([CHANNELS, HEADS * DV, RANK, HEADS], dim=-1)
    rows = torch.nn.functional.conv1d(
        torch.nn.functional.pad(qkv.transpose(1, 2).float(), (TAPS - 1, 0)),
        w.conv.unsqueeze(1),
        groups=CHANNELS,
    )
    rows = torch.nn.functional.silu(rows.bfloat16()).transpose(1, 2)
    q, k, v = (
        t.unflatten(-1, (HEADS, -1)).float()
        for t in rows.split([HEADS * DK, HEADS * DK, HEADS * DV], dim=-1)
    )
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    f = ((f_a @ w.f_b.T).float() + w.dt_bias).unflatten(-1, (HEADS, DK))
    decay = (w.lower_bound * torch.sigmoid(w.A_log.exp()[:, None] * f)).exp()
    state = torch.zeros(x.shape[0], HEADS, DK, DV)
    out = []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, :, None]
        error = v[:, t] - torch.einsum("rhkv,rhk->rhv", state, k[:, t])
        update = torch.einsum("rhk,rhv->rhkv", k[:, t], error)
        state = state + b[:, t].float().sigmoid()[..., None, None] * update
        out.append(torch.einsum("rhkv,rhk->rhv", state, q[:, t] * DK**-0.5))
    o = torch.stack(out, 1).bfloat16()
    o = torch.nn.functional.rms_norm(o.float(), (DV,), w.o_norm, w.eps)
    return (o * gate.float().sigmoid().unflatten(-1, (HEADS, DV))).flatten(-2).bfloat16()


@pytest.mark.parametrize("bound", [-0.1, -5.0, -20.0, -80.0, -200.0])
@pytest.mark.parametrize("op", BOTH)
def test_lower_bounds(op: Op, bound: float) -> None:
    """The gate is bound * sigmoid(rate * f), not a clamp; extremes of f reach both ends.

    -200 is too strong for chunks: the op walks the rows.
    """
    w, x = kda_weights(torch.float64, bound), inputs(1, 66, torch.float64)
    x[:, ::3, -HEADS - RANK : -HEADS] *= 30.0
    cached, loops = Cached(torch.float64, [1]), [Loop.start(w)]
    check_close(cached.call(op, x, w), run_loops(loops, x), 1e-11)
    cached.check(loops, 1e-11)
