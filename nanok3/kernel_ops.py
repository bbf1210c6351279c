"""The `KERNELS` reading: an op call is one or a few CuTe DSL launches, chained by PDL.

`Kernels` makes the record of ops over workspaces of fixed addresses, so that a step can be
captured. Weights lie as `packing.py` has put them. Imports the kernels, and with them CuTe DSL:
nothing on a CPU path imports this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.kernels.attn_res import attn_res
from nanok3.kernels.embed import embed
from nanok3.kernels.expert_down import expert_down
from nanok3.kernels.expert_up import expert_up
from nanok3.kernels.gemv import gemv
from nanok3.kernels.kda_commit import kda_commit
from nanok3.kernels.kda_decode import kda_decode, kda_recorded
from nanok3.kernels.mla_decode import Shape as MLAShape
from nanok3.kernels.mla_decode import mla_decode, num_splits
from nanok3.kernels.mla_latent import mla_latent
from nanok3.kernels.mla_merge import mla_merge
from nanok3.kernels.rms_norm import rms_norm
from nanok3.kernels.route import route
from nanok3.kernels.tap import tap
from nanok3.ops import Ops, stay
from nanok3.packing import Packed, PackedMLA
from nanok3.reference.attn_res import AttnResWeights
from nanok3.reference.experts import ExpertWeights
from nanok3.reference.kda_records import KDARecords
from nanok3.reference.linear import GateUpWeights, LatentUpWeights
from nanok3.reference.router import RouterWeights
from nanok3.workspaces import allocate, decode_spaces


class Kernels:
    """The workspaces that ops with several launches pass on, and the ops over them.

    A rank's exchanges with peers are not among them: it runs alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_rows: int,
        device: str,
        shard: Shard = WHOLE,
        num_queries: int = 1,
    ) -> None:
        """num_queries: rows of a request, at most."""
        c, self.config = config, config
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._heads = shard.local(c.num_attention_heads)
        spaces = allocate(decode_spaces(c, shard, max_rows, self._sms, num_queries), device)
        self._distinct, self._num_distinct = spaces["distinct"], spaces["num_distinct"]
        self._slot_of, self._expert_act = spaces["slot_of"], spaces["expert_act"]
        self._routed_normed = spaces["routed_normed"]
        self._q_latent, self._context = spaces["q_latent"], spaces["context"]
        self._partial, self._stats = spaces["partial"], spaces["stats"]

    def record(self) -> Ops:
        return Ops(
            embed=embed,
            attn_res=self.attn_res,
            linear=self.linear,
            kda=kda_decode,
            kda_recorded=kda_recorded,
            mla_latent=self.mla_latent,
            mla=self.mla,
            gate_up=self.gate_up,
            moe_in=self.moe_in,
            route=self.route,
            experts=self.experts,
            tap=tap,
            latent_up=self.latent_up,
            lm_head=self.lm_head,
            all_reduce=stay,
            all_gather=stay,
            reduce_moe=stay,
        )

    def commit(
        self,
        conv_state: Tensor,
        state: Tensor,
        records: KDARecords,
        state_slots: Tensor,
        counts: Tensor,
    ) -> None:
        """After a step whose rows were recorded: the first counts[r] rows of each request stand.
        All layers' states, in place, in one launch; state_slots, counts [R] i64 on the device."""
        kda_commit(conv_state, state, records, state_slots, counts)

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
