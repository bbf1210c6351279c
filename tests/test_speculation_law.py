"""What a whole engine draws with drafts has the target's law, computed from its own logits.

Two ids are left at each row (top-k 2), so that a reply of three has eight forms; many seeded
requests run at once, with a draft of random weights whose drafts are sometimes right.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafts import tiny_inferact, tiny_redhat
from engines import make_engine
from spec.test_verify import chi_square_p

from nanok3.engine import Engine
from nanok3.sampling import SamplingParams
from nanok3.spec_loop import SpecLoop

PROMPT = [77]  # without a prefill, so that a whole batch decodes at once
LENGTH, COUNT, BATCH = 3, 1200, 48


def law_of(engine: Engine, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Exact chances of all replies of LENGTH ids."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for reply, chance in chances.items():
            logits = engine.logits([*PROMPT, *reply])[-1].double() / params.temperature
            top = logits.topk(params.top_k)
            for p, token in zip(top.values.softmax(-1).tolist(), top.indices.tolist(), strict=True):
                longer[(*reply, token)] = chance * p
        chances = longer
    return chances


CASES: list[tuple[str, dict[str, Any]]] = [
    ("inferact", {"acceptance": "block"}),
    ("redhat", {"acceptance": "standard"}),
    ("inferact", {"acceptance": "block", "adaptive_drafts": True}),
]


@pytest.mark.parametrize(("draft", "settings"), CASES)
def test_replies_have_the_law_of_the_model(draft: str, settings: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.7, top_k=2, max_tokens=LENGTH)
    engine = make_engine(
        draft={"inferact": tiny_inferact(), "redhat": tiny_redhat()}[draft],
        **({"strict": False, "debug": False, "num_snapshots": 1, "break_even": 0.0} | settings),
        max_num_reqs=BATCH,
    )
    law = law_of(engine, params)
    loop = engine._runner.loop
    assert isinstance(loop, SpecLoop)
    # Random weights know nothing: let them propose what is likely, by a law of their own.
    likely = sorted({token for reply in law for token in reply})
    drafter: Any = loop.drafter
    propose = drafter.propose

    def near(*args: Any) -> Any:
        out = propose(*args)
        generator = torch.Generator().manual_seed(int(sum(args[0])) * 1000 + len(drawn))
        drawn.append(len(args[0]))
        shape = out.ids.shape
        weights = torch.full((*shape, len(likely)), 1.0, dtype=torch.float64)
        weights += 3 * torch.rand(weights.shape, generator=generator, dtype=torch.float64)
        weights /= weights.sum(-1, keepdim=True)
        pick = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view(shape)
        law_of_drafts = torch.zeros_like(out.probabilities)
        law_of_drafts[..., likely] = weights
        return replace(out, ids=torch.tensor(likely)[pick], probabilities=law_of_drafts)

    drawn: list[int] = []
    drafter.propose = near
    counts = dict.fromkeys(law, 0)
    for begin in range(0, COUNT, BATCH):
        requests = [
            engine.submit_ids(PROMPT, SamplingParams(**vars(params) | {"seed": seed}), None)
            for seed in range(begin, begin + BATCH)
        ]
        engine.run(requests)
        for r in requests:
            counts[tuple(r.ids[len(PROMPT) :])] += 1
    assert sum(loop.acceptance.accepted) > COUNT / 10, "too few drafts stand to show anything"
    keys = list(itertools.chain(law))
    p = chi_square_p(
        torch.tensor([counts[k] for k in keys]),
        torch.tensor([law[k] for k in keys], dtype=torch.float64),
    )
    assert p > 1e-3 / len(CASES)
