"""Virtual ranks: the persistent kernel's ranks on one GPU, all in one launch.

Each has its weights, caches, buffers, counters and mailboxes, as it would on a GPU of its own, and
an equal share of the SMs. It stands in for as many GPUs: everything but NVLink's own latency.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanok3.cache import Cache
from nanok3.comm.words import Peers, device_tables, virtual_peers
from nanok3.config import ModelConfig, Shard
from nanok3.kernels.mega.launch import RankSpace, launch_ranks, sync_part
from nanok3.mega_ops import Mega, MegaError
from nanok3.step import Buffers, Step
from nanok3.weights import Weights


class MegaRanks:
    """Runs steps of P ranks in lockstep; like `Mega`, whose options it takes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Sequence[Weights],
        caches: Sequence[Cache],
        block_size: int,
        max_blocks: int,
        **options: Any,
    ) -> None:
        """weights, caches: of each rank."""
        size = len(weights)
        assert size == len(caches)
        self.ranks = [
            Mega(
                *(config, w, cache, block_size, max_blocks),
                **{"shard": Shard(rank, size), "together": True, "share": size, **options},
            )
            for rank, (w, cache) in enumerate(zip(weights, caches, strict=True))
        ]
        self._device = str(self.ranks[0].sync.device)
        self._table_of = device_tables(self._device)
        self._peers: dict[int, list[Peers]] = {}
        self.peers = functools.cache(self._make_peers)

    def _make_peers(self, place: int, num_bytes: int) -> list[Peers]:
        """Of program 0 or 1: as its tags, its mailboxes are its own."""
        made = virtual_peers(len(self.ranks), num_bytes, self._device)
        self._peers[place] = made
        return made

    def run(self, step: Step, buffers: Sequence[Buffers]) -> None:
        """One launch; the ranks have the same step. Each leaves its logits in `logits_part`."""
        prepared = [m.prepared(step, buf) for m, buf in zip(self.ranks, buffers, strict=True)]
        program = prepared[0][0].program
        assert all(space.program is program for space, _ in prepared)
        peers = self.peers(prepared[0][0].place, program.sizes.mail_bytes)
        spaces = [
            RankSpace(space.work, sync_part(m.sync, space.place), space.stamps, own)
            for m, (space, _), own in zip(self.ranks, prepared, peers, strict=True)
        ]
        launch_ranks(program, spaces, [arguments for _, arguments in prepared], self._table_of)

    def check(self) -> None:
        """MegaError if a wait of any rank gave up since the last call."""
        failures = []
        for mega in self.ranks:
            try:
                mega.check()
            except MegaError as error:
                failures.append(str(error))
        if failures:
            self.clear()
            raise MegaError("\n".join(failures))

    def clear(self) -> None:
        """As if there had been no launch, of all ranks: their tags and words belong together."""
        for mega in self.ranks:
            mega.clear()
        for peers in self._peers.values():
            for own in peers:
                own.mail.zero_()


def gathered(parts: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
    """The logits' columns [N, V / P] of all ranks, to each rank's whole."""
    whole = torch.cat(list(parts), dim=1)
    for own in out:
        own.copy_(whole)
