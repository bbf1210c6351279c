"""What a rank of a model needs in memory, to the byte, and whether a GPU has that much.

Weights come from `weight_table.table`, caches and buffers from their allocators without a device,
so that a plan is what gets allocated where weights are held once. Not counted: what the driver,
captured graphs and kernel workspaces take. Knows no files of weights and needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import Tensor

from nanok3.cache import allocate_cache
from nanok3.config import TP_SIZES, EngineConfig, ModelConfig, Shard
from nanok3.reference import mxfp4
from nanok3.runner import DEFAULT_CONTEXT, DTYPES
from nanok3.step import allocate_buffers, without_parts
from nanok3.weight_table import Field, table

WEIGHTS = ("experts", "attention", "rest of MoE", "dense MLP", "embedding and head", "norms")
STATES, SNAPSHOTS, LATENTS, BUFFERS = "KDA states", "KDA snapshots", "latent pages", "buffers"


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
    """On a CPU experts are unpacked to the engine's dtype; on a GPU they stay as stored."""
    assert not (shard.problems(config) or settings.problems(config)), "the caller checks these"
    dtype = DTYPES[settings.dtype]
    counts = dict.fromkeys((*WEIGHTS, STATES, SNAPSHOTS, LATENTS, BUFFERS), 0)
    for field in table(config, shard):
        values = prod(field.shape)
        if field.kind == "experts" and settings.device != "cpu":
            counts[kind_of(field)] += values // 2 + values // mxfp4.GROUP
        else:
            counts[kind_of(field)] += values * field.dtype(dtype).itemsize

    num_reqs, block_size = settings.max_num_reqs, settings.block_size
    tokens = min(DEFAULT_CONTEXT, config.max_position_embeddings)
    num_blocks = settings.num_blocks or num_reqs * -(-tokens // block_size)
    # One slot and one block more than anyone gets: trash.
    cache = allocate_cache(config, num_reqs + 1, num_blocks + 1, block_size, dtype, "meta", shard)
    counts[STATES] = nbytes_of((cache.conv_state, cache.state))
    counts[SNAPSHOTS] = settings.num_snapshots * counts[STATES] // (num_reqs + 1)
    counts[LATENTS] = nbytes_of((cache.latent,))
    max_rows = max(num_reqs, settings.prefill_chunk)
    buffers = allocate_buffers(config, max_rows, max_rows, dtype, "meta", shard)
    counts[BUFFERS] = nbytes_of(without_parts(buffers).values())
    return Plan(shard.size, settings, num_blocks, counts)


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def kind_of(field: Field) -> str:
    """Which of WEIGHTS a field is; norms inside of attention or of a MoE count there."""
    parts = field.name.split(".")
    first = parts[2] if parts[0] == "layers" else parts[0]
    if first == "moe":
        return "experts" if field.kind == "experts" else "rest of MoE"
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
        if size <= chosen.size or shard.problems(config):
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


def lines(chosen: Plan) -> list[str]:
    """The bytes of a rank, a line a kind."""
    rows = [*chosen.nbytes.items(), ("total", chosen.total_bytes)]
    return [f"{kind:20}{count:>19,} B{count / 1e9:>9.2f} GB" for kind, count in rows if count]
