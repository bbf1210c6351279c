"""Kimi K3, once: which op is called on which buffers, in which order.

Read it downwards: `forward` -> `kda_layer` or `mla_layer` -> `dense_mlp` or `latent_moe` -> `head`.
Every line is one call `ops.<name>(inputs, weights, out=...)`; what a call does is the reading of
`ops.py` that was passed in, and its formula stands in `nanok3/reference/<op>.py`. No branch on
data; the only loop is over layers.

With several ranks each has its heads, its part of every F, Z, V and of the experts' columns. It
writes parts, and an exchange makes the whole of them: `all_reduce` adds up, `all_gather` puts the
ranks' columns side by side, `reduce_moe` does the one for the routed latent and leaves of the
shared experts' sum this rank's columns. A part is a view of its whole (`step.py`), so for one rank
an exchange does nothing.

A token's AttnRes streams: `streams[0]` is the embedding, `streams[b + 1]` the running sum of
res_block b. A sub-layer leaves its output in `delta`; the next `attn_res` adds it to the running
sum, mixes the streams seen so far and normalises. The first sum of a res_block starts `fresh`, from
its delta.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanok3.cache import Cache
from nanok3.config import ModelConfig
from nanok3.ops import Ops
from nanok3.reference.kda_records import KDARecords
from nanok3.step import Buffers, Step
from nanok3.weights import DenseWeights, LayerWeights, MoEWeights, Weights


def forward(
    config: ModelConfig,
    w: Weights,
    cache: Cache,
    step: Step,
    buf: Buffers,
    ops: Ops,
    taps: Sequence[int] = (),
) -> None:
    """Tokens of `step` -> `buf.logits`; the caches hold these tokens afterwards.

    taps: after how many layers a draft reads the running sum, pending delta included (1 .. layers
    - 1, ascending) -> `buf.taps`.
    """
    embedding(w, step, buf, ops)
    for i, layer in enumerate(w.layers):
        if i in taps:
            at = taps.index(i) * config.hidden_size
            streams = buf.streams[: -(-i // config.attn_res_block_size) + 1]
            ops.tap(buf.delta, streams, out=buf.taps[:, at : at + config.hidden_size])  # [T, C]
        one_layer(config, i, layer, cache, step, buf, ops)
    head(w, buf.streams, step, buf, ops)


def embedding(w: Weights, step: Step, buf: Buffers, ops: Ops) -> None:
    ops.embed(step.input_ids, w.embed, out=buf.delta_sum)  # [T, C]
    ops.all_reduce(buf.delta_sum, out=buf.delta)


def one_layer(
    config: ModelConfig, i: int, w: LayerWeights, cache: Cache, step: Step, buf: Buffers, ops: Ops
) -> None:
    """Layer i: `delta` of the layer before -> `delta`."""
    res_block = config.attn_res_block_size  # layers
    streams = buf.streams[: -(-i // res_block) + 1]
    if config.is_kda(i):
        k = config.kda_layer_ids.index(i)
        records = None if step.records is None else step.records.layer(k)
        states = cache.conv_state[k], cache.state[k]
        kda_layer(w, *states, streams, i == 0, step, buf, ops, records)
    else:
        m = config.mla_layer_ids.index(i)
        mla_layer(w, cache.latent[m], streams, i == 0, step, buf, ops)
    streams = buf.streams[: i // res_block + 2]
    if isinstance(w.mlp, DenseWeights):
        dense_mlp(w, w.mlp, streams, i % res_block == 0, buf, ops)
    else:
        latent_moe(w, w.mlp, streams, i % res_block == 0, buf, ops)


def kda_layer(
    w: LayerWeights,
    conv_state: Tensor,
    state: Tensor,
    streams: Tensor | Sequence[Tensor],
    fresh: bool,
    step: Step,
    buf: Buffers,
    ops: Ops,
    records: KDARecords | None = None,
) -> None:
    ops.attn_res(buf.delta, streams, w.attn_res, fresh, out=buf.x)  # [T, C]
    ops.linear(buf.x, w.in_proj, out=buf.kda_in)  # [T, q|k|v|gate|f_a|b]
    if records is None:
        ops.kda(buf.kda_in, w.attn, conv_state, state, step.state_slots, out=buf.kda_heads)
    else:  # rows that may be rolled back
        ops.kda_recorded(
            buf.kda_in, w.attn, conv_state, state, step.state_slots, records, out=buf.kda_heads
        )
    ops.linear(buf.kda_heads, w.o_proj, out=buf.delta_sum)  # [T, C]
    ops.all_reduce(buf.delta_sum, out=buf.delta)


def mla_layer(
    w: LayerWeights,
    latent: Tensor,
    streams: Tensor | Sequence[Tensor],
    fresh: bool,
    step: Step,
    buf: Buffers,
    ops: Ops,
) -> None:
    ops.attn_res(buf.delta, streams, w.attn_res, fresh, out=buf.x)  # [T, C]
    ops.linear(buf.x, w.in_proj, out=buf.mla_in)  # [T, q_a|kv_a|gate]
    ops.mla_latent(buf.mla_in, w.attn, latent, step.slot_mapping, out=buf.q_latent)  # [T, q_lora]
    ops.linear(buf.q_latent, w.q_b, out=buf.q)  # [T, H * (Dn + Dr)]
    ops.mla(
        buf.q,
        buf.mla_in,
        w.attn,
        latent,
        step.block_table,
        step.positions,
        step.block_size,
        out=buf.mla_heads,
    )  # [T, H * Dv]
    ops.linear(buf.mla_heads, w.o_proj, out=buf.delta_sum)  # [T, C]
    ops.all_reduce(buf.delta_sum, out=buf.delta)


def dense_mlp(
    w: LayerWeights,
    mlp: DenseWeights,
    streams: Tensor | Sequence[Tensor],
    fresh: bool,
    buf: Buffers,
    ops: Ops,
) -> None:
    ops.attn_res(buf.delta, streams, w.mlp_res, fresh, out=buf.x)  # [T, C]
    ops.gate_up(buf.x, mlp.gate_up, out=buf.dense_act)  # [T, F]
    ops.linear(buf.dense_act, mlp.down, out=buf.delta_sum)  # [T, C]
    ops.all_reduce(buf.delta_sum, out=buf.delta)


def latent_moe(
    w: LayerWeights,
    moe: MoEWeights,
    streams: Tensor | Sequence[Tensor],
    fresh: bool,
    buf: Buffers,
    ops: Ops,
) -> None:
    ops.attn_res(buf.delta, streams, w.mlp_res, fresh, out=buf.x)  # [T, C]
    ops.moe_in(
        buf.x, moe.in_proj, out=(buf.router_part, buf.latent_part, buf.shared_act)
    )  # [T, E / P] f32, [T, Z / P], [T, F]
    ops.all_gather((buf.router_part, buf.latent_part), out=(buf.router_logits, buf.latent))
    ops.route(buf.router_logits, moe.router, out=(buf.topk_ids, buf.topk_weights))  # [T, A]
    ops.linear(buf.shared_act, moe.shared_down, out=buf.shared_sum)  # [T, C]
    ops.experts(
        buf.latent, buf.topk_ids, buf.topk_weights, moe.experts, out=buf.routed_sum
    )  # [T, Z]
    ops.reduce_moe((buf.routed_sum, buf.shared_sum), out=(buf.routed, buf.shared_part))
    ops.latent_up(buf.routed, buf.shared_part, moe.latent_up, out=buf.delta_part)  # [T, C / P]
    ops.all_gather((buf.delta_part,), out=(buf.delta,))


def head(
    w: Weights, streams: Tensor | Sequence[Tensor], step: Step, buf: Buffers, ops: Ops
) -> None:
    ops.attn_res(buf.delta, streams, w.output_res, False, out=buf.x)  # [T, C]
    ops.lm_head(buf.x, w.lm_head, step.logit_rows, out=buf.logits_part)  # [N, V / P] f32
    ops.all_gather((buf.logits_part,), out=(buf.logits,))
