"""Runs a grid of CTAs on a Program: warps in random order, copies that complete late.

Clusters run one after another, and a warp runs until it has to wait. Checked besides values: bounds
and alignment; shared memory that a copy is under way to; races between warps on shared memory;
mbarriers that are used before their init or have too many arrivals; weights written, anything else
read or written before griddepcontrol.wait; lanes that miss a collective; CTAs of a cluster that may
not have begun or may have ended; waits without end. Not checked: races on global memory and between
the lanes of a warp, fences, resources, time.
"""

from __future__ import annotations

import itertools
import random

import numpy as np

from ptx.instructions import Program
from ptx.memory import Fault, Global, Shared
from ptx.warp import CTA, Cluster


def run_cluster(cluster: Cluster, rng: random.Random) -> None:
    """Until all warps have ended."""
    while any(w.state != "done" for w in cluster.warps):
        moved = False
        for warp in rng.sample(cluster.warps, len(cluster.warps)):
            while cluster.copies and rng.random() < 0.3:
                cluster.copies.pop(rng.randrange(len(cluster.copies)))()
                moved = True
            moved |= warp.advance()
        if not moved and cluster.copies:
            cluster.copies.pop(rng.randrange(len(cluster.copies)))()
        elif not moved:
            raise Fault(f"deadlock: {', '.join(w.waits_for() for w in cluster.warps)}")
    if cluster.copies:
        raise Fault("a CTA ends before a copy to its shared memory is complete")
    for cta in cluster.ctas:
        if any(m.bytes_due for m in cta.mbarriers.values()):
            raise Fault("a CTA ends before the bytes that an mbarrier expects have come")


def run_grid(
    program: Program,
    memory: Global,
    numbers: list[int],
    grid: tuple[int, int, int],
    cluster_size: int,
    shared_bytes: int,
    seed: int,
) -> None:
    """`numbers` are the kernel's parameters."""
    rng = random.Random(seed)
    params = [
        np.full(32, n % (1 << int(t[1:])), t.replace("u", "uint"))
        for n, t in zip(numbers, program.params, strict=True)
    ]
    num_warps = program.threads // 32 * cluster_size
    spots = list(itertools.product(*(range(n) for n in reversed(grid))))
    groups = [spots[i : i + cluster_size] for i in range(0, len(spots), cluster_size)]
    rng.shuffle(groups)
    with np.errstate(all="ignore"):
        for group in groups:
            ctas = [
                CTA((x, y, z), grid, rank, Shared(shared_bytes, num_warps))
                for rank, (z, y, x) in enumerate(group)
            ]
            run_cluster(Cluster(program, memory, ctas, params), rng)
