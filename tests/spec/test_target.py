"""The target over drafts: rows, caches and taps against decoding the same ids one at a time.

A script says how many drafts stand in each step; those that do are the true continuation, the
others are wrong. Numbers of drafts differ between the requests of a step, blocks are small, and
what nobody wrote is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import check_close, check_equal
from tiny import TINY, tiny_weights
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache, allocate_cache
from nanok3.ops import DECODE, REFERENCE, VERIFY
from nanok3.reference.kda_records import KDARecords, allocate_records
from nanok3.spec.target import Target, commit_on_cpu
from nanok3.step import Buffers, Step, allocate_buffers

BLOCK, MAX_DRAFTS, NUM_REQS, BLOCKS = 4, 7, 3, 30
TAPS = (1, 3, 4, 6)  # inside a res_block of 3, at its border, the last that may be
# (drafts, how many stand) of each request in each step: all pairs of 0, 1, 3, 7, borders of blocks
SCRIPT = [
    *([(7, 0), (7, 7), (3, 3)], [(7, 3), (0, 0), (1, 0)], [(7, 1), (5, 2), (2, 2)]),
    *([(0, 0), (0, 0), (0, 0)], [(1, 1), (7, 4), (6, 0)], [(4, 4), (3, 0), (0, 0)]),
]


def caches(dtype: torch.dtype) -> Cache:
    cache = allocate_cache(TINY, NUM_REQS + 1, BLOCKS * NUM_REQS + 1, BLOCK, dtype, "cpu")
    for tensor in vars(cache).values():
        tensor.fill_(float("nan"))
    cache.state[:, 1:] = 0
    cache.conv_state[:, 1:] = 0
    return cache


def blocks_of(request: int) -> list[int]:
    return [1 + request + NUM_REQS * i for i in range(BLOCKS)]


class Plain:
    """One id of one request at a time."""

    def __init__(self, weights: Any, dtype: torch.dtype) -> None:
        self.weights, self.cache, self.dtype = weights, caches(dtype), dtype

    def feed(self, request: int, position: int, token: int) -> tuple[Tensor, Tensor]:
        blocks = blocks_of(request)
        step = Step(
            input_ids=torch.tensor([token]),
            positions=torch.tensor([position]),
            slot_mapping=torch.tensor([blocks[position // BLOCK] * BLOCK + position % BLOCK]),
            block_table=torch.tensor([blocks[: position // BLOCK + 1]]),
            state_slots=torch.tensor([request + 1]),
            logit_rows=torch.tensor([0]),
            block_size=BLOCK,
        )
        buf = allocate_buffers(TINY, 1, 1, self.dtype, "cpu", num_taps=len(TAPS))
        model.forward(TINY, self.weights, self.cache, step, buf, REFERENCE, taps=TAPS)
        return buf.logits[0], buf.taps[0]


def poisoned(record: Any) -> Any:
    for tensor in vars(record).values():
        if isinstance(tensor, Tensor):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    return record


def step_of(
    requests: list[list[int]], lengths: list[int], num_rows: int, records: KDARecords
) -> Step:
    """Rows past a request's own are padding."""
    ids, positions, slots = [], [], []
    for r, own in enumerate(requests):
        for i in range(num_rows):
            position = lengths[r] + min(i, len(own) - 1)
            ids.append(own[i] if i < len(own) else 0)
            positions.append(position)
            slot = blocks_of(r)[position // BLOCK] * BLOCK + position % BLOCK
            slots.append(slot if i < len(own) else -1)
    return Step(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_table=torch.tensor([blocks_of(r) for r in range(NUM_REQS)]),
        state_slots=torch.arange(NUM_REQS) + 1,
        logit_rows=torch.arange(len(ids)),
        block_size=BLOCK,
        records=records if num_rows > 1 else None,
    )


@pytest.mark.parametrize(
    ("strict", "dtype", "limit"),  # limit 0: the same bits
    [(True, torch.float32, 0.0), (False, torch.float64, 1e-12), (False, torch.float32, 2e-4)],
)
def test_drafts_that_stand_leave_what_decoding_leaves(
    strict: bool, dtype: torch.dtype, limit: float
) -> None:
    def same(actual: Tensor, expected: Tensor, what: str) -> None:
        if limit:
            check_close(actual, expected, limit, what)
        else:
            check_equal(actual, expected, what)

    weights = tiny_weights(TINY, 5, dtype)
    cache, plain = caches(dtype), Plain(weights, dtype)
    records = poisoned(
        allocate_records(*cache.state.shape[:2], MAX_DRAFTS + 1, cache.conv_state, cache.state)
    )

    def forward(step: Step, buf: Buffers) -> None:
        ops = REFERENCE if strict else DECODE if step.records is None else VERIFY
        columns = int(step.positions.max()) // BLOCK + 1  # bits depend on how many are read
        step = replace(step, block_table=step.block_table[:, :columns])
        model.forward(TINY, weights, cache, step, buf, ops, taps=TAPS)

    most = NUM_REQS * (MAX_DRAFTS + 1)
    buffers = poisoned(allocate_buffers(TINY, most, most, dtype, "cpu", num_taps=len(TAPS)))
    target = Target(
        forward, buffers, cache, records, commit_on_cpu(strict), strict=strict, on_cpu=True
    )
    generator = torch.Generator().manual_seed(3)
    truth = torch.randint(0, 256, (NUM_REQS, 100), generator=generator).tolist()
    lengths = [0] * NUM_REQS
    for script in [*SCRIPT, *SCRIPT]:
        requests, counts = [], []
        for r, (drafts, stand) in enumerate(script):
            at = lengths[r]
            ids = truth[r][at : at + drafts + 1]
            ids[stand + 1 :] = [(token + 1) % 256 for token in ids[stand + 1 :]]
            requests.append(ids)
            counts.append(stand + 1)
        num_rows = max(len(ids) for ids in requests)
        step = step_of(requests, lengths, num_rows, records)
        target.run(step)
        logits_of_rows = target.logits[: len(step.input_ids)].unflatten(0, (-1, num_rows))
        taps_of_rows = target.taps[: len(step.input_ids)].unflatten(0, (-1, num_rows))
        right = []
        for r, count in enumerate(counts):
            for i in range(count):
                logits, taps = plain.feed(r, lengths[r] + i, truth[r][lengths[r] + i])
                right.append((logits_of_rows[r, i], logits, taps_of_rows[r, i], taps))
        for actual, logits, tapped, taps in right:
            same(actual, logits, "logits")
            same(tapped, taps, "taps")
        if num_rows > 1:
            target.commit(step.state_slots, torch.tensor(counts))
        for r, count in enumerate(counts):
            lengths[r] += count
            slot = r + 1
            same(cache.state[:, slot], plain.cache.state[:, slot], "states")
            same(cache.conv_state[:, slot], plain.cache.conv_state[:, slot], "windows")
            used = torch.tensor(
                [blocks_of(r)[p // BLOCK] * BLOCK + p % BLOCK for p in range(lengths[r])]
            )
            same(cache.latent[:, used], plain.cache.latent[:, used], "latent rows")


def test_a_tap_is_the_running_sum_that_the_next_layer_receives() -> None:
    weights = tiny_weights(TINY, 5, torch.float32)
    seen: list[Tensor] = []

    def attn_res(delta: Tensor, streams: Tensor, *others: Any, out: Tensor) -> None:
        REFERENCE.attn_res(delta, streams, *others, out=out)
        seen.append(streams[-1].clone())

    cache = caches(torch.float32)
    step = Step(
        input_ids=torch.tensor([65, 66, 67]),
        positions=torch.tensor([0, 0, 0]),
        slot_mapping=torch.tensor([b * BLOCK for b in (1, 2, 3)]),
        block_table=torch.tensor([[1], [2], [3]]),
        state_slots=torch.tensor([1, 2, 3]),
        logit_rows=torch.arange(3),
        block_size=BLOCK,
    )
    buf = allocate_buffers(TINY, 3, 3, torch.float32, "cpu", num_taps=len(TAPS))
    ops = replace(DECODE, attn_res=attn_res)
    model.forward(TINY, weights, cache, step, buf, ops, taps=TAPS)
    for i, layers in enumerate(TAPS):  # two attn_res a layer: the first one after `layers` of them
        check_equal(buf.taps[:, i * 64 : i * 64 + 64], seen[2 * layers], f"tap {layers}")
