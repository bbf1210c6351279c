"""Many steps of the persistent kernel with changing batches, each against the chain of kernels.

    python scripts/soak_mega.py [--steps 10000] [--model DIR] [--seed 0]

Every step begins from the same caches for all. It runs twice through `MEGA`, which must give the
same bits (the order of its sums is fixed, so anything else is a race), and once through the chain,
whose sums are in another order: a row may differ where two experts nearly tie for the last place,
so of 1000 rows MANY may be beyond FAR and none beyond WRONG (relative L2 of the logits). Exits with
1 if not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache
from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.graph import buckets
from nanok3.kernel_ops import Kernels
from nanok3.mega_ops import MAX_ROWS, Mega
from nanok3.step import Step, allocate_buffers

MODEL = Path(__file__).parent.parent / "nanok3" / "models" / "k3_mini"
BLOCK, BLOCKS = 64, 8  # tokens of a block, blocks of a request
REQUESTS = 8
FAR, MANY, WRONG = 0.05, 20, 0.7
RECOMPOSE = 0.1  # of steps that change the batch


@dataclass
class Batch:
    """Requests by number, with `rows` rows each; the rest of a bucket is padding."""

    requests: list[int]
    rows: int
    lengths: list[int] = field(default_factory=lambda: [0] * REQUESTS)  # cached, of all requests

    def recompose(self, rng: random.Random) -> None:
        self.requests = rng.sample(range(REQUESTS), rng.randint(1, REQUESTS))
        most = MAX_ROWS // len(self.requests)
        self.rows = 1 if rng.random() < 0.7 else rng.randint(1, most)

    def step(self, vocab: int, rng: random.Random) -> Step:
        num_reqs = len(self.requests)
        padded = next(b for b in buckets(MAX_ROWS) if b >= num_reqs) if self.rows == 1 else num_reqs
        positions = [self.lengths[r] + q for r in self.requests for q in range(self.rows)]
        owners = [r for r in self.requests for _ in range(self.rows)]
        extra = padded - num_reqs
        slots = [
            (1 + r * BLOCKS) * BLOCK + p for r, p in zip(owners, positions, strict=True)
        ]  # the blocks of a request follow each other
        tables = [[1 + r * BLOCKS + b for b in range(BLOCKS)] for r in self.requests]

        def ints(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device="cuda")

        return Step(
            input_ids=ints([rng.randrange(vocab) for _ in positions] + [0] * extra),
            positions=ints(positions + [-1] * extra),
            slot_mapping=ints(slots + [-1] * extra),
            block_table=ints(tables + [[0] * BLOCKS] * extra),
            state_slots=ints([1 + r for r in self.requests] + [0] * extra),
            logit_rows=ints(list(range(len(positions) + extra))),
            block_size=BLOCK,
        )


def own(cache: Cache) -> list[Tensor]:
    """All but the trash."""
    return [cache.state[:, 1:], cache.conv_state[:, 1:], cache.latent[:, BLOCK:]]


def soak(model_dir: Path, num_steps: int, seed: int) -> bool:
    settings = EngineConfig(
        max_num_reqs=REQUESTS, num_blocks=REQUESTS * BLOCKS, num_snapshots=0, ops="chain"
    )
    engine = Engine.load(model_dir, device="cuda", settings=settings)
    config, weights = engine.config, engine._runner.weights
    cache = engine._manager.cache
    for tensor in (cache.state, cache.conv_state, cache.latent):
        tensor.zero_()
    mega = Mega(config, weights, cache, BLOCK, BLOCKS)
    chain = Kernels(config, MAX_ROWS, "cuda").record()
    rng = random.Random(seed)
    batch, rows, far, worst, worst_state = Batch([0], 1), 0, 0, 0.0, 0.0
    started = time.monotonic()
    for number in range(num_steps):
        if rng.random() < RECOMPOSE:
            batch.recompose(rng)
        for r in batch.requests:
            if batch.lengths[r] + batch.rows > BLOCKS * BLOCK or rng.random() < 0.002:
                batch.lengths[r] = 0
                cache.state[:, 1 + r].zero_()
                cache.conv_state[:, 1 + r].zero_()
        step = batch.step(config.vocab_size, rng)
        num_rows = len(step.positions)
        before = [t.clone() for t in own(cache)]
        found: list[list[Tensor]] = []
        for reading in ("mega", "mega", "chain"):
            for tensor, old in zip(own(cache), before, strict=True):
                tensor.copy_(old)
            buf = allocate_buffers(config, num_rows, num_rows, torch.bfloat16, "cuda")
            if reading == "mega":
                mega.run(step, buf)
                mega.check()
            else:
                model.forward(config, weights, cache, step, buf, chain)
            real = buf.logits[step.positions >= 0]
            found.append([real, *(t.clone() for t in own(cache))])
        first, second, right = found
        if not all(a.equal(b) for a, b in zip(first, second, strict=True)):
            print(f"step {number}: two runs differ; {batch}")
            return False
        error = (first[0] - right[0]).norm(dim=-1) / right[0].norm(dim=-1)  # [rows]
        state = float((first[1] - right[1]).norm() / right[1].norm().clamp(min=1e-6))
        top = float(error.max())
        if not top < WRONG or not state < WRONG:
            print(f"step {number}: logits differ by {top:.3f}, states by {state:.3f}; {batch}")
            return False
        far += int((error > FAR).sum())
        rows += len(error)
        worst, worst_state = max(worst, top), max(worst_state, state)
        for r in batch.requests:
            batch.lengths[r] += batch.rows
        if (number + 1) % 1000 == 0:
            print(f"{number + 1} steps, {far} of {rows} rows beyond {FAR}", flush=True)
    print(
        f"{num_steps} steps, {rows} rows, {time.monotonic() - started:.0f} s: two runs through the "
        f"persistent kernel never differ; of its rows {far} are beyond {FAR} of the chain's, "
        f"at most {worst:.3f}, states {worst_state:.3f}"
    )
    return far * 1000 <= MANY * max(rows, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with torch.inference_mode():
        sys.exit(0 if soak(args.model, args.steps, args.seed) else 1)


if __name__ == "__main__":
    main()
