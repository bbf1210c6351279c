"""Sizes of what the kernels and prefill need on a GPU beside weights, caches and buffers.

Here, and not where it is used, so that a plan can add it up without a GPU and without CuTe DSL.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from nanok3.config import ModelConfig, Shard

SMS = 160  # of a GPU, at most; a few are counted too many, a few KB each

# How much prefill does at a time, so that its memory does not grow with prompt and context.
SCRATCH = 32 << 20  # values of a matrix that is unpacked, 64 MiB: 4681 rows of 7168
WIDE_SCRATCH = SCRATCH // 4  # of one that is then widened to float32
HEADS = 16  # of MLA
QUERIES = 256  # rows of a request that attend together
CONTEXT = 2048  # cached rows that they attend to; with few heads as many times more
KDA_ROWS = 256  # rows of a request: the state goes from some to the next
LIBRARY_BYTES = 32 << 20  # what cuBLAS takes from torch for itself, on Hopper and later

Spaces = dict[str, tuple[tuple[int, ...], torch.dtype]]  # by name


def decode_spaces(
    c: ModelConfig, shard: Shard, max_rows: int, sms: int = SMS, num_queries: int = 1
) -> Spaces:
    """What ops of several launches pass on, for up to `num_queries` rows of each request."""
    heads, rank, top_k = shard.local(c.num_attention_heads), c.kv_lora_rank, c.num_experts_per_token
    bf16, f32, i32 = torch.bfloat16, torch.float32, torch.int32
    most = (sms * num_queries + max_rows) * heads  # (split, row, head) of any number of requests
    return {
        "distinct": ((min(c.num_experts, max_rows * top_k),), i32),
        "num_distinct": ((1,), i32),
        "slot_of": ((max_rows, top_k), i32),
        "expert_act": ((max_rows, top_k, shard.local(c.moe_intermediate_size)), bf16),
        "routed_normed": ((max_rows, c.routed_expert_hidden_size), bf16),
        "q_latent": ((max_rows, heads * rank), bf16),
        "context": ((max_rows, heads * rank), bf16),
        "partial": ((most * rank,), f32),
        "stats": ((most * 2,), f32),
    }


def prefill_spaces(c: ModelConfig, shard: Shard, max_rows: int) -> Spaces:
    pairs = max_rows * c.num_experts_per_token
    return {
        "scratch": ((SCRATCH,), torch.bfloat16),
        "expert_act": ((pairs, shard.local(c.moe_intermediate_size)), torch.bfloat16),
        "routed": ((pairs, c.routed_expert_hidden_size), torch.bfloat16),
    }


def allocate(spaces: Spaces, device: str) -> dict[str, Tensor]:
    return {name: torch.empty(s, dtype=t, device=device) for name, (s, t) in spaces.items()}


def spaces_bytes(spaces: Spaces) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype in spaces.values())


def temporary_bytes(c: ModelConfig, shard: Shard, max_rows: int) -> int:
    """What ops of a prefill pass of `max_rows` take from torch for a while: the largest counts.

    Factors are bytes of what lives at once; `tests/test_prefill_memory.py` counts it."""
    kda, num_local_heads = c.linear_attn_config, shard.local(c.num_attention_heads)
    hidden, latent, value = c.hidden_size, c.routed_expert_hidden_size, c.v_head_dim
    heads, rows = min(HEADS, num_local_heads), min(max_rows, QUERIES)
    piece = min(CONTEXT * (HEADS // heads), c.max_position_embeddings)
    expanded = 2 * piece * (heads * max(c.qk_head_dim, 2 * value) + c.latent_width)
    scores = heads * rows * (6 * piece + 4 * (3 * value + 8))
    width = max_rows * num_local_heads * value
    attention = 2 * width + max(expanded + scores + piece * rows, 14 * width)
    kda_rows = -(-min(max_rows, KDA_ROWS) // 64) * 64
    delta_rule = 4 * shard.local(kda.num_heads) * kda.head_dim * (36 * kda_rows + 2 * kda.head_dim)
    wide = min(WIDE_SCRATCH // hidden, shard.local(c.vocab_size))  # rows of the head
    wide_head = 4 * wide * hidden + max_rows * (6 * hidden + 8 * wide)
    latent_up = max_rows * max(14 * latent, 2 * latent + 15 * shard.local(hidden))
    return max(attention, delta_rule, wide_head, latent_up)
