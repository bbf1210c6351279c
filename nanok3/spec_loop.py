"""The decode loop with a draft: queues steps of a batch, and reads what they gave one step late.

The same calls as `loop.DecodeLoop`, so that `scheduler.py` drives either; a step gives a request
one id more than it accepted drafts, in order. A step is up to four calls of `spec_decode.py`:
replays of graphs on a GPU, the functions themselves on a CPU. What stands of a step is committed
when the next one is queued, as the device decided. If none is queued, `settle` commits exactly as
many rows as ids were taken, so a stop string inside a block, or a cancel, leaves in the caches what
decoding one id at a time leaves. A step that was queued before the host had met the stop string has
committed the whole block; then the caches are ahead of the reply.

A step has Q rows of each request, as the host chooses from what it has read: 1 where nobody may
draft (a grammar must see every id, drafting rests) or the budget says so, else all K + 1. Where it
waits for each step anyway, it looks how many rows there are drafts for, and takes as few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanok3.decode import ENDED, FLOATS, NOT_FINITE, STOP_WIDTH
from nanok3.graph import Health, Readback
from nanok3.loop import (
    PLACES,
    Drawn,
    count_ids,
    extras,
    forbid,
    logprob_of,
    needs_host,
    params_of,
)
from nanok3.request import Request
from nanok3.sampling import Logprobs, SamplingRows, rows_of
from nanok3.spec.budget import Costs, best_budget
from nanok3.spec_decode import CERTAIN, DRAFTING, FACTS, SpecState
from nanok3.spec_steps import SpecSteps


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

    def note(self, length: int, accepted: int, taken: int) -> None:
        """A step of one request. Of a reply that ended in its block nothing is known past it."""
        is_cut = taken <= accepted
        self.num_steps += 1
        self.num_tokens += taken
        for j in range(taken if is_cut else length):
            self.verified[j] += 1
            self.accepted[j] += j < (taken if is_cut else accepted)


@dataclass(frozen=True)
class _Queued:
    place: int  # in the readback
    num_rows: int  # Q
    logprobs: Logprobs | None  # [R * Q, ...]
    gaps: Tensor | None  # [R * Q]


@dataclass(frozen=True)
class Step:
    """What was read of a step, by request."""

    ids: list[list[int]]  # and what ended them
    before: list[int]  # ids of each request before it
    recorded: bool  # states stay as they were until the commit
    lengths: list[int]  # drafts verified
    accepted: list[int]
    stand: list[int]  # rows, as the device has it
    failure: str | None


class SpecLoop:
    """One batch at a time, with what its steps read and write on the device."""

    def __init__(self, steps: SpecSteps, runs_ahead: bool, health: Health | None = None) -> None:
        """health: of what the steps run, if it can fail."""
        self.runs_ahead = runs_ahead
        self.batch: list[Request] = []
        self.num_drafts = steps.num_drafts
        self.acceptance = Acceptance.empty(self.num_drafts)
        self.target, self.drafter = steps.target, steps.drafter
        self._steps, self._memory, self._settings = steps, steps.memory, steps.settings
        self._costs: Costs | None = None  # measured where drafts are adaptive
        self._drafting: dict[Request, dict[str, Any]] = {}  # what each had when last dissolved
        self._queued: deque[_Queued] = deque()
        self._read: Step | None = None  # and not settled
        self._uncommitted: int | None = None  # rows of the last step that was queued
        self._num_steps = 0
        self._attended = False
        self._wide_stops: Tensor | None = None
        self._readback = Readback(self.state.result, PLACES)
        self._health = health
        self._words = Readback(health.words, PLACES) if health else None
        self._failed = False  # since the last batch began

    # ---- as DecodeLoop ----

    @property
    def state(self) -> SpecState:
        """As the last queued step leaves it."""
        return self._memory.state

    @property
    def num_queued(self) -> int:
        """Steps whose result is not read."""
        return len(self._queued)

    @property
    def most_queued(self) -> int:
        """Steps that may stay unread while the host does other things."""
        return 1 if self.runs_ahead and not self._attended else 0

    def num_ahead(self, request: Request) -> int:
        """Queued steps that the request has rows in; each gives it one id at least."""
        return self.num_queued if request in self.batch else 0

    def compose(self, requests: Sequence[Request]) -> None:
        """From now on a step has rows of each of these, which have one pending id each."""
        assert not self._queued and not self.batch, "the last batch is not dissolved"
        if self._settings.adaptive_drafts and self._costs is None:
            self._costs = self.measure()
        most = self.num_drafts
        self._attended = any(needs_host(r) for r in requests)
        options = rows_of([params_of(r) for r in requests], "cpu")
        self._size = self._steps.size_for(len(requests))
        self._options, self._is_greedy = options, bool((options.temperature == 0).all())
        known, fresh = self._drafting, {**dict.fromkeys(DRAFTING, 0), "survival": [1.0] * most}
        self._drafting = {r: known.get(r) or fresh for r in requests}
        self._resting = [self._drafting[r]["resting"] for r in requests]
        self._survival = [self._drafting[r]["survival"] for r in requests]
        self._unread = 0  # steps queued since these were so
        self._fill(requests, options)
        self._wide_stops = None  # more ids than the state has room for
        if (width := options.stop_ids.shape[1]) > STOP_WIDTH:
            padding = torch.full((self._size - len(requests), width), -1)
            stop_ids = torch.cat([options.stop_ids, padding])
            self._wide_stops = stop_ids.to(self.state.logits.device)
        if options.uses_counts:
            count_ids(requests, self.state.counts, self.state.prompt_seen)
        self._memory.upload()
        self.batch = list(requests)  # last, so that an interruption leaves no batch

    def dissolve(self) -> None:
        """No batch, so that none of its requests is taken for part of the next one."""
        assert not self._queued, "the last batch's steps are not read"
        if self._failed and self._health is not None:
            self._health.clear()
            self._failed = False
        fields, num_reqs = self._memory.mirror.fields, len(self.batch)
        if num_reqs:
            columns = [fields[name][:num_reqs].tolist() for name in DRAFTING]
            for r, *values in zip(self.batch, *columns, strict=True):
                self._drafting[r] = dict(zip(DRAFTING, values, strict=True))
        self.batch = []
        self._read = self._uncommitted = None  # an interrupted step stays unsettled

    def queue(self) -> None:
        """One more step of the batch. Nothing here waits, where steps may stay unread."""
        assert len(self._queued) < PLACES, "a result would be lost"
        for request in self.batch:
            request.in_flight = True
        with torch.inference_mode():
            queued = self._step()
            if self._words is not None:  # before the results, whose event then holds for both
                self._words.copy(queued.place)
            self._readback.copy(queued.place)
        self._num_steps += 1
        self._unread += 1
        self._queued.append(queued)
        for request in self.batch:
            request.in_flight = False

    def read(self) -> list[tuple[Request, Drawn]]:
        """Each request's ids of the oldest queued step, in order; waits for that step. Its requests
        are in flight until the caller has dealt with them; one that was in flight before gets
        nothing, and what follows a request's end means nothing."""
        queued = self._queued[0]
        results: Any = self._readback.read(queued.place)  # the only wait for the device
        results = results[: len(self.batch)]
        failure = self._failure(queued)
        rows = [(i, r) for i, r in enumerate(self.batch) if not r.in_flight]
        for _, request in rows:
            request.in_flight = True
        self._queued.popleft()
        most = self.num_drafts
        facts = [result[most + 1 : -most] for result in results]
        by_name = dict(zip(FACTS, zip(*facts, strict=True), strict=True))
        step = Step(
            ids=[result[: queued.num_rows] for result in results],
            before=[len(r.ids) for r in self.batch],
            recorded=queued.num_rows > 1,
            lengths=list(by_name["lengths"]),
            accepted=list(by_name["accepted"]),
            stand=list(by_name["stand"]),
            failure=failure,
        )
        self._read = step
        self._resting, self._unread = list(by_name["resting"]), len(self._queued)
        self._survival = [[n / CERTAIN for n in result[-most:]] for result in results]
        found = []
        for i, request in rows:
            has_ended = step.ids[i][0] == ENDED
            request.num_cached += step.stand[i] if step.recorded else not has_ended
            found += [(request, drawn) for drawn in self._drawn(queued, step, i)]
        return found

    def settle(self) -> None:
        """After the ids of a step were handed out: commits what was taken of them, unless a later
        step is queued, which has committed all that the device accepted."""
        step, self._read = self._read, None
        if step is None:
            return
        taken = [len(r.ids) - n for r, n in zip(self.batch, step.before, strict=True)]
        for length, accepted, count in zip(step.lengths, step.accepted, taken, strict=True):
            if length and count:
                self.acceptance.note(length, accepted, count)
        if self._queued or self._uncommitted is None or step.failure is not None:
            return
        in_flight = [r.in_flight for r in self.batch]
        for request in self.batch:
            request.in_flight = True
        with torch.inference_mode():
            for i, request in enumerate(self.batch):
                if step.recorded and taken[i] < step.stand[i]:
                    self.state.stand[i] = taken[i]
                    request.num_cached -= step.stand[i] - taken[i]
            self._commit_last()
        for request, was in zip(self.batch, in_flight, strict=True):
            request.in_flight = was

    # ---- a step ----

    def _step(self) -> _Queued:
        state, num_reqs = self.state, len(self.batch)
        self._commit_last()
        budget = self._budget()
        if self._may_draft():
            state.budget.fill_(budget)
            self._steps.propose(self._size, self._is_greedy)()
            num_rows = self._num_rows(budget)
        else:
            state.limits.zero_()
            state.lengths.zero_()
            num_rows = 1
        self._steps.compute(self._size, num_rows)()
        logits = state.logits[: num_reqs * num_rows]
        if self._attended:
            forbid(self.batch, logits, num_rows)
        self._accept_now(num_rows)
        self._uncommitted = num_rows
        logprobs = gaps = None
        if self._attended:
            ids = state.result[:num_reqs, :num_rows].flatten()
            logprobs, gaps = extras(self.batch, logits, ids)
        return _Queued(self._num_steps % PLACES, num_rows, logprobs, gaps)

    def _commit_last(self) -> None:
        if self._uncommitted is not None:
            self._steps.commit(self._size, self._uncommitted)()
        self._uncommitted = None

    def _may_draft(self) -> bool:
        """Whether any request may have drafts, by what is known of it. A rest goes on by a step
        each, and each step gives one id at least."""
        for r, resting in zip(self.batch, self._resting, strict=True):
            left = r.max_tokens - r.num_output - self.num_queued - 1
            if r.grammar is None and resting <= self._unread and left > 0:
                return True
        return False

    def _budget(self) -> int:
        """Drafts of all requests that are worth a row, by confidences from before them."""
        num_reqs = len(self.batch)
        if self._costs is None:
            return num_reqs * self.num_drafts
        old = [chance for chances in self._survival for chance in chances]
        return best_budget(old, num_reqs, num_reqs, self._costs)

    def _num_rows(self, budget: int) -> int:
        """Q of a step whose drafts are proposed."""
        most = min(budget, self.num_drafts)
        if self.most_queued == 0:
            most = int(self.state.lengths[: len(self.batch)].max())
        return self._steps.rows_for(most)

    def _accept_now(self, num_rows: int) -> None:
        options, stop_ids = self._options, self._wide_stops
        variant = options.uses_sort, options.uses_counts
        self._steps.accept(self._size, num_rows, *variant, stop_ids)()

    def measure(self) -> Costs:
        """Of steps on this machine, while there is no batch."""
        assert not self.batch
        return self._steps.measure()

    # ---- inside compose and read ----

    def _fill(self, requests: Sequence[Request], options: SamplingRows) -> None:
        """The mirror's small fields, from the requests as the host knows them."""
        self._memory.clear()
        host = self._memory.host
        for i, r in enumerate(requests):
            assert r.slot is not None and r.num_pending == 1
            host["anchors"][i] = r.ids[-1]
            host["positions"][i] = r.num_cached
            host["state_slots"][i] = r.slot
            host["block_table"][i, : len(r.blocks)] = torch.tensor(r.blocks)
            host["num_output"][i] = r.num_output
            host["max_output"][i] = r.max_tokens
            host["most_drafts"][i] = 0 if r.grammar is not None else self.num_drafts
            for name, value in self._drafting[r].items():
                host[name][i] = torch.tensor(value)
        for name in (*FLOATS, "top_k", "seeds", "min_tokens"):
            host[name][: len(requests)] = getattr(options, name)
        num_rows, width = options.stop_ids.shape
        if width <= STOP_WIDTH:
            host["stop_ids"][:num_rows, :width] = options.stop_ids

    def _drawn(self, queued: _Queued, step: Step, i: int) -> list[Drawn]:
        """One request's ids, and what ended them; one entry at least."""
        request, found = self.batch[i], list[Drawn]()
        gaps = None if queued.gaps is None else queued.gaps.tolist()
        for j, token in enumerate(step.ids[i]):
            if token == ENDED and j > 0:
                break
            row = i * queued.num_rows + j
            found.append(
                Drawn(
                    max(token, -1),
                    token != NOT_FINITE,
                    step.failure,
                    token == ENDED,
                    logprob_of(queued.logprobs, row, token, request.params.logprobs),
                    None if gaps is None else gaps[row],
                )
            )
        return found

    def _failure(self, queued: _Queued) -> str | None:
        """Of the step whose results were just read."""
        if self._words is None or self._health is None:
            return None
        failure = self._health.failure(self._words.read(queued.place))
        self._failed = self._failed or failure is not None
        return failure
