"""The emulator's checks of memory, on accesses made by hand; its mma against a plain product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compare import check_close

from ptx.arithmetic import bf16_bits, mma
from ptx.instructions import SHARED_BASE
from ptx.memory import Fault, Global, Shared, buffer_of

BASE = np.array([SHARED_BASE])


def global_memory(tensor: torch.Tensor, constant: bool = False) -> tuple[Global, int]:
    return Global([buffer_of(tensor, constant)]), tensor.data_ptr()


def at(*addresses: int) -> Any:
    return np.array(addresses, np.int64)


def test_global_accesses_are_held_to_the_tensor() -> None:
    memory, start = global_memory(torch.arange(8, dtype=torch.int32))
    assert memory.load(at(start + 28), 4, False).view(np.uint32).tolist() == [[7]]
    for wrong in (start + 32, start - 4, start + 24):
        size = 16 if wrong == start + 24 else 4
        with pytest.raises(Fault, match=r"outside every tensor|no multiple"):
            memory.load(at(start, wrong), size, False)


def test_gaps_between_rows_are_not_inside() -> None:
    whole = torch.zeros(3, 8, dtype=torch.int32)
    memory, start = global_memory(whole[:, :5])
    assert not memory.load(at(start + 32 + 16), 4, False).any()
    with pytest.raises(Fault, match="outside every tensor"):
        memory.load(at(start + 20), 4, False)


def test_weights_are_not_written_and_others_not_read_early() -> None:
    weight, start = global_memory(torch.zeros(4), constant=True)
    weight.load(at(start), 4, True)
    with pytest.raises(Fault, match="a store to a weight"):
        weight.store(at(start), np.zeros((1, 4), np.uint8))
    other, start = global_memory(torch.zeros(4))
    with pytest.raises(Fault, match=r"before griddepcontrol\.wait"):
        other.load(at(start), 4, True)


def test_shared_memory_is_bounded_and_poisoned() -> None:
    shared, clock = Shared(64, 2), np.array([1, 0, 0])
    assert np.isnan(shared.load(BASE, 4, 0, clock).view(np.float32)).all()
    for wrong, size in ((BASE + 64, 4), (BASE - 4, 4), (BASE + 8, 16)):
        with pytest.raises(Fault, match=r"of 64|not a multiple"):
            shared.load(wrong, size, 0, clock)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_read_must_follow_the_write(ordered: bool) -> None:
    shared = Shared(64, 2)
    shared.store(BASE, np.ones((1, 4), np.uint8), 0, np.array([1, 0, 0]))
    reader = np.array([1 if ordered else 0, 1, 0])
    if ordered:
        assert shared.load(BASE, 4, 1, reader).tolist() == [[1, 1, 1, 1]]
    else:
        with pytest.raises(Fault, match="race"):
            shared.load(BASE, 4, 1, reader)


def test_a_write_must_follow_the_reads() -> None:
    shared = Shared(64, 2)
    shared.load(BASE, 4, 1, np.array([0, 1, 0]))
    with pytest.raises(Fault, match="may read it yet"):
        shared.store(BASE, np.ones((1, 4), np.uint8), 0, np.array([1, 0, 0]))


def test_mma_is_the_product() -> None:
    """By the lane mapping of the PTX manual, written element by element."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s).astype(np.float32) for s in ((16, 16), (16, 8), (16, 8)))
    bits_a, bits_b = bf16_bits(a), bf16_bits(b)
    words_a, words_b = np.zeros((4, 32), np.uint32), np.zeros((2, 32), np.uint32)
    words_c = np.zeros((4, 32), np.float32)
    for lane in range(32):
        g, q = divmod(lane, 4)
        for i, (row, column) in enumerate([(g, 2 * q), (g + 8, 2 * q)]):
            words_a[i, lane] = bits_a[row, column] | bits_a[row, column + 1] << 16
            words_a[i + 2, lane] = bits_a[row, column + 8] | bits_a[row, column + 9] << 16
        for i in range(2):
            words_b[i, lane] = bits_b[2 * q + 8 * i, g] | bits_b[2 * q + 8 * i + 1, g] << 16
        words_c[:, lane] = c[g, 2 * q], c[g, 2 * q + 1], c[g + 8, 2 * q], c[g + 8, 2 * q + 1]
    got = mma(list(words_a), list(words_b), list(words_c.view(np.uint32)))
    exact = [torch.from_numpy(v).bfloat16().double() for v in (a, b)]
    right = exact[0] @ exact[1] + torch.from_numpy(c).double()
    for lane in range(32):
        g, q = divmod(lane, 4)
        own = right[[g, g, g + 8, g + 8], [2 * q, 2 * q + 1, 2 * q, 2 * q + 1]]
        check_close(got[:, lane], own, 1e-6, f"lane {lane}")
