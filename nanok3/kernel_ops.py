"""The `KERNELS` reading: an op call is one or a few CuTe DSL launches, chained by PDL.

`pack_weights` turns the records of `weights.py` into the kernels' layouts, `Kernels` makes the
record of ops over workspaces of fixed addresses, so that a step can be captured. Imports the
kernels, and with them CuTe DSL: nothing on a CPU path imports this file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.kernels.attn_res import attn_res
from nanok3.kernels.embed import embed
from nanok3.kernels.expert_down import expert_down, pack_expert_down
from nanok3.kernels.expert_up import expert_up, pack_expert_up
from nanok3.kernels.gemv import gemv
from nanok3.kernels.gemv_layout import Shape, choose_split, pack_gemv, pack_moe_in
from nanok3.kernels.kda_decode import kda_decode
from nanok3.kernels.mla_decode import Shape as MLAShape
from nanok3.kernels.mla_decode import mla_decode, num_splits
from nanok3.kernels.mla_latent import mla_latent
from nanok3.kernels.mla_merge import mla_merge
from nanok3.kernels.rms_norm import rms_norm
from nanok3.kernels.route import route
from nanok3.ops import Ops, stay
from nanok3.reference import mxfp4
from nanok3.reference.attn_res import AttnResWeights
from nanok3.reference.experts import ExpertWeights
from nanok3.reference.linear import GateUpWeights, LatentUpWeights, MoEInWeights
from nanok3.reference.mla import MLAWeights
from nanok3.reference.router import RouterWeights
from nanok3.weights import DenseWeights, LayerWeights, MoEWeights, Weights


@dataclass(frozen=True)
class Packed:
    """A matrix in the layout of `gemv`, with the static sizes that its launch needs."""

    tensor: Tensor  # [tiles, K / 32, 16, 32]
    shape: Shape


@dataclass(frozen=True)
class ExpertBytes:
    """A field of experts as it is stored."""

    packed: Tensor  # [E, rows, columns / 2] u8
    scale: Tensor  # [E, rows, columns / 32] u8


@dataclass(frozen=True)
class PackedMLA:
    q_norm: Tensor  # [q_lora]
    kv_norm: Tensor  # [L]
    absorb: Packed  # H blocks of [L, Dn]: q_n -> the latent
    value: Packed  # H blocks of [Dv, L]: the latent -> the head, then the gate
    nope_dim: int
    eps: float


# ---- packing ----


def pack(weight: Tensor, finish: str = "bf16", **sizes: Any) -> Packed:
    """weight [O, K]; `sizes` where x is wider than K or rows come in groups."""
    rows, k = weight.shape
    split = 1 if "groups" in sizes else choose_split(rows, k)
    fields: dict[str, Any] = {"rows": rows, "k": k, "finish": finish, "split": split} | sizes
    shape = Shape(**fields)
    return Packed(pack_gemv(weight, situ=finish == "situ"), shape)


def plain(weight: Tensor, finish: str = "bf16") -> Packed:
    return pack(weight, finish, x_width=weight.shape[1])


def gate_up(w: GateUpWeights) -> GateUpWeights:
    betas = {"beta": w.beta, "linear_beta": w.linear_beta}
    packed: Any = pack(w.weight, "situ", x_width=w.weight.shape[1], **betas)
    return replace(w, weight=packed)


def pack_front(w: MoEInWeights) -> Packed:
    """The three matrices of `moe_in` as one product."""
    up = w.shared_gate_up
    matrices = w.gate, w.latent_down, up.weight
    packed = pack_moe_in(*matrices)
    k = packed.shape[1] * packed.shape[3]
    shape = Shape(
        rows=sum(len(m) for m in matrices),
        k=k,
        x_width=k,
        finish="moe_in",
        split=choose_split(packed.shape[0] * packed.shape[2], k),
        beta=up.beta,
        linear_beta=up.linear_beta,
        router_rows=len(w.gate),
        latent_rows=len(w.latent_down),
    )
    return Packed(packed, shape)


def pack_mla(w: MLAWeights, rope_dim: int) -> PackedMLA:
    heads, width, rank = w.kv_b.shape
    nope, value = w.nope_dim, width - w.nope_dim
    key_rows = w.kv_b[:, :nope].transpose(1, 2).reshape(heads * rank, nope)
    value_rows = w.kv_b[:, nope:].reshape(heads * value, rank)
    query = nope + rope_dim
    absorb = pack(key_rows, x_width=heads * query, groups=heads, group_stride=query)
    out = pack(value_rows, "gate", x_width=heads * rank, groups=heads, group_stride=rank)
    return PackedMLA(w.q_norm, w.kv_norm, absorb, out, nope, w.eps)


def pack_layer(w: LayerWeights, rope_dim: int) -> LayerWeights:
    attn: Any = w.attn
    if isinstance(attn, MLAWeights):
        attn = pack_mla(attn, rope_dim)
    mlp: Any = w.mlp
    if isinstance(mlp, DenseWeights):
        mlp = DenseWeights(gate_up(mlp.gate_up), plain(mlp.down))  # type: ignore[arg-type]
    else:
        mlp = pack_moe(mlp)
    fields: dict[str, Any] = {
        "in_proj": plain(w.in_proj),
        "attn": attn,
        "q_b": None if w.q_b is None else plain(w.q_b),
        "o_proj": plain(w.o_proj),
        "mlp": mlp,
    }
    return replace(w, **fields)


def pack_moe(w: MoEWeights) -> MoEWeights:
    latent_up: Any = plain(w.latent_up.weight, "add")
    fields: dict[str, Any] = {
        "in_proj": pack_front(w.in_proj),
        "shared_down": plain(w.shared_down),
        "experts": pack_routed(w.experts),
        "latent_up": replace(w.latent_up, weight=latent_up),
    }
    return replace(w, **fields)


def pack_routed(w: ExpertWeights) -> ExpertWeights:
    """Experts as `ExpertBytes`, or dense ones whose values are MXFP4's; ValueError for others."""
    fields: dict[str, Any] = {}
    for name, pack_one in (("w13", pack_expert_up), ("w2", pack_expert_down)):
        stored = getattr(w, name)
        if not isinstance(stored, ExpertBytes):
            dense, stored = stored, ExpertBytes(*mxfp4.quantize(stored))
            if not torch.equal(mxfp4.dequantize(stored.packed, stored.scale, dense.dtype), dense):
                raise ValueError("these experts are not MXFP4; the GPU kernels serve no others")
        fields[name] = pack_one(stored.packed, stored.scale)
    return replace(w, **fields)


