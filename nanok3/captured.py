"""What decode runs with on a GPU: buffers of its own, and one of two readings.

`MEGA` (one launch a step) or `KERNELS` (the chain: a launch an op), by the rows of a step; the
choice stands in `rows_of_mega`. Imports CuTe DSL through `kernel_ops` and `mega_ops`; the runner
imports this file only for a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nanok3 import model
from nanok3.cache import Cache
from nanok3.config import EngineConfig, ModelConfig
from nanok3.graph import Health
from nanok3.kernel_ops import Kernels
from nanok3.mega_ops import MAX_ROWS, Mega
from nanok3.ops import Ops
from nanok3.reference.kda_records import Commit, kda_recorded_ref
from nanok3.step import Buffers, Step, allocate_buffers
from nanok3.weights import Weights

# Steps of up to so many rows run through MEGA where nobody says otherwise: at one row it is the
# faster one, at eight the chain is, between them nobody has measured (docs/perf/layers.md).
FASTEST_ROWS = 1


@dataclass(frozen=True)
class GpuDecode:
    """Graphs hold the addresses of all that is in here."""

    buffers: Buffers
    forward: Callable[[Step, Buffers], None]  # views of the buffers, of as many rows as the step
    chain: Ops
    commit: Commit  # of the rows that a step recorded
    health: Health | None  # of what `forward` runs
    reading: str  # for people


def rows_of_mega(settings: EngineConfig) -> int:
    """Rows that a step may have to run as one launch; none: every step runs the chain."""
    return {"auto": FASTEST_ROWS, "mega": MAX_ROWS, "chain": 0}[settings.ops]


def gpu_decode(
    config: ModelConfig,
    weights: Weights,
    cache: Cache,
    settings: EngineConfig,
    max_blocks: int,
    num_queries: int = 1,
    taps: Sequence[int] = (),
) -> GpuDecode:
    """For steps of at most `max_num_reqs` requests with up to `num_queries` rows each. weights:
    packed; max_blocks: of one request; taps: of a draft."""
    most, device, size = settings.max_num_reqs * num_queries, settings.device, settings.block_size
    dtype = torch.bfloat16
    buffers = allocate_buffers(config, most, most, dtype, device, num_taps=len(taps))
    height = 1 if settings.strict else most  # rows that are computed together, at most
    mega_rows = rows_of_mega(settings)
    mega = Mega(config, weights, cache, size, max_blocks, taps=taps) if mega_rows else None
    if mega is not None and (refusal := mega.refusal(height)):
        if settings.ops == "mega":
            raise ValueError(f"ops: mega cannot take this model ({refusal}); take auto or chain")
        mega, mega_rows = None, 0
    kernels = Kernels(config, most, device, num_queries=num_queries)
    chain = kernels.record()
    if settings.strict:  # rows that begin from recorded ones
        chain = replace(chain, kda_recorded=kda_recorded_ref)

    def forward(step: Step, buf: Buffers) -> None:
        one_by_one = settings.strict and step.records is not None
        if mega is not None and len(step.input_ids) <= mega_rows and not one_by_one:
            mega.run(step, buf)
        else:
            model.forward(config, weights, cache, step, buf, chain, taps)

    if mega is None:
        return GpuDecode(buffers, forward, chain, kernels.commit, None, "the chain of kernels")
    reading = "the persistent kernel"
    if height > mega_rows:
        steps = "of one row" if mega_rows == 1 else f"up to {mega_rows} rows"
        reading += f" for steps {steps}, the chain of kernels above"
    return GpuDecode(buffers, forward, chain, kernels.commit, mega.health(), reading)
