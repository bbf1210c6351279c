"""Which requests run: admission, one chunk of one prompt a step, decode steps, ends and snapshots.

On a GPU decode runs one step ahead: a step of the engine queues step n + 1 of the device and then
reads the ids of step n. So the host learns of an end one step late, and what the device did in that
step must do no harm:

- At a stop id and at the last allowed id the device ends the row itself (`decode.py`). Its caches
  stay at the end of the reply, as if it had been alone.
- What the host alone decides (a stop string, a cancel, text that fails) finds the row one id
  further. That id is dropped. What the caches then hold is every id of the request, one more than
  otherwise, and the snapshot says so. With drafts the caches move one step later than the ids
  (`spec_loop.py`), but by a whole block: where they have gone past the reply, nothing is kept.

Before a request's slot and blocks go back, all queued steps are read (`_drain`).

A prompt leaves snapshots at its marks (`reuse.py`) and at its end, and a request one at the end of
its reply. Nobody goes on from what a prompt left before a finite row of logits has vouched for it.
"""

from __future__ import annotations

from collections import deque

from nanok3.cache import TRASH, CacheManager
from nanok3.loop import Drawn
from nanok3.request import Request, describe
from nanok3.reuse import marks, page_keys
from nanok3.runner import Runner


class Scheduler:
    """The requests that wait and run, over one runner."""

    def __init__(self, runner: Runner) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._runner = runner
        self._loop = runner.loop
        self._manager: CacheManager = runner.manager
        self._prefilling: Request | None = None  # whose prompt has begun, one at a time
        self._marks: set[int] = set()  # of that prompt

    def step(self) -> None:
        """Admit, run one chunk of one prompt, one decode step of every request that decodes."""
        for request in [r for r in self.running if r.in_flight]:  # between two steps for ever
            request.finish("error", "the step that this request was in was interrupted")
        if any(r.done for r in self.running):
            self._drain()
        self._admit()
        if self._runner.settings.debug:
            self._manager.audit([(r.slot or TRASH, r.blocks) for r in self.running])
        prefilling = next((r for r in self.running if r.num_pending > 1), None)
        if prefilling is not None:
            self._prefill(prefilling)
        self._decode()

    def cancel(self, request: Request) -> None:
        """Ends a request now; its partial output stays readable. Nothing happens if it is done."""
        if request.done:
            return
        request.finish("cancelled")
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self._loop.batch:
            self._drain()
        else:
            self._retire_done()

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            most = request.num_prompt + request.max_tokens
            taken = self._manager.admit(request.ids, most, self._keys(request))
            if taken is None:
                assert self.running, "submit refuses what an empty cache cannot hold"
                return
            request.slot, request.blocks, request.num_cached = taken
            request.num_reused = request.num_cached
            self.running.append(self.waiting.popleft())

    def _prefill(self, request: Request) -> None:
        """A chunk of its prompt, in pieces that end at marks."""
        left = self._runner.settings.prefill_chunk
        if request is not self._prefilling:
            if self._loop.num_queued:  # what is not read yet may vouch for what this one shares
                self._drain()
            self._prefilling, self._marks = request, self._marks_of(request)
        while left and request.num_pending > 1:
            self._catch_up_with_others(request)
            begin = request.num_cached
            ahead = [place - begin for place in self._marks if place > begin]
            count = min([request.num_pending - 1, left, *ahead])
            if count:
                self._compute(request, count)
                left -= count
            if request.done:  # it failed
                return
            if request.num_pending == 1 or request.num_cached in self._marks:
                self._keep(request, vouched=False)

    def _catch_up_with_others(self, request: Request) -> None:
        """Takes over what others have computed of its prompt since it came."""
        assert request.slot is not None
        before, keys = request.num_cached, self._keys(request)
        request.in_flight = True  # should it be interrupted half way
        request.num_cached = self._manager.advance(
            request.ids, keys, request.slot, request.blocks, before
        )
        request.num_reused += request.num_cached - before
        request.in_flight = False

    def _compute(self, request: Request, count: int) -> None:
        """Ids of a prompt. What goes wrong here ends this request and no other."""
        try:
            self._runner.prefill(request, count, with_logits=False)
        except Exception as error:
            if self._runner.settings.gpus > 1:  # the other ranks have not failed
                raise
            request.finish("error", describe(error))
            self._retire_done()

    def _marks_of(self, request: Request) -> set[int]:
        settings = self._runner.settings
        beside = [self._keys(r) for r in (*self.waiting, *self.running) if r is not request]
        return marks(
            self._keys(request),
            request.num_prompt,
            request.num_cached,
            beside + [s.keys for s in self._manager.snapshots],
            block_size=settings.block_size,
            chunk=settings.prefill_chunk,
            most=settings.num_snapshots // 2,
        )

    def _keys(self, request: Request) -> list[int]:
        if request.page_keys is None:
            prompt = request.ids[: request.num_prompt]
            request.page_keys = page_keys(prompt, self._runner.settings.block_size)
        return request.page_keys

    def _decode(self) -> None:
        """Queues a step, and hands out what was drawn by all but the steps that may stay queued."""
        loop = self._loop
        self._catch_up()  # a step that was interrupted may have left one too many
        rows = self._rows()
        if rows != loop.batch:
            self._drain()
            rows = self._rows()  # without those who ended
            if rows:
                loop.compose(rows)
        if rows:
            loop.queue()
        self._catch_up()
        if any(r.done for r in loop.batch):
            self._drain()

    def _catch_up(self) -> None:
        while self._loop.num_queued > self._loop.most_queued:
            self._hand_out()

    def _rows(self) -> list[Request]:
        """Who has a row in the next step. Not those whose last allowed id is queued already."""
        return [
            r
            for r in self.running
            if r.num_pending == 1 and r.num_output + self._loop.num_ahead(r) < r.max_tokens
        ]

    def _drain(self) -> None:
        """Reads all queued steps, and lets go of the requests that are done."""
        while self._loop.num_queued:
            self._hand_out()
        self._loop.dissolve()
        self._retire_done()

    def _hand_out(self) -> None:
        """The ids of the oldest queued step."""
        for request, drawn in self._loop.read():
            if drawn.failure is not None:  # in flight: its caches hold anything
                request.finish("error", drawn.failure)
                continue
            if not drawn.finite:  # it stays in flight: nobody may go on from these caches
                request.finish("error", "the model's logits are not finite")
                self._manager.forget(request.ids)
                continue
            if request.num_output == 0 and request.slot is not None:
                self._manager.vouch(request.slot)
            if not request.done:
                _take(request, drawn)
            request.in_flight = False
        self._loop.settle()

    def _retire_done(self) -> None:
        for request in [r for r in self.running if r.done]:
            self.running.remove(request)
            # Only what a finite row of logits has vouched for: not the half of a prompt.
            vouched = not request.in_flight and request.num_pending in (0, 1)
            if request.finish_reason != "error" and vouched:
                self._keep(request, vouched=True)
            assert request.slot is not None
            self._manager.release(request.slot, request.blocks)
            request.slot, request.blocks = None, []

    def _keep(self, request: Request, vouched: bool) -> None:
        """A snapshot to go on from, of exactly what is cached."""
        assert request.slot is not None
        ids = request.ids[: request.num_cached]
        self._manager.snapshot(ids, request.slot, request.blocks, vouched)


def _take(request: Request, drawn: Drawn) -> None:
    """The id that a step drew for a request that goes on."""
    assert not drawn.ended, "the device ended a row that the host has not ended"
    if drawn.token_id < 0:
        request.finish("error", "min_tokens and the stop ids leave no id to draw")
        return
    if drawn.logprob is not None:
        request.logprobs.append(drawn.logprob)
    if request.gaps is not None and drawn.gap is not None:
        request.gaps.append(drawn.gap)
    request.take(drawn.token_id)
