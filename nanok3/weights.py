"""The model's weights as records, and `build`, which makes them of fields that it gets by name.

A record holds what one rank has: sizes such as its number of heads are those of its tensors. Which
checkpoint tensors fill a field, and which part of them a rank keeps, is for `weight_table.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.reference.attn_res import AttnResWeights
from nanok3.reference.embed import EmbedWeights
from nanok3.reference.experts import ExpertWeights
from nanok3.reference.kda import KDAWeights
from nanok3.reference.linear import GateUpWeights, LatentUpWeights, MoEInWeights
from nanok3.reference.mla import MLAWeights
from nanok3.reference.router import RouterWeights


@dataclass(frozen=True)
class MoEWeights:
    in_proj: MoEInWeights  # [router gate|latent_down|shared gate_up, C]
    router: RouterWeights
    shared_down: Tensor  # [C, F]
    experts: ExpertWeights
    latent_up: LatentUpWeights


@dataclass(frozen=True)
class DenseWeights:
    gate_up: GateUpWeights  # [2F, C]
    down: Tensor  # [C, F]


@dataclass(frozen=True)
class LayerWeights:
    attn_res: AttnResWeights
    in_proj: Tensor  # [q|k|v|gate|f_a|b, C] or [q_a|kv_a|gate, C]
    attn: KDAWeights | MLAWeights
    q_b: Tensor | None  # [H * (Dn + Dr), q_lora], MLA only
    o_proj: Tensor  # [C, H * D]
    mlp_res: AttnResWeights
    mlp: DenseWeights | MoEWeights


@dataclass(frozen=True)
class Weights:
    embed: EmbedWeights  # [V, C]
    layers: tuple[LayerWeights, ...]
    output_res: AttnResWeights
    lm_head: Tensor  # [V, C]


Get = Callable[[str], Any]  # a field by its name: a tensor, or what stands for one


def build(c: ModelConfig, get: Get, shard: Shard = WHOLE) -> Weights:
    """All records of a rank."""
    layers = tuple(build_layer(c, get, i) for i in range(c.num_hidden_layers))
    return build_ends(c, get, layers, shard)


def build_ends(
    c: ModelConfig, get: Get, layers: tuple[LayerWeights, ...], shard: Shard = WHOLE
) -> Weights:
    """The records around these layers."""
    table = get("embed")
    embed = EmbedWeights(table, shard.rank * table.shape[0])
    return Weights(embed, layers, res_weights(c, get, "output_res"), get("lm_head"))


def res_weights(c: ModelConfig, get: Get, name: str) -> AttnResWeights:
    return AttnResWeights(get(f"{name}.score"), get(f"{name}.norm"), c.rms_norm_eps)


def build_layer(c: ModelConfig, get: Get, i: int) -> LayerWeights:
    """The records of one layer."""

    def gate_up(name: str) -> GateUpWeights:
        betas = c.activation_situ_beta, c.activation_situ_linear_beta
        return GateUpWeights(get(name), *betas)

    def kda(name: str) -> KDAWeights:
        return KDAWeights(
            conv=get(f"{name}.conv"),
            f_b=get(f"{name}.f_b"),
            A_log=get(f"{name}.A_log"),
            dt_bias=get(f"{name}.dt_bias"),
            o_norm=get(f"{name}.o_norm"),
            lower_bound=c.linear_attn_config.gate_lower_bound,
            eps=c.rms_norm_eps,
        )

    def mla(name: str) -> MLAWeights:
        kv_b = get(f"{name}.kv_b")  # [H * (Dn + Dv), L]
        heads = kv_b.shape[0] // (c.qk_nope_head_dim + c.v_head_dim)
        norms = get(f"{name}.q_norm"), get(f"{name}.kv_norm")
        return MLAWeights(
            *norms, kv_b.unflatten(0, (heads, -1)), c.qk_nope_head_dim, c.rms_norm_eps
        )

    def moe(name: str) -> MoEWeights:
        norm = get(f"{name}norm") if c.latent_moe_use_norm else None
        betas = c.activation_situ_beta, c.activation_situ_linear_beta
        return MoEWeights(
            in_proj=MoEInWeights(
                get(f"{name}gate"), get(f"{name}latent_down"), gate_up(f"{name}shared_gate_up")
            ),
            router=RouterWeights(
                get(f"{name}bias"),
                c.num_experts_per_token,
                c.num_expert_group,
                c.topk_group,
                c.moe_renormalize,
                c.routed_scaling_factor,
            ),
            shared_down=get(f"{name}shared_down"),
            experts=ExpertWeights(get(f"{name}w13"), get(f"{name}w2"), *betas),
            latent_up=LatentUpWeights(norm, get(f"{name}latent_up"), c.rms_norm_eps),
        )

    name = f"layers.{i}."
    is_kda = c.is_kda(i)
    return LayerWeights(
        attn_res=res_weights(c, get, f"{name}attn_res"),
        in_proj=get(f"{name}in_proj"),
        attn=kda(f"{name}attn") if is_kda else mla(f"{name}attn"),
        q_b=None if is_kda else get(f"{name}q_b"),
        o_proj=get(f"{name}o_proj"),
        mlp_res=res_weights(c, get, f"{name}mlp_res"),
        mlp=moe(f"{name}moe.")
        if c.is_moe(i)
        else DenseWeights(gate_up(f"{name}dense.gate_up"), get(f"{name}dense.down")),
    )
