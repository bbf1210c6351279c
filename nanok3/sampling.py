"""From logits to ids: what a request may ask for, and one draw a row that no other row changes.

A row's steps, in this order: repetition penalty, frequency and presence penalties, a ban on stop
ids while the answer is shorter than min_tokens, temperature, top-k, top-p, min-p, one draw. Each
filter works on the tempered distribution as the filters before it left it. Wherever values tie, the
lowest id wins.

Why a request gets the same ids in any company: probabilities are held as whole numbers (`masses`),
so a sum does not depend on the order that a kernel adds in; the random number belongs to the row
(`uniform.py`); and an option that a row does not use leaves that row's bits alone, so work may be
skipped when no row uses the option.

Nothing here but `rows_of` waits for the device, so the rest may stand in a captured graph.
Requests, caches, text and the acceptance of drafts are for others: `stop.py` matches stop strings,
the engine counts tokens and gives an unseeded request its seed, and the drafts' rules reuse
`penalise`, `probabilities`, `draw`, `logprobs_of` and `uniform`.

T rows, V ids in the vocabulary, S stop ids a row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.uniform import TARGET, uniform

UNIT = 2.0**44  # the mass of a row's likeliest id; ids below 2^-45 of it have none
MAX_VOCAB = 2**18  # a row's masses then add up to at most 2^62, within i64


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the sampler; `problems` says what in it cannot be served."""

    temperature: float = 1.0  # 0 = the likeliest id
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # share of the likeliest id's probability that an id needs
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # 0 = the chosen id's only, n = the n likeliest ids' as well

    def problems(self) -> list[str]:
        """One sentence for every value that is out of range or of the wrong type."""
        huge = sys.float_info.max
        most = 2**31 - 1
        found: list[str] = []

        def expect(ok: bool, name: str, wanted: str, value: object) -> None:
            if not ok:
                found.append(f"{name} must be {wanted}, not {value!r}")

        t, p, k, m = self.temperature, self.top_p, self.top_k, self.min_p
        expect(_is_number(t, 0, huge), "temperature", "a number from 0 (greedy) up", t)
        expect(_is_number(p, 0, 1) and p != 0, "top_p", "above 0 and at most 1 (1 = off)", p)
        expect(_is_int(k, 0, most), "top_k", "a whole number from 1 up, or 0 for off", k)
        expect(_is_number(m, 0, 1), "min_p", "a number from 0 (off) to 1", m)
        seed_ok = self.seed is None or _is_int(self.seed, -(2**63), 2**63 - 1)
        expect(seed_ok, "seed", "a whole number that fits in 64 bits with its sign", self.seed)
        for name, value in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            expect(_is_number(value, -2, 2), name, "a number from -2 to 2 (0 = off)", value)
        r = self.repetition_penalty  # bounded so that no logit overflows
        expect(_is_number(r, 0.001, 1000), "repetition_penalty", "from 0.001 to 1000 (1 = off)", r)
        longest, shortest = self.max_tokens, self.min_tokens
        longest_ok = longest is None or _is_int(longest, 1, most)
        shortest_ok = _is_int(shortest, 0, most)
        expect(longest_ok, "max_tokens", "a whole number from 1 up", longest)
        expect(shortest_ok, "min_tokens", "a whole number from 0 up", shortest)
        if longest is not None and longest_ok and shortest_ok:
            expect(shortest <= longest, "min_tokens", f"at most max_tokens ({longest})", shortest)
        stop_ok = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        expect(stop_ok, "stop", "a tuple of strings, none of them empty", self.stop)
        ids = self.stop_token_ids
        ids_ok = isinstance(ids, tuple) and all(_is_int(i, 0, most) for i in ids)
        expect(ids_ok, "stop_token_ids", "a tuple of token ids", ids)
        n = self.logprobs
        expect(n is None or _is_int(n, 0, most), "logprobs", "a whole number from 0 up", n)
        return found


@dataclass(frozen=True)
class SamplingRows:
    """Every row's options as tensors that a graph may hold; made when the batch changes."""

    temperature: Tensor  # [T] f64
    top_p: Tensor  # [T] f64
    top_k: Tensor  # [T] i64
    min_p: Tensor  # [T] f64
    seeds: Tensor  # [T] i64
    presence: Tensor  # [T] f64
    frequency: Tensor  # [T] f64
    repetition: Tensor  # [T] f64
    min_tokens: Tensor  # [T] i64
    stop_ids: Tensor  # [T, S] i64, banned below min_tokens; -1 = padding
    uses_sort: bool  # some row that samples has top-k or top-p
    uses_counts: bool  # some row has a penalty or min_tokens, so `sample` needs its counts


