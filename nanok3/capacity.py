"""Whether a plan fits into a GPU, what else would, and what a step there must read.

Every question is put to `plan.make_plan`, which says what is allocated, so an answer holds to the
byte. `nanok3 plan` prints this. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanok3.cards import CARDS
from nanok3.config import TP_SIZES, EngineConfig, ModelConfig, Shard
from nanok3.count import count_step, total
from nanok3.packing import layout_problems
from nanok3.plan import Plan, make_plan
from nanok3.spec.config import DraftConfig

MOST_REQUESTS = 4096  # no more are looked for, unless more are asked for
STEP_ROWS = (1, 8, 64)


@dataclass(frozen=True)
class StepBytes:
    """What one decode step of one rank must move once, and how long that takes at least.

    `rows` are those of `num_reqs` requests of equally many rows (one, or drafts too), each with the
    plan's whole context cached. Weights of experts: of as many as uniform picks would hit."""

    rows: int
    num_reqs: int
    weight_bytes: int
    cache_bytes: int  # latents and states
    written_bytes: int  # to the same
    floor_ms: float


@dataclass(frozen=True)
class Capacity:
    """A plan beside a GPU's memory."""

    chosen: Plan
    context: int  # tokens of a request, as asked
    memory: int
    longest_context: int  # tokens of each of the plan's requests that would fit; 0: none
    most_requests: int  # of the plan's context that would fit, as far as was looked
    steps: tuple[StepBytes, ...]
    verdict: str

    @property
    def fits(self) -> bool:
        return self.chosen.needed_bytes <= self.memory

    def lines(self) -> Iterator[str]:
        """The bytes of a rank, a line a kind; what fits; what steps read; the verdict."""
        chosen = self.chosen
        rows = [*chosen.nbytes.items(), ("total", chosen.total_bytes)]
        rows += [("reserve: driver, kernels", chosen.reserve), ("to be free", chosen.needed_bytes)]
        for kind, count in rows:
            if count:
                yield f"{kind:26}{count:>19,} B{count / 1e9:>9.2f} GB"
        more = " or more" if self.most_requests >= MOST_REQUESTS else ""
        num_reqs = chosen.settings.max_num_reqs
        yield f"largest context that fits, {num_reqs} requests: {self.longest_context} tokens"
        yield f"most requests that fit, {self.context} tokens each: {self.most_requests}{more}"
        for r in self.steps:
            what = f"{r.num_reqs} request{'s' if r.num_reqs > 1 else ''}"
            nbytes = f"weights {r.weight_bytes / 1e9:.2f} GB, caches {r.cache_bytes / 1e9:.2f} GB"
            rows_of = f"a step of {r.rows} row{'s' if r.rows > 1 else ''} ({what})"
            nbytes += f"; writes {r.written_bytes / 1e9:.2f} GB"
            yield f"{rows_of:34}reads {nbytes}: {r.floor_ms:.2f} ms at least"
        yield self.verdict

    def as_dict(self) -> dict[str, Any]:
        chosen = self.chosen
        return {
            "gpus": chosen.size,
            "context": self.context,
            "requests": chosen.settings.max_num_reqs,
            "bytes_a_gpu": chosen.nbytes,
            "total_bytes_a_gpu": chosen.total_bytes,
            "reserve_bytes_a_gpu": chosen.reserve,
            "gpu_memory_bytes": self.memory,
            "spare_bytes_a_gpu": self.memory - chosen.needed_bytes,
            "longest_context": self.longest_context,
            "most_requests": self.most_requests,
            "steps": [asdict(r) for r in self.steps],
            "fits": self.fits,
            "verdict": self.verdict,
        }


def settings_for(context: int, requests: int) -> EngineConfig:
    """Of an engine on a GPU with room for so many requests of so many tokens."""
    base = EngineConfig(device="cuda", dtype="bfloat16", max_num_reqs=requests)
    return replace(base, num_blocks=base.blocks_for(context), max_context=context)


def capacity(
    config: ModelConfig,
    size: int,
    context: int,
    requests: int,
    draft: DraftConfig | None,
    memory: int,
    bandwidth: float,
) -> Capacity:
    """Of one of `size` ranks; the caller has checked that the model can be split so."""
    shard = Shard(0, size)
    chosen = make_plan(config, shard, settings_for(context, requests), draft)

    def fits(context: int, requests: int) -> bool:
        settings = settings_for(context, requests)
        if settings.problems(config):  # more than slots can be numbered
            return False
        return make_plan(config, shard, settings, draft).needed_bytes <= memory

    most, block_size = config.max_position_embeddings, chosen.settings.block_size
    blocks = largest(lambda n: fits(min(n * block_size, most), requests), -(-most // block_size))
    longest = min(blocks * block_size, most)
    num_reqs = largest(lambda n: fits(context, n), max(requests, MOST_REQUESTS))
    steps = tuple(
        step_bytes(config, shard, rows, context, requests, bandwidth) for rows in STEP_ROWS
    )
    said = verdict(config, chosen, memory, longest, num_reqs)
    return Capacity(chosen, context, memory, longest, num_reqs, steps, said)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest n up to `most` that `holds`, which once false stays false; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def step_bytes(
    config: ModelConfig, shard: Shard, rows: int, context: int, requests: int, bandwidth: float
) -> StepBytes:
    """Of as many requests as there may be and divide the rows."""
    num_reqs = max(n for n in range(1, min(rows, requests) + 1) if rows % n == 0)
    num_rows = rows // num_reqs
    found = total(count_step(config, num_reqs, num_rows, max(context, num_rows), shard=shard))
    read, cached, written = found.weight_bytes, found.cache_read_bytes, found.cache_write_bytes
    return StepBytes(
        rows,
        num_reqs,
        weight_bytes=round(read),
        cache_bytes=round(cached),
        written_bytes=round(written),
        floor_ms=1e3 * (read + cached + written) / bandwidth,
    )


def larger_size(config: ModelConfig, chosen: Plan, memory: int) -> int | None:
    """The fewest ranks that do what this plan does within `memory` bytes each."""
    for size in TP_SIZES:
        shard = Shard(0, size)
        if size <= chosen.size or shard.problems(config) or layout_problems(config, shard):
            continue
        if make_plan(config, shard, chosen.settings, chosen.draft).needed_bytes <= memory:
            return size
    return None


def verdict(config: ModelConfig, chosen: Plan, memory: int, context: int, requests: int) -> str:
    """One sentence: whether it fits into `memory` bytes, by how much, and otherwise what would.

    context, requests: what of each would fit beside the rest of the plan."""
    spare = memory - chosen.needed_bytes
    if spare >= 0:
        room = f"as it is there is room for --context {context} or --requests {requests}"
        return f"fits with {spare / 1e9:.1f} GB to spare on each GPU; {room}"
    ways = []
    if (size := larger_size(config, chosen, memory)) is not None:
        ways.append(f"{size} GPUs")
    if context:
        ways.append(f"--context {context}")
    if requests:
        ways.append(f"--requests {requests}")
    enough = {name: card for name, card in CARDS.items() if card.memory >= chosen.needed_bytes}
    if enough:
        ways.append(f"--gpu {min(enough, key=lambda name: enough[name].memory)}")
    advice = " or ".join(ways) if ways else f"GPUs with {chosen.needed_bytes / 1e9:.1f} GB"
    return f"does not fit by {-spare / 1e9:.1f} GB on each GPU; use {advice}"
