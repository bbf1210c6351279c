"""`kda_decode` against the reference: outputs, states, convolution windows and who keeps what.

A result of the convolution that lies between two bf16 may be rounded either way, and the state then
differs by 2^-9 of a value. Where the state is judged closely, `settled` rows have no such results,
and f_a @ f_b.T is exact.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compare import check_bf16, check_close, check_equal
from torch import Tensor
from torch.nn.functional import silu

from nanok3.reference.kda import KDAWeights, kda_ref

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.kda_decode import PASS, Shape, compile_kda_decode, kda_decode

D, TAPS, RANK = 128, 4, 128
HUGE = 1e30  # in slots that nobody may read or write


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_rows", [1, PASS])
def test_kda_decode_compiles(pass_rows: int, arch: str) -> None:
    compile_kda_decode(Shape(6, -5.0, 1e-5), pass_rows, False, arch)


def test_other_sizes_are_refused() -> None:
    w, slots = weights(2), torch.tensor([1])
    x, conv_state, state = torch.zeros(1, 1).bfloat16(), torch.zeros(1), torch.zeros(1)
    for changed, sentence in (
        ({"dt_bias": torch.zeros(2 * 64), "o_norm": torch.zeros(64)}, "heads of 128"),
        ({"conv": torch.zeros(6 * D, 3)}, "4 taps are needed, not 3"),
        ({"f_b": torch.zeros(2 * D, 64).bfloat16()}, "an f_a of 128 is needed, not 64"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            kda_decode(x, replace(w, **changed), conv_state, state, slots, out=x)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(heads: int) -> KDAWeights:
    """Channels that forget at once and such that remember thousands of rows."""
    return KDAWeights(
        conv=normal(0, 3 * heads * D, TAPS) * 0.5,
        f_b=(normal(1, heads * D, RANK) * RANK**-0.5).bfloat16(),
        A_log=normal(2, heads) * 0.5,
        dt_bias=normal(3, heads * D) * 4 - 4,
        o_norm=1 + 0.2 * normal(4, D),
        lower_bound=-5.0,
        eps=1e-5,
    )


def inputs(seed: int, num_rows: int, heads: int) -> Tensor:
    return normal(seed, num_rows, 4 * heads * D + RANK + heads).bfloat16()


def caches(seed: int, heads: int, slots: list[int], num_slots: int = 8) -> tuple[Tensor, Tensor]:
    conv_state = torch.full((num_slots, TAPS - 1, 3 * heads * D), HUGE).bfloat16()
    state = torch.full((num_slots, heads, D, D), HUGE)
    for slot in slots:
        conv_state[slot] = normal(seed + slot, TAPS - 1, 3 * heads * D).bfloat16()
        state[slot] = normal(100 + seed + slot, heads, D, D) * 0.3
    return conv_state, state


def on_gpu(w: KDAWeights) -> KDAWeights:
    tensors = {k: v.cuda() for k, v in vars(w).items() if isinstance(v, Tensor)}
    return replace(w, **tensors)


def doubled(w: KDAWeights) -> KDAWeights:
    return replace(w, **{k: v.double() for k, v in vars(w).items() if isinstance(v, Tensor)})


def run(
    x: Tensor, w: KDAWeights, conv_state: Tensor, state: Tensor, slots: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel on copies of the caches -> out, conv_state, state."""
    conv_state, state = conv_state.cuda(), state.cuda()
    out = torch.full((x.shape[0], w.dt_bias.shape[0]), float("nan")).bfloat16().cuda()
    kda_decode(x.cuda(), on_gpu(w), conv_state, state, torch.tensor(slots).cuda(), out=out)
    return out.cpu(), conv_state.cpu(), state.cpu()


def reference(
    x: Tensor, w: KDAWeights, conv_state: Tensor, state: Tensor, slots: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    conv_state, state = conv_state.clone(), state.clone()
    out = torch.empty(x.shape[0], w.dt_bias.shape[0], dtype=x.dtype)
    kda_ref(x, w, conv_state, state, torch.tensor(slots), out=out)
    return out, conv_state, state


# Heads of the golden model, of k3-mini, of K3 at TP16 and at TP8; rows up to a pass, and two or
# three passes, the last one part full or with fewer rows than the window.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, num_rows, slots",
    [
        (2, 1, [3]),
        (4, 2, [5, 1]),
        (6, 8, [2, 7, 4]),
        (12, 1, [6, 1, 3]),
        (6, 11, [1]),
        (2, 18, [4]),
    ],
)
def test_kda_decode_matches_ref(heads: int, num_rows: int, slots: list[int]) -> None:
    w, x = weights(heads), inputs(5, len(slots) * num_rows, heads)
    conv_state, state = caches(20, heads, slots)
    got, got_conv, got_state = run(x, w, conv_state, state, slots)
    bf16, bf16_conv, bf16_state = reference(x, w, conv_state, state, slots)
    right, _, _ = reference(x.double(), doubled(w), conv_state.double(), state.double(), slots)
    check_bf16(got, bf16, right)
    check_equal(got_conv, bf16_conv, "windows")  # of the slots in use, and what others hold
    foreign = [slot for slot in range(len(state)) if slot not in slots]
    check_equal(got_state[foreign], state[foreign], "states of others")
    check_close(got_state[slots], bf16_state[slots], 2e-3, "state")  # q, k, v, f may round apart


