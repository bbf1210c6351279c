"""Sampling against a plain form in Python numbers, against hand-made numbers, and row against row.

`expected` below is the oracle: one row, lists and `math`, no line shared with the module.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanok3.sampling import (
    SampledTokens,
    SamplingParams,
    draw,
    logprobs_of,
    penalise,
    probabilities,
    rows_of,
    sample,
)
from nanok3.uniform import TARGET, uniform

V = 61
INF = math.inf


def expected(
    logits: list[float], p: SamplingParams, counts: list[int], seen: list[bool]
) -> list[float]:
    """The probabilities that one row should have, in the order that the module's header gives."""
    x = list(logits)
    for i in range(len(x)):
        if seen[i] or counts[i]:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        if counts[i]:
            x[i] -= p.frequency_penalty * counts[i] + p.presence_penalty
        if i in p.stop_token_ids and sum(counts) < p.min_tokens:
            x[i] = -INF
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.temperature == 0:
        return [float(i == order[0]) for i in range(len(x))]
    chance = [math.exp((v - max(x)) / p.temperature) for v in x]
    if p.top_k:
        order = order[: p.top_k]
    total = math.fsum(chance[i] for i in order)
    kept: list[int] = []
    for i in order:
        if p.top_p < 1 and math.fsum(chance[j] for j in kept) >= p.top_p * total:
            break
        kept.append(i)
    kept = [i for i in kept if chance[i] >= p.min_p * max(chance)]
    total = math.fsum(chance[i] for i in kept)
    return [chance[i] / total if i in kept else 0.0 for i in range(len(x))]


def chances(logits: Tensor, *params: SamplingParams) -> Tensor:
    """Probabilities of rows without penalties."""
    return probabilities(logits, rows_of([replace(p, seed=p.seed or 0) for p in params], "cpu"))


def draws(logits: Tensor, p: SamplingParams, num: int) -> Tensor:
    """Ids of one request at positions 0..num-1, every row with the same `logits` [V]."""
    rows = rows_of([replace(p, seed=p.seed or 0)] * num, "cpu")
    return sample(logits.expand(num, -1), rows, torch.arange(num)).ids


# Each option's values, the neutral one first.
OPTIONS: dict[str, list[object]] = {
    "temperature": [1.0, 0.0, 0.3, 1.7],
    "top_p": [1.0, 0.6, 1e-9],
    "top_k": [0, 1, 7, 1000],
    "min_p": [0.0, 0.2, 1.0],
    "seed": [0, -5, 2**63 - 1],
    "presence_penalty": [0.0, 1.5, -2.0],
    "frequency_penalty": [0.0, 0.7, -0.4],
    "repetition_penalty": [1.0, 1.3, 0.8],
    "min_tokens": [0, 50],
    "logprobs": [None, 0, 3],
}


def pairs() -> list[SamplingParams]:
    """Every value of every option beside every value of every other one."""
    found = []
    for (a, b), others in itertools.product(itertools.combinations(OPTIONS, 2), (False, True)):
        for x, y in itertools.product(OPTIONS[a], OPTIONS[b]):
            # Once with all other options neutral, once with all of them in use.
            chosen = {name: values[-1 if others else 0] for name, values in OPTIONS.items()}
            chosen |= {"min_p": 0.05, "top_k": 9, "top_p": 0.8} if others else {}
            found.append(SamplingParams(**(chosen | {a: x, b: y}), stop_token_ids=(3, 8)))  # type: ignore[arg-type]
    return found


def batch(num: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits with ties and forbidden ids, positions, counts, and what the prompts contain."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num, vocab, generator=g) * 3 * 8).round() / 8
    logits[torch.rand(num, vocab, generator=g) < 0.05] = -INF
    counts = torch.randint(0, 30, (num, vocab), generator=g).sub(26).clamp(min=0)
    prompt_seen = torch.rand(num, vocab, generator=g) < 0.2
    return logits, torch.randint(0, 5000, (num,), generator=g), counts, prompt_seen


def test_every_pair_of_options_gives_the_expected_distribution() -> None:  # D-03
    params = pairs()
    assert not [problem for p in params for problem in p.problems()]
    logits, positions, counts, seen = batch(len(params), V)
    rows = rows_of(params, "cpu")
    scores = penalise(logits.double(), counts, seen, rows)
    got = probabilities(scores, rows)
    out = sample(logits.double(), rows, positions, counts, seen, num_logprobs=3)
    assert out.finite.all()
    assert torch.equal(out.ids, draw(got, uniform(rows.seeds, positions, TARGET)))
    for t, p in enumerate(params):
        want = expected(logits[t].tolist(), p, counts[t].tolist(), seen[t].tolist())
        torch.testing.assert_close(got[t], torch.tensor(want).double(), atol=1e-7, rtol=1e-6)
        assert want[int(out.ids[t])] > 0


# D-01: a row by itself and in any company.


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7e9), b.nan_to_num(7e9))


