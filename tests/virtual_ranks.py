"""Ranks as threads of one process, which run the same text in step and exchange through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from nanok3.config import Shard
from nanok3.ops import Ops

Result = TypeVar("Result")
TIMEOUT = 60  # seconds that a rank waits for the others


class VirtualRanks:
    def __init__(self, size: int) -> None:
        self.shards = [Shard(rank, size) for rank in range(size)]
        self._barrier = threading.Barrier(size, timeout=TIMEOUT)
        self._posted: list[Sequence[Tensor]] = [()] * size

    def run(self, rank_of: Callable[[Shard], Result]) -> list[Result]:
        """What each rank returns; an error of one ends all."""

        def guarded(shard: Shard) -> Result:
            try:
                return rank_of(shard)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.shards)) as pool:
            return list(pool.map(guarded, self.shards))

    def ops(self, shard: Shard, ops: Ops) -> Ops:
        """The reading `ops` with exchanges between these ranks."""

        def posted(parts: Sequence[Tensor]) -> list[list[Tensor]]:
            """Part i of all ranks, in their order; copies, since the wholes are over the parts."""
            self._posted[shard.rank] = [part.clone() for part in parts]
            self._barrier.wait()
            found = [list(of_ranks) for of_ranks in zip(*self._posted, strict=True)]
            self._barrier.wait()
            return found

        def all_reduce(part: Tensor, *, out: Tensor) -> None:
            (parts,) = posted([part])
            out.copy_(torch.stack(parts).sum(0))

        def all_gather(parts: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
            for whole, of_ranks in zip(out, posted(parts), strict=True):
                whole.copy_(torch.cat(of_ranks, dim=1))

        def reduce_moe(parts: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
            routed, shared = (torch.stack(of_ranks).sum(0) for of_ranks in posted(parts))
            out[0].copy_(routed)
            out[1].copy_(shared[:, shard.slice(shared.shape[1])])

        return replace(ops, all_reduce=all_reduce, all_gather=all_gather, reduce_moe=reduce_moe)
