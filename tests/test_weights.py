"""Names, shapes and packing: K3's own list of tensors, filling in any order, and the way back."""

from __future__ import annotations

import hashlib
import json
from math import prod
from pathlib import Path

import pytest
import torch
from compare import check_equal
from plain_model import mxfp4 as decode
from tiny import make_checkpoint, random_fields, tiny_config, tiny_weights
from torch import Tensor

from nanok3.checkpoint import Checkpoint
from nanok3.config import K3, ModelConfig, load_config
from nanok3.weights import (
    DenseWeights,
    Filler,
    MoEWeights,
    build,
    expected_tensors,
    table,
    to_checkpoint,
)

SUMMARY = json.loads((Path(__file__).parent / "data" / "k3_index_summary.json").read_text())
LAYER = "language_model.model.layers."
CONFIG = tiny_config()


def stored(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, Tensor]:
    return dict(to_checkpoint(config, random_fields(config, seed)))


def filled(
    tensors: dict[str, Tensor], config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    filler = Filler(config, dtype, "cpu")
    for name, tensor in tensors.items():
        filler.take(name, tensor)
    return filler.finish()


# ---- the table ----


def test_the_tensors_of_k3() -> None:
    expected = expected_tensors(K3)
    assert len(expected) == SUMMARY["text_tensors"] == 497_052
    digest = hashlib.sha256("\n".join(sorted(expected)).encode()).hexdigest()
    assert digest == SUMMARY["text_names_sha256"]
    assert sum(spec.nbytes for spec in expected.values()) == 1_559_965_606_912
    vision = 401_214_464 + 46_144_512  # published counts of the tower and the projector, bf16
    assert 1_559_965_606_912 + 2 * vision == SUMMARY["total_size"] == 1_560_860_324_864
    assert SUMMARY["tensors"] == 497_220 == len(expected) + 165 + 3


def test_shapes_and_dtypes_of_k3() -> None:
    """The published rows of layer 12 (KDA), 3 (MLA), 0 (dense) and the globals."""
    expected = expected_tensors(K3)
    rows = {
        "12.self_attn.q_conv1d.weight": ((12288, 1, 4), "F32"),
        "12.self_attn.A_log": ((128,), "F32"),
        "12.self_attn.dt_bias": ((12288,), "F32"),
        "12.self_attn.o_norm.weight": ((128,), "F32"),
        "12.self_attn.f_b_proj.weight": ((12288, 128), "BF16"),
        "12.self_attn.b_proj.weight": ((96, 7168), "BF16"),
        "12.block_sparse_moe.gate.e_score_correction_bias": ((896,), "F32"),
        "12.block_sparse_moe.experts.895.w1.weight_packed": ((3072, 1792), "U8"),
        "12.block_sparse_moe.experts.0.w3.weight_scale": ((3072, 112), "U8"),
        "12.block_sparse_moe.experts.0.w2.weight_packed": ((3584, 1536), "U8"),
        "12.block_sparse_moe.experts.0.w2.weight_scale": ((3584, 96), "U8"),
        "12.block_sparse_moe.shared_experts.down_proj.weight": ((7168, 6144), "BF16"),
        "12.mlp_res_proj.weight": ((1, 7168), "BF16"),
        "3.self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), "BF16"),
        "3.self_attn.kv_b_proj.weight": ((24576, 512), "BF16"),
        "92.self_attn.q_b_proj.weight": ((18432, 1536), "BF16"),
        "0.mlp.gate_proj.weight": ((33792, 7168), "BF16"),
    }
    for name, (shape, dtype) in rows.items():
        spec = expected[LAYER + name]
        assert (spec.shape, spec.dtype) == (shape, dtype), name
    assert expected["language_model.lm_head.weight"].shape == (163840, 7168)


def test_bf16_experts_have_a_table_of_their_own() -> None:
    mxfp4, bf16 = expected_tensors(CONFIG), expected_tensors(CONFIG, "bf16")
    name = f"{LAYER}1.block_sparse_moe.experts.11.w2"
    assert bf16[f"{name}.weight"].shape == (32, 64) and bf16[f"{name}.weight"].dtype == "BF16"
    assert f"{name}.weight" not in mxfp4 and f"{name}.weight_packed" not in bf16
    others = {n for n in mxfp4 if ".experts." not in n}
    assert others == {n for n in bf16 if ".experts." not in n}
    assert len(mxfp4) - len(others) == 2 * (len(bf16) - len(others)) == 6 * 12 * 3 * 2


def test_a_field_is_the_stack_of_its_pieces() -> None:
    for config in (K3, CONFIG):
        names: set[str] = set()
        for field in table(config):
            size = sum(prod(shape) for _, shape in field.pieces)
            if field.kind == "product":
                assert size == 2 * prod(field.shape)
            elif field.kind == "heads":
                assert size >= prod(field.shape)
            else:
                assert size == prod(field.shape), field.name
            assert field.name not in names, "one row each"
            names.add(field.name)


# ---- filling ----


def test_rows_are_stacked_in_order() -> None:
    """q, k, v, g, f_a, b; q_a, kv_a, g; gate, up; w1, w3: from the tensors of those names."""
    tensors, fields = stored(), filled(stored())

    def stack(layer: int, *names: str) -> Tensor:
        return torch.cat([tensors[f"{LAYER}{layer}.{name}.weight"] for name in names]).float()

    kda = [f"self_attn.{p}_proj" for p in ("q", "k", "v", "g", "f_a", "b")]
    check_equal(fields["layers.0.in_proj"], stack(0, *kda))
    mla = [f"self_attn.{p}" for p in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")]
    check_equal(fields["layers.3.in_proj"], stack(3, *mla))
    check_equal(fields["layers.0.dense.gate_up"], stack(0, "mlp.gate_proj", "mlp.up_proj"))
    shared = [f"block_sparse_moe.shared_experts.{p}_proj" for p in ("gate", "up")]
    check_equal(fields["layers.2.moe.shared_gate_up"], stack(2, *shared))
    conv = stack(4, *(f"self_attn.{p}_conv1d" for p in "qkv"))
    check_equal(fields["layers.4.attn.conv"], conv[:, 0, :])
    for e in range(12):
        for field, parts in (("w13", ("w1", "w3")), ("w2", ("w2",))):
            right = torch.cat(
                [
                    torch.from_numpy(
                        decode(
                            *(
                                tensors[
                                    f"{LAYER}1.block_sparse_moe.experts.{e}.{p}.weight_{half}"
                                ].numpy()
                                for half in ("packed", "scale")
                            )
                        )
                    )
                    for p in parts
                ]
            )
            check_equal(fields[f"layers.1.moe.{field}"][e], right.float(), f"expert {e} {field}")


def test_the_order_of_tensors_does_not_matter() -> None:
    """Shuffled, so that experts come out of id order and scales before their values."""
    tensors, fields = stored(), filled(stored())
    names = list(tensors)
    for seed in range(3):
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
        shuffled = filled({names[i]: tensors[names[i]] for i in order.tolist()})
        for name, value in fields.items():
            check_equal(shuffled[name], value, name)
    for suffix in ("packed", "scale"):
        first = sorted(names, key=lambda n: not n.endswith(suffix))
        again = filled({n: tensors[n] for n in first})
        check_equal(again["layers.1.moe.w13"], fields["layers.1.moe.w13"])


def test_an_attn_res_score_is_the_product_of_norm_and_row() -> None:
    tensors = stored()
    norm, proj = f"{LAYER}2.mlp_res_norm.weight", f"{LAYER}2.mlp_res_proj.weight"
    generator = torch.Generator().manual_seed(5)
    tensors[norm] = torch.randn(64, generator=generator).bfloat16()
    tensors[proj] = torch.randn(1, 64, generator=generator).bfloat16()
    right = tensors[norm].float() * tensors[proj][0].float()  # in float32: not bf16 again
    for dtype in (torch.bfloat16, torch.float32):
        check_equal(filled(tensors, dtype=dtype)["layers.2.mlp_res.score"], right)
    reverse = filled(dict(reversed(tensors.items())))
    check_equal(reverse["layers.2.mlp_res.score"], right)


def test_a_log_is_read_by_head_and_its_tail_must_be_zero() -> None:
    tensors = stored()
    name = f"{LAYER}0.self_attn.A_log"
    assert tensors[name].shape == (16,) and (tensors[name][3:] == 0).all()
    check_equal(filled(tensors)["layers.0.attn.A_log"], tensors[name][:3])
    tensors[name] = tensors[name].clone()
    tensors[name][15] = 1e-30
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.A_log.*past the 3 heads"):
        filled(tensors)
    tensors[name][15] = float("nan")
    with pytest.raises(ValueError, match="A_log"):
        filled(tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """What is stored in F32 stays at least that."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kept = ("conv", "A_log", "dt_bias", "o_norm", "bias", "score")
    for name, value in filled(stored(), dtype=dtype).items():
        right = wide if name.endswith(kept) and "b_proj" not in name else dtype
        assert value.dtype == right, name


def test_bf16_experts_fill_the_same_fields() -> None:
    tensors, fields = stored(), filled(stored())
    bf16 = {n: t for n, t in tensors.items() if ".experts." not in n}
    for i in range(1, 7):
        for e in range(12):
            stem = f"{LAYER}{i}.block_sparse_moe.experts.{e}."
            gate, up = fields[f"layers.{i}.moe.w13"][e].chunk(2)
            bf16[f"{stem}w3.weight"] = up.bfloat16()
            bf16[f"{stem}w2.weight"] = fields[f"layers.{i}.moe.w2"][e].bfloat16()
            bf16[f"{stem}w1.weight"] = gate.bfloat16()
    assert bf16.keys() == expected_tensors(CONFIG, "bf16").keys()
    for name, value in filled(bf16).items():
        check_equal(value, fields[name], name)


def test_what_is_missing_or_half_there_is_noticed() -> None:
    tensors = stored()
    for name in ("language_model.model.norm.weight", next(n for n in tensors if "scale" in n)):
        with pytest.raises(AssertionError):
            filled({n: t for n, t in tensors.items() if n != name})


# ---- the way back ----


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        tiny_config(latent_moe_use_norm=False, first_k_dense_replace=0, num_heads=8, head_dim=8),
    ],
)
def test_round_trip(config: ModelConfig) -> None:
    """Fields that are representable come back bit for bit, through exactly the expected tensors."""
    fields = random_fields(config, 3)
    tensors = dict(to_checkpoint(config, fields))
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
    expected = expected_tensors(config)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        found = (tuple(tensor.shape), names[tensor.dtype])
        assert found == (expected[name].shape, expected[name].dtype), name
        assert tensor.is_contiguous()
    back = filled(tensors, config)
    assert back.keys() == fields.keys()
    for name, value in fields.items():
        check_equal(back[name], value, name)


def test_from_files(tmp_path: Path) -> None:
    """The directory that other tests use holds the weights that they expect."""
    make_checkpoint(tmp_path, CONFIG, seed=4)
    config = load_config(tmp_path)
    assert config == CONFIG
    checkpoint = Checkpoint.open(tmp_path, {"mxfp4": expected_tensors(config)})
    filler = Filler(config, torch.bfloat16, "cpu")
    checkpoint.load(checkpoint.in_file_order(checkpoint.specs), filler.take)
    got = build(config, filler.finish().__getitem__)
    expected = tiny_weights(config, 4, torch.bfloat16)
    check_equal(got.embed, expected.embed)
    check_equal(got.layers[3].attn.kv_b, expected.layers[3].attn.kv_b)  # type: ignore[union-attr]
    check_equal(got.layers[6].mlp.experts.w13, expected.layers[6].mlp.experts.w13)  # type: ignore[union-attr]


# ---- records ----


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
    for situ in (kda.mlp.gate_up, mla.mlp.shared_gate_up, mla.mlp.experts):
        assert (situ.beta, situ.linear_beta) == (3.0, 9.0)
    assert w.output_res.eps == mla.mlp.latent_up.eps == 1e-3
    no_norm = tiny_config(latent_moe_use_norm=False)
    layer = build(no_norm, random_fields(no_norm, 0).__getitem__).layers[1]
    assert isinstance(layer.mlp, MoEWeights) and layer.mlp.latent_up.norm is None
