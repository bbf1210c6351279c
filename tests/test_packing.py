"""Checkpoint tensors to packed fields: the bytes that packing a whole dense field gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare import check_equal
from tiny import make_checkpoint, random_fields
from torch import Tensor

pytest.importorskip("cutlass")  # for the packers of whole experts
from packed import CONFIG

from nanok3.checkpoint import Checkpoint
from nanok3.config import WHOLE, Shard
from nanok3.kernels.expert_down import pack_expert_down
from nanok3.kernels.expert_up import pack_expert_up
from nanok3.kernels.gemv_layout import pack_gemv
from nanok3.packing import FINISH, MOE_IN, empty_weights, packed_weights, put_fields, tensors_of
from nanok3.reference import mxfp4
from nanok3.weight_table import Filler, expected_tensors, table, to_checkpoint

BF16 = torch.bfloat16


def stored(seed: int = 0) -> dict[str, Tensor]:
    return dict(to_checkpoint(CONFIG, random_fields(CONFIG, seed)))


def whole_packs(dense: dict[str, Tensor], shard: Shard) -> dict[str, list[Tensor]]:
    """Of dense fields of a rank, by the packers of whole matrices: packed tensors by field."""
    packs: dict[str, list[Tensor]] = {"lm_head": [pack_gemv(dense["lm_head"])]}
    heads = CONFIG.num_attention_heads // shard.size
    nope, value = CONFIG.qk_nope_head_dim, CONFIG.v_head_dim
    for name, field in dense.items():
        root, last = ".".join(name.split(".")[:2]) + ".", ".".join(name.split(".")[2:])
        if last in FINISH:
            packs[name] = [pack_gemv(field, situ=FINISH[last] == "situ")]
        elif last == "attn.kv_b":
            by_head = field.view(heads, nope + value, -1)
            keys = torch.cat([h[:nope].T for h in by_head])
            packs[name] = [pack_gemv(keys), pack_gemv(torch.cat([h[nope:] for h in by_head]))]
        elif last == "moe.gate":
            three = [dense[root + n] for n in MOE_IN]
            tiles = [pack_gemv(m, situ=i == 2) for i, m in enumerate(three)]
            packs[f"{root}moe.in_proj"] = [torch.cat(tiles)]
        elif last == "moe.w13":
            packs[name] = [pack_expert_up(*mxfp4.quantize(field)).tiles]
        elif last == "moe.w2":
            packs[name] = [pack_expert_down(*mxfp4.quantize(field)).tiles]
    return packs


def check_packs(packed: dict[str, object], dense: dict[str, Tensor], shard: Shard) -> None:
    right = whole_packs(dense, shard)
    assert packed.keys() == right.keys()
    for name, tensors in right.items():
        for mine, other in zip(tensors_of(packed[name]), tensors, strict=True):
            check_equal(mine, other, name)


def filled(
    tensors: dict[str, Tensor], shard: Shard, packing: bool
) -> tuple[dict[str, object], dict[str, Tensor]]:
    places = empty_weights(CONFIG, shard, "cpu") if packing else None
    filler = Filler(CONFIG, BF16, "cpu", shard, places.puts if places else None)
    for name, tensor in tensors.items():
        filler.take(name, tensor)
    return places.packed if places else {}, filler.finish()


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2), Shard(1, 2)])
def test_tensor_by_tensor_is_the_packed_dense_field(shard: Shard) -> None:
    assert not shard.problems(CONFIG)
    packed, others = filled(stored(), shard, packing=True)
    _, dense = filled(stored(), shard, packing=False)
    check_packs(packed, dense, shard)
    gone = {n for n in dense if n not in others}
    assert gone == {*packed, *(n for n in dense if n.endswith(MOE_IN))} - {
        n for n in packed if n.endswith("moe.in_proj")
    }
    for name, value in others.items():
        check_equal(value, dense[name], name)


def test_the_order_of_tensors_does_not_matter() -> None:
    tensors = stored()
    right, _ = filled(tensors, WHOLE, packing=True)
    order = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(1)).tolist()
    names = list(tensors)
    shuffled, _ = filled({names[i]: tensors[names[i]] for i in order}, WHOLE, packing=True)
    for name, packed in right.items():
        for mine, other in zip(tensors_of(shuffled[name]), tensors_of(packed), strict=True):
            check_equal(mine, other, name)


def test_whole_fields_dense_or_as_bytes() -> None:
    _, dense = filled(stored(), WHOLE, packing=False)
    as_bytes = dict(dense)
    for field in table(CONFIG):
        if field.kind == "experts":
            pair = mxfp4.quantize(as_bytes.pop(field.name))
            as_bytes[f"{field.name}.packed"], as_bytes[f"{field.name}.scale"] = pair
    for fields in (dense, as_bytes):
        places = empty_weights(CONFIG, WHOLE, "cpu")
        others = put_fields(places.puts, fields)
        check_packs(places.packed, dense, WHOLE)
        assert not set(others) & set(places.puts)


def test_bf16_experts_are_packed_if_they_are_mxfp4() -> None:
    tensors = stored()
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2"
    packed, scale = tensors.pop(f"{name}.weight_packed"), tensors.pop(f"{name}.weight_scale")
    tensors[f"{name}.weight"] = mxfp4.dequantize(packed, scale, BF16)
    right, _ = filled(stored(), WHOLE, packing=True)
    mine, _ = filled(tensors, WHOLE, packing=True)
    check_equal(mine["layers.1.moe.w2"].tiles, right["layers.1.moe.w2"].tiles)  # type: ignore[attr-defined]
    tensors[f"{name}.weight"][0, 0] = 0.7
    with pytest.raises(ValueError, match=r"experts\.3\.w2\.weight: .* not MXFP4"):
        filled(tensors, WHOLE, packing=True)


def test_a_scale_that_the_kernels_cannot_take_is_named() -> None:
    tensors = stored()
    name = "language_model.model.layers.2.block_sparse_moe.experts.5.w3.weight_scale"
    tensors[name] = tensors[name].clone()
    tensors[name][1, 0] = 129
    with pytest.raises(ValueError, match=r"experts\.5\.w3\.weight_scale: .* byte 129"):
        filled(tensors, WHOLE, packing=True)


def test_from_a_checkpoint_directory_with_little_memory(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny", CONFIG, 0)
    checkpoint = Checkpoint.open(path, {"mxfp4": expected_tensors(CONFIG)})
    places = empty_weights(CONFIG, WHOLE, "cpu")
    filler = Filler(CONFIG, BF16, "cpu", puts=places.puts)
    checkpoint.load(checkpoint.in_file_order(checkpoint.specs), filler.take)
    others = filler.finish()
    _, dense = filled(stored(), WHOLE, packing=False)
    check_packs(places.packed, dense, WHOLE)
    weights = packed_weights(CONFIG, (places.packed | others).__getitem__)
    assert len(weights.layers) == CONFIG.num_hidden_layers
