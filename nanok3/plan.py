"""What a rank of a model needs in memory, to the byte.

Weights, caches, buffers and workspaces come from their allocators without a device, so that a plan
is what gets allocated; what torch takes for a while is counted at its most. What the driver,
compiled kernels and captured graphs take outside of torch is no part of it but a reserve
(`device.SPARE_BYTES`). Not counted: the tensors that `Engine.logits` returns. Whether a GPU has
that much is for `capacity.py`. Knows no files of weights and needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from nanok3.cache import allocate_cache
from nanok3.config import MEGA_ROWS, EngineConfig, ModelConfig, Shard
from nanok3.decode import StateMemory
from nanok3.device import SPARE_BYTES
from nanok3.mega_sizes import mega_bytes
from nanok3.packing import Places, empty_head, empty_layer, tensors_of
from nanok3.runner import DEFAULT_CONTEXT, DTYPES
from nanok3.spec.config import DraftConfig
from nanok3.speculation import draft_bytes
from nanok3.step import allocate_buffers, without_parts
from nanok3.weight_table import Field, ends_table, layer_table
from nanok3.workspaces import (
    LIBRARY_BYTES,
    decode_spaces,
    prefill_spaces,
    spaces_bytes,
    temporary_bytes,
)

WEIGHTS = ("experts", "attention", "rest of MoE", "dense MLP", "embedding and head", "norms")
STATES, SNAPSHOTS, LATENTS, BUFFERS = "KDA states", "KDA snapshots", "latent pages", "buffers"
# On a GPU; graphs: what captured graphs hold of torch's memory.
DECODING, MEGA, GRAPHS, PREFILLING = (
    *("decode workspace", "persistent kernel", "graphs", "prefill workspace"),
)
DRAFT_WEIGHTS, DRAFT_CACHE, DRAFT_RECORDS, DRAFT_BUFFERS = (
    *("draft weights", "draft cache", "draft records", "draft buffers"),
)
CACHES = (STATES, SNAPSHOTS, LATENTS, DRAFT_CACHE)
SAMPLING_BYTES = 32  # of a request and an id: logits, probabilities, their order


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank; all ranks need the same."""

    size: int  # ranks
    settings: EngineConfig
    draft: DraftConfig | None
    num_blocks: int  # latent blocks that requests and snapshots may have
    nbytes: dict[str, int]  # by WEIGHTS and what follows them
    reserve: int  # what is kept free beside them

    @property
    def weight_bytes(self) -> int:
        return sum(self.nbytes[kind] for kind in WEIGHTS)

    @property
    def cache_bytes(self) -> int:
        return sum(self.nbytes.get(kind, 0) for kind in CACHES)

    @property
    def total_bytes(self) -> int:
        """What is allocated."""
        return sum(self.nbytes.values())

    @property
    def needed_bytes(self) -> int:
        """What has to be free before anything is."""
        return self.total_bytes + self.reserve


