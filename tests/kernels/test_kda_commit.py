"""`kda_recorded` and `kda_commit`: rows that are recorded, and the states after those that stand.

What stands is to leave, bit for bit, what `kda_decode` leaves when it is given these rows only, one
at a time; rows that do not stand are NaN here, and so is what nobody may read.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compare import check_bf16, check_close, check_equal
from torch import Tensor

from nanok3.reference.kda import KDAWeights
from nanok3.reference.kda_records import KDARecords, allocate_records, commit_ref, kda_recorded_ref

pytest.importorskip("cutlass")
from kernels.test_kda_decode import (
    D,
    caches,
    doubled,
    exact_weights,
    inputs,
    on_gpu,
    settled,
    weights,
)
from nanok3.dsl import ARCHS
from nanok3.kernels.kda_commit import compile_kda_commit, kda_commit
from nanok3.kernels.kda_decode import PASS, Shape, compile_kda_decode, kda_decode, kda_recorded

NAN = float("nan")


@pytest.mark.parametrize("arch", ARCHS)
def test_kda_commit_compiles(arch: str) -> None:
    compile_kda_commit(6, arch)
    compile_kda_decode(Shape(6, -5.0, 1e-5), PASS, True, arch)


def test_records_of_another_form_are_refused() -> None:
    conv_state, state = caches(1, 2, [1])
    slots = torch.tensor([1])
    whole = allocate_records(1, len(state), 3, conv_state[None], state[None])
    x, out = inputs(1, 4, 2), torch.empty(4, 2 * D).bfloat16()
    for records, sentence in (
        (replace(whole.layer(0), first=1), "need the reference ops"),
        (whole.layer(0), "4 rows, and room for 3"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            kda_recorded(x, weights(2), conv_state, state, slots, records, out=out)


def empty_records(num_rows: int, conv_state: Tensor, state: Tensor) -> KDARecords:
    """For one row more than a step has; caches [layers, slots, ..]."""
    records = allocate_records(*state.shape[:2], num_rows + 1, conv_state, state)
    for tensor in (records.qkv, records.log_decay, records.key, records.value):
        tensor.fill_(NAN)
    return records


# Heads of the golden model and of K3 at TP16 and TP8; a part of a pass, a whole one, two.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, num_rows, slots", [(2, 3, [5, 1]), (6, 8, [2, 7, 4]), (12, 1, [6]), (2, 11, [4])]
)
def test_kda_recorded_matches_ref(heads: int, num_rows: int, slots: list[int]) -> None:
    w, (conv_state, state) = exact_weights(heads), caches(40, heads, slots)
    x = torch.cat([settled(inputs(9 + s, num_rows, heads), w, conv_state[s]) for s in slots])
    records = empty_records(num_rows, conv_state[None].cuda(), state[None].cuda())
    got_conv, got_state = conv_state.cuda(), state.cuda()
    out = torch.full((len(x), heads * D), NAN).bfloat16().cuda()
    places = torch.tensor(slots)
    kda_recorded(x.cuda(), on_gpu(w), got_conv, got_state, places.cuda(), records.layer(0), out=out)
    check_equal(got_conv.cpu(), conv_state, "windows are only read")
    check_equal(got_state.cpu(), state, "states are only read")

    def by_reference(w: KDAWeights, double: bool) -> tuple[Tensor, KDARecords]:
        own = [t.double() if double else t for t in (x, conv_state, state)]
        made = empty_records(num_rows, own[1][None], own[2][None]).layer(0)
        out = torch.empty(len(x), heads * D).to(own[0])
        kda_recorded_ref(own[0], w, own[1], own[2], places, made, out=out)
        return out, made

    bf16, wanted = by_reference(w, False)  # rounds q, k and v, as the kernel does
    check_bf16(out.cpu(), bf16, by_reference(doubled(w), True)[0])
    got = KDARecords(*(t.cpu()[0] for t in vars(records).values() if isinstance(t, Tensor)))
    rows = slice(0, num_rows)
    check_equal(got.qkv[places, rows], wanted.qkv[places, rows], "inputs")
    check_close(got.log_decay[places, rows], wanted.log_decay[places, rows], 1e-5, "g")
    updates = [
        r.key[places, rows].unsqueeze(-1) * r.value[places, rows].unsqueeze(-2)
        for r in (got, wanted)
    ]
    check_close(*updates, 1e-5, "k and what it is multiplied by")
    others = [s for s in range(len(state)) if s not in slots]
    for tensor in (got.qkv, got.log_decay, got.key, got.value):
        assert tensor[others].isnan().all() and tensor[:, num_rows:].isnan().all()


# Counts of each step; a padding request in the middle. All of a step, none, part of it; rows over
# the pass.
FORCED = [[0, 7], [7, 3], [3, 0], [1, 8], [8, 2], [2, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, num_rows, forced",
    [(6, 8, FORCED), (2, 3, [[1, 3], [0, 2], [3, 1]]), (2, 11, [[11, 9], [4, 0]])],
)
def test_steps_leave_what_their_standing_rows_leave(
    heads: int, num_rows: int, forced: list[list[int]]
) -> None:
    layers, slots = 2, [3, 0, 1]
    w = on_gpu(weights(heads))
    cache = [caches(60 + layer, heads, [3, 1], num_slots=5) for layer in range(layers)]
    conv_state = torch.stack([c for c, _ in cache]).cuda()
    state = torch.stack([s for _, s in cache]).cuda()
    plain_conv, plain_state = conv_state.clone(), state.clone()
    records = empty_records(num_rows, conv_state, state)
    places = torch.tensor(slots).cuda()
    for step, (first, second) in enumerate(forced):
        counts = [first, 0, second]
        x = inputs(70 + step, layers * len(slots) * num_rows, heads).cuda()
        x = x.unflatten(0, (layers, len(slots), num_rows))
        for r, count in enumerate(counts):
            x[:, r, count:] = NAN
        for layer in range(layers):
            out = torch.full((len(slots), num_rows, heads * D), NAN).bfloat16().cuda()
            kda_recorded(
                *(x[layer].flatten(0, 1), w, conv_state[layer], state[layer], places),
                records.layer(layer),
                out=out.flatten(0, 1),
            )
            one = torch.full((1, heads * D), NAN).bfloat16().cuda()
            for r, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                for row in range(count):
                    kda_decode(
                        *(x[layer, r, row : row + 1], w, plain_conv[layer], plain_state[layer]),
                        torch.tensor([slot]).cuda(),
                        out=one,
                    )
                    check_equal(out[r, row].cpu(), one[0].cpu(), f"output, step {step}, row {row}")
        kda_commit(conv_state, state, records, places, torch.tensor(counts).cuda())
        check_equal(conv_state.cpu(), plain_conv.cpu(), f"windows after step {step}")
        check_equal(state.cpu(), plain_state.cpu(), f"states after step {step}")


# all rows, some, none; counts below none and past the rows; more rows than go at once
@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, num_rows, slots, counts",
    [(4, 5, [4, 2, 1, 3, 6], [5, 2, 0, -1, 9]), (1, 11, [2, 5], [11, 9])],
)
def test_kda_commit_matches_ref(
    heads: int, num_rows: int, slots: list[int], counts: list[int]
) -> None:
    """Records of the reference."""
    w, (conv_state, state) = weights(heads), caches(80, heads, slots)
    conv_state, state = torch.stack([conv_state] * 2), torch.stack([state] * 2)
    state[1] = state[1] * 2
    records = allocate_records(2, state.shape[1], num_rows, conv_state, state)
    for layer in range(2):
        x = inputs(81 + layer, len(slots) * num_rows, heads)
        kda_recorded_ref(
            *(x, w, conv_state[layer], state[layer], torch.tensor(slots), records.layer(layer)),
            out=torch.empty(len(x), heads * D).bfloat16(),
        )
    on_device = KDARecords(*(t.cuda() for t in vars(records).values() if isinstance(t, Tensor)))
    got_conv, got_state = conv_state.cuda(), state.cuda()
    kda_commit(
        *(got_conv, got_state, on_device),
        *(torch.tensor(slots).cuda(), torch.tensor(counts).cuda()),
    )
    standing = [min(max(count, 0), num_rows) for count in counts]
    commit_ref(conv_state, state, records, slots, standing, fold=False)
    check_equal(got_conv.cpu(), conv_state, "windows")
    check_close(got_state[:, slots].cpu(), state[:, slots], 1e-6, "states")
    others = [s for s in range(state.shape[1]) if s not in slots]
    check_equal(got_state[:, others].cpu(), state[:, others], "states of others")
