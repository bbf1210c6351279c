"""A K3 of a few layers with random weights, in memory or as a checkpoint directory.

It has what breaks engines: KDA and MLA with the last two layers MLA, one dense layer, a partial
last AttnRes block, fewer heads than `A_log` has entries, head sizes that all differ, a latent
narrower than the hidden size, a correction bias that decides. Its text is bytes: ids 0..255, then
the 256 specials. The weights are representable as they are stored, so that memory and files agree.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanok3.config import LinearAttnConfig, ModelConfig
from nanok3.reference import mxfp4
from nanok3.weight_table import Field, table, to_checkpoint
from nanok3.weights import Weights, build

TINY = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=7,
    num_attention_heads=2,
    intermediate_size=96,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    linear_attn_config=LinearAttnConfig(
        num_heads=3,
        head_dim=16,
        short_conv_kernel_size=4,
        gate_lower_bound=-5.0,
        full_attn_layers=(4, 6, 7),
        kda_layers=(1, 2, 3, 5),
    ),
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    rms_norm_eps=1e-5,
    attn_res_block_size=3,
    first_k_dense_replace=1,
    num_experts=12,
    num_experts_per_token=3,
    num_expert_group=1,
    topk_group=1,
    moe_intermediate_size=64,
    moe_renormalize=True,
    routed_expert_hidden_size=32,
    routed_scaling_factor=1.0,
    latent_moe_use_norm=True,
    num_shared_experts=2,
    num_nextn_predict_layers=0,
    max_position_embeddings=4096,
    bos_token_id=256,
    eos_token_id=258,
    pad_token_id=511,
)


def tiny_config(**changes: Any) -> ModelConfig:
    """TINY with other values; fields of `linear_attn_config` are given by their own names."""
    inner = {f.name for f in fields(LinearAttnConfig)}
    linear = replace(TINY.linear_attn_config, **{k: v for k, v in changes.items() if k in inner})
    outer = {k: v for k, v in changes.items() if k not in inner}
    return ModelConfig.from_dict(raw_config(replace(TINY, linear_attn_config=linear, **outer)))


def raw_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, as published."""
    text = asdict(config)
    text["linear_attn_config"]["use_full_rank_gate"] = True
    for name in ("full_attn_layers", "kda_layers"):
        text["linear_attn_config"][name] = list(text["linear_attn_config"][name])
    ids = {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text |= {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "situ",
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **ids,
        "text_config": text,
    }


def random_field(field: Field, generator: torch.Generator) -> Tensor:
    """f32, of a size that keeps activations near 1, and representable as it is stored."""

    def normal(std: float) -> Tensor:
        return torch.randn(field.shape, generator=generator) * std

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(field.shape, generator=generator) * (high - low) + low

    columns = field.shape[-1]
    last = field.name.rpartition(".")[2]
    special: dict[str, Callable[[], Tensor]] = {
        "embed": lambda: normal(1.0),
        "lm_head": lambda: normal(3.0 * columns**-0.5),  # peaked enough that few ids nearly tie
        "score": lambda: normal(1.5 * columns**-0.5),
        "conv": lambda: normal(0.45),
        "A_log": lambda: uniform(1.0, 3.0).log(),
        "dt_bias": lambda: uniform(-3.2, 0.2),
        "bias": lambda: normal(0.2),
    }
    if last in special:
        value = special[last]()
    elif len(field.shape) == 1:
        value = 1 + normal(0.15)  # a norm
    else:
        value = normal(columns**-0.5)
    if field.kind == "experts":
        return mxfp4.dequantize(*mxfp4.quantize(value), torch.float32)
    return value if field.stored == "F32" else value.bfloat16().float()


def random_fields(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Every field of the model's records by name, f32."""
    generator = torch.Generator().manual_seed(seed)
    return {field.name: random_field(field, generator) for field in table(config)}


def tiny_weights(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    """The same as records, in the dtypes that loading gives."""
    values = random_fields(config, seed)
    for field in table(config):
        values[field.name] = values[field.name].to(field.dtype(dtype))
    return build(config, values.__getitem__)


def make_checkpoint(path: Path, config: ModelConfig, seed: int) -> Path:
    """The same as a directory: config.json, a shard a layer, an index and a tokenizer of bytes."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw_config(config)))
    assert config.vocab_size == 512, "256 bytes and 256 specials"
    ranks = (f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (path / "tiktoken.model").write_text("".join(ranks))
    shards: dict[str, dict[str, Tensor]] = {}
    for name, tensor in to_checkpoint(config, random_fields(config, seed)):
        _, is_layer, rest = name.partition(".layers.")
        shards.setdefault(rest.partition(".")[0] if is_layer else "top", {})[name] = tensor
    files: dict[str, str] = {}
    for number, tensors in enumerate(shards.values(), 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(tensors, path / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    sizes = sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    index = {"metadata": {"total_size": sizes}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


# One of each kind of layer, for tests that run very many rows.
SMALLEST = tiny_config(num_hidden_layers=3, full_attn_layers=(3,), kda_layers=(1, 2))