def pack_weights(config: ModelConfig, w: Weights) -> Weights:
    """All records with matrices in the kernels' layouts."""
    layers = tuple(pack_layer(layer, config.qk_rope_head_dim) for layer in w.layers)
    return pack_head(replace(w, layers=layers))


def pack_head(w: Weights) -> Weights:
    lm_head: Any = plain(w.lm_head, "f32")
    return replace(w, lm_head=lm_head)


# ---- ops ----


class Kernels:
    """The workspaces that ops with several launches pass on, and the ops over them.

    A rank's exchanges with peers are not among them: it runs alone.
    """

    def __init__(
        self, config: ModelConfig, max_rows: int, device: str, shard: Shard = WHOLE
    ) -> None:
        c, self.config = config, config
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._heads, rank = shard.local(c.num_attention_heads), c.kv_lora_rank
        heads, width = self._heads, shard.local(c.moe_intermediate_size)
        experts, top_k = c.num_experts, c.num_experts_per_token

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._distinct = empty(min(experts, max_rows * top_k), dtype=torch.int32)
        self._num_distinct = empty(1, dtype=torch.int32)
        self._slot_of = empty(max_rows, top_k, dtype=torch.int32)
        self._expert_act = empty(max_rows, top_k, width)
        self._routed_normed = empty(max_rows, c.routed_expert_hidden_size)
        self._q_latent = empty(max_rows, heads * rank)
        self._context = empty(max_rows, heads * rank)
        most = (self._sms + max_rows) * heads  # (split, row, head) of any number of requests
        self._partial = empty(most * rank, dtype=torch.float32)
        self._stats = empty(most * 2, dtype=torch.float32)

    def record(self) -> Ops:
        return Ops(
            embed=embed,
            attn_res=self.attn_res,
            linear=self.linear,
            kda=kda_decode,
            mla_latent=self.mla_latent,
            mla=self.mla,
            gate_up=self.gate_up,
            moe_in=self.moe_in,
            route=self.route,
            experts=self.experts,
            latent_up=self.latent_up,
            lm_head=self.lm_head,
            all_reduce=stay,
            all_gather=stay,
            reduce_moe=stay,
        )

    def attn_res(
        self, delta: Tensor, streams: Tensor, w: AttnResWeights, fresh: bool, *, out: Tensor
    ) -> None:
        attn_res(delta, streams, w.score, w.norm, w.eps, fresh, out=out)

    def linear(self, x: Tensor, weight: Packed, *, out: Tensor) -> None:
        gemv(x, weight.tensor, weight.shape, out=out)

    def gate_up(self, x: Tensor, w: GateUpWeights, *, out: Tensor) -> None:
        packed: Any = w.weight
        gemv(x, packed.tensor, packed.shape, out=out)

    def mla_latent(
        self, x: Tensor, w: PackedMLA, cache: Tensor, slot_mapping: Tensor, *, out: Tensor
    ) -> None:
        mla_latent(x, w.q_norm, w.kv_norm, w.eps, cache, slot_mapping, out=out)

    def mla(
        self,
        q: Tensor,
        x: Tensor,
        w: PackedMLA,
        cache: Tensor,
        block_table: Tensor,
        positions: Tensor,
        block_size: int,
        *,
        out: Tensor,
    ) -> None:
        """Absorb the queries, attend in the latent, merge the splits, values and gate."""
        c, tokens, num_reqs = self.config, q.shape[0], block_table.shape[0]
        heads, rank = self._heads, c.kv_lora_rank
        gemv(q, w.absorb.tensor, w.absorb.shape, out=self._q_latent[:tokens])
        shape = MLAShape(
            heads, rank, w.nope_dim, c.qk_rope_head_dim, block_size, c.qk_head_dim**-0.5
        )
        context = block_table.shape[1] * block_size
        splits = num_splits(shape, num_reqs, tokens // num_reqs, context, self._sms)
        cells = splits * tokens * heads
        partial = self._partial[: cells * rank].view(splits, tokens, heads, rank)
        stats = self._stats[: cells * 2].view(splits, tokens, heads, 2)
        mla_decode(
            self._q_latent[:tokens],
            q,
            cache,
            block_table,
            positions,
            shape,
            partial=partial,
            stats=stats,
        )
        mla_merge(partial, stats, out=self._context[:tokens])
        gate = x[:, -out.shape[1] :]
        gemv(self._context[:tokens], w.value.tensor, w.value.shape, extra=gate, out=out)

    def moe_in(self, x: Tensor, w: Packed, *, out: tuple[Tensor, Tensor, Tensor]) -> None:
        gemv(x, w.tensor, w.shape, out=out)

    def route(self, logits: Tensor, w: RouterWeights, *, out: tuple[Tensor, Tensor]) -> None:
        """Also leaves the list of distinct experts for `experts`."""
        route(
            logits,
            w.bias,
            w.top_k,
            w.num_groups,
            w.topk_groups,
            w.renormalize,
            w.scaling,
            ids=out[0],
            weights=out[1],
            distinct=self._distinct,
            num_distinct=self._num_distinct,
            slot_of=self._slot_of[: len(logits)],
        )

    def experts(
        self, latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, *, out: Tensor
    ) -> None:
        """`route` has turned ids into places in its list of distinct experts."""
        up: Any = w.w13
        down: Any = w.w2
        slot_of, act = self._slot_of[: len(ids)], self._expert_act[: len(ids)]
        chosen = slot_of, self._distinct, self._num_distinct
        expert_up(latent, *chosen, up, w.beta, w.linear_beta, act=act)
        expert_down(act, weights, *chosen, down, out=out)

    def latent_up(self, routed: Tensor, shared: Tensor, w: LatentUpWeights, *, out: Tensor) -> None:
        packed: Any = w.weight
        if w.norm is not None:
            normed = self._routed_normed[: routed.shape[0]]
            rms_norm(routed, w.norm, w.eps, out=normed)
            routed = normed
        gemv(routed, packed.tensor, packed.shape, extra=shared, out=out)

    def lm_head(self, x: Tensor, weight: Packed, rows: Tensor, *, out: Tensor) -> None:
        assert len(rows) == x.shape[0], "a decode step wants the logits of all its rows"
        gemv(x, weight.tensor, weight.shape, out=out)
