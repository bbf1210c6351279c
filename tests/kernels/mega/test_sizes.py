"""Every tile of every product is worked on once, on machines of any number of SMs."""

from __future__ import annotations

from collections import Counter

import pytest

from nanok3.kernels.mega.sizes import PASS, SLOT_BLOCKS, TILE, Product, cut

SMS = (4, 7, 132, 148, 152)
SHAPES = [(3216, 7168), (448, 3584), (1056, 7168), (160, 160), (64, 1536), (10240, 7168), (16, 32)]


def work(product: Product, sms: int) -> Counter[tuple[int, int]]:
    """(tile, slice) pairs as `linear.Linear.place` deals them."""
    groups = product.groups(sms)
    found: Counter[tuple[int, int]] = Counter()
    for cta in range(sms):
        part, group = cta % product.slices, cta // product.slices
        found.update(
            (tile, part) for tile in range(group, product.tiles * (group < groups), groups)
        )
    return found


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("rows, k", SHAPES)
def test_each_tile_once(rows: int, k: int, sms: int) -> None:
    product = cut("p", rows, k, sms, 1)
    found = work(product, sms)
    assert set(found.values()) == {1}
    assert len(found) == product.tiles * product.slices
    assert product.chunks * product.chunk_blocks >= product.part_blocks
    assert product.chunk_blocks <= SLOT_BLOCKS and product.slices <= PASS


@pytest.mark.parametrize("pass_rows", (1, PASS))
@pytest.mark.parametrize("sms", SMS)
def test_no_other_cut_is_more_even(sms: int, pass_rows: int) -> None:
    def busiest(product: Product) -> int:
        """Bytes of the CTA that has the most: weights, and 8 for a column and row of x."""
        tiles = Counter(n % product.groups(sms) for n in range(product.tiles))
        columns = product.k // product.slices
        return max(tiles.values()) * columns * 16 * 2 + 8 * pass_rows * columns

    for rows, k in SHAPES:
        chosen = cut("p", rows, k, sms, pass_rows)
        for slices in range(1, min(PASS, sms) + 1):
            if k // 32 % slices == 0 and k // slices <= 1792:
                other = Product("p", -(-rows // TILE) * TILE, k, slices)
                assert busiest(chosen) <= busiest(other)
