"""KDA that records rows instead of moving the state, against `kda_ref`, which moves it.

Replayed rows leave the same bits as rows that were walked one at a time; folded ones stay within
1e-5. What was recorded of rows that do not stand is never read.
"""

from __future__ import annotations

import pytest
import torch
from compare import check_close, check_equal
from torch import Tensor

from nanok3.reference.kda import KDAWeights, kda_ref
from nanok3.reference.kda_records import (
    KDARecords,
    allocate_records,
    commit_masked,
    commit_ref,
    kda_recorded_few,
    kda_recorded_ref,
)

HEADS, DK, DV, RANK, TAPS, LAYERS, SLOTS = 3, 8, 12, 5, 4, 2, 5
CHANNELS = 2 * HEADS * DK + HEADS * DV
WIDTH = CHANNELS + HEADS * DV + RANK + HEADS
NUM_ROWS = 8
REQUESTS = [3, 1, 4]  # slots


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def weights(layer: int, dtype: torch.dtype, lower_bound: float) -> KDAWeights:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return KDAWeights(
        conv=random(10 * layer, CHANNELS, TAPS, scale=0.5).to(wide),
        f_b=random(10 * layer + 1, HEADS * DK, RANK).to(dtype),
        A_log=torch.tensor([-1.0, 0.2, 1.5]).to(wide),
        dt_bias=random(10 * layer + 2, HEADS * DK, scale=2.0).to(wide),
        o_norm=1 + random(10 * layer + 3, DV, scale=0.2).to(wide),
        lower_bound=lower_bound,
        eps=1e-5,
    )


class World:
    def __init__(self, dtype: torch.dtype, lower_bound: float = -5.0) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.w = [weights(layer, dtype, lower_bound) for layer in range(LAYERS)]
        self.conv_state = random(50, LAYERS, SLOTS, TAPS - 1, CHANNELS).to(dtype)
        self.state = random(51, LAYERS, SLOTS, HEADS, DK, DV).to(wide)
        self.x = random(52, LAYERS, len(REQUESTS), NUM_ROWS, WIDTH).to(dtype)
        self.records = allocate_records(LAYERS, SLOTS, NUM_ROWS, self.conv_state, self.state)
        for t in vars(self.records).values():
            if isinstance(t, Tensor):
                t.fill_(float("nan"))

    def walk(self, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """One row at a time in place, counts[r] rows: -> outputs [layers, R, Q, H * Dv], caches."""
        conv_state, state = self.conv_state.clone(), self.state.clone()
        outs = torch.full((LAYERS, len(REQUESTS), NUM_ROWS, HEADS * DV), float("nan")).to(self.x)
        for layer in range(LAYERS):
            for r, slot in enumerate(REQUESTS):
                for i in range(counts[r]):
                    kda_ref(
                        self.x[layer, r, i : i + 1],
                        self.w[layer],
                        conv_state[layer],
                        state[layer],
                        torch.tensor([slot]),
                        out=outs[layer, r, i : i + 1],
                    )
        return outs, conv_state, state

    def record(self, op: object, pieces: list[int], together: bool) -> Tensor:
        """The rows in passes of `pieces` rows; all requests in a pass, or one after another."""
        outs = torch.full((LAYERS, len(REQUESTS), NUM_ROWS, HEADS * DV), float("nan")).to(self.x)
        groups = [list(range(len(REQUESTS)))] if together else [[r] for r in range(len(REQUESTS))]
        for layer in range(LAYERS):
            for group in groups:
                first = 0
                for piece in pieces:
                    one = self.records.layer(layer)
                    rows = KDARecords(one.qkv, one.log_decay, one.key, one.value, first)
                    out = torch.empty(len(group) * piece, HEADS * DV).to(self.x)
                    op(  # type: ignore[operator]
                        self.x[layer, group, first : first + piece].flatten(0, 1),
                        self.w[layer],
                        self.conv_state[layer],
                        self.state[layer],
                        torch.tensor([REQUESTS[r] for r in group]),
                        rows,
                        out=out,
                    )
                    outs[layer, group, first : first + piece] = out.unflatten(0, (-1, piece))
                    first += piece
        return outs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 1, 2], [8, 3, 4], [5, 6, 7]])
