"""The packing of MXFP4 experts, read back bit by bit as the device reads it."""

from __future__ import annotations

import pytest
import torch
from compare import check_equal
from torch import Tensor

pytest.importorskip("cutlass")
from kernels.expert_cases import random_matrices
from nanok3.kernels.expert_down import expert_down, pack_expert_down
from nanok3.kernels.expert_up import expert_up, pack_expert_up
from nanok3.kernels.mxfp4_layout import BLOCK_BYTES, PackedExperts, byte_table
from nanok3.reference import mxfp4

SHIFTS = {0: ((0, 0x81C0),), 1: ((-3, 0x81C0),), 2: ((-6, 0x81C0),)} | {
    3: ((-2, 0x8000), (3, 0x0180), (8, 0x0040))
}  # of a pair of columns: shift right (negative: left) and mask


def bf16_value(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).item()


def read_block(block: Tensor) -> Tensor:
    """A block's 272 bytes -> [16, 32] float64, by the description of the layout."""
    out = torch.zeros(16, 32, dtype=torch.float64)
    data = block.tolist()
    for lane in range(32):
        g, q = lane // 4, lane % 4
        for h in range(2):
            word = int.from_bytes(bytes(data[8 * lane + 4 * h :][:4]), "little")
            factor = bf16_value(data[256 + 2 * g + h] << 7)
            for pair, steps in SHIFTS.items():
                for half in range(2):
                    bits = 0
                    for shift, mask in steps:
                        moved = word >> shift if shift > 0 else word << -shift
                        bits |= moved >> (16 * half) & mask
                    column = 8 * q + 2 * pair + half
                    out[g + 8 * h, column] = bf16_value(bits) * factor
    return out


def read_tiles(tiles: Tensor) -> Tensor:
    """[tiles, K / 32, 272] -> [tiles, 16, K]."""
    return torch.stack([torch.cat([read_block(b) for b in t], dim=1) for t in tiles])


def all_codes() -> tuple[Tensor, Tensor]:
    """Every nibble at every place of a word, in groups with the ends of the range of scales."""
    rows = torch.arange(16, dtype=torch.uint8)  # row r holds code r + column
    codes = (rows.unsqueeze(1) + torch.arange(160, dtype=torch.uint8)) % 16
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scale = torch.tensor([0, 1, 118, 127, 128], dtype=torch.uint8).repeat(16, 1)
    scale[5] = torch.tensor([128, 127, 60, 1, 0], dtype=torch.uint8)
    return packed, scale


def test_every_code_at_every_place_and_both_ends_of_the_scales() -> None:
    packed, scale = all_codes()
    tiles = pack_expert_down(packed.unsqueeze(0), scale.unsqueeze(0)).tiles
    assert tiles.shape == (1, 1, 5, BLOCK_BYTES)
    check_equal(read_tiles(tiles[0])[0], mxfp4.dequantize(packed, scale, torch.float64))


@pytest.mark.parametrize("rows, k", [(32, 64), (48, 96)])
def test_down_tiles_are_16_rows(rows: int, k: int) -> None:
    torch.manual_seed(0)
    m = random_matrices(2, rows, k, "cpu")
    packed = pack_expert_down(m.packed, m.scale)
    for expert in range(2):
        right = m.of(expert, torch.float64)
        check_equal(read_tiles(packed.tiles[expert]).flatten(0, 1), right)


@pytest.mark.parametrize("width, k", [(32, 32), (96, 64)])
def test_up_tiles_are_8_gate_and_8_up_rows(width: int, k: int) -> None:
    torch.manual_seed(1)
    m = random_matrices(2, 2 * width, k, "cpu")
    packed = pack_expert_up(m.packed, m.scale)
    for expert in range(2):
        right = m.of(expert, torch.float64)
        tiles = read_tiles(packed.tiles[expert])
        check_equal(tiles[:, :8].flatten(0, 1), right[:width], "gate")
        check_equal(tiles[:, 8:].flatten(0, 1), right[width:], "up")


def test_the_bits_of_a_word_do_not_overlap() -> None:
    table = byte_table("cpu").long() & 0xFFFFFFFF
    used = [0] * 4
    for i in range(4):
        for word in table[i].tolist():
            used[i] |= word
    assert sum(used) == 0xFFFFFFFF and used[0] | used[1] | used[2] | used[3] == 0xFFFFFFFF


@pytest.mark.parametrize("byte", [129, 254, 255])
def test_scales_that_bf16_cannot_carry_are_refused(byte: int) -> None:
    m = random_matrices(1, 16, 32, "cpu")
    m.scale[0, 3, 0] = byte
    with pytest.raises(ValueError, match=f"scale byte {byte} found"):
        pack_expert_down(m.packed, m.scale)


def test_each_kernel_refuses_the_other_layout() -> None:
    m = random_matrices(1, 32, 32, "cpu")
    none = torch.empty(1, 1, 32)
    down: PackedExperts = pack_expert_down(m.packed, m.scale)
    with pytest.raises(AssertionError, match="16 rows"):
        expert_up(none, none, none, none, down, 4.0, 25.0, act=none)
    up: PackedExperts = pack_expert_up(m.packed, m.scale)
    with pytest.raises(AssertionError, match="gate"):
        expert_down(none, none, none, none, none, up, out=none)