OPTIONS = (  # the tensors of `SamplingRows`
    *("temperature", "top_p", "min_p", "presence", "frequency", "repetition"),
    *("top_k", "seeds", "min_tokens", "stop_ids"),
)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities under the model itself: before penalties, temperature and filters."""

    chosen: Tensor  # [T] f32
    top_ids: Tensor  # [T, n] i64, likeliest first
    top: Tensor  # [T, n] f32


@dataclass(frozen=True)
class SampledTokens:
    ids: Tensor  # [T] i64; -1 where the row has no distribution to draw from
    finite: Tensor  # [T] bool; False for NaN or +inf in the row, or no id left: fail that request
    logprobs: Logprobs | None


def rows_of(params: Sequence[SamplingParams], device: torch.device | str) -> SamplingRows:
    """The rows' options on `device`; a request with several rows comes once for each of them.

    The model's own end ids must be in `stop_token_ids`. A request that samples must have a seed:
    the engine draws one at admission, so that all ranks and all steps of that request agree.
    """
    assert all(p.seed is not None or p.temperature == 0 for p in params), (
        "a sampled row has no seed"
    )
    width = max((len(p.stop_token_ids) for p in params), default=0)
    padded = [[*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))] for p in params]

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return SamplingRows(
        temperature=floats([p.temperature for p in params]),
        top_p=floats([p.top_p for p in params]),
        top_k=ints([p.top_k for p in params]),
        min_p=floats([p.min_p for p in params]),
        seeds=ints([p.seed or 0 for p in params]),
        presence=floats([p.presence_penalty for p in params]),
        frequency=floats([p.frequency_penalty for p in params]),
        repetition=floats([p.repetition_penalty for p in params]),
        min_tokens=ints([p.min_tokens for p in params]),
        stop_ids=torch.tensor(padded, dtype=torch.int64, device=device).view(len(params), width),
        uses_sort=any((p.top_k > 0 or p.top_p < 1) and p.temperature > 0 for p in params),
        uses_counts=any(_uses_counts(p) for p in params),
    )


def sample(
    logits: Tensor,  # [T, V] f32 or f64; -inf = an id the caller forbids
    rows: SamplingRows,
    positions: Tensor,  # [T] i64, where in its sequence the drawn token will stand
    counts: Tensor | None = None,  # [T, V] int, as for `penalise`
    prompt_seen: Tensor | None = None,  # [T, V] bool
    num_logprobs: int | None = None,  # the largest that any row asks for
) -> SampledTokens:
    """Draws each row's next id with its TARGET number."""
    scores = logits
    if rows.uses_counts:
        assert counts is not None and prompt_seen is not None, "penalties need the rows' counts"
        scores = penalise(logits, counts, prompt_seen, rows)
    ids = _pick(masses(scores, rows), uniform(rows.seeds, positions, TARGET))
    logprobs = None if num_logprobs is None else logprobs_of(logits, ids, num_logprobs)
    return SampledTokens(ids, ids >= 0, logprobs)


