"""The decode loop: queues steps of a batch of requests, and reads what they drew one step late.

A step is two calls, `decode.compute` and `decode.draw`: replays of graphs on a GPU, the functions
themselves on a CPU. The device carries the batch from step to step, so the host waits for nothing
before it queues the next one. It writes the batch anew (`compose`) when another request joins or
one leaves, with nothing queued.

A batch with a request that needs the host at every step (a grammar's mask, log-probabilities, the
gaps of a record) is `attended`: no step is queued before the last one is read, and the host does
its part between `compute` and `draw` or after it.

Which requests run, and what becomes of a drawn id, is for `scheduler.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nanok3.decode import (
    ENDED,
    FLOATS,
    NOT_FINITE,
    STOP_WIDTH,
    DecodeState,
    StateMemory,
    compute,
    draw,
    first,
)
from nanok3.graph import Health, Readback, Run
from nanok3.request import Request, TokenLogprob
from nanok3.sampling import Logprobs, SamplingParams, SamplingRows, logprobs_of, rows_of
from nanok3.step import Step

PLACES = 2  # results in host memory: one is read while the next one comes
VARIANTS = [(sort, counts) for sort in (False, True) for counts in (False, True)]


@dataclass(frozen=True)
class Drawn:
    """What one step gave one request."""

    token_id: int  # -1 where no id is left to draw
    finite: bool  # whether all logits of the row are
    failure: str | None  # why nothing of this step may be used, if the device says so
    ended: bool  # the row had ended on the device before this step: nothing was computed
    logprob: TokenLogprob | None  # if the request asks for it
    gap: float | None  # best logit less second best, if the request keeps gaps


@dataclass(frozen=True)
class _Queued:
    place: int  # in the readback
    logprobs: Logprobs | None
    gaps: Tensor | None  # [R]


class DecodeLoop:
    """One batch at a time, with what its steps read and write on the device."""

    def __init__(
        self,
        memory: StateMemory,
        forward: Callable[[Step], None],
        sizes: Sequence[int],
        record: Callable[[Run], Run],
        runs_ahead: bool,
        health: Health | None = None,
    ) -> None:
        """forward: the model, from a step to the logits of the state. sizes: numbers of rows that a
        step may have. record: makes of a call what is run instead, such as its graph's replay.
        health: of what `forward` runs, if it can fail.
        """
        self.runs_ahead = runs_ahead
        self.batch: list[Request] = []
        self._memory = memory
        self._queued: deque[_Queued] = deque()
        self._num_steps = 0
        self._attended = False
        self._readback = Readback(memory.state.result, PLACES)
        self._health = health
        self._words = Readback(health.words, PLACES) if health else None
        self._failed = False  # since the last batch began
        self._compute: dict[int, Run] = {}
        self._draw: dict[tuple[int, bool, bool], Run] = {}
        with torch.inference_mode():
            for size in sorted(sizes, reverse=True):  # the largest first: its memory serves all
                views = {v: first(memory.state, size, *v) for v in VARIANTS}
                self._compute[size] = record(partial(compute, views[False, False], forward))
                for variant, view in views.items():
                    self._draw[size, *variant] = record(partial(draw, view))

    @property
    def state(self) -> DecodeState:
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

    def compose(self, requests: Sequence[Request]) -> None:
        """From now on a step has one row of each of these, which have one pending id each."""
        assert not self._queued and not self.batch, "the last batch is not dissolved"
        self._attended = any(needs_host(r) for r in requests)
        options = rows_of([params_of(r) for r in requests], "cpu")
        self._size = min(size for size in self._compute if size >= len(requests))
        self._fill(requests, options)
        variant = (options.uses_sort, options.uses_counts)
        self._draw_now = self._draw[self._size, *variant]
        if options.stop_ids.shape[1] > STOP_WIDTH:
            self._draw_now = partial(draw, self._with_wide_stops(options))
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
        self.batch = []

    def queue(self) -> None:
        """One more step of the batch. Nothing here waits, unless the batch is attended."""
        assert len(self._queued) < PLACES, "a result would be lost"
        for request in self.batch:
            request.in_flight = True
        logprobs, gaps, num_rows = None, None, len(self.batch)
        with torch.inference_mode():
            self._compute[self._size]()
            logits = self.state.logits[:num_rows]
            if self._attended:
                forbid(self.batch, logits)
            self._draw_now()
            if self._attended:
                logprobs, gaps = extras(self.batch, logits, self.state.result[:num_rows])
            place = self._num_steps % PLACES
            if self._words is not None:  # before the results, whose event then holds for both
                self._words.copy(place)
            self._readback.copy(place)
        self._num_steps += 1
        self._queued.append(_Queued(place, logprobs, gaps))
        for request in self.batch:
            request.in_flight = False

    def read(self) -> list[tuple[Request, Drawn]]:
        """What the oldest queued step gave; waits for that step. Its requests are in flight until
        the caller has dealt with them; one that was in flight before gets nothing."""
        queued = self._queued[0]
        results = self._readback.read(queued.place)  # the only wait for the device
        failure = self._failure(queued.place)
        rows = [(i, r) for i, r in enumerate(self.batch) if not r.in_flight]
        for _, request in rows:
            request.in_flight = True
        self._queued.popleft()
        gaps = None if queued.gaps is None else queued.gaps.tolist()
        found = []
        for i, request in rows:
            result, num_top = results[i], request.params.logprobs
            ended = result == ENDED
            request.num_cached += not ended
            drawn = Drawn(
                max(result, -1),
                result != NOT_FINITE,
                failure,
                ended,
                logprob_of(queued.logprobs, i, result, num_top),
                None if gaps is None else gaps[i],
            )
            found.append((request, drawn))
        return found

    def _failure(self, place: int) -> str | None:
        """Of the step whose results were just read."""
        if self._words is None or self._health is None:
            return None
        failure = self._health.failure(self._words.read(place))
        self._failed = self._failed or failure is not None
        return failure

    def settle(self) -> None:
        """After the ids of a step were handed out: nothing, for the caches moved with the step."""

    def num_ahead(self, request: Request) -> int:
        """Queued steps that the request has a row in."""
        return self.num_queued if request in self.batch else 0

    # ---- inside compose ----

    def _fill(self, requests: Sequence[Request], options: SamplingRows) -> None:
        """The mirror's small fields, from the requests as the host knows them."""
        self._memory.clear()
        host, size = self._memory.host, self.state.step.block_size
        for i, r in enumerate(requests):
            assert r.slot is not None and r.num_pending == 1
            host["input_ids"][i] = r.ids[-1]
            host["positions"][i] = r.num_cached
            block = r.blocks[r.num_cached // size]
            host["slot_mapping"][i] = block * size + r.num_cached % size
            host["state_slots"][i] = r.slot
            host["block_table"][i, : len(r.blocks)] = torch.tensor(r.blocks)
            host["num_output"][i] = r.num_output
            host["max_output"][i] = r.max_tokens
        for name in (*FLOATS, "top_k", "seeds", "min_tokens"):
            host[name][: len(requests)] = getattr(options, name)
        num_rows, width = options.stop_ids.shape
        if width <= STOP_WIDTH:
            host["stop_ids"][:num_rows, :width] = options.stop_ids

    def _with_wide_stops(self, options: SamplingRows) -> DecodeState:
        """The state with stop ids in memory of their own: such a batch draws outside a graph."""
        state = first(self.state, self._size, options.uses_sort, options.uses_counts)
        num_rows, width = options.stop_ids.shape
        padding = torch.full((self._size - num_rows, width), -1)
        stop_ids = torch.cat([options.stop_ids, padding]).to(state.logits.device)
        return replace(state, options=replace(state.options, stop_ids=stop_ids))


def count_ids(requests: Sequence[Request], counts: Tensor, prompt_seen: Tensor) -> None:
    """What the penalties count, of the ids so far: rows of counts and prompt_seen [R, V]."""
    vocab = counts.shape[1]
    for i, r in enumerate(requests):
        output = torch.tensor(r.ids[r.num_prompt :], dtype=torch.int64)
        seen = torch.zeros(vocab, dtype=torch.bool)
        seen[r.ids[: r.num_prompt]] = True
        counts[i].copy_(torch.bincount(output, minlength=vocab))
        prompt_seen[i].copy_(seen)


# ---- what an attended batch needs ----


def forbid(batch: Sequence[Request], logits: Tensor, num_rows: int = 1) -> None:
    """-inf in `logits` [R * Q, V] for what a request's grammar leaves out, of its first row, for it
    has no other; other rows stay."""
    for i, request in enumerate(batch):
        mask = request.grammar.mask() if request.grammar is not None else None
        if mask is not None:
            logits[i * num_rows].masked_fill_(~mask.to(logits.device), -torch.inf)


def extras(
    batch: Sequence[Request], logits: Tensor, results: Tensor
) -> tuple[Logprobs | None, Tensor | None]:
    """Log-probabilities and gaps of all rows [T, V], results [T], if any request asks for them."""
    wanted = [r.params.logprobs for r in batch if r.params.logprobs is not None]
    logprobs = gaps = None
    if wanted:
        logprobs = logprobs_of(logits, results.clamp(min=-1), max(wanted))
    if any(r.gaps is not None for r in batch):
        best = logits.topk(2).values  # [T, 2]
        gaps = best[:, 0] - best[:, 1]
    return logprobs, gaps


def params_of(request: Request) -> SamplingParams:
    """With all ids that end the request, which the device has to know."""
    return replace(request.params, stop_token_ids=tuple(sorted(request.stop_ids)))


def needs_host(request: Request) -> bool:
    attended = (request.grammar, request.gaps, request.params.logprobs)
    return any(need is not None for need in attended)


def logprob_of(
    logprobs: Logprobs | None, row: int, token_id: int, num_top: int | None
) -> TokenLogprob | None:
    """The row's record, with as many of the likeliest ids as its request asks for."""
    if logprobs is None or num_top is None:
        return None
    top_ids = logprobs.top_ids[row, :num_top].tolist()
    pairs = zip(top_ids, logprobs.top[row, :num_top].tolist(), strict=True)
    top = tuple(pair for pair in pairs if pair[1] > -torch.inf)  # not what a grammar forbade
    return TokenLogprob(token_id, float(logprobs.chosen[row]), top)