def take(out: SampledTokens, row: int) -> list[Tensor]:
    assert out.logprobs is not None
    lp = out.logprobs
    return [x[row] for x in (out.ids, out.finite, lp.chosen, lp.top_ids, lp.top)]


@pytest.mark.parametrize(
    ("num", "vocab"),
    # Odd sizes leave vector tails; 40000 ids are enough for torch to add up one row in parts.
    [(24, 997), (5, 40_000)],
)
def test_a_row_does_not_see_its_neighbours(num: int, vocab: int) -> None:
    g = torch.Generator().manual_seed(3)
    params = pairs()
    params = [params[i] for i in torch.randperm(len(params), generator=g)[: num - 1].tolist()]
    params = [SamplingParams(seed=11), *params]  # and one without any option
    logits, positions, counts, seen = batch(num, vocab)
    logits += 1e-3 * torch.randn(num, vocab, generator=g)
    logits[2, 5], logits[num - 1] = math.nan, math.nan

    def run(chosen: list[int]) -> tuple[SampledTokens, Tensor]:
        rows = rows_of([params[i] for i in chosen], "cpu")
        out = sample(logits[chosen], rows, positions[chosen], counts[chosen], seen[chosen], 3)
        scores = penalise(logits[chosen], counts[chosen], seen[chosen], rows)
        return out, probabilities(scores, rows)

    together, p_together = run(list(range(num)))
    companies = [[i] for i in range(num)]
    companies += [torch.randperm(num, generator=g)[:size].tolist() for size in (2, 3, num)]
    for company in companies:
        out, p = run(company)
        for row, i in enumerate(company):
            assert torch.equal(p[row], p_together[i]), f"probabilities of row {i} in {company}"
            for a, b in zip(take(out, row), take(together, i), strict=True):
                assert bits_equal(a, b), f"row {i} in {company}"


def test_unused_options_cost_no_bit() -> None:
    """A plain row drawn with the sort and the penalties skipped, and with both in the way."""
    logits, positions, counts, seen = batch(200, V)
    plain = [SamplingParams(seed=i, temperature=0.9) for i in range(200)]
    busy = SamplingParams(seed=1, top_p=0.5, top_k=3, min_p=0.1, presence_penalty=1, min_tokens=99)
    alone = rows_of(plain, "cpu")
    assert not alone.uses_sort and not alone.uses_counts
    beside = rows_of([*plain, busy], "cpu")
    assert beside.uses_sort and beside.uses_counts
    more = [torch.cat([x, x[:1]]) for x in (logits, positions, counts, seen)]
    ids = sample(logits, alone, positions).ids
    assert torch.equal(ids, sample(more[0], beside, more[1], more[2], more[3]).ids[:200])


def test_rows_of_a_window_equal_steps_one_by_one() -> None:  # D-06
    """Q rows of one request, each with its own prefix counted, are what Q single steps would be."""
    p = SamplingParams(seed=4, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2)
    p = replace(p, top_k=20, min_tokens=3, stop_token_ids=(1, 2))
    logits, _, counts, seen = batch(6, V)
    counts = torch.zeros_like(counts)
    seen[:] = seen[0]
    ids = []
    for t in range(6):
        one = slice(t, t + 1)
        row = rows_of([p], "cpu")
        ids.append(sample(logits[one], row, torch.tensor([t]), counts[one], seen[one]).ids)
        counts[t + 1 :, int(ids[-1])] += 1
    window = sample(logits, rows_of([p] * 6, "cpu"), torch.arange(6), counts, seen)
    assert torch.equal(window.ids, torch.cat(ids))
    assert len(set(window.ids.tolist())) > 1


