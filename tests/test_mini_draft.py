"""k3-mini with its draft on held-out prompts: tokens a step, and that serving loses nothing.

Served drafts must stand where the same windows over the finished reply say so: a gap between the
two is a bug of serving (taps, positions, context), not of the draft.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.options import PACKAGED_DRAFT, PACKAGED_MODEL
from nanok3.request import Request
from nanok3.spec.config import load_draft_config
from nanok3.spec.draft_weights import build_draft, load_draft
from nanok3.spec_loop import SpecLoop

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import train_draft  # noqa: E402

PROMPTS = json.loads((ROOT / "tests" / "data" / "mini_heldout.json").read_text())["prompts"]


def served(
    temperature: float, count: int, max_tokens: int
) -> tuple[SpecLoop, list[tuple[Request, int, int]]]:
    """-> the loop, and (request, place of its anchor, drafts that stood) of every whole window."""
    settings = EngineConfig(max_num_reqs=4, break_even=0.0, num_snapshots=0)
    engine = Engine.load(PACKAGED_MODEL, draft=PACKAGED_DRAFT, settings=settings)
    loop = engine._runner.loop
    assert isinstance(loop, SpecLoop)
    windows = []
    settle = loop.settle

    def watched() -> None:
        step = loop._read
        if step is not None:
            for i, r in enumerate(loop.batch):
                taken, accepted = len(r.ids) - step.before[i], step.accepted[i]
                if step.lengths[i] == loop.num_drafts and taken == accepted + 1:
                    windows.append((r, step.before[i] - 1, accepted))
        settle()

    loop.settle = watched  # type: ignore[method-assign]
    requests = [
        engine.submit(
            p["messages"],
            engine.sampling(temperature=temperature, top_p=1.0, max_tokens=max_tokens, seed=seed),
            tools=p["tools"],
            **p["options"],
        )
        for seed, p in enumerate(PROMPTS[:count])
    ]
    engine.run(requests)
    return loop, windows


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 3.0), (1.0, 2.2)])
def test_tokens_a_step_on_held_out_prompts(temperature: float, least: float) -> None:
    loop, _ = served(temperature, 8, 128)
    seen = loop.acceptance
    stands = [round(n / seen.num_steps, 2) for n in seen.accepted]
    print(f"{seen.mean_length:.2f} tokens a step over {seen.num_tokens}; stand {stands}")
    assert seen.num_tokens > 200 and seen.mean_length >= least


@torch.no_grad()
def test_served_drafts_stand_where_teacher_forced_ones_do() -> None:
    _, windows = served(0.0, 8, 100)
    c = load_draft_config(PACKAGED_DRAFT)
    target = train_draft.Target(PACKAGED_MODEL, c.taps, 1, "cpu")
    fields = load_draft(PACKAGED_DRAFT, c, torch.float32, "cpu")
    w = build_draft(c, fields.__getitem__, target.weights.embed, target.weights.lm_head)
    agreed = total = 0
    for request in {id(r): r for r, _, _ in windows}.values():
        mine = [(at, stood) for r, at, stood in windows if r is request]
        mine = [(at, stood) for at, stood in mine if at + c.block_size < train_draft.ROW]
        if not mine:
            continue
        ids = torch.tensor([[*request.ids, *[0] * train_draft.ROW][: train_draft.ROW]])
        anchors = torch.tensor([[at for at, _ in mine]])
        taps, logits = target.run(ids)
        hidden, base = train_draft.window_rows(c, w, taps, ids, anchors, torch.float32)
        before, after, theirs = train_draft.targets(ids, anchors, logits, c.block_size)
        _, _, same = train_draft.row_losses(w, hidden, base, before, after, theirs)
        forced = same.long().cumprod(-1).sum(-1).tolist()
        agreed += sum(stood == most for (_, stood), most in zip(mine, forced, strict=True))
        total += len(mine)
    print(f"{agreed} of {total} windows")
    assert total > 40 and agreed >= 0.97 * total  # two logits may nearly tie


def test_a_form_and_logprobs_beside_drafts() -> None:
    """A request whose form must see every id, one with log-probabilities and one with neither, in
    one batch: as without drafts, and the others still draft."""
    wanted: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("What does os.path.join do?", {}, {"response_format": {"type": "json_object"}}),
        ("What is 47 + 85?", {"logprobs": 2}, {}),
        ("Hello!", {}, {}),
    ]
    results = []
    for draft in (None, PACKAGED_DRAFT):
        settings = EngineConfig(max_num_reqs=3, break_even=0.0, num_snapshots=0)
        engine = Engine.load(PACKAGED_MODEL, draft=draft, settings=settings)
        requests = [
            engine.submit(
                text, engine.sampling(temperature=0.0, max_tokens=24, **o), thinking=False, **more
            )
            for text, o, more in wanted
        ]
        engine.run(requests)
        results.append([r.result() for r in requests])
    loop = engine._runner.loop
    assert isinstance(loop, SpecLoop) and loop.acceptance.mean_length > 2
    for found, right in zip(results[1], results[0], strict=True):
        assert (found.token_ids, found.text) == (right.token_ids, right.text)
    pairs = zip(results[1][1].logprobs or [], results[0][1].logprobs or [], strict=True)
    for a, b in pairs:
        assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-3)
