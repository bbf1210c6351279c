"""Work for a device that the host queues without waiting: CUDA graphs, and results read later.

A graph holds addresses, so what it reads and writes must lie at the same place for ever, and what
it leaves for others must be allocated before. Knows nothing of what the callables compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], None]

WARM_UPS = 2  # runs before capture: compiling and first-use set-up must not be captured


def buckets(max_num_reqs: int) -> list[int]:
    """Powers of two up to the number of requests, and that number."""
    sizes = [1]
    while sizes[-1] * 2 < max_num_reqs:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == max_num_reqs else [*sizes, max_num_reqs]


class Capture:
    """Turns a callable into the replay of its CUDA graph.

    All graphs share one memory pool: what one of them leaves there is gone when another runs.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """`run` is called a few times, and must do no harm."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


@dataclass(frozen=True)
class Health:
    """What kernels leave when they gave up, for the host to look at beside a step's results."""

    words: Tensor  # whole numbers on the device, at an address that does not change
    failure: Callable[[list[int]], str | None]  # of those words after a step
    clear: Callable[[], None]  # makes the next step start clean, once no step is queued


class Readback:
    """Copies of one tensor in host memory, as it is when the stream comes to them.

    On a GPU the memory is pinned and each copy has an event, so that reading one waits for the
    work before it and for nothing queued after it.
    """

    def __init__(self, source: Tensor, num_places: int) -> None:
        """source: whole numbers, at an address that stays; num_places: copies not yet read."""
        self._source = source
        is_cuda = source.device.type == "cuda"
        self._copies = torch.empty(
            num_places, *source.shape, dtype=source.dtype, pin_memory=is_cuda
        ).unbind()
        self._events = [torch.cuda.Event() for _ in self._copies] if is_cuda else []

    def copy(self, place: int) -> None:
        """Queues a copy."""
        self._copies[place].copy_(self._source, non_blocking=True)
        if self._events:
            self._events[place].record()

    def read(self, place: int) -> Any:
        """The copy that was last queued for this place, when it is there: a list of whole numbers,
        or of lists of them."""
        if self._events:
            self._events[place].synchronize()
        return self._copies[place].tolist()
