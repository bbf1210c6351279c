"""What decoding with drafts adds to an engine: made for a runner, counted for a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from nanok3.cache import Cache, allocate_cache
from nanok3.comm.exchange import Exchange
from nanok3.config import STEP_ROWS, WHOLE, EngineConfig, ModelConfig, Shard
from nanok3.graph import Capture, Health, Run, buckets
from nanok3.loop import PLACES
from nanok3.packing import Packed
from nanok3.reference.embed import EmbedWeights
from nanok3.reference.kda_records import Commit, allocate_records
from nanok3.spec.config import DraftConfig
from nanok3.spec.draft import (
    REFERENCE,
    DraftOps,
    allocate_draft_buffers,
    allocate_draft_cache,
    between_ranks,
)
from nanok3.spec.draft_weights import DraftWeights, build_draft, draft_table
from nanok3.spec.drafter import Drafter
from nanok3.spec.target import Target
from nanok3.spec_decode import SpecMemory
from nanok3.spec_loop import SpecLoop
from nanok3.spec_steps import SpecSteps
from nanok3.step import Buffers, Step, allocate_buffers, without_parts
from nanok3.workspaces import decode_spaces, spaces_bytes

# Bytes that a step takes of the graphs' pool for each id of a row: scores, masses, laws.
ROW_BYTES = 96


def drafts_of(settings: EngineConfig, c: DraftConfig) -> int:
    """K."""
    most = c.block_size
    return most if settings.num_drafts is None else min(settings.num_drafts, most)


def step_problems(settings: EngineConfig, c: DraftConfig) -> list[str]:
    """Reasons, one a line, why steps with this draft cannot run; empty if they can."""
    num_rows, most = drafts_of(settings, c) + 1, settings.max_num_reqs
    if settings.device == "cpu" or most * num_rows <= STEP_ROWS:
        return []
    return [
        f"{num_rows} rows of each of {most} requests are more than the {STEP_ROWS} that a step on "
        f"a GPU takes; serve at most {STEP_ROWS // num_rows} requests at once (--requests)"
    ]


def context_rows(settings: EngineConfig, c: DraftConfig) -> int:
    """Rows whose taps a draft takes at a time, at most."""
    return max(settings.prefill_chunk, settings.max_num_reqs * (drafts_of(settings, c) + 1))


def make_drafter(
    draft: tuple[DraftConfig, DraftWeights],
    settings: EngineConfig,
    num_blocks: int,
    dtype: torch.dtype,
    many_rows: Callable[..., None] | None,
    exchange: Exchange | None,
) -> Drafter:
    """many_rows: on a GPU, `linear` for the rows of prompts. Packs the weights there. exchange: of
    a rank with peers."""
    config, weights = draft
    ops: DraftOps = REFERENCE
    if many_rows is not None:
        from nanok3.draft_ops import draft_kernels  # here, for it brings CuTe DSL
        from nanok3.draft_packing import pack_draft

        ops, weights = draft_kernels(many_rows), pack_draft(weights)
    if not config.owns_vocab:
        ops = between_ranks(ops, exchange)
    return Drafter(
        config,
        weights,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_num_reqs=settings.max_num_reqs,
        max_context_rows=context_rows(settings, config),
        dtype=dtype,
        device=settings.device,
        strict=settings.strict,
        ops=ops,
    )


@dataclass(frozen=True)
class Passes:
    """The target's part: the model over rows with taps, and the commit of recorded ones."""

    forward: Callable[[Step, Buffers], None]
    buffers: Buffers  # of max_num_reqs * (K + 1) rows
    commit: Commit
    health: Health | None


def make_spec_loop(
    passes: Passes, drafter: Drafter, cache: Cache, settings: EngineConfig, max_blocks: int
) -> SpecLoop:
    """Of captured graphs on a GPU; on a CPU of the same functions, read at once."""
    most, on_cpu = settings.max_num_reqs, settings.device == "cpu"
    num_drafts = drafts_of(settings, drafter.config)
    layers, slots = cache.state.shape[:2]
    records = allocate_records(layers, slots, num_drafts + 1, cache.conv_state, cache.state)
    if settings.debug:
        poison((*vars(passes.buffers).values(), *vars(records).values()))
    target = Target(
        passes.forward,
        passes.buffers,
        cache,
        records,
        passes.commit,
        strict=settings.strict,
        on_cpu=on_cpu,
    )
    memory = SpecMemory(
        max_blocks, settings.block_size, most, num_drafts, passes.buffers.logits, records
    )
    if on_cpu:
        return SpecLoop(SpecSteps(memory, target, drafter, settings, as_it_is), False)
    steps = SpecSteps(memory, target, drafter, settings, Capture(), buckets(most))
    return SpecLoop(steps, True, passes.health)


