"""What a K3 config.json may say: every published field, what it may hold, and why nothing else.

Tables of names, kinds and reasons; `config_check.py` applies them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What a field may hold, in words and as a test; `why` is told to whoever breaks it."""

    expected: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    why: str = ""

    def because(self, why: str) -> Kind:
        return replace(self, why=why)


def show(value: object) -> str:
    """A value as JSON writes it, for a message."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def is_int(value: object) -> bool:
    return type(value) is int  # True and False are ints to isinstance


def is_number(value: object) -> bool:
    # the bounds also turn away NaN and infinity, which Python's JSON reader lets through
    return type(value) in (int, float) and -1e300 < value < 1e300  # type: ignore[operator]


def is_layer_list(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(is_int(layer) and layer >= 1 for layer in value)
        and len(set(value)) == len(value)
    )


def only(value: object, why: str) -> Kind:
    """The one value that has a formula here."""
    return Kind(show(value), lambda v: type(v) is type(value) and v == value, why=why)


COUNT = Kind("an integer of at least 1", lambda v: is_int(v) and v >= 1)
NATURAL = Kind("an integer of at least 0", lambda v: is_int(v) and v >= 0)
POSITIVE = Kind("a number above 0", lambda v: is_number(v) and v > 0, float)
NEGATIVE = Kind("a number below 0", lambda v: is_number(v) and v < 0, float)
FLAG = Kind("true or false", lambda v: type(v) is bool)
LAYERS = Kind("a list of different layer numbers, counted from 1", is_layer_list, tuple)

# Fields with no default: the result depends on each of them.
TEXT_FIELDS: Mapping[str, Kind] = {
    "vocab_size": COUNT,
    "hidden_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "intermediate_size": COUNT,
    "q_lora_rank": COUNT.because("MLA is computed with low-rank queries only"),
    "kv_lora_rank": COUNT,
    "qk_nope_head_dim": COUNT,
    "qk_rope_head_dim": COUNT,
    "v_head_dim": COUNT,
    "mla_use_nope": only(True, "rotary positions are not computed"),
    "mla_use_output_gate": only(True, "MLA is computed with its output gate only"),
    "hidden_act": only("situ", "no other activation is computed"),
    "activation_situ_beta": POSITIVE,
    "activation_situ_linear_beta": POSITIVE,
    "rms_norm_eps": POSITIVE,
    "attn_res_block_size": COUNT.because("layers are joined by attention residuals only"),
    "first_k_dense_replace": NATURAL,
    "moe_layer_freq": only(1, "every layer after the dense ones is a mixture of experts"),
    "num_experts": COUNT,
    "num_experts_per_token": COUNT,
    "num_expert_group": COUNT,
    "topk_group": COUNT,
    "use_grouped_topk": FLAG,
    "topk_method": only("noaux_tc", "experts are picked by score plus correction bias only"),
    "moe_router_activation_func": only("sigmoid", "no other router is computed"),
    "moe_intermediate_size": COUNT,
    "moe_renormalize": FLAG,
    "routed_expert_hidden_size": COUNT.because("routed experts are computed in a latent only"),
    "routed_scaling_factor": POSITIVE,
    "latent_moe_use_norm": FLAG,
    "num_shared_experts": COUNT,
    "num_nextn_predict_layers": NATURAL,
    "max_position_embeddings": COUNT,
    "bos_token_id": NATURAL,
    "eos_token_id": NATURAL,
    "pad_token_id": NATURAL,
    "tie_word_embeddings": only(False, "the output head has weights of its own"),
}

LINEAR_FIELDS: Mapping[str, Kind] = {
    "num_heads": COUNT,
    "head_dim": COUNT,
    "short_conv_kernel_size": COUNT,
    "gate_lower_bound": NEGATIVE.because("KDA is computed with the bounded decay gate only"),
    "use_full_rank_gate": only(True, "KDA is computed with a full-rank output gate only"),
    "full_attn_layers": LAYERS,
    "kda_layers": LAYERS,
}

# Published at both levels; either will do, and where both are given they must agree.
EITHER_LEVEL = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"})

# May be left out; where given, only this.
OPTIONAL_FIELDS: Mapping[str, Kind] = {
    "dtype": only("bfloat16", "weights and activations are bfloat16"),
    "torch_dtype": only("bfloat16", "weights and activations are bfloat16"),
    "model_type": only("kimi_linear", "it is the text model of the K3 family"),
    "rope_theta": only(None, "rotary positions are not computed"),
    "rope_scaling": only(None, "rotary positions are not computed"),
}

# Left there by the library that wrote the file; they do not change what the model computes.
# `head_dim` is among them because the head sizes are qk_nope_head_dim and its neighbours.
IGNORED_FIELDS = frozenset(
    """
    _name_or_path add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id head_dim id2label initializer_range
    is_decoder is_encoder_decoder label2id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
    torchscript transformers_version typical_p use_bfloat16 use_cache
    """.split()  # noqa: SIM905  (as a list literal these are 54 lines)
)

# Only these say how experts are stored; which tensors are stored so is seen in the checkpoint.
QUANT_FIELDS: Mapping[str, Kind] = {
    "quant_method": only("compressed-tensors", "no other quantisation is read"),
    "format": only("mxfp4-pack-quantized", "no other quantisation is read"),
    "quantization_status": only("compressed", "weights are read as stored"),
    "kv_cache_scheme": only(None, "the cache is not quantised"),
}
QUANT_GROUP_FIELDS: Mapping[str, Kind] = {
    "format": only("mxfp4-pack-quantized", "no other quantisation is read"),
    "targets": only(["Linear"], "no other modules are quantised"),
    "input_activations": only(None, "activations are not quantised"),
    "output_activations": only(None, "activations are not quantised"),
}
QUANT_WEIGHT_FIELDS: Mapping[str, Kind] = {
    "num_bits": only(4, "weights are MXFP4"),
    "type": only("float", "weights are MXFP4"),
    "strategy": only("group", "weights are MXFP4"),
    "group_size": only(32, "weights are MXFP4"),
    "symmetric": only(True, "weights have no zero point"),
    "dynamic": only(False, "scales are stored"),
    "actorder": only(None, "columns are stored in order"),
    "block_structure": only(None, "weights are MXFP4"),
    "zp_dtype": only(None, "weights have no zero point"),
    "scale_dtype": only("torch.uint8", "scales are E8M0 bytes"),
}
QUANT_IGNORED = frozenset({"ignore", "global_compression_ratio", "version", "config_groups"})
QUANT_WEIGHT_IGNORED = frozenset({"observer", "observer_kwargs"})
QUANT_MAY_LACK = frozenset({"scale_dtype", "quantization_status"})

# What generation_config.json may propose for sampling.
PROPOSALS: Mapping[str, Kind] = {
    "temperature": Kind("a number of at least 0", lambda v: is_number(v) and v >= 0, float),
    "top_p": Kind("a number above 0 and at most 1", lambda v: is_number(v) and 0 < v <= 1, float),
    "top_k": NATURAL,
    "min_p": Kind("a number from 0 to 1", lambda v: is_number(v) and 0 <= v <= 1, float),
    "repetition_penalty": POSITIVE,
}

# What it may propose for replies and nobody here takes, with the values that
# change nothing; absent or null changes nothing either.
NOT_TAKEN: Mapping[str, tuple[object, ...]] = {
    **{"typical_p": (1,), "presence_penalty": (0,), "frequency_penalty": (0,)},
    **{
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "length_penalty": (1,),
        "num_beams": (1,),
        "min_length": (0,),
    },
    **{"encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,), "min_new_tokens": (0,)},
    **dict.fromkeys(("max_new_tokens", "stop_strings", "bad_words_ids", "suppress_tokens"), ()),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), ()),
}


def not_taken(raw: Mapping[str, Any]) -> list[str]:
    """What a generation_config.json proposes in vain, a sentence each."""
    return [
        f"generation_config.json: {name} {show(raw[name])} is not taken"
        for name, neutral in NOT_TAKEN.items()
        if raw.get(name) is not None and raw[name] not in neutral
    ]


# (fields, what must hold of them, why). The first field is the one named.
Relation = tuple[tuple[str, ...], Callable[..., bool], str]
RELATIONS: tuple[Relation, ...] = (
    (
        ("num_key_value_heads", "num_attention_heads"),
        lambda kv, heads: kv == heads,
        "must equal num_attention_heads: MLA has a key and a value for every query head",
    ),
    (
        ("num_expert_group", "num_experts"),
        lambda groups, experts: experts % groups == 0,
        "must divide num_experts",
    ),
    (
        ("num_expert_group", "num_experts"),
        lambda groups, experts: groups == 1 or experts >= 2 * groups,
        "must leave two experts a group: the two best scores of a group rank it",
    ),
    (
        ("topk_group", "num_expert_group"),
        lambda kept, groups: kept <= groups,
        "must be at most num_expert_group",
    ),
    (
        ("use_grouped_topk", "num_expert_group"),
        lambda grouped, groups: grouped or groups == 1,
        "must be true where num_expert_group is above 1",
    ),
    (
        ("num_experts_per_token", "num_experts"),
        lambda picked, experts: picked <= experts,
        "must be at most num_experts",
    ),
    (
        ("num_experts_per_token", "topk_group", "num_experts", "num_expert_group"),
        lambda picked, kept, experts, groups: picked <= kept * (experts // groups),
        "must be at most topk_group * num_experts / num_expert_group, the experts left to pick",
    ),
    (
        ("moe_intermediate_size",),
        lambda width: width % 32 == 0,
        "must be divisible by 32: experts' inputs share a scale in groups of 32",
    ),
    (
        ("routed_expert_hidden_size",),
        lambda width: width % 32 == 0,
        "must be divisible by 32: experts' inputs share a scale in groups of 32",
    ),
    (
        ("first_k_dense_replace", "num_hidden_layers"),
        lambda dense, layers: dense <= layers,
        "must be at most num_hidden_layers",
    ),
    (
        ("num_heads", "head_dim"),
        lambda heads, head_dim: heads <= head_dim,
        "must be at most head_dim: A_log is stored with head_dim entries, one a head",
    ),
    *(
        (
            (token, "vocab_size"),
            lambda token_id, vocab_size: token_id < vocab_size,
            "must be below vocab_size",
        )
        for token in ("bos_token_id", "eos_token_id", "pad_token_id")
    ),
)
