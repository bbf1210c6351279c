"""The products of the model: `out = x @ weight.T`, and those with something around it.

`linear` rounds once, at the store. `gate_up` applies SiTU to the two halves of its rows. `lm_head`
gives float32 logits of chosen rows. `moe_in` and `latent_up` are the beginning and the end of the
latent mixture of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

from nanok3.reference.numerics import acc, rms_norm, situ


@dataclass(frozen=True)
class GateUpWeights:
    weight: Tensor  # [2F, C], gate rows first
    beta: float
    linear_beta: float


@dataclass(frozen=True)
class MoEInWeights:
    """Three matrices that read the same x."""

    gate: Tensor  # [E, C], of the router
    latent_down: Tensor  # [Z, C]
    shared_gate_up: GateUpWeights  # [2F, C]


@dataclass(frozen=True)
class LatentUpWeights:
    norm: Tensor | None  # [Z], absent when the latent is not normalised
    weight: Tensor  # [C, Z]
    eps: float


def linear_ref(x: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """x [T, C], weight [O, C] -> out [T, O]."""
    out.copy_(linear(x, weight))


def gate_up_ref(x: Tensor, w: GateUpWeights, *, out: Tensor) -> None:
    """x [T, C] -> out [T, F] = situ(x @ gate.T, x @ up.T)."""
    gate, up = linear(x, w.weight).chunk(2, dim=-1)
    out.copy_(situ(gate, up, w.beta, w.linear_beta))


def moe_in_ref(x: Tensor, w: MoEInWeights, *, out: tuple[Tensor, Tensor, Tensor]) -> None:
    """x [T, C] -> out: router logits [T, E] f32, latent [T, Z], shared experts' act [T, F]."""
    router_logits, latent, shared_act = out
    router_logits.copy_(linear(acc(x), acc(w.gate)))
    linear_ref(x, w.latent_down, out=latent)
    gate_up_ref(x, w.shared_gate_up, out=shared_act)


def latent_up_ref(routed: Tensor, shared: Tensor, w: LatentUpWeights, *, out: Tensor) -> None:
    """routed [T, Z], shared [T, C] -> out [T, C] = norm(routed) @ weight.T + shared."""
    if w.norm is not None:
        routed = rms_norm(routed, w.norm, w.eps).to(routed.dtype)
    out.copy_(acc(linear(routed, w.weight)) + acc(shared))


def lm_head_ref(x: Tensor, weight: Tensor, rows: Tensor, *, out: Tensor) -> None:
    """x [T, C], weight [V, C], rows [N] -> out [N, V] f32: logits of the chosen rows."""
    out.copy_(linear(acc(x[rows]), acc(weight)))
