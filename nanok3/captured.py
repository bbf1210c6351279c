"""What decode runs with on a GPU: buffers of its own and the `KERNELS` reading.

Imports CuTe DSL through `kernel_ops`; the runner imports this file only for a CUDA device.
"""

from __future__ import annotations

import torch

from nanok3.config import EngineConfig, ModelConfig
from nanok3.kernel_ops import Kernels
from nanok3.ops import Ops
from nanok3.step import Buffers, allocate_buffers


def kernel_decode(config: ModelConfig, settings: EngineConfig) -> tuple[Buffers, Ops]:
    """For steps of at most `max_num_reqs` rows. Graphs hold the addresses of both."""
    most, device = settings.max_num_reqs, settings.device
    buffers = allocate_buffers(config, most, most, torch.bfloat16, device)
    return buffers, Kernels(config, most, device).record()
