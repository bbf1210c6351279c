"""The records: each field has one place, and sizes are those of a rank's tensors."""

from __future__ import annotations

import pytest
import torch
from compare import check_close, check_equal
from tiny import random_fields, tiny_config
from torch import Tensor
from torch.nn.functional import linear

from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.reference.experts import experts_value
from nanok3.reference.kda import KDAWeights, kda_value
from nanok3.reference.linear import gate_up_ref
from nanok3.reference.mla import MLAWeights, mla_latent_ref, mla_ref
from nanok3.weight_table import Filler, to_checkpoint
from nanok3.weights import DenseWeights, MoEWeights, Weights, build


def test_records() -> None:
    """Each field has one place, and the constants are the config's."""
    config = tiny_config(
        routed_scaling_factor=2.0,
        num_expert_group=4,
        topk_group=3,
        moe_renormalize=False,
        gate_lower_bound=-7.0,
        rms_norm_eps=1e-3,
        activation_situ_beta=3.0,
        activation_situ_linear_beta=9.0,
    )
    used = []
    fields = random_fields(config, 0)

    def get(name: str) -> Tensor:
        used.append(name)
        return fields[name]

    w = build(config, get)
    assert sorted(used) == sorted(fields), "each field once"
    kda, mla = w.layers[0], w.layers[3]
    assert isinstance(kda.mlp, DenseWeights) and isinstance(mla.mlp, MoEWeights)
    assert kda.q_b is None and mla.q_b is not None
    assert (kda.attn.lower_bound, kda.attn.eps) == (-7.0, 1e-3)  # type: ignore[union-attr]
    assert (mla.attn.nope_dim, mla.attn.eps) == (16, 1e-3)  # type: ignore[union-attr]
    assert mla.attn.kv_b.shape == (2, 16 + 12, 32)  # type: ignore[union-attr]
    check_equal(mla.attn.kv_b[1, 2], fields["layers.3.attn.kv_b"][28 + 2])  # type: ignore[union-attr]
    router = mla.mlp.router
    assert (router.top_k, router.num_groups, router.topk_groups) == (3, 4, 3)
    assert (router.renormalize, router.scaling) == (False, 2.0)
    for situ in (kda.mlp.gate_up, mla.mlp.in_proj.shared_gate_up, mla.mlp.experts):
        assert (situ.beta, situ.linear_beta) == (3.0, 9.0)
    assert w.output_res.eps == mla.mlp.latent_up.eps == 1e-3
    no_norm = tiny_config(latent_moe_use_norm=False)
    layer = build(no_norm, random_fields(no_norm, 0).__getitem__).layers[1]
    assert isinstance(layer.mlp, MoEWeights) and layer.mlp.latent_up.norm is None


# ---- shards ----


def layer_outputs(config: ModelConfig, w: Weights, x: Tensor) -> dict[str, Tensor]:
    """What one rank gives for rows x of one request: parts of a sum, or of the columns."""
    kda, mla, dense, moe = w.layers[0], w.layers[3], w.layers[0].mlp, w.layers[1].mlp
    assert isinstance(kda.attn, KDAWeights) and isinstance(mla.attn, MLAWeights)
    assert isinstance(dense, DenseWeights) and isinstance(moe, MoEWeights) and mla.q_b is not None
    heads, dim = len(kda.attn.A_log), config.linear_attn_config.head_dim
    conv_state = torch.zeros(1, 3, 3 * heads * dim, dtype=x.dtype)
    state = torch.zeros(1, heads, dim, dim, dtype=x.dtype)
    kda_heads = kda_value(linear(x, kda.in_proj), kda.attn, conv_state, state, False)[0]

    mla_in, cache = linear(x, mla.in_proj), torch.zeros(len(x), config.latent_width, dtype=x.dtype)
    q_latent = torch.empty(len(x), config.q_lora_rank, dtype=x.dtype)
    slots, table = torch.arange(len(x)), torch.zeros(1, 1, dtype=torch.int64)
    mla_latent_ref(mla_in, mla.attn, cache, slots, out=q_latent)
    mla_heads = torch.empty(len(x), mla.o_proj.shape[1], dtype=x.dtype)
    q = linear(q_latent, mla.q_b)
    mla_ref(q, mla_in, mla.attn, cache, table, slots, len(x), out=mla_heads)

    latent = x[:, : config.routed_expert_hidden_size]
    picks = torch.tensor([[0, 3, 11], [1, 4, 5], [0, 4, 7]])
    dense_act = torch.empty(len(x), dense.down.shape[1], dtype=x.dtype)
    gate_up_ref(x, dense.gate_up, out=dense_act)
    shared_act = torch.empty(len(x), moe.shared_down.shape[1], dtype=x.dtype)
    gate_up_ref(x, moe.in_proj.shared_gate_up, out=shared_act)
    return {
        "sum kda": linear(kda_heads, kda.o_proj),
        "sum mla": linear(mla_heads, mla.o_proj),
        "sum dense": linear(dense_act, dense.down),
        "sum shared": linear(shared_act, moe.shared_down),
        "sum experts": experts_value(latent, picks, torch.full((3, 3), 0.5), moe.experts),
        "columns router": linear(x, moe.in_proj.gate),
        "columns down": linear(x, moe.in_proj.latent_down),
        "columns up": linear(latent, moe.latent_up.weight),
        "columns head": linear(x, w.lm_head),
        "rows embed": w.embed.table,
        "same cache": cache,
    }


@pytest.mark.parametrize("size", [2, 4])
def test_what_ranks_compute_is_the_whole_models(size: int) -> None:
    """Heads, gates, experts and columns of a rank belong together: partial results add up."""
    config = tiny_config(num_heads=4, num_attention_heads=4, moe_intermediate_size=128)
    tensors = dict(to_checkpoint(config, random_fields(config, 1)))
    x = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def outputs(shard: Shard) -> dict[str, Tensor]:
        filler = Filler(config, torch.float64, "cpu", shard)
        for name, tensor in tensors.items():
            filler.take(name, tensor)
        return layer_outputs(config, build(config, filler.finish().__getitem__), x)

    right = outputs(WHOLE)
    ranks = [outputs(Shard(rank, size)) for rank in range(size)]
    for name, value in right.items():
        parts = [rank[name] for rank in ranks]
        if name.startswith("sum"):
            check_close(torch.stack(parts).sum(0), value, 1e-12, name)
        elif name.startswith("columns"):
            check_close(torch.cat(parts, dim=1), value, 1e-12, name)
        elif name.startswith("rows"):
            check_equal(torch.cat(parts), value, name)
        else:
            for part in parts:
                check_close(part, value, 1e-12, name)
