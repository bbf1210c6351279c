"""Configs as published are read exactly; whatever else is refused by its JSON path."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanok3.config import (
    K3,
    TP_SIZES,
    WHOLE,
    ConfigError,
    EngineConfig,
    GenerationDefaults,
    ModelConfig,
    Shard,
    load_config,
    load_generation_defaults,
)

DATA = Path(__file__).parent / "data"
OFFICIAL = Path(__file__).parents[2] / "shared" / "data" / "k3_config.json"
LINEAR = "linear_attn_config"
WEIGHTS = "text_config.quantization_config.config_groups.group_0.weights"


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("golden")
    subprocess.run([sys.executable, DATA / "make_golden_k3.py", "golden", out], check=True)
    return out


@pytest.fixture
def raw(golden: Path) -> dict[str, Any]:
    """A parsed config of 11 layers that is in order, to be spoilt."""
    return json.loads((golden / "config.json").read_text())


def put(raw: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    *parents, last = path.split(".")
    level = raw
    for name in parents:
        level = level[name]
    level[last] = value
    return raw


def drop(raw: dict[str, Any], path: str) -> dict[str, Any]:
    *parents, last = path.split(".")
    level = raw
    for name in parents:
        level = level[name]
    del level[last]
    return raw


def problems_of(raw: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw)
    assert str(caught.value).splitlines() == caught.value.problems
    return caught.value.problems


def test_official_config_is_the_preset() -> None:
    if not OFFICIAL.exists():
        pytest.skip("needs ../shared/data/k3_config.json")
    assert ModelConfig.from_dict(json.loads(OFFICIAL.read_text())) == K3


def test_preset_has_the_published_numbers() -> None:
    assert [i for i in range(93) if not K3.is_kda(i)] == [*range(3, 92, 4), 92]
    assert (len(K3.kda_layer_ids), len(K3.mla_layer_ids)) == (69, 24)
    assert [K3.is_moe(0), K3.is_moe(1), K3.is_moe(92)] == [False, True, True]
    assert (K3.qk_head_dim, K3.latent_width) == (192, 576)
    assert (K3.linear_attn_config.width, K3.shared_intermediate_size) == (12288, 6144)
    assert K3.num_res_blocks == 9  # the embedding and 8 blocks of layers
    # bytes that grow with each token, and the fixed fp32 state of a request (pitfalls L-01)
    assert len(K3.mla_layer_ids) * K3.latent_width * 2 == 27_648
    heads, head_dim = K3.linear_attn_config.num_heads, K3.linear_attn_config.head_dim
    assert len(K3.kda_layer_ids) * heads * head_dim**2 * 4 == 434_110_464


def test_golden_config_is_read(golden: Path, raw: dict[str, Any]) -> None:
    config = load_config(golden)
    for field in dataclasses.fields(config):
        if field.name != LINEAR:
            assert getattr(config, field.name) == raw["text_config"][field.name]
    for field in dataclasses.fields(config.linear_attn_config):
        value = getattr(config.linear_attn_config, field.name)
        published = raw["text_config"][LINEAR][field.name]
        assert (list(value) if isinstance(value, tuple) else value) == published
    assert config.kda_layer_ids == (0, 1, 2, 4, 5, 6, 8)
    assert config.num_res_blocks == 4


REFUSED = [
    ("text_config.moe_router_activation_func", "softmax"),
    ("text_config.q_lora_rank", None),
    ("text_config.routed_expert_hidden_size", None),
    ("text_config.attn_res_block_size", None),
    ("text_config.attn_res_block_size", 0),
    ("text_config.mla_use_output_gate", False),
    ("text_config.mla_use_nope", False),
    ("text_config.rope_theta", 10000.0),
    ("text_config.rope_scaling", {"type": "yarn"}),
    ("text_config.moe_layer_freq", 2),
    ("text_config.hidden_act", "silu"),
    ("text_config.topk_method", "greedy"),
    ("text_config.num_key_value_heads", 1),
    ("text_config.dtype", "float16"),
    ("text_config.model_type", "llama"),
    ("text_config.linear_attn_config.gate_lower_bound", None),
    ("text_config.linear_attn_config.gate_lower_bound", 0),
    ("text_config.linear_attn_config.gate_lower_bound", 5.0),
    ("text_config.linear_attn_config.use_full_rank_gate", False),
    ("text_config.linear_attn_config.num_heads", 129),  # A_log has head_dim entries
    # wrong types: true is no number, a number in quotes neither, and NaN is JSON to Python
    ("text_config.num_shared_experts", True),
    ("text_config.hidden_size", "320"),
    ("text_config.hidden_size", 320.0),
    ("text_config.hidden_size", -1),
    ("text_config.moe_renormalize", 1),
    ("text_config.routed_scaling_factor", "1"),
    ("text_config.rms_norm_eps", float("nan")),
    ("text_config.rms_norm_eps", 0),
    ("text_config.activation_situ_beta", float("inf")),
    ("text_config.linear_attn_config", None),
    ("text_config.linear_attn_config.kda_layers", "1, 2"),
    ("text_config.linear_attn_config.kda_layers", [0, 1, 2, 3, 5, 6, 7, 9]),
    ("text_config.linear_attn_config.kda_layers", [1, 1, 2, 3, 5, 6, 7, 9]),
    # sizes that do not go together
    ("text_config.moe_intermediate_size", 80),
    ("text_config.routed_expert_hidden_size", 100),
    ("text_config.num_expert_group", 5),
    ("text_config.num_expert_group", 0),
    ("text_config.topk_group", 2),
    ("text_config.topk_group", 0),
    ("text_config.num_experts_per_token", 33),
    ("text_config.first_k_dense_replace", 12),
    ("text_config.bos_token_id", 608),
    ("text_config.eos_token_id", 608),
    ("text_config.pad_token_id", -1),
    # experts stored in another way
    ("text_config.quantization_config", "fp8"),
    ("text_config.quantization_config.quant_method", "gptq"),
    ("text_config.quantization_config.format", "nvfp4-pack-quantized"),
    ("text_config.quantization_config.kv_cache_scheme", {"num_bits": 8}),
    ("text_config.quantization_config.config_groups", {}),
    ("text_config.quantization_config.config_groups.group_0.weights", None),
    ("text_config.quantization_config.config_groups.group_0.input_activations", {"num_bits": 8}),
    ("text_config.quantization_config.transform_config", {"hadamard": 1}),
    (f"{WEIGHTS}.group_size", 16),
    (f"{WEIGHTS}.num_bits", 8),
    (f"{WEIGHTS}.type", "int"),
    (f"{WEIGHTS}.symmetric", False),
    (f"{WEIGHTS}.dynamic", True),
    (f"{WEIGHTS}.actorder", "group"),
    # what we have not heard of
    ("text_config.attention_bias", True),
    ("text_config.linear_attn_config.allow_neg_eigval", True),
]


@pytest.mark.parametrize(("path", "value"), REFUSED)
def test_refused_by_name(raw: dict[str, Any], path: str, value: object) -> None:
    problems = problems_of(put(raw, path, value))
    assert any(path in problem for problem in problems), problems


@pytest.mark.parametrize("layers", [[1, 2, 3, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 9], [*range(1, 13)]])
def test_layer_lists_cover_each_layer_once(raw: dict[str, Any], layers: list[int]) -> None:
    problems = problems_of(put(raw, f"text_config.{LINEAR}.kda_layers", layers))
    wrong = {6: "[9] are in neither", 8: "[4] are also in", 12: "[12] are beyond"}[len(layers)]
    assert any(f"{LINEAR}.kda_layers: layers {wrong}" in problem for problem in problems), problems


def test_a_huge_layer_count_is_refused_at_once(raw: dict[str, Any]) -> None:
    assert problems_of(put(raw, "text_config.num_hidden_layers", 10**12))


def test_every_field_may_not_be_missing(raw: dict[str, Any]) -> None:
    """A-12: no field that the result depends on has a default."""
    ignored = {"architectures", "model_type", "dtype", "initializer_range", "use_cache"}
    ignored |= {"quantization_config", "tie_word_embeddings"}
    ignored |= {"bos_token_id", "eos_token_id", "pad_token_id"}  # the top level has these
    for name in raw["text_config"].keys() - ignored - {LINEAR}:
        problems = problems_of(drop(copy.deepcopy(raw), f"text_config.{name}"))
        assert problems[0].startswith(f"text_config.{name}: missing"), problems
    for name in raw["text_config"][LINEAR]:
        problems = problems_of(drop(copy.deepcopy(raw), f"text_config.{LINEAR}.{name}"))
        assert problems[0].startswith(f"text_config.{LINEAR}.{name}: missing"), problems
    for name in ignored:
        ModelConfig.from_dict(drop(copy.deepcopy(raw), f"text_config.{name}"))


def test_all_problems_at_once(raw: dict[str, Any]) -> None:
    put(raw, "text_config.hidden_act", "silu")
    put(raw, "text_config.num_experts_per_token", 33)
    put(raw, "text_config.unheard_of", None)
    put(raw, f"text_config.{LINEAR}.gate_lower_bound", 0.0)
    drop(raw, "text_config.q_lora_rank")
    problems = problems_of(raw)
    named = [problem.partition(":")[0].rpartition(".")[2] for problem in problems]
    assert sorted(set(named)) == [
        "gate_lower_bound",
        "hidden_act",
        "num_experts_per_token",
        "q_lora_rank",
        "unheard_of",
    ]
    text = "\n".join(problems)
    assert "cannot know whether it changes the result" in text
    assert 'expected "situ", found "silu"; no other activation is computed' in text


def test_flat_config_is_refused(raw: dict[str, Any]) -> None:
    """A-12: fields are never read from the wrong level."""
    problems = problems_of(raw["text_config"])
    assert len(problems) == 1
    assert problems[0].startswith("text_config: missing")
    assert problems_of([]) and problems_of({"text_config": None}) and problems_of(None)


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_levels_must_agree(raw: dict[str, Any], name: str) -> None:
    problems = problems_of(put(copy.deepcopy(raw), name, 7))
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}: must agree with text_config.{name}; found 7 and ")
    expected = ModelConfig.from_dict(raw)
    assert ModelConfig.from_dict(drop(copy.deepcopy(raw), f"text_config.{name}")) == expected
    assert ModelConfig.from_dict(drop(copy.deepcopy(raw), name)) == expected
    neither = drop(drop(raw, name), f"text_config.{name}")
    assert problems_of(neither)[0].startswith(f"text_config.{name}: missing")


def test_tied_embeddings_are_refused_at_either_level(raw: dict[str, Any]) -> None:
    top = drop(copy.deepcopy(raw), "text_config.tie_word_embeddings")
    assert "tie_word_embeddings" in problems_of(put(top, "tie_word_embeddings", True))[0]
    assert problems_of(put(copy.deepcopy(raw), "tie_word_embeddings", True))
    assert problems_of(put(raw, "text_config.tie_word_embeddings", True))


def test_a_top_level_that_says_otherwise_is_refused(raw: dict[str, Any]) -> None:
    assert problems_of(put(copy.deepcopy(raw), "hidden_size", 640))[0].startswith("hidden_size:")
    assert problems_of(put(copy.deepcopy(raw), "model_type", "kimi_k2"))
    assert problems_of(put(copy.deepcopy(raw), "rope_theta", 1e6))
    assert problems_of(put(raw, "quantization_config", {"quant_method": "fp8"}))


HONOURED = [
    {"num_expert_group": 4, "topk_group": 2},
    {"moe_renormalize": False, "routed_scaling_factor": 2.5, "latent_moe_use_norm": False},
    {"first_k_dense_replace": 3},
    {"first_k_dense_replace": 0},
    {"num_experts": 896, "num_experts_per_token": 16},
    {"num_experts": 1024, "num_experts_per_token": 16},
    {"activation_situ_beta": 2.0, "activation_situ_linear_beta": 7, "rms_norm_eps": 1e-6},
    {"num_attention_heads": 3, "num_key_value_heads": 3},  # KDA keeps 2
    {"hidden_size": 77, "vocab_size": 613, "qk_rope_head_dim": 6, "v_head_dim": 20},
    {"attn_res_block_size": 1, "num_nextn_predict_layers": 1},
    {"use_grouped_topk": False},  # one group: the same
]


@pytest.mark.parametrize("changes", HONOURED, ids=str)
def test_the_rest_of_the_family_is_honoured(raw: dict[str, Any], changes: dict[str, Any]) -> None:
    raw["text_config"] |= changes
    config = ModelConfig.from_dict(raw)
    for name, value in changes.items():
        if hasattr(config, name):
            assert getattr(config, name) == value


def test_any_layer_pattern_and_numbers_without_a_point(raw: dict[str, Any]) -> None:
    linear = raw["text_config"][LINEAR]
    linear |= {"kda_layers": [], "full_attn_layers": [*range(11, 0, -1)], "gate_lower_bound": -3}
    config = ModelConfig.from_dict(raw)
    assert config.kda_layer_ids == ()
    assert config.mla_layer_ids == tuple(range(11))
    assert isinstance(config.linear_attn_config.gate_lower_bound, float)


def test_grouped_experts_must_leave_enough_to_pick(raw: dict[str, Any]) -> None:
    raw["text_config"] |= {"num_expert_group": 8, "topk_group": 1}
    assert "num_experts_per_token" in problems_of(raw)[0]  # 6 of the 4 in one group
    raw["text_config"] |= {"num_expert_group": 32, "topk_group": 8}
    assert "two experts a group" in problems_of(raw)[0]
    raw["text_config"] |= {"num_expert_group": 8, "topk_group": 4, "use_grouped_topk": False}
    assert "use_grouped_topk" in problems_of(raw)[0]


def test_leftovers_and_a_missing_quantization_are_harmless(raw: dict[str, Any]) -> None:
    expected = ModelConfig.from_dict(raw)
    raw["text_config"] |= {"temperature": 0.3, "return_dict": True, "_name_or_path": "x"}
    raw["text_config"] |= {"head_dim": 74, "rope_scaling": None, "top_k": 50}
    drop(raw, "text_config.quantization_config")
    drop(raw, "vision_config")
    assert ModelConfig.from_dict(raw) == expected


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_config(tmp_path)
    for text in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(ConfigError, match=r"config\.json: expected a JSON file"):
            load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, GenerationDefaults()),
        ("{}", GenerationDefaults()),
        ('{"temperature": 1, "top_p": 0.95}', GenerationDefaults(1.0, 0.95)),
        ('{"top_k": 50, "eos_token_id": 594}', GenerationDefaults(top_k=50, eos_token_id=(594,))),
        (
            '{"eos_token_id": [594, 593], "do_sample": true}',
            GenerationDefaults(eos_token_id=(594, 593)),
        ),
        (
            '{"min_p": 0.1, "repetition_penalty": 1.2}',
            GenerationDefaults(min_p=0.1, repetition_penalty=1.2),
        ),
        ('{"temperature": 0.7, "do_sample": false}', GenerationDefaults(temperature=0.0)),
    ],
)
def test_generation_defaults(
    tmp_path: Path, text: str | None, expected: GenerationDefaults
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert load_generation_defaults(tmp_path) == expected


def test_generation_defaults_are_checked(tmp_path: Path) -> None:
    bad = (
        '{"temperature": -1, "top_p": 0, "top_k": true, "min_p": 2, "repetition_penalty": 0, '
        '"do_sample": 1, "eos_token_id": ["x"]}'
    )
    (tmp_path / "generation_config.json").write_text(bad)
    with pytest.raises(ConfigError) as caught:
        load_generation_defaults(tmp_path)
    names = [problem.split(": ")[1] for problem in caught.value.problems]
    sampled = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
    assert names == [*sampled, "do_sample", "eos_token_id"]


def test_engine_config_problems() -> None:
    assert EngineConfig().problems(K3) == []
    assert EngineConfig(device="cuda:1", dtype="bfloat16", num_blocks=1).problems(K3) == []
    bad = EngineConfig("gpu", "fp16", max_num_reqs=0, block_size=0, num_blocks=0, prefill_chunk=0)
    named = [problem.partition(":")[0] for problem in bad.problems(K3)]
    assert sorted(named) == sorted(
        ["device", "dtype", "max_num_reqs", "block_size", "num_blocks", "prefill_chunk"]
    )
    longer_than_the_model = EngineConfig(block_size=1048577).problems(K3)
    assert longer_than_the_model[0].startswith("block_size")
    for tokens in (0, K3.max_position_embeddings + 1):
        assert EngineConfig(max_context=tokens).problems(K3)[0].startswith("max_context")
    assert EngineConfig(num_blocks=2**26).problems(K3)[0].startswith("num_blocks")


# ---- shards ----


def test_a_shard_names_its_part() -> None:
    assert [Shard(r, 4).slice(12) for r in range(4)] == [
        *(slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12))
    ]
    assert WHOLE.slice(5) == slice(0, 5) and WHOLE.local(5) == 5
    for wrong in ((4, 4), (-1, 2), (0, 3), (0, 64)):
        with pytest.raises(AssertionError):
            Shard(*wrong)
    with pytest.raises(AssertionError):
        Shard(0, 8).slice(12)


def test_k3_splits_over_every_size() -> None:
    for size in TP_SIZES:
        assert Shard(0, size).problems(K3) == []


def test_all_that_does_not_split_is_told_at_once() -> None:
    """k3-mini's experts are 128 wide: four ranks have one scale group each, eight less than one."""
    mini = load_config(Path(__file__).parent.parent / "nanok3" / "models" / "k3_mini")
    assert Shard(0, 4).problems(mini) == []
    problems = Shard(0, 8).problems(mini)
    names = ("num_attention_heads", f"{LINEAR}.num_heads", "moe_intermediate_size")
    assert [p.partition(":")[0] for p in problems] == [f"text_config.{name}" for name in names]
    assert "multiple of 256" in problems[2] and "found 128" in problems[2]
    odd = dataclasses.replace(K3, vocab_size=163841, hidden_size=7170, intermediate_size=33793)
    odd = dataclasses.replace(odd, num_experts=898, routed_expert_hidden_size=3586)
    problems = Shard(0, 4).problems(odd)
    assert len(problems) == 5 and all("multiple of 4" in p for p in problems), problems
