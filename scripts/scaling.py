"""A model on paper of many GPUs: what a step should take, from one rank's measured times.

    step = bytes / bandwidth + layers * latency + hops * hop + bytes received / link
    tokens a second = tokens a step / step

Bytes of a rank are COUNT's. What was measured, on one H200 without peers, and what is assumed
stands in the constants below. Nothing here ran on more than one GPU. Prints the tables of
docs/scaling.md; with --write puts them there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from nanok3.config import K3, Shard
from nanok3.count import count_step, total

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- tables: python scripts/scaling.py --write -->\n", "<!-- end of tables -->\n"

# Measured, docs/perf/layers.md: a step of 93 layers takes 4372 us at one row, of which 2056 are its
# bytes; a KDA layer of 8 rows 91.7 us by the chain, of which 44.6 are its bytes.
LATENCY_US = {1: (4372 - 2056) / 93, 8: 91.7 - 44.6}
LATENCY_US[64] = LATENCY_US[8]  # assumed
CONTEXT = 4096
DRAFTS, ACCEPTED = 7, 6.0  # drafts a step; tokens a step where 842 tok/s was announced
# A draft in the Inferact layout, read whole by every rank but for its embedding's other rows, and
# five layers' latency.
DRAFT_BYTES = 7_124_625_922 - 163_840 * 7168 * 2
DRAFT_LAYERS = 5


@dataclass(frozen=True)
class Card:
    name: str
    bandwidth: float  # bytes a second that a step reaches
    link: float  # bytes a second that a GPU receives
    hop_us: tuple[float, float]  # of an exchange: without NVLink's latency, a whole all-reduce


# Hop: a sum of 7168 values among 8 ranks on one GPU took 1.16 us; an all-reduce of 8 bytes by NCCL
# takes 2.3 us on 8 H200 and 3 on 8 B200 (NVIDIA/nccl issue 1940), launch included.
CARDS = (
    Card("H200", 4.64e12, 450e9, (1.16, 2.3)),
    Card("GB300", 8.0e12 * 4.64 / 4.8, 900e9, (1.16, 3.0)),  # the same share of 8 TB/s, assumed
)


@dataclass(frozen=True)
class Work:
    num_reqs: int
    num_rows: int  # of each
    announced: dict[int, float]  # tok/s by GPUs, 2026-10, GB300

    @property
    def rows(self) -> int:
        return self.num_reqs * self.num_rows

    @property
    def name(self) -> str:
        if self.num_rows > 1:
            return f"1 request, {DRAFTS} drafts, {ACCEPTED:g} tokens a step"
        return f"{self.num_reqs} request{'s' if self.num_reqs > 1 else ''}, no draft"


WORKS = (
    Work(1, 1, {8: 193.3, 16: 256.4}),
    Work(1, 1 + DRAFTS, {16: 842.0}),
    Work(8, 1, {}),
    Work(64, 1, {8: 2375.9, 16: 3606.1}),
)


@dataclass(frozen=True)
class Step:
    """Milliseconds."""

    read_gb: float
    stream: float
    latency: float
    exchange: tuple[float, float]
    draft: float

    @property
    def whole(self) -> tuple[float, float]:
        low, high = (self.stream + self.latency + e + self.draft for e in self.exchange)
        return low, high


def hops() -> int:
    """Exchanges that a step has to wait for, where one rank has none (docs/megakernel.md)."""
    moe = sum(K3.is_moe(i) for i in range(K3.num_hidden_layers))
    return 1 + 3 * moe + 2 * (K3.num_hidden_layers - moe)


def step_of(work: Work, card: Card, size: int) -> Step:
    counted = total(count_step(K3, work.num_reqs, work.num_rows, CONTEXT, shard=Shard(0, size)))
    moved = counted.weight_bytes + counted.cache_read_bytes + counted.cache_write_bytes
    latency = LATENCY_US[work.rows] * K3.num_hidden_layers / 1e3
    links = counted.exchanged_bytes / card.link * 1e3
    low, high = (hops() * hop / 1e3 + links for hop in card.hop_us)
    draft = 0.0
    if work.num_rows > 1:
        draft = DRAFT_BYTES / card.bandwidth * 1e3 + DRAFT_LAYERS * LATENCY_US[8] / 1e3
    return Step(moved / 1e9, moved / card.bandwidth * 1e3, latency, (low, high), draft)


def tokens(work: Work) -> float:
    return ACCEPTED if work.num_rows > 1 else float(work.num_reqs)


def lines() -> list[str]:
    made = [
        "| work | GPUs | read a rank | bytes, ms | latency, ms | exchanges, ms | draft, ms "
        "| step, ms | us a layer | tok/s | announced |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for work in WORKS:
        for card in CARDS:
            for size in (8, 16):
                s = step_of(work, card, size)
                low, high = s.whole
                layer = [(t - s.draft) * 1e3 / K3.num_hidden_layers for t in (low, high)]
                rate = [tokens(work) / t * 1e3 for t in (high, low)]
                announced = work.announced.get(size) if card.name == "GB300" else None
                made.append(
                    f"| {work.name} | {size} {card.name} | {s.read_gb:.1f} GB | {s.stream:.2f} "
                    f"| {s.latency:.2f} | {s.exchange[0]:.2f} to {s.exchange[1]:.2f} "
                    f"| {s.draft:.2f} | {low:.2f} to {high:.2f} | {layer[0]:.0f} to {layer[1]:.0f} "
                    f"| {rate[0]:.0f} to {rate[1]:.0f} | {announced or '-'} |"
                )
    return made


def budget_lines() -> list[str]:
    """What a layer may lose to latency and exchanges together, to come to an announced figure."""
    made = [
        "| announced | a step may take, ms | its bytes take, ms | left a layer, us | of these the "
        "exchanges take, us | left for latency, us | measured latency, us |",
        "|---|---|---|---|---|---|---|",
    ]
    card = CARDS[1]
    for work in WORKS:
        for size, rate in work.announced.items():
            s = step_of(work, card, size)
            allowed = tokens(work) / rate * 1e3
            left = (allowed - s.stream - s.draft) * 1e3 / K3.num_hidden_layers
            own = [e * 1e3 / K3.num_hidden_layers for e in s.exchange]
            made.append(
                f"| {rate:g} tok/s, {size} GB300, {work.name} | {allowed:.2f} "
                f"| {s.stream + s.draft:.2f} | {left:.1f} | {own[0]:.1f} to {own[1]:.1f} "
                f"| {left - own[1]:.1f} to {left - own[0]:.1f} | {LATENCY_US[work.rows]:.1f} |"
            )
    return made


def tables() -> str:
    return "\n".join(["", *lines(), "", *budget_lines(), "", ""])


def main() -> int:
    if "--write" not in sys.argv[1:]:
        print(tables())
        return 0
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
