"""What the config.json of a draft may say, for both published formats; `config.py` applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanok3.config_rules import COUNT, NATURAL, POSITIVE, Kind, is_int, only

BFLOAT16 = only("bfloat16", "draft weights are bfloat16")
SILU = only("silu", "no other activation is computed")
IDS = Kind(
    "a list of different layer numbers, upwards",
    lambda v: (
        isinstance(v, list)
        and len(v) > 0
        and all(is_int(i) and i >= 0 for i in v)
        and v == sorted(set(v))
    ),
    tuple,
)
LAYER_TYPES = Kind(
    "sliding_attention or full_attention for each layer",
    lambda v: isinstance(v, list) and {*v} <= {"sliding_attention", "full_attention"},
    tuple,
    "the window and the mask of each layer depend on it",
)

INFERACT_FIELDS: Mapping[str, Kind] = {
    "model_type": only("k3_dspark", "it is the only draft of this architecture"),
    "vocab_size": COUNT,
    "draft_vocab_size": COUNT,
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "q_lora_rank": COUNT,
    "kv_lora_rank": COUNT,
    "qk_nope_head_dim": COUNT,
    "qk_rope_head_dim": COUNT,
    "v_head_dim": COUNT,
    "mla_use_nope": only(False, "the draft's attention is computed with rotary positions only"),
    "mla_use_output_gate": only(False, "the draft's attention is computed without a gate only"),
    "rms_norm_eps": POSITIVE,
    "max_position_embeddings": COUNT,
    "rope_theta": POSITIVE,
    "target_layer_ids": IDS,
    "num_target_layers": COUNT,
    "target_hidden_size": COUNT,
    "target_num_hidden_layers": COUNT,
    "mask_token_id": NATURAL,
    "markov_rank": COUNT,
    "markov_head_type": only("vanilla", "no other sequential head is computed"),
    "enable_confidence_head": only(True, "the budget of drafts is made of its output"),
    "confidence_head_with_markov": only(True, "its input has the Markov features"),
    "tie_word_embeddings": only(False, "the embedding and the head are the model's own"),
}
INFERACT_OPTIONAL: Mapping[str, Kind] = {
    "torch_dtype": BFLOAT16,
    "dtype": BFLOAT16,
    "hidden_act": SILU,
    "block_size": COUNT,
}
YARN_FIELDS: Mapping[str, Kind] = {
    "rope_type": only("yarn", "no other scaling is computed"),
    "rope_theta": POSITIVE,
    "factor": POSITIVE,
    "original_max_position_embeddings": COUNT,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "mscale": POSITIVE,
    "mscale_all_dim": POSITIVE,
}
SPECULATORS_FIELDS: Mapping[str, Kind] = {
    "aux_hidden_state_layer_ids": IDS,
    "block_size": COUNT,
    "mask_token_id": NATURAL,
    "draft_vocab_size": COUNT,
    "markov_rank": COUNT,
    "markov_head_type": only("vanilla", "no other sequential head is computed"),
    "enable_confidence_head": only(True, "the budget of drafts is made of its output"),
    "confidence_head_with_markov": only(True, "its input has the Markov features"),
    "sample_from_anchor": only(True, "each row of the draft window gives the token after its own"),
    "sliding_window_non_causal": only(False, "windowed layers are causal in the draft window"),
}
SPECULATORS_OPTIONAL: Mapping[str, Kind] = {
    "dtype": BFLOAT16,
    "torch_dtype": BFLOAT16,
    "tie_word_embeddings": only(False, "the head has weights of its own"),
}
QWEN3_FIELDS: Mapping[str, Kind] = {
    "model_type": only("qwen3", "no other layers are computed"),
    "vocab_size": COUNT,
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": COUNT,
    "rms_norm_eps": POSITIVE,
    "max_position_embeddings": COUNT,
    "rope_theta": POSITIVE,
    "use_sliding_window": Kind("true or false", lambda v: type(v) is bool),
    "layer_types": LAYER_TYPES,
}
QWEN3_OPTIONAL: Mapping[str, Kind] = {
    "sliding_window": Kind("a number of tokens or null", lambda v: v is None or COUNT.accepts(v)),
    "max_window_layers": NATURAL,  # layer_types says it, and says it first
    "rope_scaling": only(None, "rotary positions of this format are not scaled"),
    "rope_parameters": Kind(
        "null, or type default with the same rope_theta",
        lambda v: (
            v is None
            or (
                (isinstance(v, dict) and set(v) <= {"rope_type", "rope_theta"})
                and v.get("rope_type", "default") == "default"
            )
        ),
    ),
    "hidden_act": SILU,
    "attention_bias": only(False, "projections have no bias"),
    "tie_word_embeddings": only(False, "the head has weights of its own"),
    "dtype": BFLOAT16,
    "torch_dtype": BFLOAT16,
}
# Written by the libraries that save configs; they do not change what a draft computes.
IGNORED = frozenset(
    """
    architectures model_type auto_map transformers_version _torchspec_version _name_or_path
    bos_token_id eos_token_id pad_token_id initializer_range use_cache attention_dropout
    speculators_model_type speculators_version has_no_defaults_at_init
    """.split()  # noqa: SIM905  (as a list literal these are 16 lines)
)
SAID_BY_THE_CHECKPOINT = frozenset({"speculators_config", "transformer_layer_config"})


@dataclass(frozen=True)
class Format:
    """What a published format fixes without writing it."""

    tap_offset: int  # tap id + this = how many layers of the target have run
    interleaved_rope: bool
    owns_vocab: bool
    block_size: int | None  # where the config does not say


# Taps of both are the running sum with the pending output of the layer ("prefix only").
FORMATS: Mapping[str, Format] = {
    "K3DSparkModel": Format(tap_offset=1, interleaved_rope=True, owns_vocab=False, block_size=7),
    "DSparkDraftModel": Format(
        tap_offset=0, interleaved_rope=False, owns_vocab=True, block_size=None
    ),
}
