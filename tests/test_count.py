"""COUNT against K3's published sizes, real tensors, and what the ops really touch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
import torch
from tiny import TINY, random_fields, tiny_config, tiny_weights
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nanok3 import model
from nanok3.cache import allocate_cache
from nanok3.config import K3, Shard
from nanok3.count import (
    MXFP4_BYTES,
    Access,
    OpCount,
    count_step,
    distinct_experts,
    total,
)
from nanok3.ops import REFERENCE, Ops, stay
from nanok3.step import Step, allocate_buffers, without_parts
from nanok3.weight_table import table

# ---- the official config: parameters and bytes as derived from the checkpoint's tensor list ----

PARTS: dict[str, tuple[str, ...]] = {
    "norms": ("attn_res.", "mlp_res."),
    "attention": ("in_proj", "attn.", "q_b", "o_proj"),
    "dense MLP": ("dense.",),
    "router": ("moe.gate", "moe.bias"),
    "latent": ("moe.latent_", "moe.norm"),
    "shared experts": ("moe.shared_",),
    "routed experts": ("moe.w13", "moe.w2"),
}
KDA_LAYER, MLA_LAYER = 1, 3


@pytest.fixture(scope="module")
def one_token() -> list[OpCount]:
    return count_step(K3, 1, 1, 1)


def weights_by_part(counts: list[OpCount], layer: int | None) -> dict[str, tuple[float, float]]:
    """Part -> (parameters, bytes) of one layer, or of what belongs to none."""
    sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for access in (a for c in counts if c.layer == layer for a in c.reads if a.kind == "weight"):
        part = next((p for p, starts in PARTS.items() if access.name.startswith(starts)), "ends")
        values, nbytes = sums[part]
        sums[part] = values + access.values, nbytes + access.nbytes
    return sums


def test_a_token_touches_the_announced_parameters(one_token: list[OpCount]) -> None:
    in_table = sum(a.values for a in one_token[0].reads if a.name == "embed")
    assert in_table == K3.hidden_size
    assert round(total(one_token).parameters - in_table) == 104_189_614_848


def test_parts_of_the_official_layers(one_token: list[OpCount]) -> None:
    kda, mla = weights_by_part(one_token, KDA_LAYER), weights_by_part(one_token, MLA_LAYER)
    assert kda["attention"] == (443_740_416, 887_800_832)
    assert mla["attention"] == (232_196_096, 464_392_192)
    assert weights_by_part(one_token, 0)["dense MLP"] == (726_663_168, 1_453_326_336)
    assert kda["norms"] == mla["norms"] == (43_008, 86_016)
    assert kda["router"][0] == 6_423_424
    assert kda["latent"][0] == 51_383_808
    assert kda["shared experts"][0] == 132_120_576
    fixed = sum(kda[part][1] for part in ("router", "latent", "shared experts"))
    assert fixed == 379_857_408
    values, nbytes = kda["routed experts"]
    assert values == pytest.approx(16 * 33_030_144, rel=1e-12)
    assert nbytes == pytest.approx(15_722_348_544 * 16 / 896, rel=1e-12)
    ends = weights_by_part(one_token, None)  # one row of the embedding instead of 163,840
    assert ends["ends"][0] == 2_348_831_744 - 163_839 * 7168


def test_every_parameter_is_read_when_there_are_many_tokens() -> None:
    counts = count_step(K3, 200_000, 1, 1)
    assert total(counts).parameters == pytest.approx(2_779_484_478_208, rel=1e-12)
    assert total(counts).weight_bytes == pytest.approx(1_559_965_606_912, rel=1e-12)


def test_experts_and_states_of_several_requests() -> None:
    assert distinct_experts(896, 16, 1) == pytest.approx(16)
    assert distinct_experts(896, 16, 8) == pytest.approx(120.3, abs=0.05)
    assert distinct_experts(4, 4, 1) == 4
    one, eight = count_step(K3, 1, 1, 1), count_step(K3, 8, 1, 1)
    ratio = expert_bytes(eight) / expert_bytes(one)
    assert ratio == pytest.approx(distinct_experts(896, 16, 8) / 16)
    assert expert_bytes(eight) == pytest.approx(24.27e9 * 8, rel=1e-3)
    states = sum(a.nbytes for c in eight if c.op == "kda" for a in c.reads if a.name == "state")
    assert states == 8 * 69 * 96 * 128 * 128 * 4
    assert total(eight).cache_read_bytes - total(one).cache_read_bytes == pytest.approx(
        7 * total(one).cache_read_bytes
    )


def expert_bytes(counts: list[OpCount]) -> float:
    experts = [a for c in counts if c.op == "experts" for a in c.reads]
    return sum(a.nbytes for a in experts if a.kind == "weight")


def test_a_cached_token_costs_what_the_latent_cache_keeps_of_it() -> None:
    near, far = total(count_step(K3, 1, 1, 1000)), total(count_step(K3, 1, 1, 33_768))
    assert far.cache_read_bytes - near.cache_read_bytes == 27_648 * 32_768
    assert far.cache_write_bytes == pytest.approx(near.cache_write_bytes)
    verify = total(count_step(K3, 1, 8, 1000))  # 8 rows of one request read its context once
    assert verify.cache_read_bytes == near.cache_read_bytes
    assert verify.cache_write_bytes - near.cache_write_bytes == pytest.approx(7 * 27_648)


# ---- one rank's share ----


def test_without_peers_nothing_is_exchanged(one_token: list[OpCount]) -> None:
    assert total(one_token).exchanged_bytes == 0
    assert not {c.op for c in one_token} & {"all_reduce", "all_gather", "reduce_moe"}


def test_bytes_of_a_rank_are_those_of_its_fields() -> None:
    shard = Shard(3, 16)
    counts = count_step(K3, 5, 40_000, 40_000, shard=shard)  # every expert, every row
    held = sum(
        prod(f.shape) * (MXFP4_BYTES if f.kind == "experts" else f.dtype(torch.bfloat16).itemsize)
        for f in table(K3, shard)
    )
    assert total(counts).weight_bytes == pytest.approx(held)
    one = total(count_step(K3, 1, 1, 1, shard=shard))
    assert one.cache_write_bytes == total(count_step(K3, 1, 1, 1)).cache_write_bytes - 15 / 16 * (
        69 * (96 * 128 * 128 * 4 + 3 * 3 * 12288 * 2)
    )


def test_what_a_rank_gets_of_its_peers() -> None:
    """Written out for K3 over 16: the embedding, 93 o_proj, a dense MLP, 92 MoE, the logits."""
    counts = count_step(K3, 1, 1, 1, shard=Shard(0, 16))
    one_of = {
        "sums": 7168 * 2,
        "moe_in": 896 // 16 * 4 + 3584 // 16 * 2,
        "reduce_moe": 3584 * 2 + 7168 // 16 * 2,
        "latent_up": 7168 // 16 * 2,
        "logits": 163_840 // 16 * 4,
    }
    moe = one_of["moe_in"] + one_of["reduce_moe"] + one_of["latent_up"]
    right = 15 * ((1 + 93 + 1) * one_of["sums"] + 92 * moe + one_of["logits"])
    assert total(counts).exchanged_bytes == right
    in_a_layer = [c.op for c in counts if c.exchanged and c.layer == KDA_LAYER]
    assert in_a_layer == ["all_reduce", *["all_gather"] * 2, *["reduce_moe"] * 2, "all_gather"]


# ---- against real tensors ----


def test_bytes_are_those_of_loaded_tensors() -> None:
    counts = count_step(TINY, 1, 700, 700, dtype=torch.float32, expert_bytes_per_value=4)
    sizes = {name: tensor.nbytes for name, tensor in random_fields(TINY, 0).items()}
    unused = TINY.linear_attn_config.head_dim - TINY.linear_attn_config.num_heads
    padding = 4 * unused * len(TINY.kda_layer_ids)  # A_log is stored longer than it is used
    assert total(counts).weight_bytes == pytest.approx(sum(sizes.values()) + padding)


def test_every_field_is_some_op_s() -> None:
    counts = count_step(TINY, 1, 1, 1)
    read = {(a.index, a.name) for c in counts for a in c.reads if a.kind == "weight"}
    names = {f"layers.{i}.{name}" if i is not None else name for i, name in read}
    assert names == {field.name for field in table(TINY)}


def test_without_logits_the_head_s_weights_are_not_read() -> None:
    head = count_step(TINY, 2, 5, 9, num_logit_rows=0)[-1]
    assert head.op == "lm_head"
    assert head.flops == 0
    assert sum(a.nbytes for a in (*head.reads, *head.writes)) == 0


@dataclass(frozen=True)
class Run:
    """A real pass of a tiny model: 2 requests, their rows, tokens cached before."""

    weights: Any
    step: Step
    buffers: Any
    cache: Any


NUM_REQS, BLOCK = 2, 4


def make_run(config: Any, num_rows: int, context: int) -> Run:
    generator = torch.Generator().manual_seed(0)
    tokens, blocks = NUM_REQS * num_rows, -(-context // BLOCK)
    positions = torch.arange(context - num_rows, context)
    tables = torch.arange(1, 1 + NUM_REQS * blocks).view(NUM_REQS, blocks)
    slots = tables[:, positions // BLOCK] * BLOCK + positions % BLOCK
    step = Step(
        input_ids=torch.randint(config.vocab_size, (tokens,), generator=generator),
        positions=positions.repeat(NUM_REQS),
        slot_mapping=slots.flatten(),
        block_table=tables,
        state_slots=torch.tensor([2, 1]),
        logit_rows=torch.arange(tokens),
        block_size=BLOCK,
    )
    cache = allocate_cache(config, 3, 1 + NUM_REQS * blocks, BLOCK, torch.float32, "cpu")
    for tensor in vars(cache).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    buffers = allocate_buffers(config, tokens, tokens, torch.float32, "cpu")
    for tensor in vars(buffers).values():  # what nobody wrote must not be read
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    return Run(tiny_weights(config, 0), step, buffers, cache)


def forward(config: Any, run: Run, ops: Ops) -> None:
    model.forward(config, run.weights, run.cache, run.step, run.buffers, ops)


Key = tuple[str, int | None]


def tensors_of(run: Run) -> dict[Key, Tensor]:
    """Every activation and cache under the identity that COUNT gives it."""
    found: dict[Key, Tensor] = {}
    for name, tensor in without_parts(run.buffers).items():
        parts = enumerate(tensor) if name == "streams" else [(None, tensor)]
        found |= {(name, index): part for index, part in parts}
    for name, tensor in vars(run.cache).items():
        found |= {(name, index): part for index, part in enumerate(tensor)}
    return found


def keys(accesses: tuple[Access, ...]) -> list[Key]:
    return [(a.name, a.index) for a in accesses if a.kind in ("activation", "cache")]


def watched(counts: Iterator[OpCount], run: Run, check: Callable[..., None]) -> Ops:
    """REFERENCE with `check(count, call, run)` instead of each call."""

    def wrap(name: str) -> Callable[..., None]:
        if getattr(REFERENCE, name) is stay:
            return stay

        def op(*args: Any, **kwargs: Any) -> None:
            count = next(counts)
            assert count.op == name
            check(count, lambda: getattr(REFERENCE, name)(*args, **kwargs), run)

        return op

    return Ops(**{name: wrap(name) for name in Ops.__dataclass_fields__})


def poison(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_ops_touch_what_count_says_and_nothing_else(num_rows: int) -> None:
    """Each call runs with every other buffer poisoned; then once more with each of its reads."""
    context = 9
    run = make_run(TINY, num_rows, context)
    forward(TINY, run, REFERENCE)
    plain = run.buffers.logits.clone()
    counts = iter(count_step(TINY, NUM_REQS, num_rows, context))
    run = make_run(TINY, num_rows, context)
    forward(TINY, run, watched(counts, run, check_call))
    assert next(counts, None) is None
    assert torch.equal(run.buffers.logits, plain)


def check_call(count: OpCount, call: Callable[[], None], run: Run) -> None:
    tensors = tensors_of(run)
    reads, writes = keys(count.reads), keys(count.writes)
    before = {key: tensor.clone() for key, tensor in tensors.items()}

    def attempt(poisoned: list[Key]) -> dict[Key, Tensor]:
        for key in poisoned:
            poison(tensors[key])
        call()
        after = {key: tensor.clone() for key, tensor in tensors.items()}
        for key, tensor in tensors.items():
            tensor.copy_(before[key])
        return after

    # A cache is written in part, so what it held stays; all else that is not read goes.
    unread = [k for k in tensors if k not in reads and not (k in writes and k[0] == "latent")]
    good = attempt(unread)
    for key in tensors:
        if key in writes:
            assert key[0] == "latent" or good[key].isfinite().all(), f"{count.op}: {key}"
        elif key not in unread:
            assert torch.equal(good[key], before[key]), f"{count.op} writes {key}"
        else:
            assert not good[key].isfinite().any() or good[key].eq(-1).all(), f"{count.op}: {key}"
    for key in reads:
        if tensors[key].is_floating_point():
            bad = attempt([*unread, key])
            same = all(torch.equal(bad[w], good[w]) for w in writes)
            assert not same, f"{count.op} does not read {key}"
    for key in writes:
        tensors[key].copy_(good[key])


# ---- flops, against torch's own count of the products it runs ----


@pytest.mark.parametrize("num_rows", [1, 4])
def test_flops_of_products(num_rows: int) -> None:
    context = 8  # whole blocks: the reference multiplies a block's unseen rows as well
    counts = count_step(TINY, NUM_REQS, num_rows, context)
    run = make_run(TINY, num_rows, context)
    seen = []

    def measure(count: OpCount, call: Callable[[], None], run: Run) -> None:
        with FlopCounterMode(display=False) as counter:
            call()
        seen.append((count, counter.get_total_flops()))

    forward(TINY, run, watched(iter(counts), run, measure))
    exact = {"linear", "gate_up", "moe_in", "experts", "latent_up", "lm_head"}
    compared = {count.op for count, flops in seen if count.op in exact and count.flops == flops}
    assert compared == exact
    for count, flops in seen:
        if count.op in exact:
            assert count.flops == flops
        if count.op == "mla":  # the reference does not skip what causality hides
            heads, rank = TINY.num_attention_heads, TINY.kv_lora_rank
            hidden = NUM_REQS * num_rows * (num_rows - 1) // 2
            assert count.flops == flops - 2 * hidden * heads * (TINY.latent_width + rank)


def test_flops_of_the_delta_rule_written_out() -> None:
    kda = TINY.linear_attn_config
    count = next(c for c in count_step(TINY, 2, 3, 5) if c.op == "kda")
    per_head = kda.head_dim**2 * (1 + 2 + 2 + 2)
    conv, decay = 2 * 3 * kda.width * kda.short_conv_kernel_size, 2 * kda.head_dim * kda.width
    assert count.flops == 2 * 3 * (kda.num_heads * per_head + conv + decay)


# ---- the graph that waits are derived from ----


def test_activations_are_written_before_they_are_read() -> None:
    written: set[Key] = set()
    for count in count_step(K3, 1, 1, 1):
        activations = [a for a in count.reads if a.kind == "activation"]
        assert {(a.name, a.index) for a in activations} <= written
        written |= set(keys(count.writes))


def test_a_model_without_latent_norm_is_counted_too() -> None:
    plain = tiny_config(latent_moe_use_norm=False)
    less = (
        total(count_step(TINY, 1, 1, 1)).parameters - total(count_step(plain, 1, 1, 1)).parameters
    )
    assert less == pytest.approx(TINY.routed_expert_hidden_size * (TINY.num_hidden_layers - 1))
    assert replace(TINY, latent_moe_use_norm=False) == plain
