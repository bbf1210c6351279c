"""The record of the model's ops and its readings.

`model.py` calls `ops.<name>(inputs, weights, out=...)` and nothing else; a reading says what such a
call means. `REFERENCE` walks rows one by one (the specification), `DECODE` is the same record with
the forms for one row of each request on a CPU, `PREFILL` with the forms for many rows, `TRAIN` is
for `Fresh` buffers. `nanok3.count` adds up bytes instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanok3.comm.exchange import Exchange
from nanok3.reference.attn_res import attn_res_ref, tap_ref
from nanok3.reference.embed import embed_ref
from nanok3.reference.experts import experts_grouped_ref, experts_ref
from nanok3.reference.kda import kda_chunked_ref, kda_ref
from nanok3.reference.kda_records import kda_recorded_few, kda_recorded_ref
from nanok3.reference.linear import (
    gate_up_ref,
    latent_up_ref,
    linear_ref,
    lm_head_ref,
    moe_in_ref,
)
from nanok3.reference.mla import mla_expanded_ref, mla_latent_ref, mla_ref
from nanok3.reference.one_row import experts_one_row, experts_sorted, kda_one_row, mla_one_row
from nanok3.reference.router import route_ref


@dataclass(frozen=True)
class Ops:
    """One row an op: what it reads -> what it writes."""

    embed: Callable[..., None]  # ids, w -> out
    attn_res: Callable[..., None]  # delta, streams, w -> streams[-1], out
    linear: Callable[..., None]  # x, weight -> out
    kda: Callable[..., None]  # x, w, conv_state, state -> conv_state, state, out
    kda_recorded: Callable[..., None]  # x, w, conv_state, state -> records, out
    mla_latent: Callable[..., None]  # x, w -> cache rows, out
    mla: Callable[..., None]  # q, x (gate), w, cache -> out
    gate_up: Callable[..., None]  # x, w -> out
    moe_in: Callable[..., None]  # x, w -> router logits, latent, shared act
    route: Callable[..., None]  # logits, w -> ids, weights
    experts: Callable[..., None]  # latent, ids, weights, w -> out
    tap: Callable[..., None]  # delta, streams[-1] -> out
    latent_up: Callable[..., None]  # routed, shared, w -> out
    lm_head: Callable[..., None]  # x, weight, rows -> out
    all_reduce: Callable[..., None]  # part -> whole: the sum over ranks
    all_gather: Callable[..., None]  # parts -> wholes: the columns of all ranks
    reduce_moe: Callable[..., None]  # routed, shared parts -> routed whole, shared: own columns


def stay(parts: Any, *, out: Any) -> None:
    """Every exchange of a rank without peers: its parts are views of the wholes already.

    One rank of many, run alone, keeps in the peers' places of a whole what the caller put there.
    """


def between_ranks(ops: Ops, exchange: Exchange | None) -> Ops:
    """The reading `ops` for a rank that has peers; for one without, as it is."""
    if exchange is None:
        return ops
    return replace(
        ops,
        all_reduce=exchange.all_reduce,
        all_gather=exchange.all_gather,
        reduce_moe=exchange.reduce_moe,
    )


REFERENCE = Ops(
    embed=embed_ref,
    attn_res=attn_res_ref,
    linear=linear_ref,
    kda=kda_ref,
    kda_recorded=kda_recorded_ref,
    mla_latent=mla_latent_ref,
    mla=mla_ref,
    gate_up=gate_up_ref,
    moe_in=moe_in_ref,
    route=route_ref,
    experts=experts_ref,
    tap=tap_ref,
    latent_up=latent_up_ref,
    lm_head=lm_head_ref,
    all_reduce=stay,
    all_gather=stay,
    reduce_moe=stay,
)
PREFILL = replace(REFERENCE, kda=kda_chunked_ref, mla=mla_expanded_ref)
DECODE = replace(REFERENCE, kda=kda_one_row, mla=mla_one_row, experts=experts_one_row)
VERIFY = replace(DECODE, kda_recorded=kda_recorded_few, mla=mla_ref, experts=experts_sorted)
TRAIN = replace(PREFILL, experts=experts_grouped_ref)  # on Fresh buffers


class Fresh:
    """A buffer that a write replaces instead of overwriting, so that autograd sees every value.

    It stands where a tensor stands in the text of the model: it is read like one, and `copy_` or an
    indexed assignment gives it a new value of its dtype.
    """

    def __init__(self, dtype: torch.dtype, value: Tensor | None = None) -> None:
        self.dtype = dtype
        self.value = value

    def copy_(self, value: Tensor) -> None:
        self.value = value.to(self.dtype)

    def __setitem__(self, index: Tensor, value: Tensor) -> None:
        assert self.value is not None
        self.value = self.value.index_put((index,), value.to(self.dtype))

    def __getitem__(self, index: Any) -> Tensor:
        assert self.value is not None
        return self.value[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*(a.value if isinstance(a, Fresh) else a for a in args), **(kwargs or {}))