def make_plan(
    config: ModelConfig, shard: Shard, settings: EngineConfig, draft: DraftConfig | None = None
) -> Plan:
    """On a CPU experts are unpacked to the engine's dtype; on a GPU all is as kernels take it.

    draft: whole on every rank, since nothing splits it."""
    assert not (shard.problems(config) or settings.problems(config)), "the caller checks these"
    dtype, on_gpu = DTYPES[settings.dtype], settings.device != "cpu"
    draft = None if settings.num_drafts == 0 else draft
    counts = dict.fromkeys((*WEIGHTS, STATES, SNAPSHOTS, LATENTS, BUFFERS), 0)
    counts |= weight_bytes(config, shard, dtype, on_gpu)
    num_reqs, block_size = settings.max_num_reqs, settings.block_size
    tokens = min(DEFAULT_CONTEXT, config.max_position_embeddings)
    num_blocks = settings.num_blocks or num_reqs * -(-tokens // block_size)
    # One slot and one block more than anyone gets: trash.
    cache = allocate_cache(config, num_reqs + 1, num_blocks + 1, block_size, dtype, "meta", shard)
    counts[STATES] = nbytes_of((cache.conv_state, cache.state))
    counts[SNAPSHOTS] = settings.num_snapshots * counts[STATES] // (num_reqs + 1)
    counts[LATENTS] = nbytes_of((cache.latent,))
    rows, num_taps = max(num_reqs, settings.prefill_chunk), len(draft.taps) if draft else 0
    counts[BUFFERS] = buffer_bytes(config, shard, rows, dtype, num_taps)
    if on_gpu:
        counts[DECODING] = spaces_bytes(decode_spaces(config, shard, num_reqs))
        counts[MEGA] = persistent_bytes(config, shard, settings)
        counts[GRAPHS] = graph_bytes(config, shard, settings, num_blocks)
        spaces = spaces_bytes(prefill_spaces(config, shard, settings.prefill_chunk))
        for_a_while = temporary_bytes(config, shard, settings.prefill_chunk)
        counts[PREFILLING] = spaces + for_a_while + LIBRARY_BYTES
    if draft is not None:
        kinds = DRAFT_WEIGHTS, DRAFT_CACHE, DRAFT_RECORDS, DRAFT_BUFFERS
        taken = draft_bytes(config, draft, settings, num_blocks, dtype, shard)
        counts |= dict(zip(kinds, taken, strict=True))
    reserve = SPARE_BYTES if on_gpu else 0
    return Plan(shard.size, settings, draft, num_blocks, counts, reserve)


def weight_bytes(
    config: ModelConfig, shard: Shard, dtype: torch.dtype, on_gpu: bool
) -> Counter[str]:
    """By kind. Layers of one kind have the same, so each kind is looked at once."""

    def count(fields: Iterable[Field], places: Places) -> Counter[str]:
        found: Counter[str] = Counter()
        for field in fields:
            if field.name not in places.puts:
                found[kind_of(field.name)] += prod(field.shape) * field.dtype(dtype).itemsize
        for name, packed in places.packed.items():
            found[kind_of(name)] += nbytes_of(tensors_of(packed))
        return found

    places = empty_head(config, shard, "meta") if on_gpu else Places()
    found = count(ends_table(config, shard), places)
    layers: dict[tuple[bool, bool], Counter[str]] = {}
    for i in range(config.num_hidden_layers):
        kind = config.is_kda(i), config.is_moe(i)
        if kind not in layers:
            places = empty_layer(config, shard, i, "meta") if on_gpu else Places()
            layers[kind] = count(layer_table(config, i, shard), places)
        found += layers[kind]
    return found


def buffer_bytes(
    config: ModelConfig, shard: Shard, max_rows: int, dtype: torch.dtype, num_taps: int = 0
) -> int:
    buffers = allocate_buffers(config, max_rows, max_rows, dtype, "meta", shard, num_taps)
    return nbytes_of(without_parts(buffers).values())


def persistent_bytes(config: ModelConfig, shard: Shard, settings: EngineConfig) -> int:
    if settings.ops == "chain":
        return 0
    height = 1 if settings.strict else min(settings.max_num_reqs, MEGA_ROWS)
    return mega_bytes(config, shard, height, settings.block_size)


def graph_bytes(config: ModelConfig, shard: Shard, settings: EngineConfig, num_blocks: int) -> int:
    """Buffers at addresses of their own, the state of a step, and what drawing takes of the pool
    of captured graphs."""
    num_reqs, size = settings.max_num_reqs, settings.block_size
    longest = min(num_blocks, -(-config.max_position_embeddings // size))
    logits = torch.empty(num_reqs, config.vocab_size, dtype=torch.float32, device="meta")
    state = StateMemory(longest, size, logits).state
    held = (vars(state.step), vars(state.options), vars(state))
    tensors = [t for fields in held for t in fields.values() if isinstance(t, Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    buffers = buffer_bytes(config, shard, num_reqs, torch.bfloat16)
    pool = SAMPLING_BYTES * num_reqs * config.vocab_size
    return sum(storages.values()) - logits.nbytes + buffers + pool


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def kind_of(name: str) -> str:
    """Which of WEIGHTS a field is; norms inside of attention or of a MoE count there."""
    parts = name.split(".")
    first = parts[2] if parts[0] == "layers" else parts[0]
    if first == "moe":
        return "experts" if parts[3] in ("w13", "w2") else "rest of MoE"
    if first == "dense":
        return "dense MLP"
    if first in ("embed", "lm_head"):
        return "embedding and head"
    return "norms" if first.endswith("_res") else "attention"


def summary(chosen: Plan) -> str:
    """What a plan consists of, and what would make it smaller, to end a sentence with."""
    weights = chosen.weight_bytes + chosen.nbytes.get(DRAFT_WEIGHTS, 0)
    rest = chosen.total_bytes - weights - chosen.cache_bytes
    shares = (weights, "weights"), (chosen.cache_bytes, "caches"), (rest, "workspaces")
    named = ", ".join(f"{count / 1e9:.1f} for {name}" for count, name in shares)
    return f" ({named}): fewer or shorter requests need less for caches"
