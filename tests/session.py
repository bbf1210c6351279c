"""Runs the model by itself, without an engine: rows of several requests through one cache.

Everything that nobody wrote is NaN, blocks and slots lie in no order, and the buffers are new in
every call, so that an op which reads what it must not is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import allocate_cache
from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.ops import Ops
from nanok3.step import Step, allocate_buffers
from nanok3.weights import Weights


class Session:
    """`num_reqs` requests of at most `capacity` tokens each."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        num_reqs: int = 1,
        capacity: int = 256,
        block_size: int = 8,
        shard: Shard = WHOLE,
    ) -> None:
        self.config, self.weights, self.dtype, self.shard = config, weights, dtype, shard
        self.block_size = block_size
        self.poison = float("nan")  # in the buffers, before a call
        self.num_cached = 0
        columns = -(-capacity // block_size)
        shuffled = torch.randperm(num_reqs * columns, generator=torch.Generator().manual_seed(0))
        self.block_table = shuffled.view(num_reqs, columns) + 1
        self.slots = torch.arange(num_reqs, 0, -1)
        self.cache = allocate_cache(
            config, num_reqs + 2, num_reqs * columns + 1, block_size, dtype, "cpu", shard
        )
        for tensor in (self.cache.latent, self.cache.state, self.cache.conv_state):
            tensor.fill_(float("nan"))
        self.cache.state[:, self.slots] = 0
        self.cache.conv_state[:, self.slots] = 0

    def feed(self, ids: Sequence[Sequence[int]], ops: Ops) -> Tensor:
        """The same number of ids of every request -> logits [R, Q, V]."""
        num_reqs, num_rows = len(ids), len(ids[0])
        positions = torch.arange(self.num_cached, self.num_cached + num_rows)
        block = self.block_table[:, positions // self.block_size]  # [R, Q]
        total = num_reqs * num_rows
        step = Step(
            input_ids=torch.tensor(ids).flatten(),
            positions=positions.repeat(num_reqs),
            slot_mapping=(block * self.block_size + positions % self.block_size).flatten(),
            block_table=self.block_table[:, : int(positions[-1]) // self.block_size + 1],
            state_slots=self.slots,
            logit_rows=torch.arange(total),
            block_size=self.block_size,
        )
        buf = allocate_buffers(self.config, total, total, self.dtype, "cpu", self.shard)
        for name in vars(buf):
            tensor = getattr(buf, name)
            tensor.fill_(self.poison if tensor.is_floating_point() else -1)
        with torch.inference_mode():
            model.forward(self.config, self.weights, self.cache, step, buf, ops)
        self.num_cached += num_rows
        return buf.logits.view(num_reqs, num_rows, -1)

    def cached(self) -> list[Tensor]:
        """What the requests have in the caches: states, convolution windows, latent rows."""
        positions = torch.arange(self.num_cached)
        block = self.block_table[:, positions // self.block_size]
        slots = block * self.block_size + positions % self.block_size  # [R, S]
        used = self.slots
        return [
            self.cache.state[:, used],
            self.cache.conv_state[:, used],
            self.cache.latent[:, slots],
        ]
