"""Virtual ranks of the chain: P texts in P threads on one GPU, one launch for all an exchange.

The last thread that comes to an exchange launches it, then all go on. It stands in for P processes
with a GPU each, where every rank launches its own (`kernels/exchange`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from nanok3.comm.words import device_tables
from nanok3.config import ModelConfig, Shard
from nanok3.kernels.exchange import clear, exchange, failure, virtual_ends
from nanok3.ops import Ops

Result = TypeVar("Result")
TIMEOUT_S = 600  # that a rank's thread waits for the others


def most_items(config: ModelConfig, size: int, max_rows: int) -> int:
    """Of the longest message that a step of this model sends."""
    c = config
    delta, routed = c.hidden_size // 4, c.routed_expert_hidden_size // 4
    logits, router = c.vocab_size // size // 2, c.num_experts // size // 2
    return max_rows * max(delta + routed, logits, router + routed)


class ChainRanks:
    def __init__(self, size: int, num_items: int, device: str) -> None:
        """num_items: see `most_items`."""
        self.shards = [Shard(rank, size) for rank in range(size)]
        self.ends = virtual_ends(size, num_items, device)
        self._table_of = device_tables(device)
        self._kinds: tuple[str, ...] = ()
        self._parts: list[Sequence[Tensor]] = [()] * size
        self._outs: list[Sequence[Tensor]] = [()] * size
        self._barrier = threading.Barrier(size, self._launch, TIMEOUT_S)
        self._turn = threading.Lock()  # one text at a time: kernels are compiled in it

    def _launch(self) -> None:
        exchange(self.ends, self._kinds, self._parts, outs=self._outs, table_of=self._table_of)

    def run(self, rank_of: Callable[[Shard], Result]) -> list[Result]:
        """What each rank returns; an error of one ends all."""

        def guarded(shard: Shard) -> Result:
            try:
                with self._turn, torch.inference_mode():
                    return rank_of(shard)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.shards)) as pool:
            return list(pool.map(guarded, self.shards))

    def ops(self, shard: Shard, ops: Ops) -> Ops:
        """The reading `ops` with exchanges between these ranks."""

        def meet(kinds: tuple[str, ...], parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
            self._kinds = kinds
            self._parts[shard.rank], self._outs[shard.rank] = parts, outs
            self._turn.release()
            try:
                self._barrier.wait()
            finally:
                self._turn.acquire()

        def all_reduce(part: Tensor, *, out: Tensor) -> None:
            meet(("sum",), [part], [out])

        def all_gather(parts: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
            meet(("gather",) * len(parts), parts, out)

        def reduce_moe(parts: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
            meet(("sum", "scatter"), parts, out)

        return replace(ops, all_reduce=all_reduce, all_gather=all_gather, reduce_moe=reduce_moe)

    def failures(self) -> list[str]:
        """Of waits that gave up since the last call. Afterwards the next step starts clean."""
        found = [text for text in map(failure, self.ends) if text]
        if found:
            clear(self.ends)
        return found
