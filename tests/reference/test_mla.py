"""MLA against a loop over tokens and heads in float64, through a paged cache full of garbage.

The loop keeps what each request has seen in plain lists and expands keys and values; the op gets
shuffled blocks, NaN and huge values wherever it must not look, and block tables with trash columns.
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

from nanok3.reference.mla import MLAWeights, mla_expanded_ref, mla_latent_ref, mla_ref
from nanok3.reference.one_row import mla_one_row

F64 = NDArray[np.float64]
Op = Callable[..., None]
FORMS: list[Op] = [mla_ref, mla_expanded_ref]
HEADS, DN, DR, DV, Q_RANK, RANK = 3, 6, 4, 5, 7, 8  # all different
WIDTH = Q_RANK + RANK + DR + HEADS * DV
BLOCK, NUM_BLOCKS = 4, 24
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-12}
GARBAGE = [float("nan"), 1e30]


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def mla_weights(dtype: torch.dtype) -> MLAWeights:
    return MLAWeights(
        q_norm=(1 + random(0, Q_RANK, scale=0.2)).to(dtype),
        kv_norm=(1 + random(1, RANK, scale=0.2)).to(dtype),
        kv_b=random(2, HEADS, DN + DV, RANK, scale=0.5).to(dtype),
        nope_dim=DN,
        eps=1e-5,
    )


def rms(x: F64, weight: Tensor, eps: float) -> F64:
    return weight.double().numpy() * x / math.sqrt(sum(v * v for v in x) / len(x) + eps)


def cached_row(x: F64, w: MLAWeights) -> F64:
    """[c | k_r] of one token: the latent normalised, the shared key part as it is."""
    kv_a = x[Q_RANK : Q_RANK + RANK + DR]
    return np.concatenate([rms(kv_a[:RANK], w.kv_norm, w.eps), kv_a[RANK:]])


def attend(q: F64, x: F64, seen: list[F64], w: MLAWeights) -> F64:
    """One token that sees the cached rows `seen`, its own the last of them -> [H * Dv]."""
    kv_b, gate = w.kv_b.double().numpy(), x[-HEADS * DV :]
    out = []
    for h in range(HEADS):
        q_h = q[h * (DN + DR) : (h + 1) * (DN + DR)]
        scores, values = [], []
        for row in seen:
            expanded = kv_b[h] @ row[:RANK]
            key = np.concatenate([expanded[:DN], row[RANK:]])
            scores.append(sum(q_h * key) / math.sqrt(DN + DR))
            values.append(expanded[DN:])
        exps = [math.exp(s - max(scores)) for s in scores]
        o = sum(e / sum(exps) * v for e, v in zip(exps, values, strict=True))
        out.append(o / (1 + np.exp(-gate[h * DV : (h + 1) * DV])))
    return np.concatenate(out)


@dataclass
class Request:
    blocks: list[int]
    seen: list[F64]  # cached rows of all its tokens so far


class Paged:
    """A cache in blocks; whatever has not been written holds `garbage`, trash block 0 included."""

    def __init__(self, dtype: torch.dtype, garbage: float, capacities: list[int]) -> None:
        self.dtype = dtype
        self.latent = torch.full((NUM_BLOCKS * BLOCK, RANK + DR), garbage, dtype=dtype)
        order = (random(9, NUM_BLOCKS - 1).argsort() + 1).tolist()
        self.requests = []
        for capacity in capacities:
            count = -(-capacity // BLOCK)
            self.requests.append(Request(order[:count], []))
            order = order[count:]

    def call(
        self, op: Op, x: Tensor, q: Tensor, w: MLAWeights, extra_columns: int = 0
    ) -> tuple[Tensor, F64]:
        """x [R, Q, width], q [R, Q, H * D] -> (the op's, the loop's) [R, Q, H * Dv]."""
        num_reqs, num_rows = x.shape[:2]
        positions = [len(r.seen) + i for r in self.requests for i in range(num_rows)]
        slots = [
            r.blocks[p // BLOCK] * BLOCK + p % BLOCK
            for r in self.requests
            for p in range(len(r.seen), len(r.seen) + num_rows)
        ]
        columns = max(-(-(len(r.seen) + num_rows) // BLOCK) for r in self.requests)
        columns += extra_columns
        table = [(r.blocks + [0] * columns)[:columns] for r in self.requests]
        flat_x = x.flatten(0, 1)
        q_latent = torch.full((len(positions), Q_RANK), float("nan"), dtype=self.dtype)
        before = self.latent.clone()
        mla_latent_ref(flat_x, w, self.latent, torch.tensor(slots), out=q_latent)
        others = [s for s in range(len(before)) if s not in slots]
        check_equal(self.latent[others], before[others], "slots of nobody in this call")

        out = torch.full((len(positions), HEADS * DV), float("nan"), dtype=self.dtype)
        args = self.latent, torch.tensor(table), torch.tensor(positions), BLOCK
        op(q.flatten(0, 1), flat_x, w, *args, out=out)
        expected = []
        for r, request in enumerate(self.requests):
            for i in range(num_rows):
                x_row = x[r, i].double().numpy()
                request.seen.append(cached_row(x_row, w))
                expected.append(attend(q[r, i].double().numpy(), x_row, request.seen, w))
        return out.unflatten(0, (num_reqs, num_rows)), np.stack(expected).reshape(
            num_reqs, num_rows, -1
        )


def inputs(
    num_reqs: int, num_rows: int, dtype: torch.dtype, seed: int = 3
) -> tuple[Tensor, Tensor]:
    x = random(seed, num_reqs, num_rows, WIDTH).to(dtype)
    return x, random(seed + 1, num_reqs, num_rows, HEADS * (DN + DR)).to(dtype)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("size", [1.0, 3e-3])  # small rows, where the eps counts
def test_latents(dtype: torch.dtype, size: float) -> None:
    w, x = mla_weights(dtype), inputs(1, 5, dtype)[0][0] * size
    slots = [9, 4, 17, 0, 5]
    cache = torch.full((20, RANK + DR), 1e30, dtype=dtype)
    out = torch.full((5, Q_RANK), float("nan"), dtype=dtype)
    mla_latent_ref(x, w, cache, torch.tensor(slots), out=out)
    for t, slot in enumerate(slots):
        row = x[t].double().numpy()
        check_close(out[t], rms(row[:Q_RANK], w.q_norm, w.eps), LIMIT[dtype], "q latent")
        check_close(cache[slot], cached_row(row, w), LIMIT[dtype], "cached row")
        check_equal(cache[slot, RANK:], x[t, Q_RANK + RANK : Q_RANK + RANK + DR], "shared key")
    untouched = [s for s in range(20) if s not in slots]
    assert (cache[untouched] == 1e30).all()


def test_padding_writes_trash_and_no_other_row() -> None:
    """Slot -1 must not be the last row, as it is to an index."""
    w, x = mla_weights(torch.float32), random(4, 3, WIDTH).float()
    cache = torch.full((12, RANK + DR), 7.0)
    mla_latent_ref(x, w, cache, torch.tensor([-1, 5, -1]), out=torch.empty(3, Q_RANK))
    changed = (cache != 7.0).any(-1).nonzero().flatten().tolist()
    assert changed == [0, 5]


def test_bf16_latents_are_rounded_before_and_after_the_weight() -> None:
    w, x = mla_weights(torch.bfloat16), inputs(1, 9, torch.bfloat16)[0][0]
    cache = torch.full((9, RANK + DR), float("nan")).bfloat16()
    out = torch.full((9, Q_RANK), float("nan")).bfloat16()
    mla_latent_ref(x, w, cache, torch.arange(9), out=out)

    def published(part: Tensor, weight: Tensor) -> Tensor:
        f = part.double()
        return (f / (f.square().mean(-1, keepdim=True) + w.eps).sqrt()).bfloat16() * weight

    check_equal(out, published(x[:, :Q_RANK], w.q_norm))
    check_equal(cache[:, :RANK], published(x[:, Q_RANK : Q_RANK + RANK], w.kv_norm))


# seq_len 1; up to a block border, over it, and several blocks at once
@pytest.mark.parametrize("pieces", [[1], [1, 1, 1, 1, 1], [4, 1], [3, 2], [9, 1, 4], [8, 8]])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_request_in_pieces(
    garbage: float, dtype: torch.dtype, form: Op, pieces: list[int]
) -> None:
    w, paged = mla_weights(dtype), Paged(dtype, garbage, [sum(pieces)])
    for i, count in enumerate(pieces):
        got, expected = paged.call(form, *inputs(1, count, dtype, seed=10 * i), w)
        check_close(got, expected, LIMIT[dtype], f"piece {i}")


@pytest.mark.parametrize(
    "form, num_rows",
    [(mla_ref, 1), (mla_ref, 3), (mla_expanded_ref, 1), (mla_expanded_ref, 3), (mla_one_row, 1)],
)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_requests_of_different_lengths(garbage: float, form: Op, num_rows: int) -> None:
    """New, just before, at and after a block border, and long; short ones have trash columns."""
    dtype = torch.float64
    lengths = [0, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 2]
    w, paged = mla_weights(dtype), Paged(dtype, garbage, [n + num_rows for n in lengths])
    requests = paged.requests
    for r, length in enumerate(lengths):  # each alone, to its length
        paged.requests = requests[r : r + 1]
        if length:
            paged.call(mla_ref, *inputs(1, length, dtype, seed=100 + r), w)
    paged.requests = requests
    got, expected = paged.call(form, *inputs(5, num_rows, dtype), w, extra_columns=2)
    check_close(got, expected, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_request_that_is_not_a_number_spoils_only_itself(form: Op) -> None:
    dtype = torch.float64
    w, paged = mla_weights(dtype), Paged(dtype, 1e30, [6, 6, 6])
    x, q = inputs(3, 6, dtype)
    alone = Paged(dtype, 1e30, [6])
    expected, _ = alone.call(form, x[2:], q[2:], w)
    bad = x.clone()
    bad[1, 2] = float("nan")
    latents = [r.blocks for r in paged.requests]
    positions = torch.arange(6).repeat(3)
    slots = torch.tensor([b[p // BLOCK] * BLOCK + p % BLOCK for b in latents for p in range(6)])
    mla_latent_ref(bad.flatten(0, 1), w, paged.latent, slots, out=torch.empty(18, Q_RANK).double())
    out = torch.full((18, HEADS * DV), 0.0, dtype=dtype)
    args = paged.latent, torch.tensor(latents), positions, BLOCK
    form(q.flatten(0, 1), bad.flatten(0, 1), w, *args, out=out)
    check_close(out[12:], expected[0], 1e-12)
    assert out[8:12].isnan().all(), "the rows that see it"


@pytest.mark.parametrize("form", FORMS)
def test_bf16(form: Op) -> None:
    dtype = torch.bfloat16
    w, paged = mla_weights(dtype), Paged(dtype, float("nan"), [30, 30])
    x, q = inputs(2, 30, dtype)
    got, _ = paged.call(form, x, q, w)

    # from the cache as it was stored: bf16 torch, and the same in float64
    def causal(dtype: torch.dtype) -> Tensor:
        out = []
        for r, request in enumerate(paged.requests):
            slots = [request.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(30)]
            rows = paged.latent[slots].to(dtype)
            kv = torch.einsum("sl,hdl->hsd", rows[:, :RANK], w.kv_b.to(dtype))
            shared = rows[:, RANK:].expand(HEADS, -1, -1)
            heads = q[r].to(dtype).unflatten(-1, (HEADS, -1)).transpose(0, 1)
            scores = heads @ torch.cat([kv[..., :DN], shared], -1).mT * (DN + DR) ** -0.5
            hidden = torch.ones(30, 30, dtype=torch.bool).triu(1)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            p = scores.to(wide).masked_fill(hidden, float("-inf")).softmax(-1).to(dtype)
            o = (p @ kv[..., DN:]).transpose(0, 1).flatten(1)
            out.append(o * x[r, :, -HEADS * DV :].to(dtype).sigmoid())
        return torch.stack(out)

    check_bf16(got, causal(dtype), causal(torch.float64))


# ---- no positions ----


@pytest.mark.parametrize("form", FORMS)
def test_only_the_set_of_rows_counts_and_not_their_places(form: Op) -> None:
    """The last of n tokens, its past in another order, and everything shifted by a repetition.

    Rotary positions would change all of these.
    """
    dtype = torch.float64
    w = mla_weights(dtype)
    x, q = inputs(1, 7, dtype)
    order = torch.tensor([3, 0, 5, 1, 4, 2, 6])
    tripled = torch.arange(7).repeat(3)  # each row three times: the same probabilities
    results = []
    for index in (torch.arange(7), order, tripled):
        paged = Paged(dtype, float("nan"), [len(index)])
        results.append(paged.call(form, x[:, index], q[:, index], w)[0][0, -1])
    check_close(results[1], results[0], 1e-13, "past in another order")
    check_close(results[2], results[0], 1e-13, "14 positions later")


@pytest.mark.parametrize("form", FORMS)
def test_a_row_sees_itself_and_nothing_later(form: Op) -> None:
    dtype = torch.float64
    w = mla_weights(dtype)
    x, q = inputs(1, 6, dtype)
    changed = x.clone()
    changed[0, 4:] += 1.0
    before = Paged(dtype, 1e30, [6]).call(form, x, q, w)[0]
    after = Paged(dtype, 1e30, [6]).call(form, changed, q, w)[0]
    check_close(after[0, :4], before[0, :4], 1e-13)
    assert (after[0, 4] - before[0, 4]).abs().max() > 1e-3
