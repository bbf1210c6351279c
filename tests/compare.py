"""How tests judge values against a right answer; prints the largest error and where it is.

Integers, copies and cache writes are bit-equal. Float32 and float64 may err by a stated share of
the largest right value. A bf16 result may err at most twice what plain bf16 torch errs on the same
inputs, both at its worst element and in the mean square.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_equal(actual: Any, expected: Any, what: str = "") -> None:
    """Same dtype, same bits."""
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    a, e = (t.cpu().contiguous() for t in (actual, expected))
    if a.numel() and not torch.equal(a.view(torch.uint8), e.view(torch.uint8)):
        differs = a.reshape(-1, 1).view(torch.uint8) != e.reshape(-1, 1).view(torch.uint8)
        flat = differs.any(-1).nonzero().flatten()
        at = index_of(int(flat[0]), a)
        raise AssertionError(
            f"{what}: {len(flat)} of {a.numel()} differ, first at {at}: {a[at]}, expected {e[at]}"
        )


def check_close(actual: Any, expected: Any, limit: float, what: str = "") -> None:
    """The largest error is at most `limit` times the largest right value."""
    worst, text = worst_of(actual, expected, what)
    right = doubles(expected).abs()
    scale = float(right.max()) if right.numel() else 0.0
    print(f"{text}; allowed {limit * scale:.3e}")
    assert worst <= limit * scale, f"{text}, more than {limit:.1e} of {scale:.3e}"


def check_bf16(actual: Tensor, torch_bf16: Tensor, expected: Any, what: str = "") -> None:
    """`expected` is right (from float32 or wider), `torch_bf16` what bf16 torch makes of it."""
    worst, text = worst_of(actual, expected, what)
    torch_errors = errors_of(torch_bf16, expected, what)
    allowed = 2 * float(torch_errors.max())
    print(f"{text}; bf16 torch errs {allowed / 2:.3e}")
    assert worst <= allowed, f"{text}, more than twice the {allowed / 2:.3e} of bf16 torch"
    rms, torch_rms = (
        float(e.square().mean().sqrt()) for e in (errors_of(actual, expected, what), torch_errors)
    )
    assert rms <= 2 * torch_rms, f"{what}: rms error {rms:.3e}, bf16 torch errs {torch_rms:.3e}"


def errors_of(actual: Any, expected: Any, what: str) -> Tensor:
    a, e = doubles(actual), doubles(expected)
    assert a.shape == e.shape, f"{what}: {a.shape}, expected {e.shape}"
    assert e.isfinite().all(), f"{what}: the right answer is not finite"
    return (a - e).abs().nan_to_num(nan=float("inf"))


def worst_of(actual: Any, expected: Any, what: str) -> tuple[float, str]:
    errors = errors_of(actual, expected, what)
    if not errors.numel():
        return 0.0, f"{what}: empty"
    at = index_of(int(errors.argmax()), errors)
    values = f"{doubles(actual)[at]:.6g}, expected {doubles(expected)[at]:.6g}"
    return float(errors[at]), f"{what}: largest error {float(errors[at]):.3e} at {at}: {values}"


def doubles(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64).detach().cpu()


def index_of(flat: int, tensor: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape))
