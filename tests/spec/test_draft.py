"""The draft's forward pass and its drafts against a plain numpy one, for both formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from compare import check_close, check_equal
from drafts import INFERACT, random_draft_fields, tiny_inferact, tiny_redhat
from tiny import TINY, tiny_weights
from torch import Tensor

from nanok3.reference.rope import yarn_mscale
from nanok3.sampling import SamplingParams, rows_of
from nanok3.spec import draft
from nanok3.spec.config import DraftConfig, draft_config
from nanok3.spec.draft import (
    REFERENCE,
    DraftOps,
    allocate_draft_buffers,
    allocate_draft_cache,
    draft_rows,
)
from nanok3.spec.draft_weights import DraftWeights, build_draft, draft_to_checkpoint
from nanok3.spec.propose import Proposal, propose, window_rows
from spec.plain_draft import PlainDraft

BLOCK = 4
CONTEXTS = (0, 1, 4, 13)  # none, one, a block, past the window of 6 and several blocks
RAWS = {
    "inferact": tiny_inferact(),
    "redhat": tiny_redhat(),
    "redhat, one full layer": tiny_redhat(("sliding_attention", "full_attention")),
}


@dataclass
class Session:
    """A draft over a paged cache, with the taps of four requests."""

    raw: dict[str, Any]
    c: DraftConfig
    w: DraftWeights
    plain: PlainDraft
    cache: Tensor
    taps: list[Tensor]  # [S, n * C] of each request
    table: Tensor  # [R, blocks]
    dtype: torch.dtype
    ops: DraftOps = REFERENCE

    def slots(self, request: int, positions: Tensor) -> Tensor:
        return self.table[request, positions // BLOCK] * BLOCK + positions % BLOCK

    def keep(self, request: int, start: int, taps: Tensor) -> None:
        positions = torch.arange(start, start + len(taps))
        buf = allocate_draft_buffers(self.c, len(taps), 1, self.dtype, "cpu")
        slots = self.slots(request, positions)
        draft.keep_context(
            self.w, taps.to(self.dtype), positions, slots, self.cache, buf, self.ops
        )  # fmt: skip

    def propose(
        self, requests: list[int], anchors: list[int], k: int, params: list[SamplingParams],
        steps: int = 0,
    ) -> tuple[Proposal, Tensor, Tensor]:  # fmt: skip
        """-> drafts, and hidden rows and base logits behind them [R, Q, ...]."""
        rows = window_rows(self.c, k)
        buf = allocate_draft_buffers(self.c, 1, len(requests) * rows, self.dtype, "cpu")
        drawn = propose(
            self.c,
            self.w,
            self.cache,
            torch.tensor(anchors),
            torch.tensor([len(self.taps[r]) for r in requests]),
            self.table[requests],
            BLOCK,
            rows_of(params, "cpu"),
            torch.full((len(requests),), steps),
            k,
            all(p.temperature == 0 for p in params),
            buf,
            self.ops,
        )
        used = draft_rows(buf, len(requests) * rows)
        return drawn, used.x.unflatten(0, (-1, rows)), used.logits.unflatten(0, (-1, rows))


def session(raw: dict[str, Any], dtype: torch.dtype = torch.float64) -> Session:
    c = draft_config(raw)
    fields = random_draft_fields(c, 2)
    target = tiny_weights(TINY, 5, dtype)
    w = build_draft(
        c, {n: t.to(dtype) for n, t in fields.items()}.__getitem__, target.embed, target.lm_head
    )
    tensors = {n: t.double().numpy() for n, t in draft_to_checkpoint(c, fields).items()}
    exact = tiny_weights(TINY, 5, torch.float64)
    plain = PlainDraft(raw, tensors, exact.embed.table.numpy(), exact.lm_head.numpy())
    generator = torch.Generator().manual_seed(9)
    width = len(c.taps) * c.hidden_size
    taps = [torch.randn(s, width, generator=generator).bfloat16().double() for s in CONTEXTS]
    cache = allocate_draft_cache(c, 20, BLOCK, dtype, "cpu")
    cache.fill_(float("nan"))  # what is not context must not be read
    table = torch.tensor([[7, 1, 9, 3], [2, 12, 4, 17], [19, 5, 6, 8], [10, 11, 16, 13]])
    s = Session(raw, c, w, plain, cache, taps, table, dtype)
    for r, rows in enumerate(taps):
        for start in range(0, len(rows), 5):  # in parts, as a chunked prompt comes
            s.keep(r, start, rows[start : start + 5])
    return s


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0)


@pytest.mark.parametrize("name", RAWS)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_rows_and_drafts_are_those_of_the_plain_model(name: str, k: int) -> None:
    s = session(RAWS[name])
    anchors = [5, 300, 17, 255]
    drawn, hidden, base = s.propose([0, 1, 2, 3], anchors, k, [greedy()] * 4)
    for r, anchor in enumerate(anchors):
        rows = k if s.c.is_causal else s.c.block_size
        right, logits = s.plain.window(s.taps[r].numpy(), anchor, rows)
        check_close(hidden[r], right, 1e-11, "hidden rows")
        check_close(base[r], logits, 1e-11, "base logits")
        before = anchor
        for i in range(k):
            sure = s.plain.confidence(right[i], before)
            assert drawn.confidence[r, i].item() == pytest.approx(sure, abs=1e-9)
            before = int(s.plain.biased(logits[i], before).argmax())
            assert drawn.ids[r, i].item() == before
    assert drawn.lengths.tolist() == [k] * 4


@pytest.mark.parametrize("name", ["inferact", "redhat"])
def test_narrower_dtypes_stay_close(name: str) -> None:
    right, limits = None, {torch.float64: 0.0, torch.float32: 1e-5, torch.bfloat16: 0.1}
    for dtype, limit in limits.items():
        _, hidden, _ = session(RAWS[name], dtype).propose([3], [17], 3, [greedy()])
        right = hidden if right is None else right
        check_close(hidden, right, limit, str(dtype))


@pytest.mark.parametrize("name", RAWS)
def test_company_changes_nothing_that_matters(name: str) -> None:
    s = session(RAWS[name])
    together, _, _ = s.propose([0, 1, 2, 3], [5, 300, 17, 255], 3, [greedy()] * 4)
    for r, anchor in enumerate([5, 300, 17, 255]):
        alone, _, _ = s.propose([r], [anchor], 3, [greedy()])
        check_equal(alone.ids[0], together.ids[r], "drafts")


def test_every_row_of_the_window_gives_its_own_draft() -> None:
    """One row lost or shifted changes a proposal: rows 0..6 are seven drafts."""
    s = session(RAWS["inferact"])
    whole, _, base = s.propose([3], [17], 7, [greedy()])
    for i in range(7):
        changed = base[0].clone()
        changed[i] = -changed[i]

        def lm_head(
            x: Tensor, w: Tensor, rows: Tensor, *, out: Tensor, to: Tensor = changed
        ) -> None:
            out.copy_(to)

        other = replace(s, ops=replace(REFERENCE, lm_head=lm_head))
        drawn, _, _ = other.propose([3], [17], 7, [greedy()])
        assert drawn.ids[0, :i].tolist() == whole.ids[0, :i].tolist()
        assert drawn.ids[0, i] != whole.ids[0, i]


def test_drafts_are_drawn_from_what_is_kept() -> None:
    """At a temperature: the frequency of first drafts is their kept law; greedy rows one-hot."""
    s = session(RAWS["redhat"])
    count = 2000
    params = [SamplingParams(temperature=0.7, seed=i, top_k=1) for i in range(count)]
    drawn, _, base = s.propose([3] * count, [17] * count, 2, params)
    law = drawn.probabilities[0, 0]
    right = torch.tensor(s.plain.biased(base[0, 0].double().numpy(), 17)) / 0.7
    check_close(law, right.softmax(-1), 1e-9, "softmax at the request's temperature, no top-k")
    counts = torch.bincount(drawn.ids[:, 0], minlength=512).double()
    top = law.topk(6).indices
    error = (counts[top] - count * law[top]).abs() / (count * law[top]).sqrt()
    assert error.max() < 4
    again, _, _ = s.propose([3] * count, [17] * count, 2, params, steps=1)
    assert (again.ids != drawn.ids).any(), "a position that is drafted again draws anew"
    one_hot, _, _ = s.propose([3], [17], 2, [greedy()])
    assert one_hot.probabilities.sum(-1).tolist() == [[1.0, 1.0]]
    assert one_hot.probabilities.max(-1).values.tolist() == [[1.0, 1.0]]


def test_logits_that_are_not_finite_end_the_drafts() -> None:
    s = session(RAWS["inferact"])

    def markov(logits: Tensor, w: Any, previous: Tensor, *, out: Tensor) -> None:
        REFERENCE.markov(logits, w, previous, out=out)
        seen.append(1)
        if len(seen) == 3:
            out[1].fill_(float("nan"))

    seen: list[int] = []
    other = replace(s, ops=replace(REFERENCE, markov=markov))
    drawn, _, _ = other.propose([2, 3], [5, 17], 5, [greedy()] * 2)
    assert drawn.lengths.tolist() == [5, 2]
    assert (drawn.ids >= 0).all()


def test_softmax_scale_of_the_published_draft() -> None:
    c = draft_config(INFERACT)
    scale = 192**-0.5 * yarn_mscale(c.rope.factor, c.rope.mscale_all_dim) ** 2
    assert scale == pytest.approx(0.130861, abs=1e-6)
