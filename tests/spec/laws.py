"""The law of what speculation emits, enumerated exactly, and the law it must have.

A world has a target and a draft over V ids, each a table of distributions by prefix. `emitted`
walks over all draft sequences and asks the real functions for chances and remainders; nothing is
drawn. Functions and policies may be replaced, so that tests can show that a wrong one is found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.spec import verify as v

Prefix = tuple[int, ...]
Policy = Callable[[Prefix], int]  # drafts -> how many are verified


@dataclass(frozen=True)
class World:
    vocab: int
    num_drafts: int
    target: dict[Prefix, Tensor]  # [V] f64 after each prefix of up to num_drafts ids
    draft: dict[Prefix, Tensor]  # [V] f64, of up to num_drafts - 1 ids

    @property
    def sequences(self) -> list[Prefix]:
        return list(itertools.product(range(self.vocab), repeat=self.num_drafts))


def make_world(
    vocab: int,
    num_drafts: int,
    seed: int,
    law: Callable[[torch.Generator, int], Tensor],
    draft_law: Callable[[torch.Generator, int, Tensor], Tensor],
) -> World:
    """`law` gives the target's distribution, `draft_law` the draft's (it sees the target's)."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = {}, {}
    for length in range(num_drafts + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            target[prefix] = law(generator, vocab)
            if length < num_drafts:
                draft[prefix] = draft_law(generator, vocab, target[prefix])
    return World(vocab, num_drafts, target, draft)


def tables(world: World, table: dict[Prefix, Tensor], rows: int) -> Tensor:
    """[sequences, rows, V]: row i after the first i drafts of each sequence."""
    return torch.stack([torch.stack([table[d[:i]] for i in range(rows)]) for d in world.sequences])


def target_law(world: World) -> Tensor:
    """[V] * (K + 1): chance of the first K + 1 ids, by the target alone."""
    law = torch.ones((), dtype=torch.float64)
    for length in range(world.num_drafts + 1):
        prefixes = itertools.product(range(world.vocab), repeat=length)
        rows = torch.stack([world.target[p] for p in prefixes])
        law = law.reshape(-1, 1) * rows
    return law.reshape((world.vocab,) * (world.num_drafts + 1))


def chances_of_tau(stand: Tensor, rule: v.Rule) -> Tensor:
    """h [R, K] -> chance of each tau [R, K + 1], for independent uniforms."""
    one = torch.ones_like(stand[:, :1])
    if rule == "standard":
        reached = torch.cat([one, stand.cumprod(-1)], 1)
        return reached - torch.cat([reached[:, 1:], torch.zeros_like(one)], 1)
    fails = torch.cat([(1 - stand).flip(1).cumprod(1).flip(1)[:, 1:], one], 1)  # all after i fail
    later = stand * fails
    return torch.cat([1 - later.sum(-1, keepdim=True), later], 1)


def emitted(
    world: World,
    rule: v.Rule,
    *,
    policy: Policy | None = None,
    drawn_from: dict[Prefix, Tensor] | None = None,
    chances: Callable[..., v.Chances] = v.chances,
    remainder: Callable[..., Tensor] = v.remainder,
    tau_law: Callable[[Tensor, v.Rule], Tensor] = chances_of_tau,
) -> tuple[Tensor, float]:
    """-> chance of the first K + 1 ids, [V] * (K + 1), continued by the target where a step gave
    fewer; mean of tau. drawn_from: what the drafts really came from, if not the world's."""
    k, vocab, sequences = world.num_drafts, world.vocab, world.sequences
    target, draft = tables(world, world.target, k + 1), tables(world, world.draft, k)
    source = tables(world, drawn_from or world.draft, k)
    ids = torch.tensor(sequences)
    lengths = torch.tensor([k if policy is None else policy(d) for d in sequences])
    odds = chances(target, draft, ids, lengths, rule)
    taus = tau_law(odds.stand, rule)  # [R, K + 1]
    weight = source.gather(-1, ids.unsqueeze(-1)).squeeze(-1).prod(-1)  # [R], of the drafts
    law = torch.zeros((vocab,) * (k + 1), dtype=torch.float64)
    after = target_law(world)
    for tau in range(k + 1):
        place = torch.full_like(lengths, tau)
        left = remainder(target, draft, odds.rho, place, lengths)
        left = left / left.sum(-1, keepdim=True).clamp(min=1e-300)
        for r, drafts in enumerate(sequences):
            mass = weight[r] * taus[r, tau]
            if mass == 0:
                continue
            for token in range(vocab):
                begun = (*drafts[:tau], token)
                rest = after[begun]  # the target's law of these ids and what follows
                share = rest / rest.sum() if rest.sum() > 0 else torch.zeros_like(rest)
                if rest.sum() == 0 and mass * left[r, token] > 1e-15:
                    share = torch.full_like(rest, 1 / rest.numel())  # impossible ids came out
                law[begun] += mass * left[r, token] * share
    mean = float((weight[:, None] * taus * torch.arange(k + 1)).sum())
    return law, mean
