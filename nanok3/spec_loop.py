"""The decode loop with a draft: draft, verify, accept, commit, for a batch of requests.

The same calls as `loop.DecodeLoop`, so that `scheduler.py` drives either; a step gives a request
one id more than it accepted drafts, in order. The scheduler hands them out until the request ends,
and `settle` then commits exactly as many rows as ids were taken: KDA states by their records,
latent rows by length, the draft's context from the taps. So a stop id, a stop string or max_tokens
inside an accepted block leaves what decoding one id at a time leaves.

A step without drafts (K = 0: nothing to draft, a grammar that must see every id, drafting that does
not pay) is an ordinary decode step with the ordinary random number. In strict mode requests are
drafted and passed one by one, and K is what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanok3.config import EngineConfig
from nanok3.loop import Drawn, logprob_of, params_of
from nanok3.request import Request
from nanok3.sampling import (
    Logprobs,
    SamplingRows,
    logprobs_of,
    penalise,
    probabilities,
    rows_of,
)
from nanok3.spec.budget import Costs, Fallback, admit, best_budget, survival
from nanok3.spec.drafter import Drafter
from nanok3.spec.measure import measure_costs
from nanok3.spec.propose import Proposal
from nanok3.spec.target import Passed, Rows, Target
from nanok3.spec.verify import Rule, verify
from nanok3.uniform import ACCEPT, NUM_STREAMS, TARGET, uniform


@dataclass
class Acceptance:
    """How drafts fared, by their place in the block."""

    verified: list[int]  # times that draft i was verified
    accepted: list[int]  # times that it stood
    num_steps: int = 0  # with a draft to verify, a request each
    num_tokens: int = 0  # that these gave

    @classmethod
    def empty(cls, num_drafts: int) -> Acceptance:
        return cls([0] * num_drafts, [0] * num_drafts)

    @property
    def mean_length(self) -> float:
        """Tokens a step; 1 where nothing is ever accepted."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True)
class _Step:
    """A step that was queued and is not settled."""

    rows: list[Rows]
    passed: Passed
    limits: list[int]  # drafts that each request might use
    lengths: list[int]  # drafts verified
    accepted: list[int]
    ids: Tensor  # [R, Q] i64: accepted drafts, then the next id; -1 past it
    finite: list[bool]  # of the row that gave the next id
    logprobs: Logprobs | None  # [R * Q, ...]
    gaps: Tensor | None  # [R * Q]
    before: list[int]  # ids of each request before the step


@dataclass
class _Drafting:
    """What is remembered of a request from step to step."""

    survival: list[float]  # of its last drafts
    fallback: Fallback
    num_steps: int = 0  # in which it drafted


