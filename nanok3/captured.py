"""Decode on a GPU: packed weights, the `KERNELS` reading, one graph for each bucket of requests.

Imports CuTe DSL through `kernel_ops`; the runner imports this file only for a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache
from nanok3.config import EngineConfig, ModelConfig
from nanok3.graph import Row, capture_all
from nanok3.kernel_ops import Kernels, pack_weights
from nanok3.step import Step, allocate_buffers, rows
from nanok3.weights import Weights


class CapturedDecode:
    """Owns everything that the graphs point to."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: Cache,
        settings: EngineConfig,
        max_blocks: int,
    ) -> None:
        """max_blocks: the longest block table that a request may have."""
        self._weights = pack_weights(config, weights)
        most = settings.max_num_reqs
        self._ops = Kernels(config, most, settings.device).record()
        self._buffers = allocate_buffers(config, most, most, torch.bfloat16, settings.device)

        def run(step: Step) -> Tensor:
            num_reqs = len(step.input_ids)
            buf = rows(self._buffers, num_reqs, num_reqs)
            model.forward(config, self._weights, cache, step, buf, self._ops)
            return buf.logits

        with torch.no_grad():
            self._graphs = capture_all(most, max_blocks, settings.block_size, settings.device, run)

    def logits(self, decode_rows: Sequence[Row]) -> Tensor:
        """[len(decode_rows), V] f32, valid until the next call."""
        bucket = min(size for size in self._graphs if size >= len(decode_rows))
        return self._graphs[bucket].replay(decode_rows)
