"""One step with drafts on the device, in four calls, and what the next step reads.

    propose   K drafts after each request's anchor, and how many of them are worth a row
    compute   the model over anchor and drafts, Q rows of each request; states are not moved
    accept    which drafts stand, the id after them, where a reply ends -> `result`
    commit    states, windows and the draft's context of the rows that stand; the next anchors

A step without drafts is `compute` with Q = 1, which moves the states itself, and the same `accept`
and `commit`. As in `decode.py`, steps follow each other without the host. A request ends here at a
stop id, also inside its block (what was accepted after it is dropped), at its last allowed id, at
logits that are not finite, or where no id is left to draw: then it is padding, position and latent
slot -1, state slot 0. A row past a request's drafts is padding too: it repeats the last position
and writes nothing. Stop strings, grammars and cancels are for the host.

Nothing here waits for the device or branches on its values, and everything lies at addresses that
do not change: all of it can be captured. R requests, K drafts, Q rows of each (Q - 1 <= K), B
blocks of the longest request, V ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanok3.cache import TRASH
from nanok3.decode import ENDED, FLOATS, NO_ID, NOT_FINITE, STOP_WIDTH
from nanok3.mirror import Mirror
from nanok3.reference.kda_records import KDARecords
from nanok3.sampling import OPTIONS, SamplingRows, penalise, probabilities
from nanok3.spec.budget import Fallback, Rests, admit, note_step, survival
from nanok3.spec.propose import Proposal
from nanok3.spec.verify import Rule, verify
from nanok3.step import Step
from nanok3.uniform import ACCEPT, NUM_STREAMS, TARGET, uniform

# What a result says after the K + 1 places for ids, then K survivals in units of 1 / CERTAIN.
FACTS = ("lengths", "accepted", "stand", "resting")
CERTAIN = 1 << 30

INTS = (
    *("anchors", "positions", "state_slots", "num_output", "max_output", "most_drafts"),
    *("top_k", "seeds", "min_tokens"),
)
# What a request keeps when the batch around it changes.
DRAFTING = ("num_drafted", "num_steps", "resting", "next_rest", "mean", "survival")


@dataclass(frozen=True)
class SpecState:
    """What steps read and leave on the device."""

    anchors: Tensor  # [R] i64, each request's last id, which is in no cache
    positions: Tensor  # [R] i64, of the anchor, so the length of what is cached; -1: ended, padding
    state_slots: Tensor  # [R] i64
    num_output: Tensor  # [R] i64, ids that the request has drawn
    max_output: Tensor  # [R] i64, ids that it may draw
    most_drafts: Tensor  # [R] i64, in a step
    options: SamplingRows
    counts: Tensor  # [R, V] i32, of each id in the output; kept while `options.uses_counts`
    prompt_seen: Tensor  # [R, V] bool, whether it stands in the prompt; likewise
    num_drafted: Tensor  # [R] i64, steps in which the request has drafted
    rests: Rests
    survival: Tensor  # [R, K] f64, of the last drafts
    budget: Tensor  # [] i64, drafts of all requests that may be verified
    # Of the step in hand:
    limits: Tensor  # [R] i64, drafts that the request might use
    lengths: Tensor  # [R] i64, drafts that are verified
    drafts: Tensor  # [R, K] i64
    laws: Tensor  # [R, K, V] f64, what each was drawn from
    rows: Step  # [R * Q]
    logits: Tensor  # [R * Q, V]
    finite: Tensor  # [R * Q] bool, whether all logits of the row are, as the model gave them
    stand: Tensor  # [R] i64, rows that stand
    following: Tensor  # [R] i64, the next anchor, -1 where the reply ends
    # [R, K + 1 | FACTS | K] i64: the ids of the step in order; NO_ID or NOT_FINITE where it failed;
    # ENDED from where there is nothing more, so first of all if the request had ended before.
    result: Tensor

    @property
    def num_rows(self) -> int:
        """Q."""
        return len(self.rows.positions) // len(self.positions)


# (anchors, positions, block_table, options, num_drafted) -> drafts
Propose = Callable[[Tensor, Tensor, Tensor, SamplingRows, Tensor], Proposal]


def propose(state: SpecState, draw: Propose, adaptive: bool) -> None:
    """Drafts for the requests that may have some."""
    wants = (state.positions >= 0) & (state.rests.resting == 0)
    left = state.max_output - state.num_output - 1
    limits = torch.minimum(state.most_drafts, left).clamp(min=0) * wants
    places = state.positions.clamp(min=0)
    table = state.rows.block_table
    found = draw(state.anchors, places, table, state.options, state.num_drafted)
    lengths = torch.minimum(found.lengths, limits)
    if adaptive:
        current = survival(found.confidence.double(), lengths)
        state.survival.copy_(current)
        lengths = admit(current, state.budget)
    state.limits.copy_(limits)
    state.lengths.copy_(lengths)
    state.drafts.copy_(found.ids)
    state.laws.copy_(found.probabilities)


def compute(state: SpecState, forward: Callable[[Step], None]) -> None:
    """`forward` takes the rows to their logits."""
    fill_rows(state)
    forward(state.rows)
    state.finite.copy_(state.logits.isfinite().all(-1))


def fill_rows(state: SpecState) -> None:
    """The step's rows, of as many drafts as they have room for."""
    rows, num_rows = state.rows, state.num_rows
    state.lengths.clamp_(max=num_rows - 1)
    runs = state.positions >= 0
    index = torch.arange(num_rows, device=runs.device)
    real = runs[:, None] & (index <= state.lengths[:, None])  # [R, Q]
    ids = torch.cat([state.anchors[:, None], state.drafts[:, : num_rows - 1]], dim=1)
    places = state.positions[:, None] + torch.minimum(index, state.lengths[:, None])
    within = places.clamp(0, rows.block_table.shape[1] * rows.block_size - 1)
    blocks = rows.block_table.gather(1, within // rows.block_size)
    slots = blocks * rows.block_size + within % rows.block_size
    rows.input_ids.copy_(ids.masked_fill(~real, 0).flatten())
    rows.positions.copy_(places.masked_fill(~runs[:, None], -1).flatten())
    rows.slot_mapping.copy_(slots.masked_fill(~real, -1).flatten())


def accept(state: SpecState, rule: Rule, fallback: Fallback) -> None:
    """The ids of the step, and where each request goes on."""
    num_reqs, num_rows = len(state.positions), state.num_rows
    k, runs = num_rows - 1, state.positions >= 0
    drafts, laws = state.drafts[:, :k], state.laws[:, :k]
    index = torch.arange(num_rows, device=runs.device)
    finite = state.finite.unflatten(0, (num_reqs, num_rows))

    # 1. the target's distributions, each row after the drafts before it
    options = repeated(state.options, num_rows)
    scores = state.logits
    if options.uses_counts:
        scores = penalise(scores, *counts_of_rows(state, drafts), options)
    law = probabilities(scores, options).masked_fill(~state.finite[:, None], 0.0)
    law = law.unflatten(0, (num_reqs, num_rows))

    # 2. which drafts stand, and the id after them
    seeds, place = state.options.seeds[:, None], state.positions[:, None] + 1
    stream = (ACCEPT + NUM_STREAMS * state.num_drafted)[:, None].expand(-1, k)
    streams = torch.cat([torch.full_like(place, TARGET), stream], dim=1)
    places = torch.cat([place, place + index[:k]], dim=1)
    chances = uniform(seeds, places, streams)  # [R, Q], of the id after the drafts, of each draft
    verified = verify(law, laws, drafts, state.lengths, chances[:, 1:], chances[:, 0], rule)
    accepted = verified.num_accepted[:, None]
    ids = torch.cat([drafts, torch.full_like(accepted, NO_ID)], dim=1)
    ids = ids.masked_fill(index >= accepted, NO_ID).scatter(1, accepted, verified.next_ids[:, None])

    # 3. where the reply ends
    stops = (ids.unsqueeze(-1) == state.options.stop_ids.unsqueeze(1)).any(-1) & (ids >= 0)
    reached = runs[:, None] & (stops.cumsum(1) - stops.long() == 0) & (index <= accepted)
    taken = reached & (ids >= 0)
    stand = taken.sum(1)
    failed = torch.where(finite, NO_ID, NOT_FINITE)
    result = torch.where(taken, ids, torch.where(reached, failed, ENDED))
    state.num_output.add_(stand)
    if state.options.uses_counts:
        state.counts.scatter_add_(1, ids.clamp(min=0), taken.int())
    ends = (taken & stops).any(1) | (reached & ~taken).any(1)
    goes_on = runs & ~ends & (state.num_output < state.max_output)
    state.stand.copy_(stand)
    state.following.copy_(torch.where(goes_on, verified.next_ids, -1))

    # 4. what is remembered of the drafts, and what the host is told
    drafted = runs & (state.limits > 0)
    note_step(state.rests, drafted, stand, fallback)
    state.num_drafted.add_(drafted)
    most = state.drafts.shape[1]
    state.result[:, :num_rows].copy_(result)
    state.result[:, num_rows : most + 1].fill_(ENDED)
    facts = state.lengths, verified.num_accepted, stand, state.rests.resting
    state.result[:, most + 1 : -most].copy_(torch.stack(facts, dim=1))
    state.result[:, -most:].copy_((state.survival * CERTAIN).long())


def commit(
    state: SpecState,
    fold: Callable[[Tensor, Tensor], None] | None,
    keep: Callable[[Tensor, Tensor], None],
) -> None:
    """fold (state slots [R], rows [R]): the states go on by so many rows; None where they have
    moved. keep (positions [T], latent slots [T]): the draft's context of rows; slot -1: not of this
    one."""
    if fold is not None:
        fold(state.state_slots, state.stand)
    index = torch.arange(state.num_rows, device=state.stand.device)
    falls = index >= state.stand[:, None]
    keep(state.rows.positions, state.rows.slot_mapping.masked_fill(falls.flatten(), -1))
    goes_on = state.following >= 0
    state.anchors.copy_(state.following.clamp(min=0))
    state.positions.copy_(torch.where(goes_on, state.positions + state.stand, -1))
    state.state_slots.copy_(torch.where(goes_on, state.state_slots, TRASH))


def counts_of_rows(state: SpecState, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """How often each id stands in the output before each row, drafts included, and whether it
    stands in the prompt: [R * Q, V]."""
    num_rows, vocab = drafts.shape[1] + 1, state.counts.shape[1]
    counts = state.counts.unsqueeze(1).expand(-1, num_rows, -1)
    if num_rows > 1:
        here = torch.zeros(counts.shape, dtype=counts.dtype, device=counts.device)
        here[:, 1:].scatter_(2, drafts.unsqueeze(-1), 1)
        counts = counts + here.cumsum(1, dtype=counts.dtype)
    seen = state.prompt_seen.unsqueeze(1).expand(-1, num_rows, -1)
    return counts.reshape(-1, vocab), seen.reshape(-1, vocab)


def repeated(options: SamplingRows, num_rows: int) -> SamplingRows:
    """Each request's options for each of its rows."""
    if num_rows == 1:
        return options
    tensors = {name: getattr(options, name).repeat_interleave(num_rows, 0) for name in OPTIONS}
    return replace(options, **tensors)


# ---- memory ----


class SpecMemory:
    """Owns a `SpecState` of the most requests; `host` is a mirror of its small fields."""

    def __init__(
        self,
        max_blocks: int,
        block_size: int,
        max_num_reqs: int,
        num_drafts: int,
        logits: Tensor,
        records: KDARecords,
    ) -> None:
        """max_blocks: of one request; logits: [R * (K + 1), V], where the model leaves them;
        records: of the rows that a step with drafts computes."""
        device, (num_rows, vocab), most = logits.device, logits.shape, max_num_reqs
        assert num_rows == max_num_reqs * (num_drafts + 1)
        self._records = records
        widths = dict.fromkeys((*INTS, *FLOATS, *DRAFTING)) | {
            "stop_ids": STOP_WIDTH,
            "block_table": max_blocks,
            "survival": num_drafts,
        }
        floats = (*FLOATS, "mean", "survival")
        self.mirror = mirror = Mirror(widths, floats, ("positions", "stop_ids"), most, device)
        self.host, self.clear, self.upload = mirror.host, mirror.clear, mirror.upload
        fields = mirror.fields

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.state = SpecState(
            anchors=fields["anchors"],
            positions=fields["positions"],
            state_slots=fields["state_slots"],
            num_output=fields["num_output"],
            max_output=fields["max_output"],
            most_drafts=fields["most_drafts"],
            options=SamplingRows(
                **{name: fields[name] for name in OPTIONS}, uses_sort=True, uses_counts=True
            ),
            counts=torch.zeros(most, vocab, dtype=torch.int32, device=device),
            prompt_seen=torch.zeros(most, vocab, dtype=torch.bool, device=device),
            num_drafted=fields["num_drafted"],
            rests=Rests(*(fields[n] for n in ("mean", "num_steps", "resting", "next_rest"))),
            survival=fields["survival"],
            budget=ints(),
            limits=ints(most),
            lengths=ints(most),
            drafts=ints(most, num_drafts),
            laws=torch.zeros(most, num_drafts, vocab, dtype=torch.float64, device=device),
            rows=Step(
                input_ids=ints(num_rows),
                positions=ints(num_rows),
                slot_mapping=ints(num_rows),
                block_table=fields["block_table"],
                state_slots=fields["state_slots"],
                logit_rows=torch.arange(num_rows, device=device),
                block_size=block_size,
            ),
            logits=logits,
            finite=torch.zeros(num_rows, dtype=torch.bool, device=device),
            stand=ints(most),
            following=ints(most),
            result=ints(most, 2 * num_drafts + 1 + len(FACTS)),
        )

    def first(self, num_reqs: int, num_rows: int, uses_sort: bool, uses_counts: bool) -> SpecState:
        """Views of the first requests with `num_rows` rows each, whose options use what is said."""
        state, total = self.state, num_reqs * num_rows
        of_rows = ("input_ids", "positions", "slot_mapping", "logit_rows")
        rows = {name: getattr(state.rows, name)[:total] for name in of_rows}
        rests = {name: t[:num_reqs] for name, t in vars(state.rests).items()}
        options = {name: getattr(state.options, name)[:num_reqs] for name in OPTIONS}
        views = {
            name: value[: total if name in ("logits", "finite") else num_reqs]
            for name, value in vars(state).items()
            if isinstance(value, Tensor) and value.dim()
        }
        return replace(
            state,
            **views,
            rests=Rests(**rests),
            options=SamplingRows(**options, uses_sort=uses_sort, uses_counts=uses_counts),
            rows=replace(
                state.rows,
                **rows,
                block_table=state.rows.block_table[:num_reqs],
                state_slots=state.state_slots[:num_reqs],
                records=self._records if num_rows > 1 else None,
            ),
        )
