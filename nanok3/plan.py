"""What a rank of a model needs in memory, to the byte, and whether a GPU has that much.

Weights, caches, buffers and workspaces come from their allocators without a device, so that a plan
is what gets allocated; what torch takes for a while is counted at its most. Not counted: what the
driver, compiled kernels and captured graphs take outside of torch (`device.SPARE_BYTES`), and the
tensors that `Engine.logits` returns. Knows no files of weights and needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from nanok3.cache import allocate_cache
from nanok3.config import TP_SIZES, EngineConfig, ModelConfig, Shard
from nanok3.decode import StateMemory
from nanok3.packing import Places, empty_head, empty_layer, layout_problems, tensors_of
from nanok3.runner import DEFAULT_CONTEXT, DTYPES
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
DECODING, PREFILLING = "decode workspace", "prefill workspace"  # on a GPU
SAMPLING_BYTES = 32  # of a request and an id: logits, probabilities, their order


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank; all ranks need the same."""

    size: int  # ranks
    settings: EngineConfig
    num_blocks: int  # latent blocks that requests and snapshots may have
    nbytes: dict[str, int]  # by WEIGHTS and what follows them

    @property
    def weight_bytes(self) -> int:
        return sum(self.nbytes[kind] for kind in WEIGHTS)

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())


def make_plan(config: ModelConfig, shard: Shard, settings: EngineConfig) -> Plan:
    """On a CPU experts are unpacked to the engine's dtype; on a GPU all is as kernels take it."""
    assert not (shard.problems(config) or settings.problems(config)), "the caller checks these"
    dtype, on_gpu = DTYPES[settings.dtype], settings.device != "cpu"
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
    counts[BUFFERS] = buffer_bytes(config, shard, max(num_reqs, settings.prefill_chunk), dtype)
    if on_gpu:
        counts[DECODING] = decode_bytes(config, shard, settings, num_blocks)
        spaces = spaces_bytes(prefill_spaces(config, shard, settings.prefill_chunk))
        for_a_while = temporary_bytes(config, shard, settings.prefill_chunk)
        counts[PREFILLING] = spaces + for_a_while + LIBRARY_BYTES
    return Plan(shard.size, settings, num_blocks, counts)


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


def buffer_bytes(config: ModelConfig, shard: Shard, max_rows: int, dtype: torch.dtype) -> int:
    buffers = allocate_buffers(config, max_rows, max_rows, dtype, "meta", shard)
    return nbytes_of(without_parts(buffers).values())


def decode_bytes(config: ModelConfig, shard: Shard, settings: EngineConfig, num_blocks: int) -> int:
    """Of the captured graphs: kernels' workspaces, buffers at addresses of their own, the state of
    a step, and what drawing takes of their pool."""
    num_reqs, size = settings.max_num_reqs, settings.block_size
    longest = min(num_blocks, -(-config.max_position_embeddings // size))
    logits = torch.empty(num_reqs, config.vocab_size, dtype=torch.float32, device="meta")
    state = StateMemory(longest, size, logits).state
    held = (vars(state.step), vars(state.options), vars(state))
    tensors = [t for fields in held for t in fields.values() if isinstance(t, Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    buffers = buffer_bytes(config, shard, num_reqs, torch.bfloat16)
    spaces = spaces_bytes(decode_spaces(config, shard, num_reqs))
    pool = SAMPLING_BYTES * num_reqs * config.vocab_size
    return sum(storages.values()) - logits.nbytes + buffers + spaces + pool


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


# ---- the verdict ----


def larger_size(config: ModelConfig, chosen: Plan, memory: int) -> int | None:
    """The fewest ranks that do what this plan does within `memory` bytes each."""
    for size in TP_SIZES:
        shard = Shard(0, size)
        if size <= chosen.size or shard.problems(config) or layout_problems(config, shard):
            continue
        if make_plan(config, shard, chosen.settings).total_bytes <= memory:
            return size
    return None


def longest_context(chosen: Plan, memory: int) -> int:
    """Tokens for each request that would fit within `memory`; 0 if not even a block would."""
    settings = chosen.settings
    if not chosen.nbytes[LATENTS]:
        return 0
    num_blocks = chosen.num_blocks + 1  # trash
    left = memory - (chosen.total_bytes - chosen.nbytes[LATENTS])
    blocks = left * num_blocks // chosen.nbytes[LATENTS] - 1 - settings.num_snapshots
    return max(0, blocks // settings.max_num_reqs * settings.block_size)


def verdict(config: ModelConfig, chosen: Plan, memory: int) -> str:
    """One sentence: whether it fits into `memory` bytes, by how much, and otherwise what would."""
    spare = memory - chosen.total_bytes
    if spare >= 0:
        return f"fits with {spare / 1e9:.1f} GB to spare on each GPU"
    ways = []
    if (size := larger_size(config, chosen, memory)) is not None:
        ways.append(f"{size} GPUs")
    if context := longest_context(chosen, memory):
        ways.append(f"--context {context}")
    advice = " or ".join(ways) if ways else f"GPUs with {chosen.total_bytes / 1e9:.1f} GB"
    return f"does not fit by {-spare / 1e9:.1f} GB on each GPU; use {advice}"


def summary(chosen: Plan) -> str:
    """What a plan consists of, and what would make it smaller, to end a sentence with."""
    caches = sum(chosen.nbytes[kind] for kind in (STATES, SNAPSHOTS, LATENTS))
    rest = chosen.total_bytes - chosen.weight_bytes - caches
    shares = (chosen.weight_bytes, "weights"), (caches, "caches"), (rest, "workspaces")
    named = ", ".join(f"{count / 1e9:.1f} for {name}" for count, name in shares)
    return f" ({named}): fewer or shorter requests need less for caches"


def lines(chosen: Plan) -> list[str]:
    """The bytes of a rank, a line a kind."""
    rows = [*chosen.nbytes.items(), ("total", chosen.total_bytes)]
    return [f"{kind:20}{count:>19,} B{count / 1e9:>9.2f} GB" for kind, count in rows if count]
