"""Small drafts in both published formats, for the tiny K3: configs, random weights, directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import TINY
from torch import Tensor

from nanok3.spec.config import DraftConfig
from nanok3.spec.draft_weights import (
    EMBED,
    DraftWeights,
    build_draft,
    draft_table,
    draft_to_checkpoint,
)

INFERACT: dict[str, Any] = {  # config.json of Inferact/Kimi-K3-DSpark
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_theta": 50000,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1,
        "mscale_all_dim": 1,
    },
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "_torchspec_version": "0.1.0",
}
REDHAT: dict[str, Any] = {  # config.json of RedHatAI/Kimi-K3-speculator.dspark
    "architectures": ["DSparkDraftModel"],
    "aux_hidden_state_layer_ids": [24, 48, 72, 88, 92],
    "block_size": 8,
    "mask_token_id": 163837,
    "draft_vocab_size": 163840,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "dtype": "bfloat16",
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 7168,
        "num_hidden_layers": 5,
        "num_attention_heads": 96,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "intermediate_size": 14336,
        "sliding_window": 2048,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * 5,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "vocab_size": 163840,
    },
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
        "verifier": {"name_or_path": "moonshotai/Kimi-K3"},
    },
}


def tiny_inferact(**changes: Any) -> dict[str, Any]:
    """The same for TINY, which has 7 layers of width 64 and 512 ids."""
    small = {
        **{"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24},
        **{"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
        **{"vocab_size": 512, "draft_vocab_size": 512, "max_position_embeddings": 4096},
        **{"num_target_layers": 3, "target_hidden_size": 64, "target_num_hidden_layers": 7},
        **{"target_layer_ids": [1, 2, 5], "mask_token_id": 509, "markov_rank": 8},
    }
    rope = INFERACT["rope_parameters"] | {"factor": 4, "original_max_position_embeddings": 64}
    return INFERACT | small | {"rope_parameters": rope} | changes


def tiny_redhat(layer_types: tuple[str, ...] = ("sliding_attention",) * 2) -> dict[str, Any]:
    inner = REDHAT["transformer_layer_config"] | {
        **{"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": len(layer_types)},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"sliding_window": 6, "layer_types": list(layer_types), "vocab_size": 512},
    }
    return REDHAT | {
        **{"aux_hidden_state_layer_ids": [1, 4, 6], "mask_token_id": 509, "markov_rank": 8},
        **{"draft_vocab_size": 512, "transformer_layer_config": inner},
    }


def random_draft_fields(c: DraftConfig, seed: int, spread: float = 1.0) -> dict[str, Tensor]:
    """f32 of the size that keeps activations near 1, representable in bf16."""
    generator = torch.Generator().manual_seed(seed)
    fields = {}
    for field in draft_table(c):
        value = torch.randn(field.shape, generator=generator)
        is_norm = field.name.endswith("norm")
        value = 1 + 0.15 * value if is_norm else value * spread * field.shape[-1] ** -0.5
        fields[field.name] = value.bfloat16().float()
    return fields


def draft_weights(c: DraftConfig, seed: int, target: Any, dtype: torch.dtype) -> DraftWeights:
    """target: the weights whose embedding and head it may share."""
    fields = {n: t.to(dtype) for n, t in random_draft_fields(c, seed).items()}
    return build_draft(c, fields.__getitem__, target.embed, target.lm_head)


def make_draft(
    path: Path, raw: dict[str, Any], c: DraftConfig, fields: dict[str, Tensor], copy: bool = True
) -> Path:
    """A directory as published; `copy`: with the embedding that nobody reads."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    tensors = draft_to_checkpoint(c, fields)
    if copy and not c.owns_vocab:
        tensors[EMBED] = torch.full((c.vocab_size, c.hidden_size), float("nan")).bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


assert TINY.hidden_size == 64 and TINY.num_hidden_layers == 7 and TINY.vocab_size == 512
