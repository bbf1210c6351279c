"""A draft's window and the rows that it keeps through a GPU's reading, against float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import check_bf16, check_equal
from drafts import draft_weights, tiny_inferact, tiny_redhat
from tiny import TINY, tiny_weights
from torch import Tensor

pytest.importorskip("cutlass")
from ptx.launch import Emulator

from nanok3.draft_ops import draft_kernels
from nanok3.draft_packing import pack_draft
from nanok3.reference.embed import EmbedWeights
from nanok3.sampling import SamplingParams, rows_of
from nanok3.spec.config import DraftConfig, draft_config
from nanok3.spec.draft import (
    REFERENCE,
    DraftOps,
    allocate_draft_buffers,
    allocate_draft_cache,
    keep_context,
)
from nanok3.spec.draft_weights import DraftWeights
from nanok3.spec.propose import propose

BLOCK, COLUMNS, POSITIONS = 4, 4, (9, 0, 13)
DRAFTS: dict[str, Any] = {
    # widths of whole blocks and others, so that both products are met
    "inferact": tiny_inferact(kv_lora_rank=32, markov_rank=32),
    "redhat": tiny_redhat(),
}


def moved(w: Any, device: str) -> Any:
    if isinstance(w, Tensor):
        return w.to(device)
    if isinstance(w, tuple):
        return tuple(moved(part, device) for part in w)
    if not hasattr(w, "__dataclass_fields__"):
        return w
    return replace(w, **{name: moved(value, device) for name, value in vars(w).items()})


def run(
    c: DraftConfig, w: DraftWeights, dtype: torch.dtype, ops: DraftOps, device: str
) -> dict[str, Tensor]:
    """Context of three requests, then a window of each; what nobody wrote is NaN."""
    generator = torch.Generator().manual_seed(5)
    num_reqs, size = len(POSITIONS), COLUMNS * BLOCK
    cache = allocate_draft_cache(c, 1 + num_reqs * COLUMNS, BLOCK, dtype, device)
    buf = allocate_draft_buffers(c, num_reqs * size, num_reqs * c.block_size, dtype, device)
    for tensor in (cache, *vars(buf).values()):
        tensor.fill_(float("nan"))
    table = 1 + torch.arange(num_reqs * COLUMNS).view(COLUMNS, num_reqs).T.contiguous()
    slots = (table.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten(1)  # [R, size]
    place = torch.arange(size).expand(num_reqs, -1)
    stands = place < torch.tensor(POSITIONS)[:, None]
    slots = slots.masked_fill(~stands, 0)
    taps = torch.randn(num_reqs * size, len(c.taps) * c.hidden_size, generator=generator)
    rows = (place.flatten().to(device), slots.flatten().to(device))
    keep_context(w, taps.bfloat16().to(device, dtype), *rows, cache, buf, ops)
    found = propose(
        c,
        w,
        cache,
        torch.tensor([5, 6, 7], device=device),
        torch.tensor(POSITIONS, device=device),
        table.to(device),
        BLOCK,
        rows_of([SamplingParams(temperature=0.0)] * num_reqs, device),
        torch.zeros(num_reqs, dtype=torch.int64, device=device),
        3,
        True,
        buf,
        ops,
    )
    kept = cache[:, slots[stands].to(device)]
    num_rows = len(buf.logits) if not c.is_causal else 3 * num_reqs
    return {
        "kept": kept,
        "hidden": buf.x[:num_rows],
        "logits": buf.logits[:num_rows],
        "confidence": found.confidence,
        "ids": found.ids,
    }


def many_rows(x: Tensor, weight: Any, *, out: Tensor) -> None:
    raise AssertionError("a few rows only")


def check_draft(name: str, device: str) -> None:
    c = draft_config(DRAFTS[name])
    target = tiny_weights(TINY, 5, torch.float32)
    wide = draft_weights(c, 3, target, torch.float32)
    narrow = moved(wide, device)

    def to_bf16(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.bfloat16() if part.dtype == torch.float32 else part
        if isinstance(part, tuple):
            return tuple(to_bf16(p) for p in part)
        if not hasattr(part, "__dataclass_fields__"):
            return part
        return replace(part, **{n: to_bf16(v) for n, v in vars(part).items()})

    narrow = to_bf16(narrow)
    assert isinstance(narrow.embed, EmbedWeights)
    right = run(c, wide, torch.float32, REFERENCE, "cpu")
    yardstick = run(c, narrow, torch.bfloat16, REFERENCE, device)
    got = run(c, pack_draft(narrow), torch.bfloat16, draft_kernels(many_rows), device)
    for key in ("kept", "hidden", "logits", "confidence"):
        check_bf16(got[key].float(), yardstick[key].float(), right[key], f"{name}: {key}")
    check_equal(got["ids"], yardstick["ids"], "drafts")


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_on_emulator(
    emulated: Emulator, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nanok3.draft_ops

    monkeypatch.setattr(nanok3.draft_ops, "FEW_ROWS", 1000)
    check_draft(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft(name: str) -> None:
    check_draft(name, "cuda")