def test_replayed_rows_leave_the_bits_of_walked_ones(dtype: torch.dtype, counts: list[int]) -> None:
    world = World(dtype)
    outs, conv_state, state = world.walk([NUM_ROWS] * 3)
    before = world.conv_state.clone(), world.state.clone()
    seen = world.record(kda_recorded_ref, [1] * NUM_ROWS, together=False)
    check_equal(seen, outs, "outputs")
    check_equal(world.conv_state, before[0], "the window is only read")
    check_equal(world.state, before[1], "the state is only read")
    _, conv_state, state = world.walk(counts)
    for slot, count in zip(REQUESTS, counts, strict=True):  # rows that do not stand
        for t in vars(world.records).values():
            if isinstance(t, Tensor):
                t[:, slot, count:] = float("nan")
    commit_ref(world.conv_state, world.state, world.records, REQUESTS, counts, fold=False)
    check_equal(world.conv_state, conv_state, "window")
    check_equal(world.state, state, "state")


@pytest.mark.parametrize("op", [kda_recorded_ref, kda_recorded_few])
@pytest.mark.parametrize("lower_bound", [-5.0, -30.0, -100.0])
@pytest.mark.parametrize("pieces", [[8], [3, 5]])
def test_folded_rows_stay_close(op: object, lower_bound: float, pieces: list[int]) -> None:
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        for counts in ([0, 1, 2], [8, 3, 4]):
            world = World(dtype, lower_bound)
            outs, _, _ = world.walk([NUM_ROWS] * 3)
            check_close(world.record(op, pieces, together=True), outs, limit, "outputs")
            _, conv_state, state = world.walk(counts)
            commit_ref(world.conv_state, world.state, world.records, REQUESTS, counts, fold=True)
            check_equal(world.conv_state, conv_state, "window")
            check_close(world.state, state, limit, "state")


@pytest.mark.parametrize("counts", [[0, 1, 2], [8, 3, 4], [5, 6, 7]])
def test_the_masked_fold_is_the_fold(counts: list[int]) -> None:
    """Rows that do not stand are NaN; padding stands on the trash slot, twice."""
    world = World(torch.float64)
    world.record(kda_recorded_few, [8], together=True)
    right = world.conv_state.clone(), world.state.clone()
    commit_ref(*right, world.records, REQUESTS, counts, fold=True)
    for slot, count in zip(REQUESTS, counts, strict=True):
        r = world.records
        for t in (r.qkv, r.log_decay, r.key, r.value):
            t[:, slot, count:] = float("nan")
    trash = [0, 0]
    slots, stand = torch.tensor(REQUESTS + trash), torch.tensor(counts + trash)
    commit_masked(world.conv_state, world.state, world.records, slots, stand)
    check_equal(world.conv_state[:, REQUESTS], right[0][:, REQUESTS], "window")
    check_close(world.state[:, REQUESTS], right[1][:, REQUESTS], 1e-14, "state")

    def meta(t: torch.Tensor) -> torch.Tensor:  # to read a value is an error there
        return t.to("meta")

    records = KDARecords(
        *(meta(getattr(world.records, n)) for n in ("qkv", "log_decay", "key", "value"))
    )
    commit_masked(meta(world.conv_state), meta(world.state), records, meta(slots), meta(stand))


def test_many_folds_do_not_drift() -> None:
    """200 steps of 8 rows, a different number standing each time."""
    world = World(torch.float32)
    exact = World(torch.float64)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        x = torch.randn(world.x.shape, generator=generator)
        world.x, exact.x = x, x.double()
        counts = torch.randint(0, NUM_ROWS + 1, (3,), generator=generator).tolist()
        world.record(kda_recorded_few, [8], together=True)
        commit_ref(world.conv_state, world.state, world.records, REQUESTS, counts, fold=True)
        _, exact.conv_state, exact.state = exact.walk(counts)
    check_close(world.state, exact.state, 1e-5, "state")
