"""Names, shapes and packing: K3's own tensors, filling in any order, the way back, shards."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from compare import check_equal
from plain_model import mxfp4 as decode
from tiny import make_checkpoint, random_fields, tiny_config, tiny_weights
from torch import Tensor

from nanok3.checkpoint import Checkpoint
from nanok3.config import K3, ModelConfig, Shard, load_config
from nanok3.weight_table import Filler, expected_tensors, table, to_checkpoint
from nanok3.weights import build

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
            size = sum(prod(piece.shape) for piece in field.pieces)
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
    check_equal(got.embed.table, expected.embed.table)
    check_equal(got.layers[3].attn.kv_b, expected.layers[3].attn.kv_b)  # type: ignore[union-attr]
    check_equal(got.layers[6].mlp.experts.w13, expected.layers[6].mlp.experts.w13)  # type: ignore[union-attr]


# ---- shards ----

# The published splits (a part of a stored tensor's name -> axis); what is not here is replicated.
AXES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "b_proj.weight", "conv1d"), 0),
    **dict.fromkeys(("A_log", "dt_bias", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("gate_proj", "up_proj", "moe.gate.weight", "routed_expert_down_proj"), 0),
    **dict.fromkeys((".w1", ".w3"), 0),
    **dict.fromkeys(("o_proj", ".mlp.down_proj", "shared_experts.down_proj", ".w2"), 1),
}
SPLITS = tiny_config(num_heads=4, num_attention_heads=4, moe_intermediate_size=128)


def axis_of(name: str) -> int | None:
    return next((axis for part, axis in AXES.items() if part in name), None)


def filled_by_rank(
    tensors: dict[str, Tensor], config: ModelConfig, size: int
) -> list[dict[str, Tensor]]:
    ranks = []
    for rank in range(size):
        filler = Filler(config, torch.float32, "cpu", Shard(rank, size))
        for name, tensor in tensors.items():
            filler.take(name, tensor)
        ranks.append(filler.finish())
    return ranks


def check_ranks(config: ModelConfig, tensors: dict[str, Tensor], size: int) -> None:
    """Every piece of the ranks' fields, put together along its axis, is the whole model's."""
    whole = filled(tensors, config)
    ranks = filled_by_rank(tensors, config, size)
    replicas = 0
    for field in table(config):
        right = whole[field.name]
        parts = [rank[field.name] for rank in ranks]
        if field.kind == "experts":
            axis = axis_of(field.pieces[0].name)
            per_expert = len(field.pieces) // field.shape[0]
            stacks = [part.chunk(per_expert, dim=1) for part in parts]
            pieces = [torch.cat(piece, dim=1 + (axis or 0)) for piece in zip(*stacks, strict=True)]
            check_equal(torch.cat(pieces, dim=1), right, field.name)
            continue
        if field.kind == "product":
            for part in parts:
                check_equal(part, right, field.name)
            replicas += right.nbytes
            continue
        at, rows_at = 0, 0
        for piece in field.pieces:
            rows = field.shape[0] if field.kind == "heads" else piece.shape[0]
            axis = axis_of(piece.name)
            own = rows // size if axis == 0 else rows
            slices = [part[at : at + own] for part in parts]
            expected = right[rows_at : rows_at + rows]
            if axis is None:
                for part in slices:
                    check_equal(part, expected, piece.name)
                replicas += expected.nbytes
            else:
                check_equal(torch.cat(slices, dim=axis), expected, piece.name)
            at, rows_at = at + own, rows_at + rows
        assert all(len(part) == at for part in parts) and len(right) == rows_at, field.name
    for rank, fields in enumerate(ranks):
        shapes = {f.name: f.shape for f in table(config, Shard(rank, size))}
        assert shapes == {name: tuple(value.shape) for name, value in fields.items()}
    held = sum(value.nbytes for rank in ranks for value in rank.values())
    assert held - (size - 1) * replicas == sum(value.nbytes for value in whole.values())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_shards_of_a_tiny_model_make_the_whole(size: int) -> None:
    assert Shard(0, 2).problems(CONFIG), "three heads"
    check_ranks(SPLITS, stored(SPLITS), size)


@pytest.mark.parametrize("size", [1, 2])
def test_the_shards_of_the_golden_model_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    path = tmp_path_factory.mktemp("golden")
    script = Path(__file__).parent / "data" / "make_golden_k3.py"
    subprocess.run([sys.executable, script, "golden", path], check=True, capture_output=True)
    config = load_config(path)
    checkpoint = Checkpoint.open(path, {"mxfp4": expected_tensors(config)})
    tensors: dict[str, Tensor] = {}
    checkpoint.load(
        checkpoint.in_file_order(checkpoint.specs),
        lambda name, tensor: tensors.update({name: tensor.clone()}),
    )
    assert Shard(0, 4).problems(config), "two heads"
    check_ranks(config, tensors, size)


def test_shards_of_bf16_experts_and_the_order_of_halves() -> None:
    tensors = stored(SPLITS)
    right = filled_by_rank(tensors, SPLITS, 4)
    plain = {n: t for n, t in tensors.items() if ".experts." not in n}
    for name in expected_tensors(SPLITS, "bf16"):
        if ".experts." in name:
            stem = name.removesuffix(".weight")
            halves = (tensors[f"{stem}.weight_{half}"].numpy() for half in ("packed", "scale"))
            plain[name] = torch.from_numpy(decode(*halves)).bfloat16()
    scale_first = dict(reversed(tensors.items()))
    for other in (plain, scale_first):
        for mine, rank in zip(filled_by_rank(other, SPLITS, 4), right, strict=True):
            for name, value in rank.items():
                check_equal(mine[name], value, name)


def test_a_log_of_a_shard_has_its_heads_and_its_tail_is_still_checked() -> None:
    tensors = stored(SPLITS)
    name = f"{LAYER}0.self_attn.A_log"
    for rank, fields in enumerate(filled_by_rank(tensors, SPLITS, 4)):
        check_equal(fields["layers.0.attn.A_log"], tensors[name][rank : rank + 1])
    tensors[name] = tensors[name].clone()
    tensors[name][4] = 1.0
    with pytest.raises(ValueError, match="past the 4 heads"):
        filled_by_rank(tensors, SPLITS, 4)


def k3_rank_bytes(p: int) -> dict[str, int]:
    """Weights of one of p ranks, from the published shapes and splits; nothing is padded."""
    gate = up = 6144 // p * 7168
    kda = 2 * (4 * 12288 // p + 128 + 96 // p) * 7168  # q, k, v, g | f_a | b
    kda += 4 * (3 * 12288 // p * 4 + 96 // p + 12288 // p + 128)  # conv, A_log, dt_bias, o_norm
    kda += 2 * (12288 // p * 128 + 7168 * 12288 // p)  # f_b, o
    mla = 2 * (1536 + 576 + 12288 // p) * 7168 + 2 * (1536 + 512)  # q_a, kv_a, g; their norms
    mla += 2 * (96 // p * 192 * 1536 + 96 // p * 256 * 512 + 7168 * 12288 // p)  # q_b, kv_b, o
    moe = 2 * (896 // p * 7168 + 3584 // p * 7168 + 7168 // p * 3584 + 3584)  # router, latent
    moe += 4 * 896 + 2 * (gate + up + 7168 * 6144 // p)  # bias, shared experts
    experts = 896 * (2 * 3072 // p * (1792 + 112) + 3584 * (1536 // p + 96 // p))
    return {
        "experts": 92 * experts,
        "attention": 69 * kda + 24 * mla,
        "rest of MoE": 92 * moe,
        "dense MLP": 2 * 3 * 33792 // p * 7168,
        "embedding and head": 2 * 2 * 163840 // p * 7168,
        "norms": (2 * 93 + 1) * 7168 * (2 + 4),  # a norm, and norm times projection in float32
    }


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_bytes_of_a_rank_of_k3(size: int) -> None:
    total = experts = 0
    for field in table(K3, Shard(size - 1, size)):
        values = prod(field.shape)
        if field.kind == "experts":
            experts += values // 2 + values // 32
        else:
            total += values * field.dtype(torch.bfloat16).itemsize
    right = k3_rank_bytes(size)
    assert experts == right["experts"]
    assert total == sum(right.values()) - experts
    if size == 1:  # all of the checkpoint but the unused entries of A_log
        assert total + experts == 1_559_965_606_912 - 69 * 32 * 4
    if size == 16:
        assert 90.35e9 < experts < 90.45e9, "unpadded"
