"""Exchanges of the chain between virtual ranks, on the emulator or on a GPU: bits as the reference.

Several exchanges of different kinds and shapes in a row over the same mailboxes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import check_equal
from session import Session
from test_ranks import IDS, SPLITS, weights_of
from torch import Tensor
from virtual_ranks import VirtualRanks

pytest.importorskip("cutlass")

from ptx.launch import ARCH, Compiled, Emulator
from ptx.memory import Buffer, buffer_of
from ptx.warp import Warp

from nanok3 import kernel_ranks
from nanok3.comm.exchange import all_reduce_ref, reduce_moe_ref
from nanok3.comm.words import device_tables
from nanok3.config import Shard
from nanok3.kernel_ranks import ChainRanks, most_items
from nanok3.kernels import exchange as module
from nanok3.kernels.exchange import CTAS, End, Segment, Swap, exchange, virtual_ends
from nanok3.ops import REFERENCE, Ops

ARCHS = ("sm_90a", "sm_100a", "sm_103a")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("launched", [1, 2])
def test_exchange_compiles(arch: str, launched: int) -> None:
    segments = Segment("sum", 40), Segment("scatter", 20)
    module.compile_exchange(segments, 2, launched, arch)


def on_emulator(patch: pytest.MonkeyPatch, folder: Path, limit: int) -> Callable[..., None]:
    """`exchange` there; words need no order, all else does."""
    emulator = Emulator(str(folder))

    @functools.cache
    def compiled(segments: tuple[Segment, ...], ranks: int, launched: int, arch: str) -> Compiled:
        import cutlass

        args = cutlass.Int64(0), cutlass.Int32(1), cutlass.cute.runtime.make_fake_stream()
        made: Compiled = emulator.compile(Swap(segments, ranks, launched, limit), args, arch)
        return made

    patch.setattr(module, "compile_exchange", compiled)
    patch.setattr(module, "arch_of", lambda index: ARCH)
    patch.setattr(module, "address", emulator.address)

    def run(
        ends: Sequence[End], kinds: Sequence[str], parts: Any, outs: Any, table_of: Any
    ) -> None:
        def launch(kernel: Compiled, *numbers: int) -> None:
            free = {t.data_ptr() for end in ends for t in (end.peers.mail, end.health)}
            made = [
                buffer_of(
                    t,
                    t.data_ptr() == numbers[0] or t is ends[0].peers.bases,
                    unordered=t.data_ptr() in free,
                )
                for t in emulator.tensors
            ]
            found: list[Buffer] = []
            for b in sorted(made, key=lambda b: -len(b.data)):  # views lie in their wholes
                if not any(w.start <= b.start < w.start + len(w.data) for w in found):
                    found.append(b)
            emulator.tensors.clear()
            emulator.run(kernel, numbers, found)

        patch.setattr(module, "launch", launch)
        exchange(ends, kinds, parts, outs=outs, table_of=table_of)

    return run


def on_gpu(ends: Sequence[End], kinds: Sequence[str], parts: Any, outs: Any, table_of: Any) -> None:
    exchange(ends, kinds, parts, outs=outs, table_of=table_of)


def rows(size: int, tokens: int, width: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(size, tokens, width, generator=generator)
    return list((wide * 10 ** torch.arange(size).view(-1, 1, 1)).to(dtype))


def check_exchanges(run: Callable[..., None], device: str, size: int, tokens: int) -> None:
    """In a row: a sum in place, columns of two kinds, a sum of other width, the two of the
    experts."""
    ends = virtual_ends(size, 2 * tokens * 100, device)
    table_of = device_tables(device)
    ranks = range(size)
    for seed, width in enumerate((64, 160, 64)):
        parts = rows(size, tokens, width, seed, torch.bfloat16)
        wholes = [p.clone().to(device) for p in parts]
        run(ends, ["sum"], [[w] for w in wholes], [[w] for w in wholes], table_of)
        for rank in ranks:
            check_equal(wholes[rank].cpu(), all_reduce_ref(parts), f"sum in rank {rank}")
        columns = [  # views of the wholes that they go to
            rows(size, tokens, 2, seed + 10, torch.float32),
            rows(size, tokens, 4 * (seed + 1), seed + 20, torch.bfloat16),
        ]
        gathers: list[list[Tensor]] = []
        for rank in ranks:
            own = []
            for kind in columns:
                whole = torch.full((tokens, size * kind[rank].shape[1]), -7.0, dtype=kind[0].dtype)
                whole.chunk(size, 1)[rank].copy_(kind[rank])
                own.append(whole.to(device))
            gathers.append(own)
        views = [[whole.chunk(size, 1)[rank] for whole in gathers[rank]] for rank in ranks]
        run(ends, ["gather", "gather"], views, gathers, table_of)
        for rank in ranks:
            for kind, whole in zip(columns, gathers[rank], strict=True):
                check_equal(whole.cpu(), torch.cat(kind, 1), f"columns in rank {rank}")
        routed = rows(size, tokens, 32, seed + 30, torch.bfloat16)
        shared = rows(size, tokens, 16 * size, seed + 40, torch.bfloat16)
        moe = [
            [r.clone().to(device), s.clone().to(device)]
            for r, s in zip(routed, shared, strict=True)
        ]
        left = [[r, s.chunk(size, 1)[rank]] for rank, (r, s) in enumerate(moe)]
        run(ends, ["sum", "scatter"], moe, left, table_of)
        for rank in ranks:
            for found, right in zip(left[rank], reduce_moe_ref(routed, shared, rank), strict=True):
                check_equal(found.cpu(), right, f"reduce_moe in rank {rank}")
    for end in ends:
        assert module.failure(end) == "" and end.epochs.tolist() == [10] * CTAS


@pytest.mark.parametrize("size, tokens", [(2, 3), (4, 1)])
def test_virtual_ranks_on_the_emulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, tokens: int
) -> None:
    monkeypatch.setattr(module, "CTAS", 2)
    monkeypatch.setattr(f"{__name__}.CTAS", 2)
    monkeypatch.setattr(module, "THREADS", 64)
    check_exchanges(on_emulator(monkeypatch, tmp_path, module.LIMIT), "cpu", size, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("size, tokens", [(2, 3), (4, 1), (8, 8)])
def test_exchange_matches_ref(size: int, tokens: int) -> None:
    check_exchanges(on_gpu, "cuda", size, tokens)


def test_a_lost_word_ends_in_a_report_and_after_clearing_all_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CTAS", 2)
    monkeypatch.setattr(module, "THREADS", 64)
    run = on_emulator(monkeypatch, tmp_path, 50)
    ends = virtual_ends(2, 64, "cpu")
    table_of = device_tables("cpu")
    parts = rows(2, 2, 64, 0, torch.bfloat16)
    store = Warp.store_global

    def drops(self: Warp, at: Any, values: Any, mask: Any) -> None:
        mail = ends[0].peers.mail
        lost = (at >= mail.data_ptr()) & (at < mail.data_ptr() + mail.nbytes)
        if self.cta.index[1] == 0 or not lost.any():
            store(self, at, values, mask)

    wholes = [p.clone() for p in parts]
    with monkeypatch.context() as patch:
        patch.setattr(Warp, "store_global", drops)
        run(ends, ["sum"], [[w] for w in wholes], [[w] for w in wholes], table_of)
    assert module.failure(ends[1]) == ""
    assert "exchange by sum: words of rank 1 with tag 1 expected, 0 seen" in module.failure(ends[0])
    module.clear(ends)
    wholes = [p.clone() for p in parts]
    run(ends, ["sum"], [[w] for w in wholes], [[w] for w in wholes], table_of)
    for whole in wholes:
        check_equal(whole, all_reduce_ref(parts), "after clearing")


def test_a_text_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a small model in torch that exchange by the launches: the bits of an exchange in
    torch, in every rank."""
    monkeypatch.setattr(module, "CTAS", 2)
    monkeypatch.setattr(module, "THREADS", 64)
    run = on_emulator(monkeypatch, tmp_path, module.LIMIT)

    def launch(ends: Any, kinds: Any, parts: Any, *, outs: Any, table_of: Any) -> None:
        run(ends, kinds, parts, outs, table_of)

    monkeypatch.setattr(kernel_ranks, "exchange", launch)
    ranks = ChainRanks(2, most_items(SPLITS, 2, 2), "cpu")
    plain = VirtualRanks(2)

    def logits(shard: Shard, ops: Ops) -> list[Tensor]:
        weights = weights_of(SPLITS, torch.bfloat16, shard)
        session = Session(SPLITS, weights, torch.bfloat16, num_reqs=2, shard=shard)
        return [session.feed([[row[i]] for row in IDS], ops) for i in range(2)]

    right = plain.run(lambda shard: logits(shard, plain.ops(shard, REFERENCE)))
    for rank, found in enumerate(ranks.run(lambda s: logits(s, ranks.ops(s, REFERENCE)))):
        for i in range(2):
            check_equal(found[i], right[0][i], f"logits of rank {rank}, step {i}")
    assert ranks.failures() == []
