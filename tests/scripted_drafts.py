"""Drafts written by a test instead of by a draft model: what to propose after each prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nanok3.engine import Engine
from nanok3.spec.propose import Proposal

# (request's ids so far, K) -> drafts, at most K
Script = Callable[[list[int], int], list[int]]


def script_drafts(engine: Engine, script: Script) -> None:
    """The engine's drafter proposes what `script` says, each with all of its law on one id."""
    loop: Any = engine._runner.loop

    def propose(
        anchors: Sequence[int], positions: Sequence[int], blocks: Any, options: Any, steps: Any,
        num_drafts: int,
    ) -> Proposal:  # fmt: skip
        ids = torch.zeros(len(anchors), num_drafts, dtype=torch.int64)
        lengths = []
        for i, (anchor, position) in enumerate(zip(anchors, positions, strict=True)):
            request = next(
                r for r in loop.batch if r.blocks == blocks[i] and r.num_cached == position
            )
            assert request.ids[-1] == anchor and len(request.ids) == position + 1
            drafts = script(request.ids, num_drafts)[:num_drafts]
            ids[i, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            lengths.append(len(drafts))
        vocab = engine.config.vocab_size
        law = torch.nn.functional.one_hot(ids, vocab).double()
        sure = torch.ones(ids.shape)
        return Proposal(ids, torch.tensor(lengths), law, sure)

    loop.drafter.propose = propose


def follows(truth: dict[int, list[int]], right: Callable[[int], int]) -> Script:
    """Of known replies, by the first id of a prompt: `right(place)` true drafts after `place` ids,
    then wrong ones."""

    def script(ids: list[int], num_drafts: int) -> list[int]:
        whole = truth[ids[0]]
        place = len(ids)
        good = min(right(place), num_drafts)
        drafts = whole[place : place + num_drafts]
        return [t if i < good else (t + 1) % 512 for i, t in enumerate(drafts)]

    return script
