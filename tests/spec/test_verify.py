"""Acceptance leaves the target's law: enumerated to the last digit, and drawn from the real code.

Every mutation of dspark's list must be found by the same tests that the real functions pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanok3.sampling import SamplingParams, draw, probabilities, rows_of
from nanok3.spec import verify as v
from nanok3.spec.budget import CostCurve, Costs, admit, best_budget, survival
from nanok3.uniform import ACCEPT, DRAFT, NUM_STREAMS, RESIDUAL, uniform
from spec.laws import World, chances_of_tau, emitted, make_world, tables, target_law

RULES: tuple[v.Rule, ...] = ("standard", "block")


def soft(scale: float) -> Callable[[torch.Generator, int], Tensor]:
    def law(generator: torch.Generator, vocab: int) -> Tensor:
        logits = torch.randn(vocab, generator=generator, dtype=torch.float64) * scale
        return logits.softmax(-1)

    return law


def with_zeros(generator: torch.Generator, vocab: int) -> Tensor:
    """As top-p leaves it."""
    p = soft(1.5)(generator, vocab)
    p[p.argsort()[: vocab // 2]] = 0
    return p / p.sum()


def one_hot(generator: torch.Generator, vocab: int) -> Tensor:
    pick = int(torch.randint(vocab, (1,), generator=generator))
    return torch.nn.functional.one_hot(torch.tensor(pick), vocab).double()


def own(law: Callable[[torch.Generator, int], Tensor]) -> Callable[..., Tensor]:
    return lambda generator, vocab, target: law(generator, vocab)


def same(generator: torch.Generator, vocab: int, target: Tensor) -> Tensor:
    return target


def disjoint(generator: torch.Generator, vocab: int, target: Tensor) -> Tensor:
    q = (target == 0).double()
    return q / q.sum() if q.sum() > 0 else torch.ones(vocab, dtype=torch.float64) / vocab


LAWS: dict[str, tuple[Any, Any]] = {  # target's, draft's
    "soft": (soft(1.0), own(soft(1.0))),
    "sharp": (soft(3.0), own(soft(3.0))),
    "one-hot draft": (soft(1.0), own(one_hot)),
    "greedy": (one_hot, own(one_hot)),
    "greedy, soft draft": (one_hot, own(soft(1.0))),
    "target with zeros": (with_zeros, own(soft(1.0))),
    "draft with zeros": (soft(1.0), own(with_zeros)),
    "equal": (soft(1.0), same),
    "disjoint": (with_zeros, disjoint),
}


def worst(law: Tensor, world: World) -> float:
    return float((law - target_law(world)).abs().max())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LAWS)
def test_the_emitted_law_is_the_target_s(name: str, rule: v.Rule) -> None:
    for vocab, seed in ((3, 0), (4, 1), (5, 2)):
        world = make_world(vocab, 3, seed, *LAWS[name])
        policies = [None] if vocab > 3 else [None, lambda d: 0, lambda d: 1, lambda d: 2]
        for policy in policies:
            law, _ = emitted(world, rule, policy=policy)
            assert worst(law, world) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_how_many_are_verified_may_depend_on_the_drafts_before(rule: v.Rule) -> None:
    """Draft 1 always; draft 2 and 3 where draft 1 is even: known before draft 2 is drawn."""
    world = make_world(4, 3, 3, *LAWS["soft"])
    law, _ = emitted(world, rule, policy=lambda d: 3 if d[0] % 2 == 0 else 1)
    assert worst(law, world) < 1e-12


@pytest.mark.parametrize("name", LAWS)
def test_block_never_accepts_less(name: str) -> None:
    gains = []
    for seed in range(4):
        world = make_world(3, 3, seed, *LAWS[name])
        gains.append(emitted(world, "block")[1] - emitted(world, "standard")[1])
    assert min(gains) > -1e-12
    if name in ("soft", "sharp", "draft with zeros"):
        assert max(gains) > 0.01
    single = make_world(4, 1, 5, *LAWS[name])
    taus = [emitted(single, rule)[1] for rule in RULES]
    assert abs(taus[0] - taus[1]) < 1e-12, "with one draft the rules are the same"


def test_equal_laws_accept_everything_and_disjoint_ones_nothing() -> None:
    for rule in RULES:
        assert emitted(make_world(4, 3, 0, *LAWS["equal"]), rule)[1] == pytest.approx(3)
        world = make_world(4, 3, 0, *LAWS["disjoint"])
        assert emitted(world, rule)[1] == 0


# ---- what must be found ----


def unscaled_remainder(target: Tensor, draft: Tensor, rho: Tensor, *others: Tensor) -> Tensor:
    return v.remainder(target, draft, torch.ones_like(rho), *others)


def stops_at_first_failure(stand: Tensor, rule: v.Rule) -> Tensor:
    return chances_of_tau(stand, "standard")


def warmed(world: World, temperature: float) -> dict[tuple[int, ...], Tensor]:
    return {p: (q.log() / temperature).softmax(-1) for p, q in world.draft.items()}


def one_row_late(world: World) -> dict[tuple[int, ...], Tensor]:
    """Drawn with the bias of the token before the one before; the right law is stored."""
    return {p: world.draft[p[:-1] + p[-2:-1]] if len(p) > 1 else q for p, q in world.draft.items()}


MUTATIONS: dict[str, Callable[[World], dict[str, Any]]] = {
    "remainder without rho": lambda w: {"remainder": unscaled_remainder},
    "block stops at its first failure": lambda w: {"tau_law": stops_at_first_failure},
    "drafts at 0.7, q kept at 1": lambda w: {"drawn_from": warmed(w, 0.7)},
    "W1 looked up a row late": lambda w: {"drawn_from": one_row_late(w)},
    "verified where its own draft says so": lambda w: {"policy": lambda d: 3 * (d[0] == 0)},
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_rule_is_found(name: str) -> None:
    world = make_world(4, 3, 6, *LAWS["soft"])
    law, _ = emitted(world, "block", **MUTATIONS[name](world))
    assert worst(law, world) > 1e-4


def test_a_budget_from_the_drafts_own_confidences_is_found() -> None:
    """B from confidences of the step before keeps the law; B from the current ones does not."""
    world = make_world(3, 2, 8, soft(1.0), own(soft(1.0)))
    costs = Costs(CostCurve.of([(1, 1.0), (2, 1.4), (3, 1.8)], 3), CostCurve.of([(1, 0.1)], 1))

    def confidence(drafts: tuple[int, ...]) -> Tensor:
        """Of draft 1, and of draft 2 by draft 1, as the draft model's are."""
        return torch.tensor([[0.5, (0.95, 0.1, 0.4)[drafts[0]]]])

    def policy(old: list[float] | None) -> Callable[[tuple[int, ...]], int]:
        def lengths(drafts: tuple[int, ...]) -> int:
            current = survival(confidence(drafts), torch.tensor([2]))
            budget = best_budget(old or current[0].tolist(), 1, 1, costs)
            return int(admit(current, budget)[0])

        return lengths

    for rule in RULES:
        law, _ = emitted(world, rule, policy=policy([0.9, 0.3]))
        assert worst(law, world) < 1e-12
        assert len({policy(None)(d) for d in world.sequences}) > 1, "no power: B never changes"
        law, _ = emitted(world, rule, policy=policy(None))
        assert worst(law, world) > 1e-3


