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


def empty_gemv(rows: int, k: int, situ: bool, device: str) -> torch.Tensor:
    """Packed zeros: rows that nobody places must be zero."""
    assert k % BLOCK == 0, f"K must be a multiple of {BLOCK}, not {k}"
    tiles = -(-rows // 2 // 8) if situ else -(-rows // TILE)
    shape = (tiles, k // BLOCK, TILE, BLOCK)
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


def place_rows(
    packed: torch.Tensor, first: int, weight: torch.Tensor, num_rows: int, situ: bool = False
) -> None:
    """Rows `first` .. of a matrix of `num_rows`, weight [n, K], to their places in `packed`.

    Tile i holds rows 16 i .. 16 i + 15; situ: of gate rows and as many up rows tile i holds gate
    rows 8 i .. 8 i + 7, then the same up rows.
    """
    n, k = weight.shape
    assert first >= 0 and first + n <= num_rows and k == packed.shape[1] * BLOCK
    row = torch.arange(first, first + n, device=packed.device)
    tile, within = row // TILE, row % TILE
    if situ:
        half = num_rows // 2
        tile, within = row % half // 8, row // half * 8 + row % half % 8
    packed[tile, :, within] = weight.view(n, k // BLOCK, BLOCK).to(packed)


def pack_gemv(weight: torch.Tensor, situ: bool = False) -> torch.Tensor:
    """weight [O, K] bf16 -> [tiles, K / 32, 16, 32] bf16: a tile's blocks in the order of K.

    A block is 16 rows of 32 columns as they lie, which is what the lanes of two mma read with two
    16-byte loads. Missing rows of the last tile are zero. situ: gate rows first, then as many up
    rows.
    """
    rows, k = weight.shape
    packed = empty_gemv(rows, k, situ, str(weight.device))
    place_rows(packed, 0, weight, rows, situ)
    return packed


def unpack_gemv(packed: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Some tiles [n, K / 32, 16, 32] -> their rows [16 n, K] as they lie in tiles, in the first
    values of `out` [any] bf16. A tile of a situ matrix has 8 gate rows, then 8 up rows."""
    tiles, blocks, _, _ = packed.shape
    rows = out[: packed.numel()]
    # as 8-byte words, which a copy moves 4 times as fast as bf16
    target = rows.view(torch.int64).view(tiles, TILE, blocks, BLOCK // 4)
    target.copy_(packed.view(torch.int64).transpose(1, 2))
    return rows.view(tiles * TILE, blocks * BLOCK)


def pack_moe_in(
    gate: torch.Tensor, latent_down: torch.Tensor, gate_up: torch.Tensor
) -> torch.Tensor:
    """Three matrices with the same K, each in tiles of its own, as `Shape.ranges` has them."""
    return torch.cat([pack_gemv(gate), pack_gemv(latent_down), pack_gemv(gate_up, situ=True)])