def poison(tensors: Iterable[Any]) -> None:
    """An op that reads what nobody wrote shows up as NaN."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def as_it_is(run: Run) -> Run:
    """A CPU has no graphs."""
    return run


# ---- for a plan ----


def draft_bytes(
    config: ModelConfig,
    c: DraftConfig,
    settings: EngineConfig,
    num_blocks: int,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
) -> tuple[int, int, int, int]:
    """Weights, cache, records, and buffers with all that a step leaves for the next: what a draft
    adds to an engine of so many blocks, beside the taps of prompts."""
    num_rows, on_gpu = drafts_of(settings, c) + 1, settings.device != "cpu"
    most, size = settings.max_num_reqs, settings.block_size
    pages = allocate_draft_cache(c, num_blocks + 1, size, dtype, "meta")
    own = allocate_draft_buffers(c, context_rows(settings, c), most * c.block_size, dtype, "meta")
    cache = allocate_cache(config, most + 1, 1, size, dtype, "meta", shard)
    layers, slots = cache.state.shape[:2]
    records = allocate_records(layers, slots, num_rows, cache.conv_state, cache.state)

    def buffers(rows: int, num_taps: int) -> dict[str, Any]:
        made = allocate_buffers(config, rows, rows, dtype, "meta", shard, num_taps=num_taps)
        return without_parts(made)

    target = buffers(most * num_rows, len(c.taps))
    longest = min(num_blocks, -(-config.max_position_embeddings // size))
    state = SpecMemory(longest, size, most, num_rows - 1, target["logits"], records)
    taken = tensor_bytes((own, target, state.state))
    if on_gpu:  # in the place of what decoding without drafts has
        spaces = decode_spaces(config, shard, most * num_rows, num_queries=num_rows)
        taken += spaces_bytes(spaces) - spaces_bytes(decode_spaces(config, shard, most))
        taken -= tensor_bytes(buffers(most, 0))
        taken += ROW_BYTES * most * num_rows * config.vocab_size
        taken += attention_bytes(c, most, longest * size)
    else:  # on a GPU these are the host's
        taken += state.mirror.memory.nbytes + PLACES * state.state.result.nbytes
    return weight_bytes(c, dtype, on_gpu), pages.nbytes, tensor_bytes(records), taken


def weight_bytes(c: DraftConfig, dtype: torch.dtype, on_gpu: bool) -> int:
    made = {f.name: torch.empty(f.shape, dtype=dtype, device="meta") for f in draft_table(c)}
    if not on_gpu:
        return tensor_bytes(made)
    from nanok3.draft_packing import pack_draft

    none = torch.empty(0, 32, dtype=dtype, device="meta")
    shared: Any = Packed(none, None)  # type: ignore[arg-type]
    packed = pack_draft(build_draft(c, made.__getitem__, EmbedWeights(none, 0), shared))
    tables = tuple(layer.attn.rope for layer in packed.layers)
    return tensor_bytes(packed) - tensor_bytes(tables)


def attention_bytes(c: DraftConfig, num_reqs: int, context: int) -> int:
    """What the torch form of a draft's attention takes for a while, in float32."""
    num_rows, heads = c.block_size, c.attention.num_heads
    own = context + num_rows
    return 4 * num_reqs * own * (3 * c.attention.cache_width + 3 * heads * num_rows)


def tensor_bytes(value: Any) -> int:
    """Of all storages that records, tuples and dictionaries hold, each once."""
    storages: dict[int, int] = {}

    def walk(part: Any) -> None:
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        elif isinstance(part, dict):
            walk(tuple(part.values()))
        elif isinstance(part, tuple):
            for item in part:
                walk(item)
        elif is_dataclass(part) and not isinstance(part, type):
            walk(tuple(getattr(part, f.name) for f in fields(part)))

    walk(value)
    return sum(storages.values())
