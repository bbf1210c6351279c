"""Drafts written by a test instead of by a draft model: what to propose after each prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanok3.engine import Engine
from nanok3.spec.propose import Proposal

# (request's ids so far, K) -> drafts, at most K
Script = Callable[[list[int], int], list[int]]


def script_drafts(
    engine: Engine, script: Script, truth: dict[int, list[int]] | None = None
) -> None:
    """The engine's drafter proposes what `script` says, each with all of its law on one id.

    truth: known replies by the first id of a prompt, for an engine that queues a step before the
    ids of the last one are read."""
    loop: Any = engine._runner.loop

    def propose(
        anchors: Tensor, positions: Tensor, table: Tensor, options: Any, steps: Tensor,
        num_drafts: int, all_greedy: bool,
    ) -> Proposal:  # fmt: skip
        ids = torch.zeros(len(anchors), num_drafts, dtype=torch.int64)
        lengths = [0] * len(anchors)
        for i, request in enumerate(loop.batch):
            position = int(positions[i])
            if int(loop.state.positions[i]) < 0:
                continue
            so_far = request.ids
            if truth is not None:
                so_far = truth[request.ids[0]][: position + 1]
            assert so_far[-1] == int(anchors[i]) and len(so_far) == position + 1
            drafts = script(so_far, num_drafts)[:num_drafts]
            ids[i, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            lengths[i] = len(drafts)
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
