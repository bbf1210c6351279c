"""Runs the model for requests: prompts in chunks, and the decode loop over the same caches.

Owns the weights, the buffers and the caches' tensors. Which requests run, and what becomes of a
drawn id, is for `scheduler.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import CacheManager, allocate_cache
from nanok3.comm.exchange import Exchange
from nanok3.config import WHOLE, EngineConfig, ModelConfig, Shard
from nanok3.decode import StateMemory, rows_between
from nanok3.graph import Capture, buckets
from nanok3.loop import DecodeLoop
from nanok3.ops import DECODE, PREFILL, REFERENCE, VERIFY, Ops, between_ranks
from nanok3.request import Request
from nanok3.spec.config import DraftConfig
from nanok3.spec.draft_weights import DraftWeights
from nanok3.spec.target import commit_on_cpu
from nanok3.spec_loop import SpecLoop
from nanok3.speculation import Passes, as_it_is, drafts_of, make_drafter, make_spec_loop, poison
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
        prefill = None
        if device != "cpu":
            from nanok3.prefill_ops import Prefill  # here, for these bring CuTe DSL

            prefill = Prefill(config, WHOLE, settings.prefill_chunk, device)
        self._drafter, num_drafts = None, 0
        if draft is not None and settings.num_drafts != 0:
            num_drafts = drafts_of(settings, draft[0])
            many_rows = None if prefill is None else prefill.linear
            self._drafter = make_drafter(
                draft, settings, num_blocks + 1, dtype, many_rows, exchange
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
        self._decode_ops = self._verify_ops = one_row
        if not settings.strict:
            self._decode_ops = between_ranks(DECODE, exchange)
            self._verify_ops = between_ranks(VERIFY, exchange)
        max_blocks = min(num_blocks, -(-config.max_position_embeddings // size))
        self.reading = "the reference ops"  # of decode steps, for people
        passes = Passes(self._run_on_cpu, self._buffers, commit_on_cpu(settings.strict), None)
        if prefill is not None:
            from nanok3.captured import gpu_decode

            num_queries = num_drafts + 1
            decode = gpu_decode(
                config, weights, cache, settings, max_blocks, num_queries, self._taps
            )
            passes = Passes(decode.forward, decode.buffers, decode.commit, decode.health)
            self.reading = decode.reading
            self._prefill_ops = self._one_row_ops = prefill.record(decode.chain)
        elif self._drafter is not None:
            most = settings.max_num_reqs * (num_drafts + 1)
            buffers = allocate_buffers(
                config, most, most, dtype, device, shard, num_taps=len(self._taps)
            )
            passes = replace(passes, buffers=buffers)
        if settings.debug:
            poison(vars(self._buffers).values())
        self.loop: DecodeLoop | SpecLoop = (
            self._decode_loop(passes, max_blocks)
            if self._drafter is None
            else make_spec_loop(passes, self._drafter, cache, settings, max_blocks)
        )

    def _decode_loop(self, passes: Passes, max_blocks: int) -> DecodeLoop:
        """Of captured graphs on a GPU; on a CPU of the same functions, read at once."""
        settings, device, buffers = self.settings, self.settings.device, passes.buffers
        most = settings.max_num_reqs
        sizes, record = list(range(1, most + 1)), as_it_is
        if device != "cpu":
            sizes, record = buckets(most), Capture()
        memory = StateMemory(max_blocks, settings.block_size, buffers.logits[:most])

        def forward(step: Step) -> None:
            """All rows at once, or in strict mode one by one."""
            height = 1 if settings.strict else len(step.input_ids)
            for begin in range(0, len(step.input_ids), height):
                end = begin + height
                part = rows_between(step, begin, end)
                own = {name: getattr(buffers, name)[begin:end] for name in LOGITS}
                buf = replace(rows(buffers, height, height), **own)
                passes.forward(part, buf)

        return DecodeLoop(memory, forward, sizes, record, device != "cpu", passes.health)

    def _run_on_cpu(self, step: Step, buf: Buffers) -> None:
        """With only the columns of the block table that are needed; a graph cannot know them."""
        columns = max(1, self.manager.blocks_for(int(step.positions.max()) + 1))
        step = replace(step, block_table=step.block_table[:, :columns])
        cache = self.manager.cache
        ops = self._decode_ops if step.records is None else self._verify_ops
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
