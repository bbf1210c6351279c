"""A directory with the official checkpoint's files, names, shapes and sizes, and no weights.

The names and shards come from a summary of the official index (tests/data/k3_index_summary.json),
the shapes from the published tensor table, written out below: both independent of
nanok3/weight_table.py. The files are sparse: 1.56 TB by their size, some 130 MB on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from nanok3.checkpoint import TensorSpec

SUMMARY = Path(__file__).parent / "data" / "k3_index_summary.json"
NUM_EXPERTS = 896

# last parts of a name -> shape; BF16 unless in F32 or U8
SHAPES: dict[str, tuple[int, ...]] = {
    "lm_head.weight": (163840, 7168),
    "embed_tokens.weight": (163840, 7168),
    "norm.weight": (7168,),
    "output_attn_res_norm.weight": (7168,),
    "output_attn_res_proj.weight": (1, 7168),
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
    "self_attention_res_norm.weight": (7168,),
    "self_attention_res_proj.weight": (1, 7168),
    "mlp_res_norm.weight": (7168,),
    "mlp_res_proj.weight": (1, 7168),
    "q_proj.weight": (12288, 7168),
    "k_proj.weight": (12288, 7168),
    "v_proj.weight": (12288, 7168),
    "g_proj.weight": (12288, 7168),
    "f_a_proj.weight": (128, 7168),
    "f_b_proj.weight": (12288, 128),
    "b_proj.weight": (96, 7168),
    "q_conv1d.weight": (12288, 1, 4),
    "k_conv1d.weight": (12288, 1, 4),
    "v_conv1d.weight": (12288, 1, 4),
    "A_log": (128,),
    "dt_bias": (12288,),
    "o_norm.weight": (128,),
    "o_proj.weight": (7168, 12288),
    "q_a_proj.weight": (1536, 7168),
    "q_a_layernorm.weight": (1536,),
    "q_b_proj.weight": (18432, 1536),
    "kv_a_proj_with_mqa.weight": (576, 7168),
    "kv_a_layernorm.weight": (512,),
    "kv_b_proj.weight": (24576, 512),
    "mlp.gate_proj.weight": (33792, 7168),
    "mlp.up_proj.weight": (33792, 7168),
    "mlp.down_proj.weight": (7168, 33792),
    "gate.weight": (896, 7168),
    "e_score_correction_bias": (896,),
    "routed_expert_down_proj.weight": (3584, 7168),
    "routed_expert_norm.weight": (3584,),
    "routed_expert_up_proj.weight": (7168, 3584),
    "shared_experts.gate_proj.weight": (6144, 7168),
    "shared_experts.up_proj.weight": (6144, 7168),
    "shared_experts.down_proj.weight": (7168, 6144),
    "w1.weight_packed": (3072, 1792),
    "w1.weight_scale": (3072, 112),
    "w2.weight_packed": (3584, 1536),
    "w2.weight_scale": (3584, 96),
    "w3.weight_packed": (3072, 1792),
    "w3.weight_scale": (3072, 112),
    "patch_embed.proj.weight": (1024, 3, 14, 14),
    "pos_emb.weight": (64, 64, 1024),
    "norm0.weight": (1024,),
    "norm1.weight": (1024,),
    "wqkv.weight": (4608, 1024),
    "wo.weight": (1024, 1536),
    "fc0.weight": (4096, 1024),
    "fc1.weight": (1024, 4096),
    "final_layernorm.weight": (1024,),
    "proj.0.weight": (4096, 4096),
    "proj.2.weight": (7168, 4096),
    "post_norm.weight": (7168,),
}
F32 = (
    "q_conv1d.weight",
    "k_conv1d.weight",
    "v_conv1d.weight",
    "A_log",
    "dt_bias",
    "o_norm.weight",
    "e_score_correction_bias",
)
U8 = ("weight_packed", "weight_scale")


def shape_of(name: str) -> tuple[int, ...]:
    """The entry of SHAPES with the most parts in common with the end of the name."""
    parts = name.split(".")
    return next(SHAPES[end] for k in range(len(parts)) if (end := ".".join(parts[k:])) in SHAPES)


def official_tensors() -> Iterator[tuple[str, int, TensorSpec]]:
    """Name, number of the shard (from 1), shape and dtype of all 497,220 tensors."""
    patterns = json.loads(SUMMARY.read_text())["patterns"]
    for pattern, where in patterns.items():
        dtype = "F32" if pattern.endswith(F32) else "U8" if pattern.endswith(U8) else "BF16"
        spec = TensorSpec(shape_of(pattern), dtype)
        for shard in numbers(where["shards"]):
            name = pattern.replace("{L}", str(shard - 1))
            if "{e}" in name:
                for expert in range(NUM_EXPERTS):
                    yield name.replace("{e}", str(expert)), shard, spec
            elif "{b}" in name:
                for block in range(where["count"]):
                    yield name.replace("{b}", str(block)), shard, spec
            else:
                yield name, shard, spec


def numbers(ranges: str) -> Iterator[int]:
    """1, 4, 5, 6 of "1,4-6"."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def write_fake_official(directory: Path) -> None:
    """The index and 96 files: headers in full, tensors as a hole."""
    headers: dict[str, dict[str, object]] = {}
    ends: dict[str, int] = {}
    weight_map = {}
    for name, shard, spec in official_tensors():
        file = f"model-{shard:05d}-of-000096.safetensors"
        weight_map[name] = file
        begin = ends.get(file, 0)
        ends[file] = begin + spec.nbytes
        entry = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, ends[file]]}
        headers.setdefault(file, {"__metadata__": {"format": "pt"}})[name] = entry
    for file, entries in headers.items():
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        with (directory / file).open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            out.truncate(8 + len(header) + ends[file])
    index = {"metadata": {"total_size": sum(ends.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
