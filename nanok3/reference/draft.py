"""The ops of a draft that its target does not have; `draft_attention.py` has its attention.

norm         out = rms_norm(x)
add_norm     stream = delta where fresh, else stream + delta;  out = rms_norm(stream)
silu_up      out = silu(x @ gate.T) * (x @ up.T)
markov       out = logits + w2 @ w1[previous]        a bias by the token before
confidence   out = sigmoid(w . [hidden | w1[previous]] + b)    chance that the draft stands
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from nanok3.reference.numerics import acc, rms_norm


@dataclass(frozen=True)
class MarkovWeights:
    w1: Tensor  # [V, M]
    w2: Tensor  # [V, M]


@dataclass(frozen=True)
class ConfidenceWeights:
    weight: Tensor  # [1, C + M]
    bias: Tensor  # [1]


def norm_ref(x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
    out.copy_(rms_norm(x, weight, eps))


def add_norm_ref(
    delta: Tensor, stream: Tensor, weight: Tensor, eps: float, fresh: bool, *, out: Tensor
) -> None:
    stream.copy_(delta[:] if fresh else acc(stream) + acc(delta))
    out.copy_(rms_norm(stream, weight, eps))


def silu_up_ref(x: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """x [T, C], weight [2F, C] (gate rows first) -> out [T, F]."""
    gate, up = linear(x[:], weight).chunk(2, dim=-1)
    out.copy_(silu(acc(gate)) * acc(up))


def markov_value(logits: Tensor, w: MarkovWeights, previous: Tensor) -> Tensor:
    """logits [T, V] f32, previous [T] ids -> [T, V]."""
    return logits + linear(w.w1[previous].to(logits.dtype), w.w2.to(logits.dtype))


def confidence_logits(hidden: Tensor, w: ConfidenceWeights, features: Tensor) -> Tensor:
    """hidden [T, C], features [T, M] = w1[previous] -> [T], before the sigmoid."""
    x = torch.cat([acc(hidden[:]), acc(features)], dim=-1)
    return linear(x, w.weight.to(x.dtype), w.bias.to(x.dtype)).squeeze(-1)


def markov_ref(logits: Tensor, w: MarkovWeights, previous: Tensor, *, out: Tensor) -> None:
    out.copy_(markov_value(logits, w, previous))


def confidence_ref(
    hidden: Tensor, w: ConfidenceWeights, markov: MarkovWeights, previous: Tensor, *, out: Tensor
) -> None:
    """hidden [T, C], previous [T] ids -> out [T]."""
    out.copy_(torch.sigmoid(confidence_logits(hidden, w, markov.w1[previous])))
