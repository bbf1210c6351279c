"""Drafts' configs: every fact read or fixed by the format, everything else refused by its name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from drafts import INFERACT, REDHAT, tiny_inferact, tiny_redhat
from tiny import TINY, tiny_config

from nanok3.config import K3, ConfigError
from nanok3.spec.config import GQAShape, LayerMask, MLAShape, Rope, draft_config, load_draft_config


def refused(raw: object) -> str:
    with pytest.raises(ConfigError) as caught:
        draft_config(raw)
    return str(caught.value)


def without(raw: dict[str, Any], *path: str) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    inner = raw
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return raw


def changed(raw: dict[str, Any], value: Any, *path: str) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    inner = raw
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return raw


def test_inferact() -> None:
    c = draft_config(INFERACT)
    assert c.attention == MLAShape(64, 1536, 512, 128, 64, 128)
    assert c.layers == (LayerMask(causal=False, window=None),) * 5 and not c.is_causal
    assert c.rope == Rope(50000.0, True, 32.0, 32768, 32.0, 1.0, 1.0, 1.0)
    assert c.taps == (3, 24, 48, 72, 90)  # after so many layers
    assert (c.block_size, c.mask_token_id, c.markov_rank, c.owns_vocab) == (7, 163837, 256, False)
    assert (c.hidden_size, c.intermediate_size, c.rms_norm_eps) == (7168, 14336, 1e-5)
    assert c.problems(K3) == []


def test_redhat() -> None:
    c = draft_config(REDHAT)
    assert c.attention == GQAShape(96, 16, 64)
    assert c.layers == (LayerMask(causal=True, window=2048),) * 5 and c.is_causal
    assert c.rope == Rope(10000.0, False)
    assert c.taps == (24, 48, 72, 88, 92)
    assert (c.block_size, c.mask_token_id, c.markov_rank, c.owns_vocab) == (8, 163837, 256, True)
    assert c.problems(K3) == []


def test_full_layers_see_the_whole_window() -> None:
    c = draft_config(tiny_redhat(("sliding_attention", "full_attention")))
    assert c.layers == (LayerMask(True, 6), LayerMask(False, None)) and not c.is_causal


ROPE = ("rope_parameters",)
INNER = ("transformer_layer_config",)
OPTIONAL = ("torch_dtype", "_torchspec_version", "bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize("name", [n for n in INFERACT if n not in OPTIONAL])
def test_every_field_of_inferact_is_needed(name: str) -> None:
    assert name in refused(without(INFERACT, name))


@pytest.mark.parametrize("name", INFERACT["rope_parameters"])
def test_every_field_of_yarn_is_needed(name: str) -> None:
    assert f"rope_parameters.{name}" in refused(without(INFERACT, *ROPE, name))


@pytest.mark.parametrize("name", [n for n in REDHAT if n != "dtype"])
def test_every_field_of_speculators_is_needed(name: str) -> None:
    assert name in refused(without(REDHAT, name))


@pytest.mark.parametrize("name", REDHAT["transformer_layer_config"])
def test_every_field_of_its_layers_is_needed(name: str) -> None:
    assert f"transformer_layer_config.{name}" in refused(without(REDHAT, *INNER, name))


@pytest.mark.parametrize(
    ("raw", "value", "path"),
    [
        (INFERACT, True, ("mla_use_nope",)),
        (INFERACT, True, ("mla_use_output_gate",)),
        (INFERACT, "gated", ("markov_head_type",)),
        (INFERACT, False, ("enable_confidence_head",)),
        (INFERACT, "gelu", ("hidden_act",)),
        (INFERACT, 32000, ("draft_vocab_size",)),
        (INFERACT, 8, ("num_key_value_heads",)),
        (INFERACT, 4096, ("target_hidden_size",)),
        (INFERACT, 4, ("num_target_layers",)),
        (INFERACT, [23, 2, 47, 71, 89], ("target_layer_ids",)),
        (INFERACT, 63, ("qk_rope_head_dim",)),
        (INFERACT, "linear", (*ROPE, "rope_type")),
        (INFERACT, 10000, (*ROPE, "rope_theta")),
        (INFERACT, 1, ("something_new",)),
        (INFERACT, 1, (*ROPE, "something_new")),
        (INFERACT, ["KimiK3DraftModel"], ("architectures",)),
        (REDHAT, False, ("sample_from_anchor",)),
        (REDHAT, True, ("sliding_window_non_causal",)),
        (REDHAT, [0, 48], ("aux_hidden_state_layer_ids",)),
        (REDHAT, {"algorithm": "eagle3"}, ("speculators_config",)),
        (REDHAT, 1, ("something_new",)),
        (REDHAT, 1, (*INNER, "something_new")),
        (REDHAT, None, (*INNER, "sliding_window")),
        (REDHAT, False, (*INNER, "use_sliding_window")),
        (REDHAT, ["sliding_attention"] * 4, (*INNER, "layer_types")),
        (REDHAT, {"rope_type": "yarn", "factor": 4}, (*INNER, "rope_scaling")),
        (REDHAT, 17, (*INNER, "num_key_value_heads")),
        (REDHAT, "llama", (*INNER, "model_type")),
    ],
)
def test_what_has_no_formula_is_refused(
    raw: dict[str, Any], value: Any, path: tuple[str, ...]
) -> None:
    assert path[-1] in refused(changed(raw, value, *path))


def test_not_an_object() -> None:
    assert "expected an object" in refused([])
    assert "architectures" in refused({})


def test_a_draft_of_another_model_is_refused() -> None:
    c = draft_config(tiny_inferact())
    assert c.problems(TINY) == []
    assert "hidden_size" in c.problems(tiny_config(hidden_size=96))[0]
    assert "vocab_size" in c.problems(K3)[1]
    shorter = draft_config(tiny_inferact(target_num_hidden_layers=9)).problems(TINY)
    assert "target_num_hidden_layers" in shorter[0]
    last = draft_config(tiny_inferact(target_layer_ids=[1, 2, 6]))
    assert "taps" in last.problems(TINY)[0]


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_draft_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(without(INFERACT, "markov_rank")))
    with pytest.raises(ConfigError, match=f"{tmp_path}.*markov_rank: missing"):
        load_draft_config(tmp_path)
