"""Prefill from packed weights, by torch on a CPU: against the reference in float32, where bf16
torch on dense weights is the yardstick. The kernel of routed experts has tests of its own; here
torch stands in for it, or the emulator runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from compare import check_bf16, check_close, check_equal
from torch import Tensor

pytest.importorskip("cutlass")
from packed import CONFIG, Both, both_weights, expert_stand_in

from nanok3 import model, prefill_ops
from nanok3.cache import Cache, allocate_cache
from nanok3.config import WHOLE
from nanok3.ops import DECODE, PREFILL, REFERENCE, Ops
from nanok3.prefill_ops import Prefill, attend
from nanok3.reference.mla import mla_expanded_ref, mla_ref
from nanok3.step import Step, allocate_buffers, rows
from nanok3.weights import DenseWeights, MoEWeights, Weights

BF16 = torch.bfloat16
BLOCK = 4
KDA_LAYER, MLA_LAYER = 1, 3  # both with routed experts; layer 0 is dense


@pytest.fixture(scope="module")
def both() -> Both:
    return both_weights()


@pytest.fixture
def ops(both: Both, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """Small pieces, so that every loop takes several turns."""
    monkeypatch.setattr(prefill_ops, "expert_prefill", expert_stand_in(both.experts))
    monkeypatch.setattr(prefill_ops, "CONTEXT", 12)
    monkeypatch.setattr(prefill_ops, "QUERIES", 5)
    monkeypatch.setattr(prefill_ops, "HEADS", 1)
    monkeypatch.setattr(prefill_ops, "KDA_ROWS", 7)
    monkeypatch.setattr(prefill_ops, "SCRATCH", 4096)
    monkeypatch.setattr(prefill_ops, "WIDE_SCRATCH", 1024)
    yield Prefill(CONFIG, WHOLE, 64, "cpu").record(PREFILL)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def nan(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


# ---- single ops ----


@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_products(both: Both, ops: Ops, tokens: int) -> None:
    """Matrices of one and of several scratches, of several pieces, with and without SiTU."""
    packed, dense, wide = (w.layers for w in (both.packed, both.dense, both.wide))
    hidden = CONFIG.hidden_size
    x = randn(tokens, hidden)
    for i in (KDA_LAYER, MLA_LAYER):
        out, right, torch_bf16 = (
            torch.empty(tokens, dense[i].in_proj.shape[0], dtype=t) for t in (BF16, None, BF16)
        )
        ops.linear(x, packed[i].in_proj, out=out.fill_(float("nan")))
        REFERENCE.linear(x, dense[i].in_proj, out=torch_bf16)
        REFERENCE.linear(x.float(), wide[i].in_proj, out=right)
        check_bf16(out, torch_bf16, right, f"in_proj {i}")
    mlps = [w[0].mlp for w in (packed, dense, wide)]
    assert all(isinstance(m, DenseWeights) for m in mlps)
    out, torch_bf16 = nan(tokens, CONFIG.intermediate_size), nan(tokens, CONFIG.intermediate_size)
    right = nan(tokens, CONFIG.intermediate_size, dtype=torch.float32)
    ops.gate_up(x, mlps[0].gate_up, out=out)
    REFERENCE.gate_up(x, mlps[1].gate_up, out=torch_bf16)
    REFERENCE.gate_up(x.float(), mlps[2].gate_up, out=right)
    check_bf16(out, torch_bf16, right, "gate_up")


@pytest.mark.parametrize("tokens", [1, 9])
def test_beginning_and_end_of_the_experts(both: Both, ops: Ops, tokens: int) -> None:
    c = CONFIG
    widths = c.num_experts, c.routed_expert_hidden_size, c.shared_intermediate_size
    packed, dense, wide = (w.layers[KDA_LAYER].mlp for w in (both.packed, both.dense, both.wide))
    assert all(isinstance(m, MoEWeights) for m in (packed, dense, wide))
    x = randn(tokens, c.hidden_size)

    def outs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        wholes = [nan(tokens, w + 16, dtype=dtype) for w in widths]  # columns of wider buffers
        wholes[0] = wholes[0].float()
        return tuple(w[:, 8 : 8 + n] for w, n in zip(wholes, widths, strict=True))

    mine, torch_bf16, right = outs(BF16), outs(BF16), outs(torch.float32)
    ops.moe_in(x, packed.in_proj, out=mine)
    REFERENCE.moe_in(x, dense.in_proj, out=torch_bf16)
    REFERENCE.moe_in(x.float(), wide.in_proj, out=right)
    check_close(mine[0], right[0], 1e-5, "router logits")
    for i in (1, 2):
        check_bf16(mine[i], torch_bf16[i], right[i], "latent, shared"[i:])
    routed, shared = (
        randn(tokens, c.routed_expert_hidden_size, seed=1),
        randn(tokens, c.hidden_size),
    )
    out, dense_out = nan(tokens, c.hidden_size), nan(tokens, c.hidden_size)
    wide_out = nan(tokens, c.hidden_size, dtype=torch.float32)
    ops.latent_up(routed, shared, packed.latent_up, out=out)
    REFERENCE.latent_up(routed, shared, dense.latent_up, out=dense_out)
    REFERENCE.latent_up(routed.float(), shared.float(), wide.latent_up, out=wide_out)
    check_bf16(out, dense_out, wide_out, "latent_up")


def test_head_of_chosen_rows(both: Both, ops: Ops) -> None:
    x = randn(6, CONFIG.hidden_size)
    for chosen in ([], [5], [0, 1, 2, 3, 4, 5]):
        wanted = torch.tensor(chosen, dtype=torch.int64)
        out = nan(len(chosen), CONFIG.vocab_size, dtype=torch.float32)
        right = out.clone()
        ops.lm_head(x, both.packed.lm_head, wanted, out=out)
        REFERENCE.lm_head(x.float(), both.wide.lm_head, wanted, out=right)
        check_close(out, right, 1e-5) if chosen else None


def routing(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, CONFIG.num_experts, generator=generator).argsort(1)
    weights = torch.rand(tokens, CONFIG.num_experts_per_token, generator=generator)
    return order[:, : CONFIG.num_experts_per_token].contiguous(), weights


def check_experts(both: Both, ops: Ops, tokens: int) -> None:
    latent, (ids, weights) = randn(tokens, CONFIG.routed_expert_hidden_size), routing(tokens)
    experts = [w.layers[MLA_LAYER].mlp.experts for w in (both.packed, both.dense, both.wide)]  # type: ignore[union-attr]
    out, torch_bf16 = torch.full_like(latent, float("nan")), torch.empty_like(latent)
    right = torch.empty_like(latent, dtype=torch.float32)
    ops.experts(latent, ids, weights, experts[0], out=out)
    REFERENCE.experts(latent, ids, weights, experts[1], out=torch_bf16)
    REFERENCE.experts(latent.float(), ids, weights, experts[2], out=right)
    check_bf16(out, torch_bf16, right, f"{tokens} rows")


@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_experts(both: Both, ops: Ops, tokens: int) -> None:
    check_experts(both, ops, tokens)


# ---- attention ----


def context_case(
    lengths: list[int], num_rows: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, x, cache with NaN where no request looks, block table, positions of the last rows."""
    c = CONFIG
    columns = max(-(-n // BLOCK) for n in lengths)
    order = torch.randperm(len(lengths) * columns, generator=torch.Generator().manual_seed(seed))
    table = (1 + order).view(len(lengths), columns)
    cache = nan((1 + len(lengths) * columns) * BLOCK, c.latent_width)
    positions = []
    for r, length in enumerate(lengths):
        slots = [int(table[r, p // BLOCK]) * BLOCK + p % BLOCK for p in range(length)]
        cache[slots] = randn(length, c.latent_width, seed=seed + r + 1)
        positions += range(length - num_rows, length)
    tokens = len(positions)
    q = randn(tokens, c.num_attention_heads * c.qk_head_dim, seed=seed + 50)
    gate = c.num_attention_heads * c.v_head_dim
    x = randn(tokens, c.q_lora_rank + c.latent_width + gate, seed=seed + 60)
    return q, x, cache, table, torch.tensor(positions)


@pytest.mark.parametrize(
    "lengths, num_rows",
    [([1], 1), ([7], 7), ([30], 13), ([49], 1), ([11, 40], 6)],  # in several contexts and queries
)
def test_mla(both: Both, ops: Ops, lengths: list[int], num_rows: int) -> None:
    q, x, cache, table, positions = context_case(lengths, num_rows)
    packed, dense, wide = (w.layers[MLA_LAYER].attn for w in (both.packed, both.dense, both.wide))
    out, torch_bf16 = (nan(len(q), CONFIG.num_attention_heads * CONFIG.v_head_dim) for _ in "ab")
    right = torch.empty_like(out, dtype=torch.float32)
    where = table, positions, BLOCK
    ops.mla(q, x, packed, cache, *where, out=out)
    mla_expanded_ref(q, x, dense, cache, *where, out=torch_bf16)  # type: ignore[arg-type]
    mla_ref(q.float(), x.float(), wide, cache.float(), *where, out=right)  # type: ignore[arg-type]
    check_bf16(out, torch_bf16, right, f"{lengths}")


def test_attend_with_scores_of_every_size_and_in_any_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """float64: the running softmax is the softmax; the largest score is last, first, or far."""
    generator = torch.Generator().manual_seed(0)
    heads, rank, nope, rope, value = 2, 8, 4, 3, 5
    monkeypatch.setattr(prefill_ops, "HEADS", 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, key, v = random(heads, 6, nope + rope), random(heads, rank, nope), random(heads, value, rank)
    cache, blocks = random(10 * BLOCK, rank + rope), torch.tensor([3, 1, 7, 2, 9])
    positions = torch.arange(13, 19)
    for factor in (0.01, 1.0, 300.0):
        slots = (blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()
        context = cache[slots]
        keys = torch.cat([context[:, :rank] @ key, context[:, rank:].expand(heads, -1, -1)], -1)
        scores = factor * q @ keys.transpose(1, 2) * (nope + rope) ** -0.5
        scores = scores.masked_fill(torch.arange(20) > positions.unsqueeze(1), float("-inf"))
        right = scores.softmax(-1) @ (context[:, :rank] @ v.transpose(1, 2))
        for size in (1, 3, 8, 20, 1000):
            monkeypatch.setattr(prefill_ops, "CONTEXT", size)
            made = attend(factor * q, key, v, cache.clone(), blocks, positions, BLOCK)
            check_close(made, right, 1e-12, f"{factor}, {size} at a time")


@pytest.mark.parametrize("slots, num_rows", [([2], 1), ([1], 20), ([3, 1], 9)])
def test_kda(both: Both, ops: Ops, slots: list[int], num_rows: int) -> None:
    kda = CONFIG.linear_attn_config
    width = kda.width
    tokens = len(slots) * num_rows
    x = randn(tokens, 4 * width + kda.head_dim + kda.num_heads)
    conv = randn(4, kda.short_conv_kernel_size - 1, 3 * width, seed=1)
    state = randn(4, kda.num_heads, kda.head_dim, kda.head_dim, seed=2).float()
    results = []
    for weights, form, dtype in (
        (both.packed, ops.kda, BF16),
        (both.dense, REFERENCE.kda, BF16),
        (both.wide, REFERENCE.kda, torch.float32),
    ):
        mine = conv.clone().to(dtype), state.clone()
        out = nan(tokens, width, dtype=dtype)
        where = torch.tensor(slots)
        form(x.to(dtype), weights.layers[KDA_LAYER].attn, *mine, where, out=out)
        results.append((out, *mine))
    (out, conv_mine, state_mine), (out_bf16, conv_bf16, state_bf16), (right, _, right_state) = (
        results
    )
    check_bf16(out, out_bf16, right, "out")
    check_equal(conv_mine, conv_bf16, "conv_state")
    check_bf16(state_mine, state_bf16, right_state, "state")


# ---- the whole model ----


def run_model(
    weights: Weights, ops: Ops, ids: list[int], chunks: list[int], dtype: torch.dtype
) -> tuple[Tensor, Cache]:
    """Logits [T, V] of one request in these chunks of rows, and its caches (slot 1, block 1..)."""
    columns = -(-len(ids) // BLOCK)
    cache = allocate_cache(CONFIG, 2, columns + 1, BLOCK, dtype, "cpu")
    for tensor in (cache.conv_state, cache.state):
        tensor[:, 0], tensor[:, 1] = float("nan"), 0
    cache.latent.fill_(float("nan"))
    buffers = allocate_buffers(CONFIG, max(chunks), max(chunks), dtype, "cpu")
    logits, done = [], 0
    for count in chunks:
        positions = torch.arange(done, done + count)
        step = Step(
            input_ids=torch.tensor(ids[done : done + count]),
            positions=positions,
            slot_mapping=positions + BLOCK,
            block_table=torch.arange(1, columns + 1)[None, : -(-(done + count) // BLOCK)],
            state_slots=torch.tensor([1]),
            logit_rows=torch.arange(count),
            block_size=BLOCK,
        )
        buf = rows(buffers, count, count)
        with torch.inference_mode():
            model.forward(CONFIG, weights, cache, step, buf, ops)
        logits.append(buf.logits.clone())
        done += count
    return torch.cat(logits), cache


def relative(actual: Tensor, right: Tensor) -> float:
    return float((actual.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("chunks", [[23], [9, 1, 13], [1] * 23])
def test_logits_states_and_latents_are_what_decode_leaves(
    both: Both, ops: Ops, chunks: list[int]
) -> None:
    """Whatever the chunks: as near to float32 as bf16 decode on dense weights is, twice at most."""
    ids = torch.randint(0, 256, (23,), generator=torch.Generator().manual_seed(3)).tolist()
    right, right_cache = run_model(both.wide, REFERENCE, ids, [23], torch.float32)
    decoded, decoded_cache = run_model(both.dense, DECODE, ids, [1] * 23, BF16)
    made, made_cache = run_model(both.packed, ops, ids, chunks, BF16)
    pairs: list[tuple[str, Tensor, Tensor, Tensor]] = [("logits", made, decoded, right)]
    for name in ("conv_state", "state", "latent"):
        caches = (getattr(c, name) for c in (made_cache, decoded_cache, right_cache))
        first = BLOCK if name == "latent" else 1  # block 0 and slot 0 are trash
        last = first + 23 if name == "latent" else None
        pairs.append((name, *(c[:, first:last] for c in caches)))
    for name, mine, other, wide in pairs:
        errors = relative(mine, wide), relative(other, wide)
        print(f"{name}: relative L2 {errors[0]:.4f}, decode's {errors[1]:.4f}")
        assert mine.isfinite().all() and errors[0] <= 2 * errors[1], name
    assert made_cache.latent[:, :BLOCK].isnan().all() and made_cache.state[:, 0].isnan().all()
