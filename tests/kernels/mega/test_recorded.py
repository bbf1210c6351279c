"""Steps of the persistent kernel whose rows may be rolled back, and what it taps, with the commit.

However many rows of a step stand, logits, taps and caches are to be those of the rows that stand,
one at a time, by the reference of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from compare import check_bf16, check_close, check_equal
from torch import Tensor

pytest.importorskip("cutlass")

from ptx.launch import Emulator

from kernels.mega.harness import OnEmulator
from kernels.mega.test_handoffs import CONFIG as SMALL
from kernels.mega.test_step import BLOCK, MAX_BLOCKS, SEED, filled_cache, step_of
from nanok3.cache import Cache
from nanok3.config import WHOLE
from nanok3.kernels.kda_commit import kda_commit
from nanok3.mega_ops import Mega
from nanok3.model import forward
from nanok3.ops import REFERENCE
from nanok3.rank_weights import packed_weights, plain_weights
from nanok3.reference.kda_records import allocate_records
from nanok3.step import Buffers, Step, allocate_buffers

# KDA and dense, MLA and MoE, KDA and MoE
CONFIG = replace(
    SMALL,
    num_hidden_layers=3,
    linear_attn_config=replace(SMALL.linear_attn_config, kda_layers=(1, 3), full_attn_layers=(2,)),
)
TAPS = (1, 2)
LENGTHS = [62, 5]  # cached before, of two requests; the first one's rows cross a block
NUM_ROWS = 3
FORCED = [[3, 0], [1, 2], [2, 3]]  # rows that stand, of each step
UNUSED = 3  # a slot


def cache_of(dtype: torch.dtype, device: str) -> Cache:
    cache = filled_cache(CONFIG, dtype, 4)
    return Cache(*(t.to(device) for t in vars(cache).values()))


def buffers_of(num_rows: int, dtype: torch.dtype, device: str) -> Buffers:
    buf = allocate_buffers(CONFIG, num_rows, num_rows, dtype, device, num_taps=len(TAPS))
    for value in vars(buf).values():
        value.fill_(-1 if value.dtype == torch.int64 else torch.nan)
    return buf


def steps(device: str) -> list[Step]:
    """All rows of both requests, for each line of FORCED."""
    made, lengths = [], LENGTHS
    for counts in FORCED:
        step = step_of(CONFIG, lengths, NUM_ROWS)
        fields = {k: v.to(device) for k, v in vars(step).items() if isinstance(v, Tensor)}
        made.append(replace(step, **fields))
        lengths = [n + count for n, count in zip(lengths, counts, strict=True)]
    return made


def standing(counts: list[int]) -> list[int]:
    return [r * NUM_ROWS + row for r, count in enumerate(counts) for row in range(count)]


@dataclass(frozen=True)
class Found:
    logits: Tensor  # of all rows that stand
    taps: Tensor
    cache: Cache


def row_by_row(dtype: torch.dtype, device: str) -> Found:
    weights, cache = plain_weights(CONFIG, WHOLE, device, dtype, SEED), cache_of(dtype, device)
    logits, taps = [], []
    for step, counts in zip(steps(device), FORCED, strict=True):
        for at in standing(counts):
            own, request = slice(at, at + 1), slice(at // NUM_ROWS, at // NUM_ROWS + 1)
            one = replace(
                step,
                input_ids=step.input_ids[own],
                positions=step.positions[own],
                slot_mapping=step.slot_mapping[own],
                block_table=step.block_table[request],
                state_slots=step.state_slots[request],
                logit_rows=step.logit_rows[:1],
            )
            buf = buffers_of(1, dtype, device)
            forward(CONFIG, weights, cache, one, buf, REFERENCE, taps=TAPS)
            logits.append(buf.logits)
            taps.append(buf.taps)
    return Found(torch.cat(logits), torch.cat(taps), cache)


def recorded(on_emulator: OnEmulator | None, device: str) -> Found:
    cache, logits, taps = cache_of(torch.bfloat16, device), [], []
    weights = packed_weights(CONFIG, WHOLE, device, SEED)
    mega = Mega(CONFIG, weights, cache, BLOCK, MAX_BLOCKS, taps=TAPS)
    records = allocate_records(*cache.state.shape[:2], NUM_ROWS + 1, cache.conv_state, cache.state)
    for step, counts in zip(steps(device), FORCED, strict=True):
        for tensor in (records.qkv, records.log_decay, records.key, records.value):
            tensor.fill_(torch.nan)
        before = cache.conv_state.clone(), cache.state.clone()
        buf = buffers_of(len(step.input_ids), torch.bfloat16, device)
        if on_emulator is not None:
            on_emulator.step(mega, replace(step, records=records), buf)
        else:
            mega.run(replace(step, records=records), buf)
            mega.check()
        check_equal(cache.conv_state, before[0], "windows are only read")
        check_equal(cache.state, before[1], "states are only read")
        rows = standing(counts)
        logits.append(buf.logits[rows])
        taps.append(buf.taps[rows])
        for r, count in enumerate(counts):  # nobody may read what does not stand
            for tensor in (records.qkv, records.log_decay, records.key, records.value):
                tensor[:, int(step.state_slots[r]), count:] = torch.nan
        counted = torch.tensor(counts, device=device)
        kda_commit(cache.conv_state, cache.state, records, step.state_slots, counted)
    return Found(torch.cat(logits), torch.cat(taps), cache)


def check_forced(on_emulator: OnEmulator | None) -> None:
    device = "cpu" if on_emulator else "cuda"
    found = recorded(on_emulator, device)
    plain, exact = (row_by_row(dtype, device) for dtype in (torch.bfloat16, torch.float32))
    check_bf16(found.taps, plain.taps, exact.taps, "taps")
    check_bf16(found.logits, plain.logits, exact.logits, "logits")
    caches = found.cache, plain.cache, exact.cache
    used = [slot for slot in range(1, 4) if slot != UNUSED]
    check_close(found.cache.state[:, used], exact.cache.state[:, used], 0.05, "state")
    check_bf16(*(c.conv_state[:, used] for c in caches), "windows")
    fresh = cache_of(torch.bfloat16, device)
    for name in ("conv_state", "state"):
        after, before = (getattr(c, name)[:, UNUSED] for c in (found.cache, fresh))
        check_equal(after, before, f"{name} of nobody")
    for r, length in enumerate(LENGTHS):  # later rows may hold what was rolled back
        length += sum(counts[r] for counts in FORCED)
        first = (1 + r * MAX_BLOCKS) * BLOCK
        check_bf16(*(c.latent[:, first : first + length] for c in caches), f"latents of {r}")


def test_forced_counts_on_emulator(emulated: Emulator, tmp_path: Path) -> None:
    check_forced(OnEmulator(tmp_path))


@pytest.mark.gpu
def test_forced_counts() -> None:
    check_forced(None)
