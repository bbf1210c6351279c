"""Runs the model for requests: prompts in chunks, and the decode loop over the same caches.

Owns the weights, the buffers and the caches' tensors. Which requests run, and what becomes of a
drawn id, is for `scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache, CacheManager, allocate_cache
from nanok3.comm.exchange import Exchange
from nanok3.config import WHOLE, EngineConfig, ModelConfig, Shard
from nanok3.decode import StateMemory, rows_between
from nanok3.graph import Capture, Health, Run, buckets
from nanok3.loop import DecodeLoop
from nanok3.ops import DECODE, PREFILL, REFERENCE, VERIFY, Ops, between_ranks
from nanok3.reference.kda_records import allocate_records
from nanok3.request import Request
from nanok3.spec.config import DraftConfig
from nanok3.spec.draft_weights import DraftWeights
from nanok3.spec.drafter import Drafter
from nanok3.spec.target import Target
from nanok3.spec_decode import SpecMemory
from nanok3.spec_loop import SpecLoop
from nanok3.spec_steps import SpecSteps
from nanok3.step import LOGITS, Buffers, Step, allocate_buffers, rows
from nanok3.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEFAULT_CONTEXT = 4096  # tokens a request that the default cache has room for


class Runner:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        settings: EngineConfig,
        draft: tuple[DraftConfig, DraftWeights] | None = None,
        shard: Shard = WHOLE,
        exchange: Exchange | None = None,
    ) -> None:
        """weights: packed (`packing.py`) on a GPU, of the settings' dtype on a CPU."""
        self.config = config
        self.settings = settings
        self.weights = weights
        dtype, device, size = DTYPES[settings.dtype], settings.device, settings.block_size
        per_request = -(-min(DEFAULT_CONTEXT, config.max_position_embeddings) // size)
        num_blocks = settings.num_blocks or settings.max_num_reqs * per_request
        cache = allocate_cache(  # one slot and one block more than anyone gets: trash
            config, settings.max_num_reqs + 1, num_blocks + 1, size, dtype, device, shard
        )
        self._drafter = None
        if draft is not None and settings.num_drafts != 0:
            self._drafter = Drafter(
                *draft,
                num_blocks=num_blocks + 1,
                block_size=size,
                max_num_reqs=settings.max_num_reqs,
                max_context_rows=max(
                    settings.prefill_chunk, settings.max_num_reqs * (draft[0].block_size + 1)
                ),
                dtype=dtype,
                device=device,
                strict=settings.strict,
            )
        self.manager = CacheManager(
            cache,
            size,
            settings.num_snapshots,
            settings.debug,
            None if self._drafter is None else self._drafter.cache,
        )
        max_rows = max(settings.max_num_reqs, settings.prefill_chunk)
        self._taps = () if self._drafter is None else self._drafter.config.taps
        self._buffers = allocate_buffers(
            config, max_rows, max_rows, dtype, device, shard, num_taps=len(self._taps)
        )
        one_row = between_ranks(REFERENCE, exchange)
        self._prefill_ops, self._one_row_ops = between_ranks(PREFILL, exchange), one_row
        self._decode_ops = one_row if settings.strict else between_ranks(DECODE, exchange)
        max_blocks = min(num_blocks, -(-config.max_position_embeddings // size))
        self.reading = "the reference ops"  # of decode steps, for people
        health: Health | None = None
        buffers = self._buffers
        run: Callable[[Step, Buffers], None] = self._run_on_cpu
        if device != "cpu":
            from nanok3.captured import gpu_decode  # here, for these bring CuTe DSL
            from nanok3.prefill_ops import Prefill

            decode = gpu_decode(config, weights, cache, settings, max_blocks)
            buffers, run, health = decode.buffers, decode.forward, decode.health
            self.reading = decode.reading
            prefill = Prefill(config, WHOLE, settings.prefill_chunk, device)
            self._prefill_ops = self._one_row_ops = prefill.record(decode.chain)
        if settings.debug:
            poison(vars(self._buffers).values())
        memory = StateMemory(max_blocks, size, buffers.logits[: settings.max_num_reqs])
        self.loop: DecodeLoop | SpecLoop = (
            self._decode_loop(memory, buffers, run, health)
            if self._drafter is None
            else self._spec_loop(cache, self._drafter, max_blocks)
        )

    def _spec_loop(self, cache: Cache, drafter: Drafter, max_blocks: int) -> SpecLoop:
        settings, most, device = self.settings, drafter.config.block_size, self.settings.device
        num_drafts = min(settings.num_drafts or most, most)
        num_rows = settings.max_num_reqs * (num_drafts + 1)
        buffers = allocate_buffers(
            self.config,
            num_rows,
            num_rows,
            DTYPES[settings.dtype],
            device,
            num_taps=len(self._taps),
        )
        records = allocate_records(
            *cache.state.shape[:2],
            num_drafts + 1,
            cache.conv_state,
            cache.state,  # type: ignore[call-arg]
        )
        if settings.debug:
            poison((*vars(buffers).values(), *vars(records).values()))
        target = Target(
            self._run_on_cpu, buffers, cache, records, strict=settings.strict, on_cpu=True
        )
        memory = SpecMemory(
            max_blocks,
            settings.block_size,
            settings.max_num_reqs,
            num_drafts,
            buffers.logits,
            records,
        )
        steps = SpecSteps(memory, target, drafter, settings, _as_it_is)
        return SpecLoop(steps, False)

    def _decode_loop(
        self,
        memory: StateMemory,
        buffers: Buffers,
        run: Callable[[Step, Buffers], None],
        health: Health | None,
    ) -> DecodeLoop:
        """Of captured graphs on a GPU; on a CPU of the same functions, read at once."""
        settings, device = self.settings, self.settings.device
        most = settings.max_num_reqs
        sizes, record = list(range(1, most + 1)), _as_it_is
        if device != "cpu":
            sizes, record = buckets(most), Capture()

        def forward(step: Step) -> None:
            """All rows at once, or in strict mode one by one."""
            height = 1 if settings.strict else len(step.input_ids)
            for begin in range(0, len(step.input_ids), height):
                end = begin + height
                part = rows_between(step, begin, end)
                own = {name: getattr(buffers, name)[begin:end] for name in LOGITS}
                buf = replace(rows(buffers, height, height), **own)
                run(part, buf)

        return DecodeLoop(memory, forward, sizes, record, device != "cpu", health)

    def _run_on_cpu(self, step: Step, buf: Buffers) -> None:
        """With only the columns of the block table that are needed; a graph cannot know them."""
        columns = max(1, self.manager.blocks_for(int(step.positions.max()) + 1))
        step = replace(step, block_table=step.block_table[:, :columns])
        cache = self.manager.cache
        ops = self._decode_ops
        if step.records is not None and not self.settings.strict:
            ops = VERIFY
        model.forward(self.config, self.weights, cache, step, buf, ops, self._taps)

    def prefill(self, request: Request, count: int, with_logits: bool) -> Tensor:
        """The next `count` pending ids through the model -> their logits, if wanted, [count, V]."""
        count = min(count, self.settings.prefill_chunk)
        pieces = [1] * count if self.settings.strict else [count]
        logits = []
        for piece in pieces:
            ops = self._prefill_ops if piece > 1 else self._one_row_ops
            buf = self._forward([request], piece, piece if with_logits else 0, ops)
            if with_logits:
                logits.append(buf.logits.clone())
            request.num_cached += piece
            request.in_flight = False
        return torch.cat(logits) if with_logits else self._buffers.logits[:0]

    def _forward(
        self, requests: list[Request], num_rows: int, num_logit_rows: int, ops: Ops
    ) -> Buffers:
        """`num_rows` pending ids of each request through the model."""
        size, device = self.settings.block_size, self.settings.device
        positions = [r.num_cached + i for r in requests for i in range(num_rows)]
        owners = [r for r in requests for _ in range(num_rows)]
        columns = max(self.manager.blocks_for(r.num_cached + num_rows) for r in requests)

        def ints(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        step = Step(
            input_ids=ints([r.ids[p] for r, p in zip(owners, positions, strict=True)]),
            positions=ints(positions),
            slot_mapping=ints(
                [
                    r.blocks[p // size] * size + p % size
                    for r, p in zip(owners, positions, strict=True)
                ]
            ),
            block_table=ints([(r.blocks + [0] * columns)[:columns] for r in requests]),
            state_slots=ints([r.slot for r in requests]),
            logit_rows=ints(list(range(num_logit_rows))),
            block_size=size,
        )
        buf = rows(self._buffers, len(positions), num_logit_rows)
        for request in requests:
            request.in_flight = True
        with torch.inference_mode():
            model.forward(self.config, self.weights, self.manager.cache, step, buf, ops, self._taps)
        if self._drafter is not None:
            self._drafter.keep(buf.taps, step.positions, step.slot_mapping)
        return buf


def poison(tensors: Iterable[Any]) -> None:
    """An op that reads what nobody wrote shows up as NaN."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def _as_it_is(run: Run) -> Run:
    """A CPU has no graphs."""
    return run
