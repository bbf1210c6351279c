"""Small fields of a batch in host memory and on the device, filled by one copy.

All fields lie in one piece, floats among whole numbers, so that one upload fills them; the device's
views stay at their addresses. Knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor


class Mirror:
    """`host` is what the next upload writes to `fields`, views of `memory` on the device."""

    def __init__(
        self,
        widths: Mapping[str, int | None],
        floats: Collection[str],
        padding: Collection[str],
        max_rows: int,
        device: torch.device,
    ) -> None:
        """widths: columns of each field, None for one number a row; floats: the fields of float64,
        others have whole numbers; padding: the fields that are -1, not 0, where no row is."""
        self._widths, self._floats, self._padding = dict(widths), set(floats), set(padding)
        size = max_rows * sum(1 if w is None else w for w in widths.values())
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda)
        self.memory = torch.zeros(size, dtype=torch.int64, device=device)
        self._uploaded = torch.cuda.Event() if is_cuda else None
        self.host = self._views(self._host, max_rows)
        self.fields = self._views(self.memory, max_rows)
        self.clear()
        self.upload()

    def clear(self) -> None:
        """All rows of the host's fields are padding, when no upload reads them any more."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        self._host.zero_()
        for name in self._padding:
            self.host[name].fill_(-1)

    def upload(self) -> None:
        """Queues the copy to the device."""
        self.memory.copy_(self._host, non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()

    def _views(self, flat: Tensor, max_rows: int) -> dict[str, Tensor]:
        widths = self._widths
        parts = flat.split([max_rows * (1 if w is None else w) for w in widths.values()])
        views = {}
        for (name, width), part in zip(widths.items(), parts, strict=True):
            part = part.view(torch.float64) if name in self._floats else part
            views[name] = part if width is None else part.view(max_rows, width)
        return views