@pytest.mark.gpu
def test_padding_leaves_others_alone() -> None:
    """Padding requests share slot 0, whatever it holds; the real ones do not notice."""
    heads, num_rows, slots = 4, 2, [0, 3, 0, 0, 1]
    w, x = weights(heads), inputs(6, len(slots) * num_rows, heads)
    conv_state, state = caches(30, heads, [3, 1])
    conv_state[0], state[0] = float("nan"), float("nan")
    x.unflatten(0, (-1, num_rows))[[0, 2, 3]] = float("nan")
    got, got_conv, got_state = run(x, w, conv_state, state, slots)
    for request, slot in ((1, 3), (4, 1)):
        rows = slice(request * num_rows, (request + 1) * num_rows)
        alone, alone_conv, alone_state = run(x[rows].clone(), w, conv_state, state, [slot])
        check_equal(got[rows], alone, "outputs")
        check_equal(got_conv[slot], alone_conv[slot], "window")
        check_equal(got_state[slot], alone_state[slot], "state")
    unused = [2, 4, 5, 6, 7]
    check_equal(got_conv[unused], conv_state[unused], "windows of others")
    check_equal(got_state[unused], state[unused], "states of others")


# ---- the state, closely ----


def exact_weights(heads: int) -> KDAWeights:
    """With `settled` rows f is a multiple of 1/32 below 8: a bf16, in any order of the sum."""
    values = torch.randint(-7, 8, (heads * D, RANK), generator=torch.Generator().manual_seed(7))
    return replace(weights(heads), f_b=(values / 32).bfloat16())


def settled(x: Tensor, w: KDAWeights, window: Tensor) -> Tensor:
    """x [Q, width] with f_a of -1, 0 and 1, and new inputs where a convolution lies so near the
    middle of two bf16 that float32 may round it either way. window [taps - 1, channels]."""
    generator = torch.Generator().manual_seed(8)
    num_rows, channels = x.shape[0], w.conv.shape[0]
    f_a = x[:, channels + w.dt_bias.shape[0] :][:, :RANK]
    f_a.copy_(torch.randint(-1, 2, f_a.shape, generator=generator))
    f = f_a.double() @ w.f_b.double().T
    check_equal(f.bfloat16().double(), f, "f")
    for _ in range(50):
        inputs = torch.cat([window, x[:, :channels]]).double()
        terms = [inputs[j : j + num_rows] * w.conv[:, j].double() for j in range(TAPS)]
        value = silu(sum(terms))
        slack = 3e-7 * sum(t.abs() for t in terms) + 2e-6 * value.abs()
        near = (value + slack).bfloat16() != (value - slack).bfloat16()
        if not near.any():
            return x
        x[:, :channels][near] = torch.randn(int(near.sum()), generator=generator).bfloat16()
    raise AssertionError("some rows stay between two bf16")


def walk(x: Tensor, w: KDAWeights, window: Tensor, state: Tensor) -> Tensor:
    """The state after the rows, in float64, of what the model rounds to bf16. state [H, Dk, Dv]."""
    heads, width = w.A_log.shape[0], w.dt_bias.shape[0]
    inputs = torch.cat([window, x[:, : 3 * width]]).double()
    terms = [inputs[j : j + x.shape[0]] * w.conv[:, j].double() for j in range(TAPS)]
    _, k, v = silu(sum(terms)).bfloat16().double().unflatten(1, (3, heads, D)).unbind(1)
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    f = x[:, 4 * width :][:, :RANK].double() @ w.f_b.double().T + w.dt_bias.double()
    rate = w.A_log.double().exp()[:, None]
    decay = (w.lower_bound * torch.sigmoid(rate * f.unflatten(1, (heads, D)))).exp()
    beta = torch.sigmoid(x[:, -heads:].double())
    state = state.double()
    for t in range(x.shape[0]):
        state = state * decay[t, :, :, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
    return state


@pytest.mark.gpu
@pytest.mark.parametrize("heads, num_rows, slots", [(6, 8, [2, 7, 4]), (2, 1, [3])])
def test_state_is_close(heads: int, num_rows: int, slots: list[int]) -> None:
    w, (conv_state, state) = exact_weights(heads), caches(40, heads, slots)
    x = [settled(inputs(9 + s, num_rows, heads), w, conv_state[s]) for s in slots]
    rows = torch.cat(x)
    _, got_conv, got_state = run(rows, w, conv_state, state, slots)
    _, right_conv, right_state = reference(rows, w, conv_state, state, slots)
    check_equal(got_conv, right_conv, "windows")
    check_close(got_state[slots], right_state[slots], 1e-5, "state, of the reference")
    for slot, own in zip(slots, x, strict=True):
        right = walk(own, w, conv_state[slot], state[slot])
        check_close(got_state[slot], right, 1e-5, "state, in float64")


@pytest.mark.gpu
def test_state_does_not_drift() -> None:
    """2,000 rows, one a step and 8 a step."""
    heads, slot, num_rows = 2, 1, 2000
    w, (conv_state, state) = exact_weights(heads), caches(50, heads, [slot], num_slots=2)
    x = settled(inputs(10, num_rows, heads), w, conv_state[slot])
    right = walk(x, w, conv_state[slot], state[slot])
    rows, device_w, slots = x.cuda(), on_gpu(w), torch.tensor([slot]).cuda()
    for step in (1, 8):
        got_conv, got_state = conv_state.cuda(), state.cuda()
        out = torch.full((num_rows, heads * D), float("nan")).bfloat16().cuda()
        for t in range(0, num_rows, step):
            part = slice(t, t + step)
            kda_decode(rows[part], device_w, got_conv, got_state, slots, out=out[part])
        check_close(got_state[slot].cpu(), right, 1e-5, f"state, {step} rows a step")
        check_equal(got_conv[slot], x[-(TAPS - 1) :, : 3 * heads * D], "window")
        check_equal(got_state[0].cpu(), state[0], "the other slot")
        assert out.isfinite().all()