def penalise(logits: Tensor, counts: Tensor, prompt_seen: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [T, V] after the penalties and the ban on stop ids, in the logits' own type.

    Repetition, once for every id of the prompt or the output: x / r if x > 0, else x * r. Then, for
    ids of the output only: x - frequency * count - presence. Then -inf for the stop ids of a row
    whose output is shorter than its min_tokens.

    `counts` [T, V] int says how often each id stands in the row's output, drafts before the row
    included; `prompt_seen` [T, V] bool, whether it stands in the prompt. Neither is written.
    """
    x = logits.double()
    r = rows.repetition[:, None]
    x = torch.where(prompt_seen | (counts > 0), torch.where(x > 0, x / r, x * r), x)
    x = x - rows.frequency[:, None] * counts - rows.presence[:, None] * (counts > 0)
    return (x + _ban(counts, rows)).to(logits.dtype)


def probabilities(scores: Tensor, rows: SamplingRows) -> Tensor:
    """[T, V] f64 by id; greedy rows one-hot, rows without a distribution all 0."""
    mass = masses(scores, rows)
    return mass / mass.sum(-1, keepdim=True).clamp(min=1).double()


def masses(scores: Tensor, rows: SamplingRows) -> Tensor:
    """Probabilities after temperature and filters, times some factor of the row; [T, V] i64."""
    top, best = scores.max(-1, keepdim=True)  # [T, 1] each; the first of equals; NaN if any
    greedy = rows.temperature[:, None] == 0
    temperature = rows.temperature[:, None].masked_fill(greedy, 1)
    ratio = ((scores.double() - top) / temperature).exp()  # to the likeliest id
    mass = _fixed(ratio)
    if rows.uses_sort:
        mass = _filter_sorted(mass, scores, rows)
    mass = mass.masked_fill(ratio < rows.min_p[:, None], 0)
    ids = torch.arange(scores.shape[1], device=scores.device)
    mass = torch.where(greedy, (ids == best) * int(UNIT), mass)
    return mass.masked_fill(~top.isfinite(), 0)  # what NaN gave above is nonsense


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Ids [T] i64 with chances as `weights` [T, V] f64 >= 0, any sum; -1 for a row without any.

    For probabilities of any origin, such as what a rejected draft leaves. Of `probabilities` it
    draws the ids that `sample` does.
    """
    top = weights.amax(-1, keepdim=True)
    mass = _fixed(weights / top)
    return _pick(mass.masked_fill(~(top.isfinite() & (top > 0)), 0), uniforms)


def logprobs_of(logits: Tensor, ids: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `ids` [T] and of the `num_top` likeliest ids, under raw logits [T, V].

    Raw: as the model gave them, with ids that the caller forbade at -inf. A row whose id is -1 gets
    NaN and ids of -1.
    """
    x = logits.double()
    x = x - x.amax(-1, keepdim=True)
    total = _fixed(x.exp()).sum(-1, keepdim=True)
    logprobs = (x - (total / UNIT).log()).float()
    # A stable sort, because top-k leaves open which of equals it gives.
    num_top = min(num_top, logits.shape[1])
    top_ids = _order(logits)[:, :num_top] if num_top else ids.new_empty(len(ids), 0)
    missing = ids[:, None] < 0
    chosen = logprobs.gather(1, ids[:, None].clamp(min=0)).masked_fill(missing, torch.nan)
    top = logprobs.gather(1, top_ids).masked_fill(missing, torch.nan)
    return Logprobs(chosen[:, 0], top_ids.masked_fill(missing, -1), top)


def _fixed(ratio: Tensor) -> Tensor:
    """Shares [T, V] f64 of a row's largest as whole numbers, i64; NaN gives nonsense."""
    assert ratio.shape[1] <= MAX_VOCAB, f"{ratio.shape[1]} ids; at most {MAX_VOCAB} add up in i64"
    return (ratio * UNIT).round().long()


def _filter_sorted(mass: Tensor, scores: Tensor, rows: SamplingRows) -> Tensor:
    """`mass` [T, V] with 0 for what top-k and then top-p drop."""
    order = _order(scores)
    place = torch.arange(scores.shape[1], device=scores.device)
    top_k = rows.top_k[:, None]
    in_order = mass.gather(1, order)
    in_order = in_order.masked_fill((top_k > 0) & (place >= top_k), 0)
    reached = in_order.cumsum(-1)
    # An id stays while the ids before it fall short of p; for p = 1 the product is too coarse.
    top_p = rows.top_p[:, None]
    needed = (top_p * reached[:, -1:]).ceil().long()
    goes = (reached - in_order >= needed) & (top_p < 1)
    return torch.zeros_like(mass).scatter(1, order, in_order.masked_fill(goes, 0))


def _order(scores: Tensor) -> Tensor:
    """Ids [T, V] by score downwards, equal ones by id upwards."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


def _pick(mass: Tensor, uniforms: Tensor) -> Tensor:
    """The first id whose running sum of masses exceeds u of the total; [T] i64, -1 without mass."""
    reached = mass.cumsum(-1)
    total = reached[:, -1]
    aim = (uniforms * total).long()  # below the total in f64 too, as u is at most 1 - 2^-53
    ids = torch.searchsorted(reached, aim[:, None], right=True)[:, 0]
    return ids.masked_fill(total <= 0, -1)


def _ban(counts: Tensor, rows: SamplingRows) -> Tensor:
    """To add to the scores: -inf for banned ids, else 0, so that a NaN stays one; [T, V] f64."""
    num_rows, vocab = counts.shape
    ids = rows.stop_ids
    early = counts.sum(-1) < rows.min_tokens
    banned = early[:, None] & (ids >= 0) & (ids < vocab)
    added = torch.zeros(num_rows, vocab + 1, dtype=torch.float64, device=counts.device)
    # Ids that are not banned write to one column too many.
    return added.scatter(1, torch.where(banned, ids, vocab), -torch.inf)[:, :vocab]


def _uses_counts(p: SamplingParams) -> bool:
    neutral = (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0, 0, 1)
    return not neutral or p.min_tokens > 0


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
