"""COUNT: what a pass of the model reads, writes and multiplies, op by op, without any values.

`count_step` runs `model.forward` on buffers that have a name and a size instead of values, with
`Ops` whose functions note each call: one function an op, which says what the op touches. `total`
adds up. Weights come from `weight_table.table`, activations and caches from the allocators, so that
nothing describes the model a second time.

Counted are bytes that must move once: a weight once a pass, a cached row once a request, a state in
and out. Flops are those of products and of the delta rule; element-wise work is left out. With a
shard all is of one rank, and what its peers send it is counted too. How fast a machine moves bytes
is for others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache, allocate_cache
from nanok3.config import WHOLE, EngineConfig, ModelConfig, Shard
from nanok3.ops import Ops
from nanok3.step import Buffers, Step, allocate_buffers, with_parts, without_parts
from nanok3.weight_table import Field, table
from nanok3.weights import build

MXFP4_BYTES = 17 / 32  # a value: 4 bits, and a scale byte for 32 of them

Kind = Literal["weight", "cache", "activation", "step"]


@dataclass(frozen=True)
class Access:
    """What one op touches of one buffer.

    `name` is the same in every layer, as in the records of weights, `Buffers`, `Cache` and `Step`;
    `index` tells buffers of one name apart: the layer of a weight, the row of a cache, the number
    of a stream.
    """

    kind: Kind
    name: str
    index: int | None
    values: float  # of weights: parameters, as the checkpoint counts them
    nbytes: float


@dataclass(frozen=True)
class OpCount:
    """One call of an op."""

    op: str
    layer: int | None  # None: embedding and head
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops: int
    exchanged: float = 0.0  # bytes that this rank gets if each peer sends its part straight to it


@dataclass(frozen=True)
class Total:
    """Sums over calls."""

    parameters: float  # weights read, in values
    weight_bytes: float
    cache_read_bytes: float
    cache_write_bytes: float
    activation_bytes: float  # read and written, the step's integers included
    flops: int
    exchanged_bytes: float = 0.0


def total(counts: Iterable[OpCount]) -> Total:
    counts = list(counts)
    reads = [a for c in counts for a in c.reads]
    writes = [a for c in counts for a in c.writes]

    def nbytes(accesses: list[Access], *kinds: Kind) -> float:
        return sum(a.nbytes for a in accesses if a.kind in kinds)

    return Total(
        parameters=sum(a.values for a in reads if a.kind == "weight"),
        weight_bytes=nbytes(reads, "weight"),
        cache_read_bytes=nbytes(reads, "cache"),
        cache_write_bytes=nbytes(writes, "cache"),
        activation_bytes=nbytes(reads + writes, "activation", "step"),
        flops=sum(c.flops for c in counts),
        exchanged_bytes=sum(c.exchanged for c in counts),
    )


def distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Experts that some token picks, expected of picks that are uniform and independent."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def count_step(
    config: ModelConfig,
    num_reqs: int,
    num_rows: int,
    context: int,
    *,
    num_logit_rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    expert_bytes_per_value: float = MXFP4_BYTES,
    shard: Shard = WHOLE,
) -> list[OpCount]:
    """Every op call of one pass, in order.

    num_rows: of each request; context: tokens each request has cached after the pass, these rows
    included. num_logit_rows: rows whose logits are wanted (None: all). dtype: of weights that are
    stored in BF16, activations and latents. expert_bytes_per_value: as the checkpoint stores them,
    or 4 for an engine that keeps them unpacked in float32.
    """
    assert 1 <= num_rows <= context, "a pass caches its own rows"
    tokens, block_size = num_reqs * num_rows, EngineConfig().block_size
    wanted = tokens if num_logit_rows is None else num_logit_rows
    shapes = {
        "input_ids": (tokens,),
        "positions": (tokens,),
        "slot_mapping": (tokens,),
        "block_table": (num_reqs, -(-context // block_size)),
        "state_slots": (num_reqs,),
        "logit_rows": (wanted,),
    }
    integers: Any = {name: Buffer("step", name, None, s, 8) for name, s in shapes.items()}
    weights = weight_buffers(config, dtype, expert_bytes_per_value, shard)
    counter = Counter(num_rows, context, shard.size)
    model.forward(
        config,
        build(config, weights.__getitem__, shard),
        cache_buffers(config, num_reqs, context, dtype, shard),
        Step(**integers, block_size=block_size),
        activation_buffers(config, tokens, wanted, dtype, shard),
        counter.ops(),
    )
    return counter.calls


# ---- what stands for tensors ----


@dataclass(frozen=True)
class Buffer:
    """Stands where a tensor stands in the text of the model."""

    kind: Kind
    name: str
    index: int | None
    shape: tuple[int, ...]
    value_bytes: float
    stored: int | None = None  # values in the checkpoint, where not as many as the shape says

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> Buffer:
        assert dim == 0 and sizes[1] == -1
        rows = (sizes[0], self.shape[0] // sizes[0])
        return replace(self, shape=(*rows, *self.shape[1:]))

    def __getitem__(self, index: tuple[slice, slice]) -> Buffer:
        """Some columns of all rows: the same buffer, of fewer values."""
        rows, columns = index
        assert rows == slice(None)
        return replace(self, shape=(self.shape[0], columns.stop - columns.start))

    def part(self, share: float) -> Access:
        values = (prod(self.shape) if self.stored is None else self.stored) * share
        return Access(self.kind, self.name, self.index, values, values * self.value_bytes)


@functools.cache  # of a K3 it takes longer than the rest of a count
def weight_buffers(
    config: ModelConfig, dtype: torch.dtype, expert_bytes: float, shard: Shard
) -> dict[str, Any]:
    def value_bytes(field: Field) -> float:
        if field.kind == "experts":
            return expert_bytes
        one = field.dtype(dtype).itemsize
        # A product is two vectors of the checkpoint and one here.
        return one / len(field.pieces) if field.kind == "product" else one

    buffers = {}
    for field in table(config, shard):
        layer, name = None, field.name
        if name.startswith("layers."):
            _, number, name = name.split(".", 2)
            layer = int(number)
        stored = prod(field.shape) * (len(field.pieces) if field.kind == "product" else 1)
        if shard == WHOLE:  # A_log is stored longer than it is used
            stored = sum(prod(piece.shape) for piece in field.pieces)
        buffers[field.name] = Buffer("weight", name, layer, field.shape, value_bytes(field), stored)
    return buffers


def cache_buffers(
    config: ModelConfig, num_reqs: int, context: int, dtype: torch.dtype, shard: Shard
) -> Cache:
    """A slot for each request and `context` rows of each, one buffer a layer."""
    cache = allocate_cache(config, num_reqs, num_reqs * context, 1, dtype, "meta", shard)

    def layers(name: str, tensor: Tensor) -> Any:
        shape, size = tuple(tensor.shape[1:]), tensor.element_size()
        return [Buffer("cache", name, i, shape, size) for i in range(len(tensor))]

    return Cache(**{name: layers(name, tensor) for name, tensor in vars(cache).items()})


def activation_buffers(
    config: ModelConfig, num_tokens: int, num_logit_rows: int, dtype: torch.dtype, shard: Shard
) -> Buffers:
    """A part goes by the name of its whole."""
    tensors = allocate_buffers(config, num_tokens, num_logit_rows, dtype, "meta", shard)

    def named(name: str, tensor: Tensor) -> Any:
        if name == "streams":
            return [one(name, i, stream) for i, stream in enumerate(tensor)]
        return one(name, None, tensor)

    def one(name: str, index: int | None, tensor: Tensor) -> Buffer:
        return Buffer("activation", name, index, tuple(tensor.shape), tensor.element_size())

    wholes = {name: named(name, tensor) for name, tensor in without_parts(tensors).items()}
    buffers: Buffers = with_parts(wholes, shard)
    return buffers


# ---- the ops ----


def parts_of(w: Any) -> list[Buffer]:
    """The buffers of a weight record."""
    return [value for value in vars(w).values() if isinstance(value, Buffer)]


class Counter:
    """The reading: a method an op says what the op reads and writes, whole buffers unless parted.

    Buffers stand where the signatures of `nanok3.reference` say tensors, weight records included.
    """

    def __init__(self, num_rows: int, context: int, num_ranks: int) -> None:
        self.num_rows = num_rows  # of each request
        self.context = context
        self.num_ranks = num_ranks
        self.calls: list[OpCount] = []

    def ops(self) -> Ops:
        return Ops(**{name: getattr(self, name) for name in Ops.__dataclass_fields__})

    def note(
        self,
        op: str,
        flops: int,
        reads: Sequence[Buffer | Access],
        writes: Sequence[Buffer | Access],
    ) -> None:
        read = tuple(r.part(1) if isinstance(r, Buffer) else r for r in reads)
        written = tuple(w.part(1) if isinstance(w, Buffer) else w for w in writes)
        layer = next(r.index for r in read if r.kind == "weight")
        self.calls.append(OpCount(op, layer, read, written, flops))

    def exchange(self, op: str, values: float, like: Buffer) -> None:
        if self.num_ranks > 1:
            got = (self.num_ranks - 1) * values * like.value_bytes
            self.calls.append(OpCount(op, self.calls[-1].layer, (), (), 0, got))

    def all_reduce(self, part: Buffer, *, out: Buffer) -> None:
        """Each peer sends all of its summand, so that all ranks add in one order."""
        self.exchange("all_reduce", prod(out.shape), out)

    def all_gather(self, parts: Sequence[Buffer], *, out: Sequence[Buffer]) -> None:
        for part in parts:
            self.exchange("all_gather", prod(part.shape), part)

    def reduce_moe(self, parts: Sequence[Buffer], *, out: Sequence[Buffer]) -> None:
        """All of the routed sum, this rank's columns of the shared one."""
        for whole in out:
            self.exchange("reduce_moe", prod(whole.shape), whole)

    def embed(self, ids: Buffer, w: Any, *, out: Buffer) -> None:
        table = w.table
        rows = table.part(min(1, ids.shape[0] / self.num_ranks / table.shape[0]))
        self.note("embed", 0, [ids, rows], [out])

    def attn_res(
        self, delta: Buffer, streams: Sequence[Buffer], w: Any, fresh: bool, *, out: Buffer
    ) -> None:
        seen = streams[:-1] if fresh else streams
        flops = 6 * len(streams) * prod(delta.shape)  # score, norm and mix of each stream
        self.note("attn_res", flops, [delta, *seen, *parts_of(w)], [streams[-1], out])

    def linear(self, x: Buffer, weight: Buffer, *, out: Buffer) -> None:
        self.note("linear", 2 * x.shape[0] * prod(weight.shape), [x, weight], [out])

    def kda(
        self,
        x: Buffer,
        w: Any,
        conv_state: Buffer,
        state: Buffer,
        state_slots: Buffer,
        *,
        out: Buffer,
    ) -> None:
        recurrence = 7 * prod(state.shape[1:])  # decay 1; k' S, the update and q' S 2 each
        products = 2 * prod(w.conv.shape) + 2 * prod(w.f_b.shape)
        flops = x.shape[0] * (recurrence + products)
        states = [conv_state, state]
        self.note("kda", flops, [x, *parts_of(w), *states, state_slots], [*states, out])

    def mla_latent(
        self, x: Buffer, w: Any, cache: Buffer, slot_mapping: Buffer, *, out: Buffer
    ) -> None:
        read = x.part((w.q_norm.shape[0] + cache.shape[1]) / x.shape[1])  # q_a | kv_a
        written = cache.part(self.num_rows / self.context)
        self.note("mla_latent", 0, [read, w.q_norm, w.kv_norm, slot_mapping], [written, out])

    def mla(
        self,
        q: Buffer,
        x: Buffer,
        w: Any,
        cache: Buffer,
        block_table: Buffer,
        positions: Buffer,
        block_size: int,
        *,
        out: Buffer,
    ) -> None:
        heads, _, rank = w.kv_b.shape
        unseen = (self.num_rows - 1) / 2  # rows after its own, on average, that a row does not see
        pairs = round(q.shape[0] * (self.context - unseen))
        absorbed = 2 * q.shape[0] * prod(w.kv_b.shape)
        flops = absorbed + 2 * pairs * heads * (cache.shape[1] + rank)
        gate = x.part(out.shape[1] / x.shape[1])
        self.note("mla", flops, [q, gate, w.kv_b, cache, block_table, positions], [out])

    def gate_up(self, x: Buffer, w: Any, *, out: Buffer) -> None:
        self.note("gate_up", 2 * x.shape[0] * prod(w.weight.shape), [x, w.weight], [out])

    def moe_in(self, x: Buffer, w: Any, *, out: tuple[Buffer, Buffer, Buffer]) -> None:
        matrices = w.gate, w.latent_down, w.shared_gate_up.weight
        flops = 2 * x.shape[0] * sum(prod(matrix.shape) for matrix in matrices)
        self.note("moe_in", flops, [x, *matrices], out)

    def route(self, logits: Buffer, w: Any, *, out: tuple[Buffer, Buffer]) -> None:
        self.note("route", 0, [logits, w.bias], out)

    def experts(self, latent: Buffer, ids: Buffer, weights: Buffer, w: Any, *, out: Buffer) -> None:
        (num_tokens, top_k), num_experts = ids.shape, w.w13.shape[0]
        share = distinct_experts(num_experts, top_k, num_tokens) / num_experts
        one_expert = prod(w.w13.shape[1:]) + prod(w.w2.shape[1:])
        used = [w.w13.part(share), w.w2.part(share)]
        flops = 2 * num_tokens * top_k * one_expert
        self.note("experts", flops, [latent, ids, weights, *used], [out])

    def latent_up(self, routed: Buffer, shared: Buffer, w: Any, *, out: Buffer) -> None:
        flops = 2 * routed.shape[0] * prod(w.weight.shape)
        self.note("latent_up", flops, [routed, shared, *parts_of(w)], [out])

    def kda_recorded(self, *args: Any, out: Buffer) -> None:
        raise AssertionError("counted without a draft")

    def tap(self, delta: Buffer, streams: Sequence[Buffer], *, out: Buffer) -> None:
        raise AssertionError("counted without a draft")

    def lm_head(self, x: Buffer, weight: Buffer, rows: Buffer, *, out: Buffer) -> None:
        wanted = rows.shape[0]
        used = x.part(wanted / x.shape[0]), weight.part(min(wanted, 1))
        self.note("lm_head", 2 * wanted * prod(weight.shape), [*used, rows], [out])
