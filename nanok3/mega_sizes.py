"""What the persistent kernel is of a model and rank, in numbers: its sizes, and its memory.

Here, and not in `mega_ops.py`, so that a plan can add it up without a GPU and without CuTe DSL.
"""

from __future__ import annotations

from nanok3.config import ModelConfig, Shard
from nanok3.kernels.mega.fields import ENTRIES
from nanok3.kernels.mega.sizes import PASS, Sizes
from nanok3.workspaces import SMS

SYNC_BYTES = 8384  # counters of two programs, `launch.sync_of`


def sizes_of(
    config: ModelConfig,
    shard: Shard,
    pass_rows: int,
    sms: int,
    block_size: int,
    together: bool = False,
) -> Sizes:
    """together: with its peers, the same for all of them; else of one rank alone."""
    c, kda = config, config.linear_attn_config
    dense = not all(c.is_moe(i) for i in range(c.num_hidden_layers))

    def first(width: int) -> int:
        return 0 if together else shard.rank * shard.local(width)

    return Sizes(
        sms=sms,
        pass_rows=pass_rows,
        hidden=c.hidden_size,
        kda_heads=shard.local(kda.num_heads),
        mla_heads=shard.local(c.num_attention_heads),
        q_rank=c.q_lora_rank,
        kv_rank=c.kv_lora_rank,
        nope_dim=c.qk_nope_head_dim,
        rope_dim=c.qk_rope_head_dim,
        value_dim=c.v_head_dim,
        num_experts=c.num_experts,
        top_k=c.num_experts_per_token,
        latent=c.routed_expert_hidden_size,
        expert_width=shard.local(c.moe_intermediate_size),
        shared_width=shard.local(c.shared_intermediate_size),
        dense_width=shard.local(c.intermediate_size) if dense else 0,
        vocab=shard.local(c.vocab_size),
        router_rows=shard.local(c.num_experts),
        latent_rows=shard.local(c.routed_expert_hidden_size),
        up_rows=shard.local(c.hidden_size),
        router_first=first(c.num_experts),
        latent_first=first(c.routed_expert_hidden_size),
        up_first=first(c.hidden_size),
        embed_rows=shard.local(c.vocab_size),
        embed_first=first(c.vocab_size),
        block_size=block_size,
        eps=c.rms_norm_eps,
        beta=c.activation_situ_beta,
        linear_beta=c.activation_situ_linear_beta,
        lower_bound=kda.gate_lower_bound,
        routed_norm=c.latent_moe_use_norm,
        renormalize=c.moe_renormalize,
        scaling=c.routed_scaling_factor,
        softmax_scale=c.qk_head_dim**-0.5,
        ranks=shard.size if together else 1,
    )


def mega_bytes(config: ModelConfig, shard: Shard, most_rows: int, block_size: int) -> int:
    """What `Mega` allocates for steps of up to `most_rows` rows: a workspace for steps of one row,
    another for steps of more, counters, the table; 0 for a model that it cannot run."""
    heights = {1, 1 if most_rows == 1 else PASS}
    try:
        sizes = [sizes_of(config, shard, height, SMS, block_size) for height in heights]
        work = sum(each.work_bytes for each in sizes)
    except AssertionError:  # what sizes say of themselves; then the chain of kernels runs
        return 0
    return work + SYNC_BYTES + 8 * ENTRIES * (config.num_hidden_layers + 1)
