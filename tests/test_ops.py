"""The readings of the ops, and `Fresh`: training sees the values of prefill, and every gradient."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from compare import check_close, check_equal
from session import Session
from tiny import random_fields, tiny_config
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache
from nanok3.config import ModelConfig
from nanok3.ops import PREFILL, REFERENCE, TRAIN, Fresh, Ops
from nanok3.reference.experts import experts_ref
from nanok3.reference.kda import kda_ref
from nanok3.step import Step, buffer_dtypes, widths, with_parts
from nanok3.weight_table import table
from nanok3.weights import build

# ---- Fresh ----


def test_a_write_leaves_the_old_value_to_autograd() -> None:
    buffer = Fresh(torch.float64)
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    buffer.copy_(x * 3)
    first = buffer[:] ** 2  # would be spoiled by a write in place
    buffer.copy_(first + 1)
    (buffer[:].sum() + first.sum()).backward()
    check_close(x.grad, [36.0, 72.0], 0.0)  # d/dx of 2 * 9 x^2


def test_writes_take_the_dtype_of_the_buffer() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        buffer = Fresh(dtype)
        buffer.copy_(torch.tensor([1.0, 2.0]))
        assert buffer[:].dtype == dtype == buffer.dtype
    rounded = Fresh(torch.bfloat16)
    rounded.copy_(torch.tensor([1.0 + 2**-12]))
    check_equal(rounded[:], torch.tensor([1.0]).bfloat16())


def test_indexed_writes() -> None:
    buffer = Fresh(torch.float32, torch.zeros(4, 2))
    old, rows = buffer[:], torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    buffer[torch.tensor([3, 0])] = rows * torch.tensor([[5.0], [7.0]])
    check_equal(buffer[:], torch.tensor([[7.0, 7.0], [0, 0], [0, 0], [5.0, 5.0]]))
    check_equal(old, torch.zeros(4, 2))
    buffer[3].sum().backward()
    check_close(rows.grad, [[5.0, 5.0], [0.0, 0.0]], 0.0)


def test_it_reads_like_a_tensor() -> None:
    value = torch.arange(6.0).view(2, 3)
    buffer = Fresh(torch.float32, value)
    assert buffer.shape == (2, 3)
    check_equal(buffer[1, :2], value[1, :2])
    check_equal(torch.sigmoid(buffer), torch.sigmoid(value))  # type: ignore[arg-type]
    check_equal(torch.nn.functional.linear(buffer, value), value @ value.T)  # type: ignore[arg-type]
    check_equal(buffer.transpose(0, 1), value.T)


# ---- TRAIN ----


def looped_experts(latent: Any, ids: Any, weights: Any, w: Any, *, out: Any) -> None:
    """The op of the other readings on the values of `Fresh` buffers."""
    experts_ref(latent[:], ids[:], weights[:], w, out=out)


FRESH_PREFILL = replace(PREFILL, experts=looped_experts)
FRESH_REFERENCE = replace(REFERENCE, experts=looped_experts)


def train_logits(config: ModelConfig, values: dict[str, Tensor], ids: Tensor, ops: Ops) -> Tensor:
    """One pass on `Fresh` buffers, as training makes it: rows of [R, Q], no cache before them."""
    num_reqs, num_rows = ids.shape
    dtype = values["embed"].dtype
    special = buffer_dtypes(dtype)
    wide = special["logits"]
    kda, rows = config.linear_attn_config, torch.arange(ids.numel())
    step = Step(
        input_ids=ids.flatten(),
        positions=rows % num_rows,
        slot_mapping=rows,
        block_table=torch.arange(num_reqs).unsqueeze(1),
        state_slots=torch.arange(num_reqs),
        logit_rows=rows,
        block_size=num_rows,
    )

    def zeros(count: int, dtype: torch.dtype, *shape: int) -> Any:
        return [Fresh(dtype, torch.zeros(shape, dtype=dtype)) for _ in range(count)]

    taps = kda.short_conv_kernel_size
    num_kda, num_mla = len(config.kda_layer_ids), len(config.mla_layer_ids)
    cache = Cache(
        conv_state=zeros(num_kda, dtype, num_reqs, taps - 1, 3 * kda.width),
        state=zeros(num_kda, wide, num_reqs, kda.num_heads, kda.head_dim, kda.head_dim),
        latent=zeros(num_mla, dtype, ids.numel(), config.latent_width),
    )
    buffers: Any = {name: Fresh(special.get(name, dtype)) for name in widths(config)}
    buffers["streams"] = [Fresh(dtype) for _ in range(config.num_res_blocks)]
    buf = with_parts(buffers)
    model.forward(config, build(config, values.__getitem__), cache, step, buf, ops)
    logits: Tensor = buf.logits.value
    return logits.view(num_reqs, num_rows, -1)


def parameters(config: ModelConfig, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = random_fields(config, seed)
    for field in table(config):
        is_wide = field.stored == "F32" or field.kind == "product"
        value = values[field.name].to(wide if is_wide else dtype)
        values[field.name] = value.requires_grad_()
    return values


def some_ids(num_reqs: int, num_rows: int) -> Tensor:
    return torch.randint(0, 512, (num_reqs, num_rows), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_sees_the_values_of_prefill(dtype: torch.dtype) -> None:
    """Bit for bit but for the sum over experts, whose order is another: compare it with all else
    equal, and the whole within what that order does."""
    config, ids = tiny_config(), some_ids(2, 70)
    values = parameters(config, 0, dtype)
    weights = build(config, {k: v.detach() for k, v in values.items()}.__getitem__)
    prefill = Session(config, weights, dtype, num_reqs=2).feed(ids.tolist(), PREFILL)
    same_experts = replace(TRAIN, experts=looped_experts)
    check_close(train_logits(config, values, ids, same_experts), prefill, 0.0)
    train = train_logits(config, values, ids, TRAIN)
    if dtype == torch.float32:
        check_close(train, prefill, 1e-5)
    else:  # an ulp of bf16 in a sum may choose another expert, for few rows
        rows = (train - prefill).norm(dim=-1) / prefill.norm(dim=-1)
        assert rows.median().item() < 2e-2


def test_every_parameter_has_a_gradient() -> None:
    """Finite and not zero, but for those that cannot matter: a correction bias only chooses, and
    the first mix has one source whatever its score."""
    config, ids = tiny_config(), some_ids(2, 70)
    values = parameters(config, 0, torch.bfloat16)
    logits = train_logits(config, values, ids, TRAIN)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, value in values.items():
        if name.endswith("moe.bias"):
            assert value.grad is None
            continue
        assert value.grad is not None, name
        assert value.grad.isfinite().all(), name
        assert (value.grad.abs().max() > 0) == (name != "layers.0.attn_res.score"), name


@pytest.mark.parametrize("num_rows", [3, 70])
def test_gradients_of_prefill_are_those_of_the_walk(num_rows: int) -> None:
    """Chunked KDA and expanded MLA against the row by row forms, through the whole model."""
    config, ids = tiny_config(), some_ids(2, num_rows)
    gradients = []
    for ops in (FRESH_PREFILL, replace(FRESH_PREFILL, kda=kda_ref), FRESH_REFERENCE):
        values = parameters(config, 1, torch.float64)
        logits = train_logits(config, values, ids, ops)
        torch.sin(logits).sum().backward()
        gradients.append({k: v.grad for k, v in values.items() if v.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == gradients[2].keys()
    for name, grad in gradients[0].items():
        check_close(grad, gradients[1][name], 1e-9, f"{name}, chunks")
        check_close(grad, gradients[2][name], 1e-9, f"{name}, all forms")


def test_a_gradient_by_differences() -> None:
    """One number of each kind of parameter moved by a little, in float64."""
    config, ids = tiny_config(), some_ids(1, 20)

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.sin(train_logits(config, values, ids, FRESH_PREFILL)).sum()

    values = parameters(config, 2, torch.float64)
    loss(values).backward()
    kinds = {name.rpartition(".")[2] + name[-9:]: name for name in values}  # the last of each
    for name in kinds.values():
        grad = values[name].grad
        if grad is None:
            continue
        at = int(grad.abs().argmax())
        moved = []
        for step in (1e-6, -1e-6):
            changed = {k: v.detach().clone() for k, v in values.items()}
            changed[name].view(-1)[at] += step
            with torch.no_grad():
                moved.append(loss(changed).item())
        right = float(grad.view(-1)[at])
        assert abs((moved[0] - moved[1]) / 2e-6 - right) < 1e-5 * abs(right) + 1e-6, name


def test_readings_have_an_op_in_every_row() -> None:
    for reading in (REFERENCE, PREFILL, TRAIN):
        assert all(callable(getattr(reading, f.name)) for f in fields(Ops))
    assert {
        f.name for f in fields(Ops) if getattr(PREFILL, f.name) != getattr(REFERENCE, f.name)
    } == {
        "kda",
        "mla",
    }
