"""Launching the persistent kernel: its workspace, its arguments, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanok3.dsl import address, arch_of, launch
from nanok3.kernels.kda_rows import check_records
from nanok3.kernels.mega.kernel import Program, compile_mega
from nanok3.kernels.mega.role import MOST_EVENTS, NEXT_TAG, PROGRAMS, SYNC_BYTES, SYNC_SHIFT
from nanok3.kernels.mega.sizes import MOST_STREAMS
from nanok3.reference.kda_records import KDARecords


@dataclass(frozen=True)
class Arguments:
    """Of one launch; T rows of R requests."""

    table: Tensor  # [L + 1, 32] i64, see `fields`
    embed_table: Tensor  # [V, C] bf16
    input_ids: Tensor  # [T] i64
    positions: Tensor  # [T] i64
    slot_mapping: Tensor  # [T] i64
    block_table: Tensor  # [R, blocks] i64
    state_slots: Tensor  # [R] i64
    streams: Tensor  # [n, T, C] bf16; streams may lie apart
    delta: Tensor  # [T, C] bf16
    router_logits: Tensor  # [T, E] f32
    latent: Tensor  # [T, Z] bf16
    topk_ids: Tensor  # [T, A] i64
    topk_weights: Tensor  # [T, A] f32
    logits: Tensor  # [T, V / P] f32, rows may lie apart
    taps: Tensor  # [T, columns] bf16, rows may lie apart
    records: KDARecords | None  # of all layers
    num_layers: int
    num_blocks: int  # of the latent cache


def work_of(program: Program, device: str) -> Tensor:
    """What CTAs exchange, bytes; `clear` before the first launch."""
    return torch.empty(program.sizes.work_bytes, dtype=torch.uint8, device=device)


def sync_of(device: str) -> Tensor:
    """Counters and numbers of PROGRAMS, each shifted against the last by SYNC_SHIFT, so that what
    the host looks at lies together; `clear` before the first launch."""
    num_bytes = SYNC_BYTES + (PROGRAMS - 1) * SYNC_SHIFT
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def sync_part(sync: Tensor, place: int) -> Tensor:
    """Of program 0, 1, .."""
    return sync[place * SYNC_SHIFT :][:SYNC_BYTES]


def clear(sync: Tensor, *works: Tensor) -> None:
    """As if there had been no launch: no word has a tag to come, counters and their numbers begin
    anew. Queued on the current stream. A program's words are its own, since tags that another
    program uses up would let old words pass for new ones."""
    for tensor in (sync, *works):
        tensor.zero_()
    for place in range(PROGRAMS):
        sync_part(sync, place)[NEXT_TAG] = 1  # a word that nobody wrote has tag 0


def stamps_of(program: Program, device: str) -> Tensor | None:
    shape = program.sizes.sms, MOST_EVENTS, 4
    return torch.zeros(shape, dtype=torch.int32, device=device) if program.stamps else None


@functools.cache
def compiled(program: Program, arch: str) -> Any:
    return compile_mega(program, arch)


def launch_mega(
    program: Program, work: Tensor, sync: Tensor, a: Arguments, stamps: Tensor | None = None
) -> None:
    """On torch's current stream. A program's work and sync serve one launch at a time. stamps [SMs,
    events, 4] i32: where a program with `stamps` leaves its clocks. Raises ValueError for a grid
    that the GPU cannot run at once: its CTAs would wait for each other for ever."""
    tokens, sizes = len(a.input_ids), program.sizes
    num_reqs, max_blocks = a.block_table.shape
    there = torch.cuda.get_device_properties(work.device).multi_processor_count
    if sizes.sms > there:
        raise ValueError(
            f"the persistent kernel was made for {sizes.sms} SMs and this GPU has {there}; make it "
            "for the GPU that it runs on"
        )
    assert 1 <= tokens <= sizes.pass_rows and tokens % num_reqs == 0
    assert (stamps is not None) == program.stamps
    assert work.nbytes >= sizes.work_bytes and sync.nbytes == SYNC_BYTES
    whole = (a.input_ids, a.positions, a.slot_mapping, a.block_table, a.state_slots, a.delta)
    parts = (a.router_logits, a.latent, a.topk_ids, a.topk_weights, a.table, a.embed_table)
    assert all(t.is_contiguous() for t in (*whole, *parts)) and a.logits.stride(1) == 1
    assert a.delta.shape == (tokens, sizes.hidden) and a.delta.dtype == torch.bfloat16
    assert a.streams[0].shape == (tokens, sizes.hidden) and a.streams[0].is_contiguous()
    assert a.streams.dtype == torch.bfloat16 and len(a.streams) <= MOST_STREAMS
    assert a.latent.shape == (tokens, sizes.latent) and a.latent.dtype == torch.bfloat16
    assert a.router_logits.shape == (tokens, sizes.num_experts)
    assert a.router_logits.dtype == a.topk_weights.dtype == a.logits.dtype == torch.float32
    assert a.logits.shape == (tokens, sizes.vocab)
    assert len(a.taps) == tokens and a.taps.dtype == torch.bfloat16 and a.taps.stride(1) == 1
    launch(
        compiled(program, arch_of(work.device.index)),
        *(address(t) for t in (a.table, work, sync, a.embed_table, a.input_ids, a.positions)),
        *(address(t) for t in (a.slot_mapping, a.block_table, a.state_slots, a.streams)),
        *(address(t) for t in (a.delta, a.router_logits, a.latent, a.topk_ids, a.topk_weights)),
        *(address(a.logits), 0 if stamps is None else address(stamps), address(a.taps)),
        *records_of(program, a, tokens // num_reqs),
        *(a.num_layers, tokens, num_reqs, max_blocks, a.num_blocks, a.logits.stride(0)),
        *(a.streams.stride(0), a.taps.stride(0), *extent_of(a.records)),
    )


def records_of(program: Program, a: Arguments, num_rows: int) -> list[int]:
    """Their addresses, 0 for a program that records nothing."""
    records = a.records
    assert (records is not None) == program.recorded
    if records is None:
        return [0] * 4
    layers, slots, rows = records.key.shape[:3]
    check_records(records, (layers, slots, rows), program.sizes.kda_heads)
    assert num_rows <= rows, f"{num_rows} rows of a request, and room for {rows}"
    return [address(t) for t in (records.qkv, records.log_decay, records.key, records.value)]


def extent_of(records: KDARecords | None) -> tuple[int, int]:
    """Slots and rows."""
    return (0, 0) if records is None else (records.key.shape[1], records.key.shape[2])
