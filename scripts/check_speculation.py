"""Greedy replies with drafts are those without, id for id, in strict mode: 200 prompts x 128 ids.

    python scripts/check_speculation.py [DRAFT_DIR] [--prompts 200] [--tokens 128]

k3-mini on its held-out prompts, spread over K = 1, 2, 3, 7 and four kinds of drafts: of the given
draft, of one of the same shape with random weights, always right, always wrong. Prints a line a
combination and exits with 1 at the first reply that differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch

from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.options import PACKAGED_DRAFT, PACKAGED_MODEL
from nanok3.request import Request
from nanok3.spec.config import load_draft_config
from nanok3.spec.draft_weights import build_draft, draft_table
from nanok3.spec.propose import Proposal
from nanok3.spec_loop import SpecLoop

HELD_OUT = Path(__file__).parent.parent / "tests" / "data" / "mini_heldout.json"
KINDS = ("trained", "random", "right", "wrong")
NUMBERS = (1, 2, 3, 7)
AT_ONCE = 4  # requests


def script(loop: SpecLoop, truth: dict[int, list[int]], is_right: bool) -> None:
    """Proposes what the replies of `truth` (by the prompt's hash) go on with, or other ids."""
    drafter: Any = loop.drafter
    vocab = drafter.config.vocab_size

    def propose(
        anchors: Any, positions: Any, table: Any, options: Any, steps: Any, k: int, all_greedy: bool
    ) -> Proposal:
        rows = []
        for r in loop.batch:
            whole = [*truth[hash(tuple(r.ids[: r.num_prompt]))], *[0] * k]
            place = len(r.ids)
            rows.append([t if is_right else (t + 1) % vocab for t in whole[place : place + k]])
        ids = torch.tensor(rows)
        law = torch.nn.functional.one_hot(ids, vocab).double()
        return Proposal(ids, torch.full((len(ids),), k), law, torch.ones(ids.shape))

    drafter.propose = propose


def random_weights(engine: Engine, draft_dir: Path) -> None:
    config = load_draft_config(draft_dir)
    generator = torch.Generator().manual_seed(0)
    fields = {
        f.name: torch.ones(f.shape)
        if f.name.endswith("norm")
        else torch.randn(f.shape, generator=generator) * f.shape[-1] ** -0.5
        for f in draft_table(config)
    }
    weights = engine._runner.weights
    drafter: Any = engine._runner._drafter
    drafter._weights = build_draft(config, fields.__getitem__, weights.embed, weights.lm_head)


def run(engine: Engine, prompts: list[dict[str, Any]], tokens: int) -> list[Request]:
    params = engine.sampling(temperature=0.0, max_tokens=tokens)
    requests = [
        engine.submit(p["messages"], params, tools=p["tools"], **p["options"]) for p in prompts
    ]
    engine.run(requests)
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("draft", type=Path, nargs="?", default=PACKAGED_DRAFT)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    prompts = json.loads(HELD_OUT.read_text())["prompts"][: args.prompts]
    combinations = list(itertools.product(KINDS, NUMBERS))
    settings = EngineConfig(strict=True, max_num_reqs=AT_ONCE, break_even=0.0, num_snapshots=0)
    plain = Engine.load(PACKAGED_MODEL, settings=settings)
    for number, (kind, k) in enumerate(combinations):
        mine = prompts[number :: len(combinations)]
        if not mine:
            continue
        start = time.monotonic()
        right = run(plain, mine, args.tokens)
        half = time.monotonic()
        own = EngineConfig(**{**vars(settings), "num_drafts": k})
        engine = Engine.load(PACKAGED_MODEL, settings=own, draft=args.draft)
        loop = engine._runner.loop
        assert isinstance(loop, SpecLoop)
        if kind == "random":
            random_weights(engine, args.draft)
        elif kind != "trained":
            script(
                loop, {hash(tuple(r.ids[: r.num_prompt])): r.ids for r in right}, kind == "right"
            )
        found = run(engine, mine, args.tokens)
        for i, (a, b) in enumerate(zip(right, found, strict=True)):
            if a.ids != b.ids or a.finish_reason != b.finish_reason:
                place = next(
                    j for j, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y
                )
                place -= a.num_prompt
                raise SystemExit(f"{kind}, K = {k}: reply {i} differs at output {place}")
        seconds = f"{half - start:.0f} s without, {time.monotonic() - half:.0f} s with drafts"
        print(
            f"{kind:8} K = {k}: {len(mine)} replies, {sum(r.num_output for r in found)} ids equal, "
            f"{loop.acceptance.mean_length:.2f} a step; {seconds}",
            flush=True,
        )


if __name__ == "__main__":
    main()