# ---- drawn from the real code ----


def chi_square_p(counts: Tensor, law: Tensor) -> float:
    """Of these counts under this law; cells that expect fewer than 10 are put together."""
    expected = law.flatten() * counts.sum()
    observed = counts.flatten().double()
    assert observed[expected == 0].sum() == 0, "an impossible sequence came out"
    small = expected < 10
    pairs = [(observed[~small], expected[~small])]
    if expected[small].sum() > 0:
        pairs.append((observed[small].sum().view(1), expected[small].sum().view(1)))
    o, e = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    statistic = ((o - e).square() / e).sum()
    degrees = len(o) - 1
    if degrees == 0:
        return 1.0
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


DRAWS = 100_000


@torch.no_grad()
def drawn(
    world_logits: tuple[Tensor, Tensor],
    params: SamplingParams,
    rule: v.Rule,
    seed: int,
    *,
    one_hot_drafts: bool = False,
    lengths_of: Callable[[Tensor], Tensor] | None = None,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Counts of the first 3 ids after two drafts, [V, V, V], and their law.

    The first-order tables are logits by the id before, of target and draft: [V, V].
    """
    target, draft = world_logits
    vocab, k = len(target), 2
    options = rows_of([replace(params, seed=0)] * vocab, "cpu")
    bare = replace(params, top_p=1.0, top_k=0, min_p=0.0, seed=0)
    draft_options = rows_of(
        [replace(bare, temperature=0.0) if one_hot_drafts else bare] * vocab, "cpu"
    )
    p, q = probabilities(target, options), probabilities(draft, draft_options)  # [V, V], by before
    seeds = torch.arange(DRAWS) + seed * DRAWS
    place = torch.zeros_like(seeds)
    before = torch.zeros(DRAWS, dtype=torch.int64)  # the anchor is id 0
    ids, laws, rows = [], [], [p[before]]
    for i in range(k):
        laws.append(q[before])
        before = draw(laws[-1], uniform(seeds, place + i, DRAFT + NUM_STREAMS * 3))
        ids.append(before)
        rows.append(p[before])
    drafts = torch.stack(ids, 1)
    lengths = torch.full((DRAWS,), k) if lengths_of is None else lengths_of(drafts)
    accept = torch.stack([uniform(seeds, place + i, ACCEPT + NUM_STREAMS * 3) for i in range(k)], 1)
    following = accept[:, 0] if shared else uniform(seeds, place, RESIDUAL)
    out = v.verify(
        torch.stack(rows, 1), torch.stack(laws, 1), drafts, lengths, accept, following, rule
    )
    sequence = torch.full((DRAWS, k + 1), -1)
    for i in range(k):
        sequence[:, i] = torch.where(i < out.num_accepted, drafts[:, i], -1)
    sequence.scatter_(1, out.num_accepted[:, None], out.next_ids[:, None])
    for i in range(k + 1):  # what the target goes on with
        last = sequence[:, i - 1] if i else before * 0
        fresh = draw(p[last], uniform(seeds, place + 10 + i, RESIDUAL))
        sequence[:, i] = torch.where(sequence[:, i] < 0, fresh, sequence[:, i])
    flat = (sequence * torch.tensor([vocab**2, vocab, 1])).sum(-1)
    counts = torch.bincount(flat, minlength=vocab**3)
    law = p[0][:, None, None] * p[:, :, None] * p[None, :, :]
    return counts.view(vocab, vocab, vocab), law


def logits_pair(seed: int, vocab: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(vocab, vocab, generator=generator) * 1.5
    return target, target + torch.randn(vocab, vocab, generator=generator)


def by_first_draft(drafts: Tensor) -> Tensor:
    return 1 + (drafts[:, 0] % 2 == 0).long()


CASES: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "T 0.3": (SamplingParams(temperature=0.3), {}),
    "T 1": (SamplingParams(temperature=1.0), {}),
    "T 1.7": (SamplingParams(temperature=1.7), {}),
    "top-p": (SamplingParams(temperature=1.0, top_p=0.8), {}),
    "top-k, min-p": (SamplingParams(temperature=1.3, top_k=4, min_p=0.1), {}),
    "one-hot drafts": (SamplingParams(temperature=1.0), {"one_hot_drafts": True}),
    "one draft": (SamplingParams(), {"lengths_of": lambda d: torch.ones(len(d)).long()}),
    "no draft": (SamplingParams(), {"lengths_of": lambda d: torch.zeros(len(d)).long()}),
    "ragged": (SamplingParams(), {"lengths_of": by_first_draft}),
}
SEEDS = 3
LEVEL = 1e-3 / (len(CASES) * len(RULES) * SEEDS)  # Bonferroni


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_draws_have_the_target_s_law(name: str, rule: v.Rule) -> None:
    params, options = CASES[name]
    for seed in range(SEEDS):
        counts, law = drawn(logits_pair(seed), params, rule, seed, **options)
        assert chi_square_p(counts, law) > LEVEL


@pytest.mark.parametrize("rule", RULES)
def test_a_uniform_used_twice_is_found(rule: v.Rule) -> None:
    counts, law = drawn(logits_pair(0), SamplingParams(), rule, 0, shared=True)
    assert chi_square_p(counts, law) < LEVEL


# ---- single steps ----


def test_greedy_accepts_the_likeliest_and_goes_on_with_it() -> None:
    """Drafts right up to each place in turn."""
    best = [3, 1, 4, 2]
    p = torch.nn.functional.one_hot(torch.tensor([best]), 5).double()
    for rule, right in itertools.product(RULES, range(4)):
        drafts = torch.tensor([[b if i < right else 0 for i, b in enumerate(best[:3])]])
        q = torch.full((1, 3, 5), 0.2, dtype=torch.float64)
        out = v.verify(
            p, q, drafts, torch.tensor([3]), torch.full((1, 3), 0.999), torch.tensor([0.5]), rule
        )
        assert out.num_accepted.tolist() == [right] and out.next_ids.tolist() == [best[right]]


def test_requests_of_a_batch_do_not_touch_one_another() -> None:
    world = make_world(4, 3, 1, *LAWS["soft"])
    target, draft = tables(world, world.target, 4), tables(world, world.draft, 3)
    ids = torch.tensor(world.sequences)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (len(ids),), generator=generator)
    u = torch.rand(len(ids), 3, generator=generator, dtype=torch.float64)
    following = torch.rand(len(ids), generator=generator, dtype=torch.float64)
    for rule in RULES:
        whole = v.verify(target, draft, ids, lengths, u, following, rule)
        for r in range(0, len(ids), 7):
            m = int(lengths[r])  # padded drafts and their rows are not read
            alone = v.verify(
                target[r : r + 1, : m + 1], draft[r : r + 1, :m], ids[r : r + 1, :m],
                lengths[r : r + 1], u[r : r + 1, :m], following[r : r + 1], rule,
            )  # fmt: skip
            assert alone.num_accepted.item() == whole.num_accepted[r].item() <= m
            assert alone.next_ids.item() == whole.next_ids[r].item()


def test_a_row_without_a_distribution_ends_there() -> None:
    """Logits that were not finite give a row of zeros: nothing past it is accepted."""
    p = torch.full((1, 3, 4), 0.25, dtype=torch.float64)
    q = p[:, :2].clone()
    p[:, 1] = 0
    for rule in RULES:
        out = v.verify(
            p, q, torch.tensor([[1, 2]]), torch.tensor([2]), torch.zeros(1, 2), torch.zeros(1), rule
        )
        assert out.num_accepted.item() == 1 and out.next_ids.item() == -1