def test_penalties_cannot_be_left_out() -> None:  # D-06
    rows = rows_of([SamplingParams(seed=0, presence_penalty=1.0)], "cpu")
    with pytest.raises(AssertionError, match="counts"):
        sample(torch.zeros(1, V), rows, torch.zeros(1).long())


def test_nothing_handed_in_is_written() -> None:  # D-08
    params = pairs()[::7]
    given = batch(len(params), V)
    copies = [x.clone() for x in given]
    logits, positions, counts, seen = given
    rows = rows_of(params, "cpu")
    first = sample(logits, rows, positions, counts, seen, 2)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert torch.equal(first.ids, sample(logits, rows, positions, counts, seen, 2).ids)


# The draw itself.


def chi_square_limit(freedom: int) -> float:
    """Chi-square that one honest run in 100000 exceeds (Wilson and Hilferty's approximation)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 4.265 * (2 / (9 * freedom)) ** 0.5) ** 3)


@pytest.mark.parametrize("seed", [0, 1, 99, -(2**63)])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0}, {"top_p": 0.7}, {"top_k": 5, "min_p": 0.1}]
)
def test_draws_follow_the_probabilities(seed: int, options: dict[str, float]) -> None:
    num = 20_000
    p = SamplingParams(seed=seed, **options)  # type: ignore[arg-type]
    logits = torch.tensor([1.0, -1.0, 0.5, 2.0, -INF, 0.5, 1.5, -2.0, 0.0, 1.0])
    ids = draws(logits, p, num)
    want = torch.tensor(expected(logits.tolist(), p, [0] * 10, [False] * 10)).double() * num
    seen = torch.bincount(ids, minlength=10)
    assert not seen[want == 0].any()
    cells = want > 0
    chi = float(((seen - want)[cells] ** 2 / want[cells]).sum())
    assert chi < chi_square_limit(int(cells.sum()) - 1)


def test_the_draw_is_the_inverse_of_the_running_sum() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    last = 1 - 2.0**-53
    below = 2.0**-40
    u = torch.tensor([0, 0.25 - below, 0.25, 0.75 - below, 0.75, last], dtype=torch.float64)
    assert draw(weights.expand(6, -1), u).tolist() == [1, 1, 3, 3, 4, 4]
    # The same for weights that do not add up to 1, as a residual's do not.
    assert draw(weights.expand(6, -1) * 1e-12, u).tolist() == [1, 1, 3, 3, 4, 4]
    poor = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [INF, 1.0]]).double()
    assert draw(poor, torch.full((3,), 0.5).double()).tolist() == [-1, -1, -1]


def test_probabilities_add_up_and_draw_as_sample_does() -> None:
    logits = torch.randn(50, 5000, generator=torch.Generator().manual_seed(1)) * 4
    rows = rows_of([SamplingParams(seed=i, top_p=0.9 + i % 2 * 0.1) for i in range(50)], "cpu")
    positions = torch.arange(50)
    p = probabilities(logits, rows)
    torch.testing.assert_close(p.sum(-1), torch.ones(50).double(), atol=1e-12, rtol=0)
    exact = logits.double().softmax(-1)[1::2]
    torch.testing.assert_close(p[1::2], exact, atol=1e-13, rtol=1e-9)
    ids = sample(logits, rows, positions).ids
    assert torch.equal(draw(p, uniform(rows.seeds, positions, TARGET)), ids)


def test_a_large_vocabulary_does_not_overflow() -> None:
    rows = rows_of([SamplingParams(seed=i) for i in range(4)], "cpu")
    p = probabilities(torch.zeros(4, 2**18), rows)
    assert (p == 2.0**-18).all()
    u = torch.tensor([0.0, 0.5, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(p, u).tolist() == [0, 2**17, 3 * 2**16, 2**18 - 1]
    with pytest.raises(AssertionError, match="at most"):
        probabilities(torch.zeros(4, 2**18 + 1), rows)


# Ties, edges and filters by hand.


def test_sums_above_2_to_the_53_are_not_rounded() -> None:
    """8192 likely ids and a few of the smallest mass: as f64, their total is off by up to 16."""
    last = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    for few in range(1, 64):
        logits = torch.zeros(1, 8192 + few, dtype=torch.float64)
        logits[:, 8192:] = -44 * math.log(2)
        rows = rows_of([SamplingParams(seed=0, top_k=10**6)], "cpu")
        assert rows.uses_sort  # for a neighbour's sake: the row itself leaves nothing out
        p = probabilities(logits, rows)
        assert (p > 0).all()
        assert 0 <= int(draw(p, last)) < 8192 + few


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.full((4, V), -1.0)
    logits[0, [7, 9, 60]] = 2.0
    logits[2, 5], logits[2, 4] = 0.0, -0.0  # equal, whatever their bits
    logits[3, 1:] = -INF
    rows = rows_of([SamplingParams(temperature=0)] * 4, "cpu")
    out = sample(logits, rows, torch.arange(4))
    assert out.ids.tolist() == [7, 0, 4, 0] and out.finite.all()
    assert torch.equal(probabilities(logits, rows), torch.eye(V).double()[[7, 0, 4, 0]])


def test_top_k_cuts_equals_by_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 2.0, 1.0, -0.0]] * 4)
    got = chances(logits, *[SamplingParams(top_k=k) for k in (1, 2, 3, 5)])
    kept = [row.nonzero()[:, 0].tolist() for row in got]
    assert kept == [[3], [1, 3], [1, 2, 3], [0, 1, 2, 3, 4]]


def test_top_p_keeps_the_smallest_prefix_that_reaches_p() -> None:
    logits = torch.zeros(1, 4).expand(6, -1)  # four equal chances, cut from the highest id down
    got = chances(logits, *[SamplingParams(top_p=p) for p in (1e-300, 0.25, 0.26, 0.5, 0.75, 1)])
    assert [row.tolist() for row in got] == [
        [1, 0, 0, 0],
        [1, 0, 0, 0],
        [0.5, 0.5, 0, 0],
        [0.5, 0.5, 0, 0],
        [1 / 3, 1 / 3, 1 / 3, 0],
        [0.25, 0.25, 0.25, 0.25],
    ]


def test_top_p_counts_what_top_k_left_and_min_p_comes_last() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(3, -1)
    got = chances(
        logits,
        SamplingParams(top_k=2, top_p=0.55),  # 0.4 of 0.7 is 0.57
        SamplingParams(top_p=0.95, min_p=0.3),  # min-p before top-p would keep the first two only
        SamplingParams(temperature=0.5, min_p=0.5),  # 0.3 / 0.4 squared is 0.56
    )
    want = torch.tensor([[1, 0, 0, 0], [4 / 9, 3 / 9, 2 / 9, 0], [16 / 25, 9 / 25, 0, 0]])
    torch.testing.assert_close(got, want.double(), atol=1e-7, rtol=0)


def test_min_p_one_keeps_the_equals_of_the_best() -> None:
    got = chances(torch.tensor([[1.0, 3.0, 3.0, 2.9999]]), SamplingParams(min_p=1.0))
    assert got.tolist() == [[0, 0.5, 0.5, 0]]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-12}, {"temperature": 1e-300}])
def test_the_narrowest_filters_are_greedy(options: dict[str, float]) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(2))
    ids = draws(logits, SamplingParams(**options), 300)  # type: ignore[arg-type]
    assert (ids == logits.argmax()).all()


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, 0.0]])
    counts = torch.tensor([[0, 0, 3, 1, 0, 1]])
    seen = torch.tensor([[True, True, True, False, False, False]])

    def after(**options: float) -> list[float]:
        rows = rows_of([SamplingParams(seed=0, **options)], "cpu")  # type: ignore[arg-type]
        return penalise(logits, counts, seen, rows)[0].tolist()

    assert after() == logits[0].tolist()
    # The prompt and the output, once each however often: 2 / 4 and -2 * 4.
    assert after(repetition_penalty=4.0) == [0.5, -8.0, 0.5, -8.0, 2.0, 0.0]
    # The output alone.
    assert after(presence_penalty=0.5) == [2.0, -2.0, 1.5, -2.5, 2.0, -0.5]
    assert after(frequency_penalty=0.5) == [2.0, -2.0, 0.5, -2.5, 2.0, -0.5]
    # Repetition first: 2 / 4 - 3 * 0.5 - 1.
    both = after(repetition_penalty=4.0, frequency_penalty=0.5, presence_penalty=1.0)
    assert both == [0.5, -8.0, -2.0, -9.5, 2.0, -1.5]


def test_stop_ids_are_banned_until_min_tokens() -> None:
    p = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(4, 999))
    logits = torch.tensor([[0.0, 0.0, 1.0, 0.0, 9.0]] * 4)
    counts = torch.tensor([[0] * 5, [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0] * 5])
    seen = torch.zeros(4, 5, dtype=torch.bool)
    rows = rows_of([p, p, p, SamplingParams(temperature=0, stop_token_ids=(1, 2, 3))], "cpu")
    assert sample(logits, rows, torch.arange(4), counts, seen).ids.tolist() == [2, 2, 4, 4]


# Rows without a distribution (G-01, lesson 3) and forbidden ids.


def test_rows_that_are_not_finite_are_flagged_and_hurt_no_other() -> None:
    g = torch.Generator().manual_seed(5)
    good = torch.randn(V, generator=g)
    bad = torch.randn(6, V, generator=g)
    bad[0] = math.nan
    bad[1, 17] = math.nan
    bad[2, 17] = INF
    bad[3] = -INF
    bad[4, 3] = math.nan  # on a banned stop id
    bad[5, [3, 20]] = torch.tensor([-INF, INF])
    logits = torch.stack([good, *bad, good])
    counts = torch.zeros(8, V, dtype=torch.int32)
    for options in ({}, {"top_p": 0.5, "top_k": 9}, {"temperature": 0.0}, {"presence_penalty": 1}):
        p = SamplingParams(seed=6, min_tokens=1, stop_token_ids=(3,), **options)
        rows = rows_of([p] * 8, "cpu")
        positions = torch.zeros(8, dtype=torch.int64)
        out = sample(logits, rows, positions, counts, counts > 0, num_logprobs=2)
        assert out.finite.tolist() == [True, *[False] * 6, True]
        assert out.ids[1:7].tolist() == [-1] * 6
        assert out.ids[0] == out.ids[7] != -1
        assert out.logprobs is not None
        assert out.logprobs.chosen.isnan().tolist() == [False, *[True] * 6, False]
        assert (out.logprobs.top_ids[1:7] == -1).all()
        scores = penalise(logits, counts, counts > 0, rows)
        assert not probabilities(scores, rows)[1:7].any()


def test_all_ids_banned_is_flagged() -> None:
    p = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=(0, 1, 2))
    counts = torch.zeros(1, 3, dtype=torch.int64)
    out = sample(torch.zeros(1, 3), rows_of([p], "cpu"), counts[:, 0], counts, counts > 0)
    assert out.ids.tolist() == [-1] and out.finite.tolist() == [False]


def test_all_equal_logits_give_ids_in_range() -> None:
    for value in (0.0, -1e30, 1e30):
        ids = draws(torch.full((V,), value), SamplingParams(), 3000)
        assert set(ids.tolist()) == set(range(V))


def test_forbidden_ids_are_never_drawn() -> None:  # G-06: also when all allowed scores are negative
    logits = torch.full((V,), -INF)
    logits[[2, 30, 60]] = torch.tensor([-500.0, -501.0, -502.0])
    for options in ({}, {"temperature": 100.0}, {"top_k": 50}, {"top_p": 0.999}, {"min_p": 1e-6}):
        ids = draws(logits, SamplingParams(**options), 2000)
        assert set(ids.tolist()) == {2, 30, 60}


def test_no_device_value_is_read() -> None:
    """On the meta device there are no values, so reading one raises."""
    params = pairs()[::40]
    rows = rows_of(params, "meta")
    shape = (len(params), V)
    counts = torch.empty(shape, dtype=torch.int32, device="meta")
    logits = torch.empty(shape, device="meta")
    positions = torch.empty(len(params), dtype=torch.int64, device="meta")
    out = sample(logits, rows, positions, counts, counts > 0, num_logprobs=2)
    assert out.ids.shape == (len(params),) and draw(probabilities(logits, rows), rows.top_p).is_meta


# Log-probabilities.


def test_logprobs_are_the_raw_models() -> None:
    logits, positions, counts, seen = batch(8, V)
    p = SamplingParams(seed=1, temperature=0.2, repetition_penalty=1.5, top_k=4, presence_penalty=2)
    out = sample(logits, rows_of([p] * 8, "cpu"), positions, counts, seen, num_logprobs=5)
    raw = logits.double().log_softmax(-1)
    assert out.logprobs is not None
    torch.testing.assert_close(
        out.logprobs.chosen.double(), raw.gather(1, out.ids[:, None])[:, 0], atol=2e-6, rtol=1e-6
    )
    torch.testing.assert_close(
        out.logprobs.top.double(), raw.gather(1, out.logprobs.top_ids), atol=2e-6, rtol=1e-6
    )
    for t in range(8):
        order = sorted(range(V), key=lambda i: (-float(logits[t, i]), i))
        assert out.logprobs.top_ids[t].tolist() == order[:5]
    assert out.logprobs.chosen.dtype == torch.float32


def test_logprobs_none_zero_and_more_than_the_vocabulary() -> None:
    logits, ids = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([0])
    rows = rows_of([SamplingParams(seed=1)], "cpu")
    assert sample(logits, rows, ids).logprobs is None
    zero = logprobs_of(logits, ids, 0)
    assert zero.top_ids.shape == zero.top.shape == (1, 0)
    torch.testing.assert_close(zero.chosen, torch.tensor([math.log(0.25)]))
    more = logprobs_of(logits, ids, 20)
    assert more.top_ids.tolist() == [[1, 0]]
    torch.testing.assert_close(more.top, torch.tensor([[math.log(0.75), math.log(0.25)]]))


# What a request may ask for.


def test_defaults_and_every_option_are_accepted() -> None:
    assert SamplingParams().problems() == []
    p = SamplingParams(0, 0.5, 40, 0.1, -1, -2, 2, 0.5, 10, 10, ("a", "\n"), (1, 2), 20)
    assert p.problems() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, INF, math.nan, "hot", None, True, 10**400)],
        *[("top_p", v) for v in (0, -0.5, 1.01, math.nan)],
        *[("top_k", v) for v in (-1, 1.5, True, 2**40)],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan)],
        *[("seed", v) for v in (1.0, "1", 2**63, -(2**63) - 1)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1)],
        *[("repetition_penalty", v) for v in (0, -1, INF, 1e-30)],
        *[("max_tokens", v) for v in (0, -1, 2.0)],
        *[("min_tokens", v) for v in (-1, 2.0)],
        *[("stop", v) for v in ("word", ("",), (1,), None)],
        *[("stop_token_ids", v) for v in (5, [5], (-1,), (1.0,), ("a",))],
        *[("logprobs", v) for v in (-1, 1.0, True)],
    ],
)
def test_a_bad_value_is_named(field: str, value: object) -> None:
    problems = SamplingParams(**{field: value}).problems()  # type: ignore[arg-type]
    assert len(problems) == 1 and problems[0].startswith(f"{field} must be ")
    assert problems[0].endswith(f"not {value!r}")


def test_all_problems_come_at_once() -> None:
    bad = SamplingParams(temperature=-1, top_p=2, min_tokens=5, max_tokens=4)
    assert bad.problems() == [
        "temperature must be a number from 0 (greedy) up, not -1",
        "top_p must be above 0 and at most 1 (1 = off), not 2",
        "min_tokens must be at most max_tokens (4), not 5",
    ]


def test_a_sampled_row_needs_a_seed() -> None:
    rows_of([SamplingParams(temperature=0)], "cpu")
    with pytest.raises(AssertionError, match="seed"):
        rows_of([SamplingParams()], "cpu")


# On a GPU: the same random bits, and a capture that replays with new inputs.


@pytest.mark.gpu
def test_uniforms_have_the_same_bits_on_a_gpu() -> None:
    seeds, positions = torch.arange(-500, 500) * 12345678901, torch.arange(1000)
    on_gpu = uniform(seeds.cuda(), positions.cuda(), TARGET)
    assert torch.equal(on_gpu.cpu(), uniform(seeds, positions, TARGET))


@pytest.mark.gpu
def test_a_captured_graph_draws_as_the_cpu_does() -> None:
    params = pairs()[::9]
    static = [x.cuda() for x in batch(len(params), V)]
    rows = rows_of(params, "cuda")
    sample(static[0], rows, static[1], static[2], static[3], 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(static[0], rows, static[1], static[2], static[3], 2)
    for seed in (1, 2):
        fresh = batch(len(params), V, seed)
        for to, source in zip(static, fresh, strict=True):
            to.copy_(source)
        graph.replay()
        want = sample(fresh[0], rows_of(params, "cpu"), fresh[1], fresh[2], fresh[3], 2)
        assert torch.equal(out.ids.cpu(), want.ids)
