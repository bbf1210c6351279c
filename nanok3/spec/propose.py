"""Drafts from a draft model: one window forward, then tokens left to right.

Row i's base logits get a bias by the token before it (the anchor, then each draft), so the window
runs once and only this bias is sequential. A draft is drawn from softmax(logits / temperature)
without top-k, top-p or penalties; that distribution is kept, for verification divides by it. A
greedy request's distribution is one-hot, so its draft is the likeliest id.

R requests, K drafts, V ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanok3.sampling import SamplingRows, draw, probabilities
from nanok3.spec import draft as draft_model
from nanok3.spec.config import DraftConfig
from nanok3.spec.draft import DraftBuffers, DraftOps, Window, draft_rows
from nanok3.spec.draft_weights import DraftWeights
from nanok3.uniform import DRAFT, NUM_STREAMS, uniform


@dataclass(frozen=True)
class Proposal:
    """Drafts of one step, before they are verified."""

    ids: Tensor  # [R, K] i64
    lengths: Tensor  # [R] i64, drafts that are there: fewer than K where logits were not finite
    probabilities: Tensor  # [R, K, V] f64, what each draft was drawn from
    confidence: Tensor  # [R, K], chance that it stands if those before it do


def window_rows(c: DraftConfig, num_drafts: int) -> int:
    """Rows to run for so many drafts. A full window is what a draft that sees all of it knows."""
    assert 1 <= num_drafts <= c.block_size
    return num_drafts if c.is_causal else c.block_size


def untruncated(rows: SamplingRows) -> SamplingRows:
    """The requests' temperatures and seeds, and nothing else of what they ask."""
    return replace(rows, min_p=torch.zeros_like(rows.min_p), uses_sort=False, uses_counts=False)


def propose(
    c: DraftConfig,
    w: DraftWeights,
    cache: Tensor | Sequence[Tensor],
    anchors: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_size: int,
    rows: SamplingRows,
    steps: Tensor,
    num_drafts: int,
    all_greedy: bool,
    buffers: DraftBuffers,
    ops: DraftOps,
) -> Proposal:
    """`num_drafts` drafts after each anchor.

    anchors [R] ids and positions [R] of them; all positions before are in `cache`. rows: options of
    the R requests. steps [R]: how often each request has drafted, so that a position that is
    drafted again gets fresh random numbers. all_greedy: no request samples, which is quicker.
    """
    num_reqs, num_rows = len(anchors), window_rows(c, num_drafts)
    device = anchors.device
    ids = torch.full((num_reqs, num_rows), c.mask_token_id, dtype=torch.int64, device=device)
    ids[:, 0] = anchors
    places = positions[:, None] + torch.arange(num_rows, device=device)
    step = Window(
        input_ids=ids.flatten(),
        positions=places.clamp(max=c.max_position_embeddings - 1).flatten(),
        anchors=positions,
        block_table=block_table,
        rows=torch.arange(num_reqs * num_rows, device=device),
        block_size=block_size,
    )
    buf = draft_rows(buffers, num_reqs * num_rows)
    draft_model.window(c, w, cache, step, buf, ops)

    base = buf.logits.unflatten(0, (num_reqs, num_rows))
    if not all_greedy:
        options, stream = untruncated(rows), (DRAFT + NUM_STREAMS * steps)[:, None]
        chances = uniform(rows.seeds[:, None], places[:, :num_drafts] + 1, stream)  # [R, K]
    previous, before, drawn, marks, laws = anchors, [], [], [], []
    logits = torch.empty_like(base[:, 0])
    for i in range(num_drafts):
        before.append(previous)
        ops.markov(base[:, i], w.markov, previous, out=logits)
        if all_greedy:
            top, previous = logits.max(-1)  # the first of equals; NaN if any is
            marks.append(top)
        else:
            laws.append(probabilities(logits, options))
            token = draw(laws[-1], chances[:, i])
            previous = token.clamp(min=0)
            marks.append(token)
        drawn.append(previous)
    ids = torch.stack(drawn, 1)
    if all_greedy:
        shape = *ids.shape, logits.shape[1]
        law = torch.zeros(shape, dtype=torch.float64, device=device)
        law.scatter_(2, ids.unsqueeze(-1), 1.0)
        is_there = torch.stack(marks, 1).isfinite()
    else:
        law = torch.stack(laws, 1)
        is_there = torch.stack(marks, 1) >= 0
    lengths = is_there.long().cumprod(1).sum(1)

    hidden = buf.x.unflatten(0, (num_reqs, num_rows))[:, :num_drafts].flatten(0, 1)
    confidence = torch.empty_like(base[:, :num_drafts, 0]).flatten()
    features = torch.stack(before, 1).flatten()
    ops.confidence(hidden, w.confidence, w.markov, features, out=confidence)
    return Proposal(
        ids,
        lengths,
        law,
        confidence.view(num_reqs, num_drafts).nan_to_num(0.0),
    )
