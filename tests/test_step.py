"""Buffers of a pass: K3's own widths, dtypes, and views of the first rows."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_config

from nanok3.config import K3, Shard
from nanok3.step import (
    COLUMNS,
    LOGITS,
    SUMS,
    Buffers,
    allocate_buffers,
    buffer_dtypes,
    rows,
    widths,
    without_parts,
)


def test_the_widths_of_k3() -> None:
    """Written out from the published table of tensors."""
    assert widths(K3) == {
        "delta": 7168,
        "x": 7168,
        "kda_in": 4 * 12288 + 128 + 96,
        "kda_heads": 12288,
        "mla_in": 1536 + 576 + 12288,
        "q_latent": 1536,
        "q": 18432,
        "mla_heads": 12288,
        "dense_act": 33792,
        "router_logits": 896,
        "topk_ids": 16,
        "topk_weights": 16,
        "latent": 3584,
        "routed": 3584,
        "shared_act": 6144,
        "shared_sum": 7168,
        "logits": 163840,
        "taps": 0,
    }
    assert widths(K3, num_taps=5)["taps"] == 35840
    assert {*widths(K3), "streams", *SUMS, *COLUMNS} == set(Buffers.__dataclass_fields__)
    assert K3.num_res_blocks == 9


def test_the_widths_of_a_rank_of_k3() -> None:
    """TP16: 6 heads, 2112 dense and 384 shared columns; what ranks exchange is whole."""
    local = {
        "kda_in": 4 * 768 + 128 + 6,
        "kda_heads": 768,
        "mla_in": 1536 + 576 + 768,
        "q": 6 * 192,
        "mla_heads": 768,
        "dense_act": 2112,
        "shared_act": 384,
    }
    assert widths(K3, Shard(15, 16)) == widths(K3) | local
    buf = allocate_buffers(K3, 2, 1, torch.bfloat16, "cpu", Shard(0, 16))
    assert buf.kda_in.shape == (2, 3206) and buf.logits.shape == (1, 163840)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    buf = allocate_buffers(tiny_config(), 5, 2, dtype, "cpu")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    special = {"topk_ids": torch.int64, "topk_weights": wide, "logits": wide, "router_logits": wide}
    assert buffer_dtypes(dtype) == special
    special |= {"logits_part": wide, "router_part": wide}
    for name in Buffers.__dataclass_fields__:
        assert getattr(buf, name).dtype == special.get(name, dtype), name


def test_rows_are_views_of_the_first() -> None:
    config = tiny_config()
    buf = allocate_buffers(config, 5, 4, torch.float32, "cpu")
    part = rows(buf, 3, 2)
    for name in Buffers.__dataclass_fields__:
        whole, view = getattr(buf, name), getattr(part, name)
        assert view.data_ptr() == whole.data_ptr(), name
        if name == "streams":
            assert whole.shape == (4, 5, 64) and view.shape == (4, 3, 64)
            view[1, 2] = 7.0
            assert (whole[1, 2] == 7.0).all()
            continue
        width = widths(config)[(SUMS | COLUMNS).get(name, name)]
        assert whole.shape == (4 if name in LOGITS else 5, width)
        assert view.shape == (2 if name in LOGITS else 3, width)
        assert view.is_contiguous()


def test_with_one_rank_a_part_is_the_whole() -> None:
    buf = allocate_buffers(tiny_config(), 5, 4, torch.float32, "cpu")
    for part, whole in (SUMS | COLUMNS).items():
        assert getattr(buf, part) is getattr(buf, whole), part
    assert {*without_parts(buf)} == {*widths(tiny_config()), "streams"}


@pytest.mark.parametrize("rank", [0, 5, 15])
def test_parts_are_columns_of_wholes(rank: int) -> None:
    """What a rank writes to its part stands in the whole, in its columns and nowhere else; also
    among the first rows."""
    buf = allocate_buffers(K3, 3, 3, torch.bfloat16, "cpu", Shard(rank, 16))
    for some in (buf, rows(buf, 2, 2)):
        for part, whole in COLUMNS.items():
            wide, own = getattr(some, whole), getattr(some, part)
            count = wide.shape[1] // 16
            wide.fill_(0)
            own.fill_(1)
            assert own.shape == (len(wide), count)
            assert wide[:, rank * count : (rank + 1) * count].eq(1).all()
            assert int(wide.sum()) == own.numel(), part
        for part, whole in SUMS.items():
            assert getattr(some, part).data_ptr() == getattr(some, whole).data_ptr()
            assert getattr(some, part).shape == getattr(some, whole).shape


def test_no_logits() -> None:
    buf = rows(allocate_buffers(tiny_config(), 5, 4, torch.float32, "cpu"), 5, 0)
    assert buf.logits.shape == (0, 512) and buf.x.shape == (5, 64)
