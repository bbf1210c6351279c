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
from nanok3.ops import DECODE, REFERENCE
from nanok3.spec.target import Rows, Target
from nanok3.step import Step, allocate_buffers

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
    target = Target(
        TINY, weights, cache, TAPS, block_size=BLOCK, max_num_reqs=NUM_REQS,
        max_drafts=MAX_DRAFTS, dtype=dtype, strict=strict, poison=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    truth = torch.randint(0, 256, (NUM_REQS, 100), generator=generator).tolist()
    lengths = [0] * NUM_REQS
    for script in [*SCRIPT, *SCRIPT]:
        requests, counts = [], []
        for r, (drafts, stand) in enumerate(script):
            at = lengths[r]
            ids = truth[r][at : at + drafts + 1]
            ids[stand + 1 :] = [(token + 1) % 256 for token in ids[stand + 1 :]]
            requests.append(Rows(ids, at, blocks_of(r), r + 1))
            counts.append(stand + 1)
        passed = target.run(requests)
        right = []
        for r, count in enumerate(counts):
            for i in range(count):
                logits, taps = plain.feed(r, lengths[r] + i, truth[r][lengths[r] + i])
                right.append((passed.logits[r, i].clone(), logits, passed.taps[r, i].clone(), taps))
        for actual, logits, tapped, taps in right:
            same(actual, logits, "logits")
            same(tapped, taps, "taps")
        if passed.recorded:
            target.commit(requests, counts)
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
