"""Runs the model for requests: pending ids into a `Step`, through `model.forward`, drawn ids out.

Owns the weights, the buffers and the caches' tensors. Which requests run, and what becomes of a
drawn id, is for `engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import CacheManager, allocate_cache
from nanok3.config import EngineConfig, ModelConfig
from nanok3.graph import Row
from nanok3.ops import DECODE, PREFILL, PREFILL_CUDA, REFERENCE, Ops
from nanok3.request import Request, TokenLogprob
from nanok3.sampling import Logprobs, rows_of, sample
from nanok3.step import Buffers, Step, allocate_buffers, rows
from nanok3.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEFAULT_CONTEXT = 4096  # tokens a request that the default cache has room for


@dataclass(frozen=True)
class Drawn:
    """What one row of a decode step gave."""

    token_id: int  # -1 where no id is left to draw
    finite: bool  # whether all logits of the row are
    logprob: TokenLogprob | None  # if the request asks for it
    gap: float | None  # best logit less second best, if the request keeps gaps


class Runner:
    def __init__(self, config: ModelConfig, weights: Weights, settings: EngineConfig) -> None:
        self.config = config
        self.settings = settings
        self.weights = weights
        dtype, device, size = DTYPES[settings.dtype], settings.device, settings.block_size
        per_request = -(-min(DEFAULT_CONTEXT, config.max_position_embeddings) // size)
        num_blocks = settings.num_blocks or settings.max_num_reqs * per_request
        cache = allocate_cache(  # one slot and one block more than anyone gets: trash
            config, settings.max_num_reqs + 1, num_blocks + 1, size, dtype, device
        )
        self.manager = CacheManager(cache, size, settings.num_snapshots, settings.debug)
        max_rows = max(settings.max_num_reqs, settings.prefill_chunk)
        self._buffers = allocate_buffers(config, max_rows, max_rows, dtype, device)
        self._prefill_ops = PREFILL
        self._captured: Callable[[list[Row]], Tensor] | None = None
        if device != "cpu":
            from nanok3.captured import CapturedDecode  # here, for it brings CuTe DSL

            self._prefill_ops = PREFILL_CUDA
            max_blocks = min(num_blocks, -(-config.max_position_embeddings // size))
            captured = CapturedDecode(config, weights, cache, settings, max_blocks)
            self._captured = captured.logits
        if settings.debug:  # an op that reads what nobody wrote shows up as NaN
            for tensor in vars(self._buffers).values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def prefill(self, request: Request, count: int, with_logits: bool) -> Tensor:
        """The next `count` pending ids through the model -> their logits, if wanted, [count, V]."""
        count = min(count, self.settings.prefill_chunk)
        pieces = [1] * count if self.settings.strict else [count]
        logits = []
        for piece in pieces:
            ops = self._prefill_ops if piece > 1 else REFERENCE
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
            model.forward(self.config, self.weights, self.manager.cache, step, buf, ops)
        return buf

    def decode(self, requests: list[Request]) -> list[Drawn]:
        """One row of each request, and the id drawn after it."""
        logits = self._decode_logits(requests)
        is_finite = logits.isfinite().all(-1)  # [R] bool, before a grammar writes -inf
        self._forbid(logits, requests)
        for request in requests:
            request.num_cached += 1
        params = [r.params for r in requests]
        options = rows_of(params, self.settings.device)
        positions = torch.tensor([len(r.ids) for r in requests], device=self.settings.device)
        counts = seen = None
        if options.uses_counts:
            counts, seen = self._counts(requests)
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        with torch.inference_mode():
            sampled = sample(
                logits, options, positions, counts, seen, max(wanted) if wanted else None
            )
        ids, finite = sampled.ids.tolist(), is_finite.tolist()  # a GPU is waited for here
        gaps: list[float | None] = [None] * len(requests)
        if any(r.gaps is not None for r in requests):
            best = logits.topk(2).values  # [R, 2]
            gaps = (best[:, 0] - best[:, 1]).tolist()
        return [
            Drawn(ids[i], finite[i], logprob_of(sampled.logprobs, i, ids[i], p.logprobs), gaps[i])
            for i, p in enumerate(params)
        ]

    def _decode_logits(self, requests: list[Request]) -> Tensor:
        """[R, V] after one pending id of each request, valid until the next pass."""
        if self._captured is None:
            ops = REFERENCE if self.settings.strict else DECODE
            return self._forward(requests, 1, len(requests), ops).logits
        size = self.settings.block_size
        decode_rows = []
        for r in requests:
            assert r.slot is not None
            r.in_flight = True
            slot = r.blocks[r.num_cached // size] * size + r.num_cached % size
            decode_rows.append(Row(r.ids[r.num_cached], r.num_cached, slot, r.slot, r.blocks))
        return self._captured(decode_rows)

    def _forbid(self, logits: Tensor, requests: list[Request]) -> None:
        """-inf in `logits` [R, V] for what a request's grammar leaves out; other rows stay."""
        for i, request in enumerate(requests):
            mask = request.grammar.mask() if request.grammar is not None else None
            if mask is not None:
                with torch.inference_mode():
                    logits[i].masked_fill_(~mask.to(logits.device), -torch.inf)

    def _counts(self, requests: list[Request]) -> tuple[Tensor, Tensor]:
        """Output counts [R, V] i64 and whether an id stands in the prompt [R, V]."""
        vocab, device = self.config.vocab_size, self.settings.device
        counts = torch.zeros(len(requests), vocab, dtype=torch.int64, device=device)
        seen = torch.zeros(len(requests), vocab, dtype=torch.bool, device=device)
        for i, r in enumerate(requests):
            output = torch.tensor(r.ids[r.num_prompt :], dtype=torch.int64, device=device)
            counts[i] = torch.bincount(output, minlength=vocab)
            seen[i, r.ids[: r.num_prompt]] = True
        return counts, seen


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
