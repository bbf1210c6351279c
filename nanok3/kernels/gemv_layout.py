"""Sizes and weight layout of `gemv`: what the packer, the kernel and its callers agree on.

A packed matrix is [tiles, K / 32, 16, 32] bf16: a tile's blocks in the order of K, a block 16 rows
of 32 columns as they lie, which is what the lanes of two mma read with two 16-byte loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = 16  # weight rows of a tile: the M of an mma
BLOCK = 32  # columns of a block: two mma, 16 bytes a lane and row
BLOCK_BYTES = TILE * BLOCK * 2
CHUNK_BLOCKS = 16  # blocks of a ring slot, 16 KB: 4 in flight saturate HBM (h200, 2026-12-01)


@dataclass(frozen=True)
class Range:
    """Rows of one output: whole tiles, the last padded."""

    first_tile: int
    rows: int  # as stored ("situ": gate and up rows)
    finish: str  # "bf16", "f32", "situ", "add", "gate"

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE)

    @property
    def out_width(self) -> int:
        return self.rows // 2 if self.finish == "situ" else self.rows


@dataclass(frozen=True)
class Shape:
    """Static sizes of one product."""

    rows: int  # O, of the matrix as stored ("situ": gate and up rows), of all ranges
    k: int
    x_width: int  # X
    groups: int = 1
    group_stride: int = 0
    finish: str = "bf16"
    split: int = 1
    beta: float = 0.0
    linear_beta: float = 0.0
    router_rows: int = 0  # "moe_in": then come those of latent_down, the rest are SiTU's
    latent_rows: int = 0

    def __post_init__(self) -> None:
        assert self.k % BLOCK == 0, f"K must be a multiple of {BLOCK}, not {self.k}"
        assert self.x_width % 8 == 0 and self.group_stride % 8 == 0
        assert self.rows % self.groups == 0
        assert self.groups == 1 or self.rows // self.groups % TILE == 0
        assert self.finish in ("bf16", "f32", "situ", "add", "gate", "moe_in")
        assert self.split == 1 or (self.groups == 1 and self.split <= 8)
        assert self.blocks % self.split == 0, f"K = {self.k} does not split in {self.split}"

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The outputs, in the order of their tiles."""
        if self.finish != "moe_in":
            return (Range(0, self.rows, self.finish),)
        router = Range(0, self.router_rows, "f32")
        latent = Range(router.tiles, self.latent_rows, "bf16")
        situ_rows = self.rows - self.router_rows - self.latent_rows
        return router, latent, Range(router.tiles + latent.tiles, situ_rows, "situ")

    @property
    def tiles(self) -> int:
        return sum(part.tiles for part in self.ranges)

    @property
    def blocks(self) -> int:
        return self.k // BLOCK

    @property
    def part_blocks(self) -> int:
        """Blocks of a CTA's part of K."""
        return self.blocks // self.split

    @property
    def chunks(self) -> int:
        return -(-self.part_blocks // CHUNK_BLOCKS)

    @property
    def out_width(self) -> int:
        """Of the only output."""
        (part,) = self.ranges
        return part.out_width


def resident_ctas(split: int, sms: int) -> int:
    """CTAs that run at once, two to an SM, in clusters of `split`.

    A cluster stays within a GPC, so that clusters of 4 or 8 leave SMs without work: 120 of 132 on
    an H200, 2026-12-01.
    """
    return 2 * sms if split <= 2 else 2 * (sms * 10 // 11)


def choose_split(rows: int, k: int, sms: int = 132) -> int:
    """Parts of K: the most with which all tiles still run at once; one if they fill the SMs."""
    tiles, blocks = -(-rows // TILE), k // BLOCK
    fitting = [
        split
        for split in (1, 2, 4, 8)
        if blocks % split == 0
        and blocks // split >= CHUNK_BLOCKS
        and tiles * split <= resident_ctas(split, sms)
    ]
    return max(fitting, default=1)


def pack_gemv(weight: torch.Tensor, situ: bool = False) -> torch.Tensor:
    """weight [O, K] bf16 -> [tiles, K / 32, 16, 32] bf16: a tile's blocks in the order of K.

    A block is 16 rows of 32 columns as they lie, which is what the lanes of two mma read with two
    16-byte loads. Missing rows of the last tile are zero. situ: gate rows first, then as many up
    rows; tile i holds gate rows 8 i .. 8 i + 7, then the same up rows.
    """
    rows, k = weight.shape
    assert k % BLOCK == 0, f"K must be a multiple of {BLOCK}, not {k}"
    if situ:
        gate, up = (
            torch.nn.functional.pad(h, (0, 0, 0, -(rows // 2) % 8)) for h in weight.chunk(2)
        )
        weight = torch.stack([gate.unflatten(0, (-1, 8)), up.unflatten(0, (-1, 8))], 1).flatten(
            0, 2
        )
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % TILE))
    return padded.view(-1, TILE, k // BLOCK, BLOCK).transpose(1, 2).contiguous()


def pack_moe_in(
    gate: torch.Tensor, latent_down: torch.Tensor, gate_up: torch.Tensor
) -> torch.Tensor:
    """Three matrices with the same K, each in tiles of its own, as `Shape.ranges` has them."""
    return torch.cat([pack_gemv(gate), pack_gemv(latent_down), pack_gemv(gate_up, situ=True)])
