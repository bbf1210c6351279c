"""Hand-offs between the CTAs of a cooperative grid: right ones pass, each fault is noticed.

The kernel passes rows round: in each round every CTA writes its row, signals, waits for all, and
reads another CTA's. Rows are used again two rounds later, which a second signal makes safe.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import (
    bulk_copy_g2s,
    evict_first_policy,
    fence_async,
    global_clock,
    ld_acquire_u32,
    ld_global_u32,
    ld_shared_u32,
    red_add_release,
    st_global_u32,
)
from ptx.launch import ARCH, Emulator
from ptx.memory import Fault, buffer_of

CTAS, THREADS, ROUNDS = 4, 64, 3
FAULTS = (
    *("none", "no wait", "no signal", "lost signal", "no barrier before", "no barrier after"),
    *("no second wait", "no fence", "bulk without wait", "gives up"),
)


class Rounds:
    """`faults`: what is left out. `bulk`: rows are read by bulk copies."""

    def __init__(self, fault: str = "none", bulk: bool = False, limit: int = 1 << 20) -> None:
        self.fault, self.bulk, self.limit = fault, bulk, limit

    @cute.jit
    def __call__(self, rows: Int64, counters: Int64, out: Int64, stream):
        self.kernel(rows, counters, out).launch(
            grid=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream, cooperative=True
        )

    @cute.kernel
    def kernel(self, rows: Int64, counters: Int64, out: Int64):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        barrier = smem.allocate_array(Int64, num_elems=2)
        row = Int32(smem.allocate(THREADS * 4, byte_alignment=128).toint())
        if tid == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        begin = global_clock()
        for i in cutlass.range(ROUNDS, unroll=1):
            mine = rows + Int64((cta * THREADS + tid) * 4)
            st_global_u32(mine, Uint32(1000 * i + 100 * cta + tid))
            self.hand_over(tid, cta, counters, i, "no wait")
            other = (cta + 1) % CTAS
            value = Uint32(0)
            if const_expr(self.bulk):
                if tid == 0:
                    if const_expr(self.fault != "no fence"):
                        fence_async()
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, THREADS * 4)
                    source = rows + Int64(other * THREADS * 4)
                    bulk_copy_g2s(row, source, Int32(THREADS * 4), barrier, evict_first_policy())
                if const_expr(self.fault != "bulk without wait"):
                    cute.arch.mbarrier_wait(barrier, i % 2)
                    value = ld_shared_u32(row + tid * 4)
                    cute.arch.sync_threads()
            else:
                value = ld_global_u32(rows + Int64((other * THREADS + tid) * 4))
            to = out + Int64(((i * CTAS + cta) * THREADS + tid) * 4)
            st_global_u32(to, value)
            self.hand_over(tid, cta, counters + Int64(128), i, "no second wait")
        if global_clock() < begin:
            st_global_u32(out, Uint32(0))

    @cute.jit
    def hand_over(self, tid: Int32, cta: Int32, counter: Int64, i: Int32, no_wait: Constexpr[str]):
        if const_expr(self.fault != "no barrier before"):
            cute.arch.sync_threads()
        if const_expr(self.fault != "no signal"):
            lost = Int32(self.fault in ("lost signal", "gives up"))
            if (tid == 0) & ((cta != 2) | (i != 1) | (lost == 0)):
                red_add_release(counter, Uint32(1))
        if const_expr(self.fault not in ("no signal", no_wait)):
            self.look(tid, counter, (i + 1) * CTAS)
        if const_expr(self.fault != "no barrier after"):
            cute.arch.sync_threads()

    @cute.jit
    def look(self, tid: Int32, counter: Int64, goal: Int32):
        if tid == 0:
            seen = ld_acquire_u32(counter)
            looks = Int32(0)
            while (Int32(seen) < goal) & (looks < self.limit):
                seen = ld_acquire_u32(counter)
                looks += 1


def run(folder: Path, kernel: Rounds, seeds: int = 3) -> None:
    emulator = Emulator(str(folder))
    compiled = emulator.compile(kernel, (Int64(0), Int64(0), Int64(0), make_fake_stream()), ARCH)
    for seed in range(seeds):
        emulator.seed = 100 * seed
        rows = torch.full((CTAS, THREADS), -1, dtype=torch.int32)
        counters = torch.zeros(64, dtype=torch.int32)
        out = torch.full((ROUNDS, CTAS, THREADS), -1, dtype=torch.int32)
        tensors = {"rows": rows, "counters": counters, "out": out}
        buffers = [buffer_of(t, False, name) for name, t in tensors.items()]
        emulator.run(compiled, [t.data_ptr() for t in tensors.values()], buffers)
        i, cta, tid = np.ogrid[:ROUNDS, :CTAS, :THREADS]
        right = 1000 * i + 100 * ((cta + 1) % CTAS) + tid
        np.testing.assert_array_equal(out.numpy(), right)
        assert counters[0] == counters[32] == ROUNDS * CTAS


@pytest.mark.parametrize("bulk", [False, True])
def test_rows_are_handed_over(tmp_path: Path, bulk: bool) -> None:
    run(tmp_path, Rounds(bulk=bulk))


@pytest.mark.parametrize(
    "fault, sentence",
    [
        ("no wait", "race: byte .* of rows .* was written by .* orders this read"),
        ("no signal", "race"),
        ("no barrier before", "race: byte .* of rows"),
        ("no barrier after", "race: byte .* of rows"),
        ("no second wait", "race: byte .* of rows .* was read by .* orders this write"),
        ("lost signal", r"(?s)deadlock.*CTA \(0, 0, 0\), warp 0 polls, sees 7 in byte 0.*counters"),
    ],
)
def test_faults_are_noticed(tmp_path: Path, fault: str, sentence: str) -> None:
    with pytest.raises(Fault, match=sentence):
        run(tmp_path, Rounds(fault))


@pytest.mark.parametrize(
    "fault, sentence",
    [
        ("no fence", r"no fence\.proxy\.async after it"),
        ("no wait", r"no signal, or no fence\.proxy\.async"),
        ("bulk without wait", "more arrivals|a bulk copy|a copy"),
    ],
)
def test_faults_of_bulk_copies_are_noticed(tmp_path: Path, fault: str, sentence: str) -> None:
    with pytest.raises(Fault, match=sentence):
        run(tmp_path, Rounds(fault, bulk=True))


def test_a_wait_that_gives_up_is_no_deadlock(tmp_path: Path) -> None:
    """The kernel goes on after its limit, and the race is reported instead."""
    with pytest.raises(Fault, match="race"):
        run(tmp_path, Rounds("gives up", limit=20))
