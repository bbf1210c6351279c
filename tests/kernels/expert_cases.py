"""Random MXFP4 experts and routings for the tests of the expert kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.reference import mxfp4


@dataclass(frozen=True)
class Sizes:
    num_experts: int
    top_k: int
    latent: int
    width: int


# Shards of K3, k3-mini, the golden model, and widths that are odd numbers of scale groups.
SIZES = {
    "k3 tp16": Sizes(896, 16, 3584, 192),
    "k3 tp8": Sizes(896, 16, 3584, 384),
    "mini": Sizes(64, 8, 64, 128),
    "golden": Sizes(32, 6, 160, 64),
    "odd": Sizes(20, 3, 96, 96),
    "one": Sizes(1, 1, 32, 32),
}
# One row; fewer than a pass; a full pass; two passes, the second of one row; many passes.
TOKENS = [1, 2, 3, 8, 9, 64]
GPU_CASES = [(n, t) for n in SIZES for t in (TOKENS if n != "k3 tp8" else [1, 8])]


@dataclass(frozen=True)
class Matrices:
    """[E, R, K] as the checkpoint stores it."""

    packed: Tensor  # [E, R, K / 2] u8
    scale: Tensor  # [E, R, K / 32] u8

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        return mxfp4.dequantize(self.packed[expert], self.scale[expert], dtype)


def random_matrices(experts: int, rows: int, k: int, device: str) -> Matrices:
    """Values of about k^-0.5; scale bytes over several octaves, and the smallest there is."""
    middle = 127 - round(0.5 * torch.tensor(float(k)).log2().item()) - 2
    packed = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, device=device)
    shape = (experts, rows, k // 32)
    scale = torch.randint(middle - 3, middle + 2, shape, dtype=torch.uint8, device=device)
    scale[0, 0, 0] = 0
    return Matrices(packed, scale)


@dataclass(frozen=True)
class Routing:
    """What `route` would write, made with torch."""

    ids: Tensor  # [T, A] i64
    weights: Tensor  # [T, A] f32
    distinct: Tensor  # [min(E, T A)] i32; huge behind the list
    num_distinct: Tensor  # [1] i32
    slot_of: Tensor  # [T, A] i32

    def places(self) -> list[tuple[int, Tensor, Tensor]]:
        """Every expert in use, its rows and where among their experts it is."""
        found = []
        for expert in self.ids.unique().tolist():
            rows, place = (self.ids == expert).nonzero(as_tuple=True)
            found.append((expert, rows, place))
        return found


def routing_of(ids: Tensor, num_experts: int) -> Routing:
    used, slot_of = ids.unique(return_inverse=True)  # ascending
    size = min(num_experts, ids.numel())
    distinct = torch.full((size,), 1 << 30, dtype=torch.int32, device=ids.device)
    distinct[: len(used)] = used.int()
    num_distinct = torch.tensor([len(used)], dtype=torch.int32, device=ids.device)
    weights = torch.rand(ids.shape, device=ids.device) / ids.shape[1]
    return Routing(ids, weights, distinct, num_distinct, slot_of.int())


def random_routing(sizes: Sizes, tokens: int, device: str) -> Routing:
    order = torch.rand(tokens, sizes.num_experts, device=device).argsort(1)
    return routing_of(order[:, : sizes.top_k].contiguous(), sizes.num_experts)