class SpecLoop:
    """One batch at a time; the host takes part in every step."""

    runs_ahead = False
    most_queued = 0  # a step is read before anything else happens

    def __init__(
        self, target: Target, drafter: Drafter, num_drafts: int, settings: EngineConfig
    ) -> None:
        """num_drafts: the most of a request in a step."""
        self.batch: list[Request] = []
        self.acceptance = Acceptance.empty(num_drafts)
        self.target, self.drafter, self.num_drafts = target, drafter, num_drafts
        self._rule: Rule = "standard" if settings.acceptance == "standard" else "block"
        self._settings = settings
        self._costs: Costs | None = None  # measured where drafts are adaptive
        self._drafting: dict[Request, _Drafting] = {}
        self._queued: _Step | None = None
        self._taken: _Step | None = None

    # ---- as DecodeLoop ----

    @property
    def num_queued(self) -> int:
        return int(self._queued is not None)

    def num_ahead(self, request: Request) -> int:
        """Nothing is ever queued while the scheduler asks."""
        return self.num_queued if request in self.batch else 0

    def compose(self, requests: Sequence[Request]) -> None:
        assert self._queued is None and not self.batch, "the last batch is not dissolved"
        self._options = rows_of([params_of(r) for r in requests], "cpu")
        known, fresh = self._drafting, [1.0] * self.num_drafts
        self._drafting = {
            r: known.get(r) or _Drafting(fresh, Fallback(self._settings.break_even))
            for r in requests
        }
        if self._settings.adaptive_drafts and self._costs is None:
            self._costs = measure_costs(
                self.target,
                self.drafter,
                self._settings.block_size,
                self._settings.max_num_reqs,
                self.num_drafts,
            )
        self.batch = list(requests)

    def dissolve(self) -> None:
        assert self._queued is None, "the last batch's step is not read"
        self.batch = []
        self._taken = None  # an interrupted step stays unsettled

    def queue(self) -> None:
        """A step of the batch, computed here and now; `read` gives what it drew."""
        for request in self.batch:
            request.in_flight = True
        with torch.inference_mode():
            self._queued = self._step()
        for request in self.batch:
            request.in_flight = False

    def read(self) -> list[tuple[Request, Drawn]]:
        """Each request's ids in order; those of a request that ends at one of them mean nothing."""
        step = self._queued
        assert step is not None
        found = []
        num_rows = step.ids.shape[1]
        gaps = None if step.gaps is None else step.gaps.tolist()
        for i, request in enumerate(self.batch):
            request.in_flight = True
            if not step.passed.recorded:
                request.num_cached += 1
            for j, token in enumerate(step.ids[i, : step.accepted[i] + 1].tolist()):
                row = i * num_rows + j
                finite = step.finite[i] or j < step.accepted[i]
                top = logprob_of(step.logprobs, row, token, request.params.logprobs)
                gap = None if gaps is None else gaps[row]
                found.append((request, Drawn(token, finite, None, False, top, gap)))
        self._queued, self._taken = None, step
        return found

    def settle(self) -> None:
        """Commits what was taken of the last step that was read."""
        step, self._taken = self._taken, None
        if step is None:
            return
        counts = [len(r.ids) - n for r, n in zip(self.batch, step.before, strict=True)]
        in_flight = [r.in_flight for r in self.batch]
        for request in self.batch:
            request.in_flight = True
        if step.passed.recorded:
            self.target.commit(step.rows, counts)
            for request, count in zip(self.batch, counts, strict=True):
                request.num_cached += count
        self._keep(step.passed, counts)
        self._note(step, counts)
        for request, was in zip(self.batch, in_flight, strict=True):
            request.in_flight = was

    # ---- a step ----

    def _step(self) -> _Step:
        batch = self.batch
        limits = self._limits()
        proposal = self._propose(limits)
        lengths = [0] * len(batch) if proposal is None else self._lengths(proposal, limits)
        num_rows = max(lengths) + 1
        rows = []
        for i, r in enumerate(batch):
            assert r.slot is not None and r.num_pending == 1
            after = [] if proposal is None else proposal.ids[i, : lengths[i]].tolist()
            rows.append(Rows([r.ids[-1], *after], r.num_cached, r.blocks, r.slot))
        passed = self.target.run(rows)

        logits = passed.logits.flatten(0, 1)  # [R * Q, V]
        is_finite = logits.isfinite().all(-1)  # before a grammar writes -inf
        self._forbid(passed.logits)
        options = repeated(self._options, num_rows)
        scores = logits
        if options.uses_counts:
            scores = penalise(logits, *self._counts(rows, num_rows), options)
        law = probabilities(scores, options).masked_fill(~is_finite[:, None], 0.0)
        vocab = logits.shape[1]
        law = law.unflatten(0, (-1, num_rows))

        k = num_rows - 1
        if proposal is None:
            drafts = torch.zeros(len(batch), 0, dtype=torch.int64)
            draft_law = law.new_zeros(len(batch), 0, vocab)
        else:
            drafts, draft_law = proposal.ids[:, :k], proposal.probabilities[:, :k]
        seeds = self._options.seeds
        places = torch.tensor([len(r.ids) for r in batch])  # of the first new id
        steps = torch.tensor([self._drafting[r].num_steps for r in batch])
        accept = uniform(
            seeds[:, None].expand(-1, k),
            places[:, None] + torch.arange(k),
            (ACCEPT + NUM_STREAMS * steps)[:, None],
        )
        chosen = torch.tensor(lengths)
        verified = verify(
            law, draft_law, drafts, chosen, accept, uniform(seeds, places, TARGET), self._rule
        )
        accepted = verified.num_accepted
        index = torch.arange(num_rows)
        padded = torch.cat([drafts, drafts.new_full((len(batch), 1), -1)], 1)
        ids = padded.masked_fill(index >= accepted[:, None], -1)
        ids = ids.scatter(1, accepted[:, None], verified.next_ids[:, None])
        logprobs, gaps = self._extras(logits, ids.flatten())
        at_next = is_finite.unflatten(0, (-1, num_rows)).gather(1, accepted[:, None])[:, 0]
        return _Step(
            rows=rows,
            passed=passed,
            limits=limits,
            lengths=lengths,
            accepted=accepted.tolist(),
            ids=ids,
            finite=at_next.tolist(),
            logprobs=logprobs,
            gaps=gaps,
            before=[len(r.ids) for r in batch],
        )

    def _propose(self, limits: list[int]) -> Proposal | None:
        """Drafts for all requests, as many as the one that may use most; None if none may."""
        most = max(limits)
        if most == 0:
            return None
        groups = [[i] for i in range(len(limits))] if self._settings.strict else [None]
        parts = [self._propose_for(group, most) for group in groups]
        if len(parts) == 1:
            return parts[0]
        return Proposal(
            *(
                torch.cat([getattr(part, name) for part in parts])
                for name in ("ids", "lengths", "probabilities", "confidence")
            )
        )

    def _propose_for(self, group: list[int] | None, num_drafts: int) -> Proposal:
        batch = self.batch if group is None else [self.batch[i] for i in group]
        options = self._options if group is None else picked(self._options, torch.tensor(group))
        return self.drafter.propose(
            [r.ids[-1] for r in batch],
            [r.num_cached for r in batch],
            [r.blocks for r in batch],
            options,
            [self._drafting[r].num_steps for r in batch],
            num_drafts,
        )

    def _limits(self) -> list[int]:
        """Drafts that each request may use: no id past max_tokens, none past a grammar's eye, none
        while drafting does not pay."""
        limits = []
        for r in self.batch:
            of = self._drafting[r].fallback
            most = min(self.num_drafts, r.max_tokens - r.num_output - 1)
            if not of.wants_drafts():
                of.skipped()
                most = 0
            limits.append(0 if r.grammar is not None else most)
        return limits

    def _lengths(self, proposal: Proposal, limits: list[int]) -> list[int]:
        """Drafts of each request that are verified; the budget looks at older confidences."""
        lengths = torch.minimum(proposal.lengths, torch.tensor(limits))
        if self._costs is not None:
            drafting = [self._drafting[r] for r in self.batch]
            old = [chance for d in drafting for chance in d.survival]
            budget = best_budget(old, len(self.batch), len(self.batch), self._costs)
            current = survival(proposal.confidence.double(), lengths)
            lengths = admit(current, budget)
            for d, chances in zip(drafting, current.tolist(), strict=True):
                d.survival = chances
        found: list[int] = lengths.tolist()
        return found

    def _note(self, step: _Step, counts: list[int]) -> None:
        """How the drafts fared. Of a reply that ended inside its block nothing is known past it."""
        seen = self.acceptance
        for i, r in enumerate(self.batch):
            if not step.limits[i]:
                continue
            self._drafting[r].num_steps += 1
            self._drafting[r].fallback.record(counts[i])
            if not step.lengths[i]:
                continue
            is_cut = counts[i] <= step.accepted[i]
            stood = counts[i] if is_cut else step.accepted[i]
            seen.num_steps += 1
            seen.num_tokens += counts[i]
            for j in range(stood if is_cut else step.lengths[i]):
                seen.verified[j] += 1
                seen.accepted[j] += j < stood

    def _keep(self, passed: Passed, counts: list[int]) -> None:
        """The draft's context of the rows that stand."""
        index = torch.arange(passed.positions.shape[1])
        stand = index < torch.tensor(counts)[:, None]
        parts = passed.taps[stand], passed.positions[stand], passed.slots[stand]
        num_rows = len(parts[0])
        height = 1 if self._settings.strict else max(num_rows, 1)
        for begin in range(0, num_rows, height):
            self.drafter.keep(*(part[begin : begin + height] for part in parts))

    # ---- what single requests ask for ----

    def _forbid(self, logits: Tensor) -> None:
        """-inf in `logits` [R, Q, V] for what a grammar leaves out; such a request has one row."""
        for i, request in enumerate(self.batch):
            mask = request.grammar.mask() if request.grammar is not None else None
            if mask is not None:
                logits[i, 0].masked_fill_(~mask, -torch.inf)

    def _counts(self, rows: list[Rows], num_rows: int) -> tuple[Tensor, Tensor]:
        """How often each id stands in the output before each row, drafts included, and whether it
        stands in the prompt: [R * Q, V]."""
        vocab = self.drafter.config.vocab_size
        counts = torch.zeros(len(rows), num_rows, vocab, dtype=torch.int64)
        seen = torch.zeros(len(rows), 1, vocab, dtype=torch.bool)
        for i, (r, part) in enumerate(zip(self.batch, rows, strict=True)):
            output = torch.tensor(r.ids[r.num_prompt :], dtype=torch.int64)
            counts[i] = torch.bincount(output, minlength=vocab)
            for j, draft in enumerate(part.ids[1:], 1):
                counts[i, j:, draft] += 1
            seen[i, 0, r.ids[: r.num_prompt]] = True
        return counts.flatten(0, 1), seen.expand(-1, num_rows, -1).flatten(0, 1)

    def _extras(self, logits: Tensor, ids: Tensor) -> tuple[Logprobs | None, Tensor | None]:
        """Log-probabilities and gaps of all rows, if any request asks for them."""
        wanted = [r.params.logprobs for r in self.batch if r.params.logprobs is not None]
        logprobs = logprobs_of(logits, ids.clamp(min=-1), max(wanted)) if wanted else None
        gaps = None
        if any(r.gaps is not None for r in self.batch):
            best = logits.topk(2).values
            gaps = best[:, 0] - best[:, 1]
        return logprobs, gaps


TENSORS = (
    *("temperature", "top_p", "top_k", "min_p", "seeds", "presence", "frequency", "repetition"),
    *("min_tokens", "stop_ids"),
)


def picked(options: SamplingRows, index: Tensor) -> SamplingRows:
    return replace(options, **{name: getattr(options, name)[index] for name in TENSORS})


def repeated(options: SamplingRows, num_rows: int) -> SamplingRows:
    """Each request's options for each of its rows."""
    if num_rows == 1:
        return options
    return picked(options, torch.arange(len(options.seeds)).repeat_interleave(num_rows))
