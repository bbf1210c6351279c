"""Training of the draft: the form of attention it uses is the one that is served."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from compare import check_close
from drafts import draft_weights, tiny_inferact
from tiny import TINY, tiny_weights

from nanok3.spec import draft
from nanok3.spec.config import draft_config
from nanok3.spec.draft import Window, allocate_draft_buffers, allocate_draft_cache

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import train_draft

ROW, PER_ROW, ROWS = train_draft.ROW, 5, 2


def test_windows_that_share_a_row_give_what_separate_requests_give() -> None:
    c = draft_config(tiny_inferact())
    w = draft_weights(c, 3, tiny_weights(TINY, 5), torch.float32)
    generator = torch.Generator().manual_seed(7)
    taps = torch.randn(ROWS * ROW, len(c.taps) * c.hidden_size, generator=generator)
    ids = torch.randint(0, 256, (ROWS, ROW), generator=generator)
    anchors = torch.randint(0, ROW - c.block_size, (ROWS, PER_ROW), generator=generator)
    anchors[0, 0] = 0  # a window without any context
    hidden, logits = train_draft.window_rows(c, w, taps, ids, anchors, torch.float32)

    num_reqs = ROWS * PER_ROW
    cache = allocate_draft_cache(c, ROWS, ROW, torch.float32, "cpu")
    buf = allocate_draft_buffers(c, ROWS * ROW, num_reqs * c.block_size, torch.float32, "cpu")
    slots = torch.arange(ROWS * ROW)
    draft.keep_context(w, taps, slots % ROW, slots, cache, buf, draft.REFERENCE)
    flat = anchors.flatten()
    tokens = torch.full((num_reqs, c.block_size), c.mask_token_id)
    tokens[:, 0] = ids.gather(1, anchors).flatten()
    step = Window(
        input_ids=tokens.flatten(),
        positions=(flat[:, None] + torch.arange(c.block_size)).flatten(),
        anchors=flat,
        block_table=torch.arange(ROWS).repeat_interleave(PER_ROW).unsqueeze(1),
        rows=torch.arange(tokens.numel()),
        block_size=ROW,
    )
    draft.window(c, w, cache, step, buf, draft.REFERENCE)
    check_close(hidden.detach(), buf.x, 1e-5, "hidden rows")
    check_close(logits.detach(), buf.logits, 1e-5, "logits")
