"""Runs a grid of CTAs on a Program: warps in random order, copies that complete late.

Clusters run one after another, a cooperative grid all at once, and a warp runs until it has to
wait, or has looked at a counter. Checked besides values: bounds
and alignment; shared memory that a copy is under way to; races between warps on shared memory;
mbarriers that are used before their init or have too many arrivals; weights written, anything else
read or written before griddepcontrol.wait; lanes that miss a collective; CTAs of a cluster that may
not have begun or may have ended; waits without end; in a cooperative grid, races on global memory
(`races`). Not checked: races between the lanes of a warp, other fences than that before bulk
copies, resources, time.
"""

from __future__ import annotations

import itertools
import random

import numpy as np

from ptx.instructions import Program
from ptx.memory import Fault, Global, Shared
from ptx.warp import CTA, Cluster, Warp

PATIENCE = 2000  # looks in vain of all that poll, before it is a deadlock
SLOW = 0.02  # how often, in rounds of a cooperative grid, it is drawn again who is slow


def run_cluster(cluster: Cluster, rng: random.Random) -> None:
    """Until all warps have ended.

    In a cooperative grid some CTAs or warps are slow: they run only when no other can move. So
    others get as far ahead of them as hand-offs allow.
    """
    slow: set[Warp] = set()
    in_vain = 0
    while any(w.state != "done" for w in cluster.warps):
        if cluster.cooperative and rng.random() < SLOW:
            slow = set(draw_slow(cluster, rng))
        moved = False
        for warp in rng.sample(cluster.warps, len(cluster.warps)):
            while cluster.copies and rng.random() < 0.3:
                cluster.copies.pop(rng.randrange(len(cluster.copies)))()
                moved = True
            moved |= warp not in slow and warp.advance()
        if moved:
            in_vain = 0
        elif cluster.copies:
            cluster.copies.pop(rng.randrange(len(cluster.copies)))()
        elif any([w.advance() for w in cluster.warps if w in slow]):
            in_vain = 0
        else:
            polling = [w for w in cluster.warps if w.state == "look"]
            if any([w.advance(again=True) for w in polling]):
                in_vain = 0
            in_vain += 1
            if not polling or in_vain > PATIENCE:
                waiting = [w.waits_for() for w in cluster.warps if w.state != "done"]
                raise Fault("deadlock:\n" + "\n".join(waiting))
    if cluster.copies:
        raise Fault("a CTA ends before a copy to its shared memory is complete")
    for cta in cluster.ctas:
        if any(m.bytes_due for m in cta.mbarriers.values()):
            raise Fault("a CTA ends before the bytes that an mbarrier expects have come")


def draw_slow(cluster: Cluster, rng: random.Random) -> list[Warp]:
    """Nobody, some CTAs, or some warps."""
    of = rng.choice((0, 1, 2))
    if of == 1:
        ctas = rng.sample(cluster.ctas, rng.randrange(len(cluster.ctas)))
        return [w for cta in ctas for w in cta.warps]
    return rng.sample(cluster.warps, rng.randrange(len(cluster.warps))) if of else []


def run_grid(
    program: Program,
    memory: Global,
    numbers: list[int],
    grid: tuple[int, int, int],
    cluster_size: int,
    cooperative: bool,
    shared_bytes: int,
    seed: int,
    races: bool = True,
) -> None:
    """`numbers` are the kernel's parameters."""
    rng = random.Random(seed)
    params = [
        np.full(32, n % (1 << int(t[1:])), t.replace("u", "uint"))
        for n, t in zip(numbers, program.params, strict=True)
    ]
    spots = list(itertools.product(*(range(n) for n in reversed(grid))))
    if cooperative and races:
        memory.track(program.threads // 32 * len(spots), program.threads // 32)
    if cooperative:
        assert cluster_size == 1, "a cooperative grid of clusters"
        cluster_size = len(spots)
    num_warps = program.threads // 32  # that share a CTA's shared memory
    if not cooperative:
        num_warps *= cluster_size
    groups = [spots[i : i + cluster_size] for i in range(0, len(spots), cluster_size)]
    rng.shuffle(groups)
    with np.errstate(all="ignore"):
        for group in groups:
            own = num_warps if cooperative else 0
            ctas = [
                CTA((x, y, z), grid, rank, Shared(shared_bytes, num_warps, rank * own))
                for rank, (z, y, x) in enumerate(group)
            ]
            run_cluster(Cluster(program, memory, ctas, params, cooperative), rng)
