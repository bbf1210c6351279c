"""KDA's recurrence under decays of every strength, walked and chunked, against a float64 loop.

Cumulative log-decays of -160 over 32 tokens are seen in the real model; a form that divides by them
overflows, one that multiplies powers of a matrix loses everything.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from compare import check_close
from numpy.typing import NDArray
from torch import Tensor

from nanok3.reference.kda import KDARows, chunked_recurrence, recurrence

F64 = NDArray[np.float64]
DK, DV = 8, 12
LIMIT = {torch.float32: 2e-5, torch.float64: 1e-11}


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def rows_of(length: int, log_decay: Tensor, dtype: torch.dtype) -> KDARows:
    """Unit q and k with log-decays [Q, Dk] that all heads share."""

    def unit(seed: int) -> Tensor:
        x = random(seed, 1, 2, length, DK)
        return x / x.square().sum(-1, keepdim=True).sqrt()

    return KDARows(
        q=unit(20).to(dtype),
        k=unit(21).to(dtype),
        v=random(22, 1, 2, length, DV).to(dtype),
        log_decay=log_decay.expand(1, 2, length, DK).to(dtype),
        beta=torch.sigmoid(random(23, 1, 2, length)).to(dtype),
    )


def walk(rows: KDARows, state: F64) -> tuple[F64, F64]:
    """The delta rule in float64, head by head."""
    q, k, v, g, beta = (
        t[0].double().numpy() for t in (rows.q, rows.k, rows.v, rows.log_decay, rows.beta)
    )
    heads, length, _ = q.shape
    state, out = state.copy(), np.zeros(v.shape)
    for h in range(heads):
        s = state[h]
        for t in range(length):
            s = np.exp(g[h, t])[:, None] * s
            s = s + beta[h, t] * np.outer(k[h, t], v[h, t] - s.T @ k[h, t])
            out[h, t] = s.T @ q[h, t]
        state[h] = s
    return out, state


def decays(kind: str, bound: float, length: int) -> Tensor:
    """[Q, Dk]."""
    if kind == "strongest":  # -5 a row is -160 over 32 rows, as seen in the real layer 0
        return torch.full((length, DK), bound, dtype=torch.float64)
    if kind == "none":  # a gate that underflows gives -0.0
        g = torch.zeros(length, DK, dtype=torch.float64)
        g[1::2] = -0.0
        return g
    if kind == "tiny":
        return torch.full((length, DK), -1e-8, dtype=torch.float64)
    if kind == "channels":  # strong and weak side by side
        values = [0.0, -0.0, -1e-8, -1e-3, bound / 100, bound / 2, bound, bound]
        return torch.tensor(values, dtype=torch.float64).expand(length, DK)
    if kind == "in turn":  # a strong row, then weak ones that must not lose their small decay
        g = torch.full((length, DK), -1e-3, dtype=torch.float64)
        g[::7] = bound
        return g
    assert kind == "mixed"
    return bound * torch.sigmoid(random(30, length, DK, scale=4.0))


@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 130])
@pytest.mark.parametrize("kind", ["strongest", "none", "tiny", "channels", "in turn", "mixed"])
@pytest.mark.parametrize("bound", [-5.0, -20.0, -80.0])
def test_strong_gates(bound: float, kind: str, length: int) -> None:
    """Finite, and in float32 close to float64, for every form, from a state that is not zero."""
    g = decays(kind, bound, length)
    for dtype in LIMIT:
        rows = rows_of(length, g, dtype)
        state = random(31, 1, 2, DK, DV).to(dtype)
        expected = walk(rows, state[0].double().numpy())
        # Float32 holds the summed decay of a chunk (64 * -80 = -5120) to 2.4e-4.
        chunk_limit = 1e-11 if dtype == torch.float64 else max(2e-5, -bound * 1e-5)
        walked = recurrence(rows, state)
        chunked = chunked_recurrence(rows, state, bound)
        for i, what in enumerate(("output", "state")):
            check_close(walked[i][0], expected[i], LIMIT[dtype], f"walked {what}")
            check_close(chunked[i][0], expected[i], chunk_limit, f"chunked {what}")


def test_a_decay_without_end_forgets_what_was() -> None:
    """F-06: -inf, which no bounded gate gives, is for the walk alone."""
    g = torch.zeros(9, DK, dtype=torch.float64)
    g[4] = float("-inf")
    rows, state = rows_of(9, g, torch.float64), random(31, 1, 2, DK, DV)
    output, after = recurrence(rows, state)
    expected = walk(rows, state[0].numpy())
    check_close(output[0], expected[0], 1e-11, "output")
    check_close(after[0], expected[1], 1e-11, "state")
    assert torch.equal(recurrence(rows, 0 * state)[1], after)


def test_keys_that_repeat_do_not_ruin_the_triangular_solve() -> None:
    """One key for 130 rows, no decay and beta 1: the worst case of the product form."""
    for dtype in LIMIT:
        rows = rows_of(130, torch.zeros(130, DK), dtype)
        rows.k.copy_(rows.k[:, :, :1].clone())
        rows.beta.fill_(1.0)
        state = random(32, 1, 2, DK, DV).to(dtype)
        expected = walk(rows, state[0].double().numpy())
        got = chunked_recurrence(rows, state, -5.0)
        for i, what in enumerate(("output", "state")):
            check_close(got[i][0], expected[i], LIMIT[dtype], what)


def test_the_chunk_size_does_not_matter() -> None:
    rows = rows_of(50, decays("mixed", -5.0, 50), torch.float64)
    state = random(33, 1, 2, DK, DV)
    expected = walk(rows, state[0].numpy())
    for chunk in (16, 32, 64, 128):
        got = chunked_recurrence(rows, state, -5.0, chunk)
        for i, what in enumerate(("output", "state")):
            check_close(got[i][0], expected[i], 1e-11, f"{what}, chunk {chunk}")


def test_a_decay_too_strong_for_chunks_is_refused_by_them() -> None:
    rows = rows_of(3, decays("strongest", -81.0, 3), torch.float32)
    with pytest.raises(AssertionError, match="decay too strong"):
        chunked_recurrence(rows, torch.zeros(1, 2, DK, DV), -81.0)


def test_gradients_of_the_chunked_form_are_those_of_the_walk() -> None:
    def gradients(form: Callable[[KDARows], tuple[Tensor, Tensor]]) -> list[Tensor]:
        rows = rows_of(37, decays("mixed", -5.0, 37), torch.float64)
        leaves = [rows.q, rows.k, rows.v, rows.log_decay.clone(), rows.beta]
        leaves = [t.clone().requires_grad_() for t in leaves]
        out, state = form(KDARows(*leaves))
        (torch.sin(out).sum() + torch.cos(state).sum()).backward()
        return [t.grad for t in leaves if t.grad is not None]

    state = random(34, 1, 2, DK, DV)
    walked = gradients(lambda rows: recurrence(rows, state))
    chunked = gradients(lambda rows: chunked_recurrence(rows, state, -5.0))
    assert len(walked) == len(chunked) == 5
    for name, a, b in zip(("q", "k", "v", "log_decay", "beta"), chunked, walked, strict=True):
        check_close(a, b, 1e-11, name)
