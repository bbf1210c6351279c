"""What a draft's config.json says: `DraftConfig`, from either of the two published formats.

A fact comes from the config, or, where a format fixes it without writing it, from `FORMATS`, the
table by `architectures[0]` in `config_rules.py`. What is in neither is refused, and so is a field
that nobody here reads: a draft that is run a little wrong still runs, and only its acceptance is
lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanok3.config import ConfigError, ModelConfig, read_json
from nanok3.config_check import read_fields, refuse_unknown
from nanok3.config_rules import show
from nanok3.spec.config_rules import (
    FORMATS,
    IGNORED,
    INFERACT_FIELDS,
    INFERACT_OPTIONAL,
    QWEN3_FIELDS,
    QWEN3_OPTIONAL,
    SAID_BY_THE_CHECKPOINT,
    SPECULATORS_FIELDS,
    SPECULATORS_OPTIONAL,
    YARN_FIELDS,
    Format,
)


@dataclass(frozen=True)
class Rope:
    """Rotary positions; `factor` 1 is the plain form, above 1 YaRN."""

    theta: float
    interleaved: bool  # pairs (0, 1), (2, 3), ... (GPT-J); else halves (NeoX)
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class MLAShape:
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values cached per token and layer: the normalised latent and the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class GQAShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def cache_width(self) -> int:
        """Values cached per token and layer: rotated keys and values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LayerMask:
    """What the rows of a layer see besides themselves."""

    causal: bool  # of the draft window: rows up to their own, else all
    window: int | None  # of the context: this many tokens before the anchor, for every row; or all


@dataclass(frozen=True)
class DraftConfig:
    """A DSpark draft; both formats come to this."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    attention: MLAShape | GQAShape
    layers: tuple[LayerMask, ...]
    rope: Rope
    taps: tuple[int, ...]  # of the target: its running sum after this many layers have run
    block_size: int  # rows of a draft window, each of which gives a draft
    mask_token_id: int
    markov_rank: int
    owns_vocab: bool  # brings its embedding and its head; else it uses the target's
    max_position_embeddings: int
    target_num_hidden_layers: int | None  # where the config says of which model it is a draft

    @property
    def is_causal(self) -> bool:
        return all(layer.causal for layer in self.layers)

    def problems(self, target: ModelConfig) -> list[str]:
        """Reasons, one a line, why this draft cannot serve this target; empty if it can."""
        refusals = (
            (
                self.hidden_size != target.hidden_size,
                f"hidden_size: the draft has {self.hidden_size}, the model {target.hidden_size}",
            ),
            (
                self.vocab_size != target.vocab_size,
                f"vocab_size: the draft has {self.vocab_size}, the model {target.vocab_size}",
            ),
            (
                self.target_num_hidden_layers not in (None, target.num_hidden_layers),
                f"target_num_hidden_layers: the draft is of a model with "
                f"{self.target_num_hidden_layers}, this one has {target.num_hidden_layers}",
            ),
            (
                max(self.taps) >= target.num_hidden_layers,
                f"taps: the draft reads the model after layer {max(self.taps) - 1} (from 0), the "
                f"model has {target.num_hidden_layers} and its last one is never tapped",
            ),
            (
                self.mask_token_id >= target.vocab_size,
                f"mask_token_id: expected below the model's {target.vocab_size}, "
                f"found {self.mask_token_id}",
            ),
        )
        return [reason for refused, reason in refusals if refused]


# ---- reading ----


def load_draft_config(draft_dir: Path) -> DraftConfig:
    """The draft that config.json of a directory describes; ConfigError if it cannot be run."""
    path = draft_dir / "config.json"
    if not path.is_file():
        raise ConfigError([f"{path}: no such file; name a directory with a DSpark draft"])
    try:
        return draft_config(read_json(path))
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error


def draft_config(raw: object) -> DraftConfig:
    """The record of a parsed config.json; ConfigError lists all that is refused."""
    if not isinstance(raw, dict):
        raise ConfigError([f"expected an object, found {show(raw)}"])
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if not isinstance(name, str) or name not in FORMATS:
        known = " or ".join(FORMATS)
        raise ConfigError([f"architectures: expected [{known}], found {show(named)}"])
    if name == "K3DSparkModel":
        return inferact(raw, FORMATS[name])
    return speculators(raw, FORMATS[name])


def inferact(raw: dict[str, Any], fixed: Format) -> DraftConfig:
    """`Inferact/Kimi-K3-DSpark`: MLA, every row sees the whole context and the whole window."""
    problems: list[str] = []
    fields = {**INFERACT_FIELDS, **INFERACT_OPTIONAL}
    v = read_fields(raw, "config", fields, problems, may_lack=set(INFERACT_OPTIONAL))
    rope = raw.get("rope_parameters")
    y: dict[str, Any] = {}
    if isinstance(rope, dict):
        y = read_fields(rope, "config.rope_parameters", YARN_FIELDS, problems)
        refuse_unknown(rope, "config.rope_parameters", set(YARN_FIELDS), problems)
    else:
        problems.append(f"config.rope_parameters: expected an object, found {show(rope)}")
    refuse_unknown(raw, "config", {*fields, *IGNORED, "rope_parameters"}, problems)
    agree(v | {"rope_parameters.rope_theta": y.get("rope_theta")}, problems, (
        ("rope_parameters.rope_theta", "rope_theta"),
        ("draft_vocab_size", "vocab_size"),
        ("num_key_value_heads", "num_attention_heads"),
        ("target_hidden_size", "hidden_size"),
    ))  # fmt: skip
    if not problems and len(v["target_layer_ids"]) != v["num_target_layers"]:
        problems.append(
            f"config.num_target_layers: expected {len(v['target_layer_ids'])}, the number of "
            f"target_layer_ids, found {v['num_target_layers']}"
        )
    check_rope_dim(v.get("qk_rope_head_dim"), "qk_rope_head_dim", problems)
    if problems:
        raise ConfigError(problems)
    y.pop("rope_type")
    y.pop("rope_theta")
    return DraftConfig(
        architecture="K3DSparkModel",
        attention=MLAShape(
            v["num_attention_heads"],
            *(v[n] for n in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")),
            *(v[n] for n in ("qk_rope_head_dim", "v_head_dim")),
        ),
        layers=(LayerMask(causal=False, window=None),) * v["num_hidden_layers"],
        rope=Rope(v["rope_theta"], fixed.interleaved_rope, **y),
        taps=tuple(i + fixed.tap_offset for i in v["target_layer_ids"]),
        target_num_hidden_layers=v["target_num_hidden_layers"],
        block_size=int(v.get("block_size") or fixed.block_size or 0),
        owns_vocab=fixed.owns_vocab,
        **{n: v[n] for n in SAME_NAMES},
    )


SAME_NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "mask_token_id"),
    *("markov_rank", "max_position_embeddings"),
)


def speculators(raw: dict[str, Any], fixed: Format) -> DraftConfig:
    """`RedHatAI/Kimi-K3-speculator.dspark`: Qwen3's layers, the mask layer by layer."""
    problems: list[str] = []
    fields = {**SPECULATORS_FIELDS, **SPECULATORS_OPTIONAL}
    v = read_fields(raw, "config", fields, problems, may_lack=set(SPECULATORS_OPTIONAL))
    refuse_unknown(raw, "config", {*fields, *IGNORED, *SAID_BY_THE_CHECKPOINT}, problems)
    spec = raw.get("speculators_config")
    if not isinstance(spec, dict) or spec.get("algorithm") != "dspark":
        expected = 'expected an object with algorithm "dspark"'
        problems.append(f"config.speculators_config: {expected}, found {show(spec)}")
    inner, path = raw.get("transformer_layer_config"), "config.transformer_layer_config"
    if isinstance(inner, dict):
        fields = {**QWEN3_FIELDS, **QWEN3_OPTIONAL}
        v |= read_fields(inner, path, fields, problems, may_lack=set(QWEN3_OPTIONAL))
        refuse_unknown(inner, path, {*fields, *IGNORED}, problems)
    else:
        problems.append(f"{path}: expected an object, found {show(inner)}")
    rope = v.get("rope_parameters") or {}
    v["rope_parameters.rope_theta"] = rope.get("rope_theta", v.get("rope_theta"))
    agree(v, problems, (
        ("draft_vocab_size", "vocab_size"),
        ("rope_parameters.rope_theta", "rope_theta"),
    ))  # fmt: skip
    check_rope_dim(v.get("head_dim"), "transformer_layer_config.head_dim", problems)
    if not problems:
        check_windows(v, path, problems)
    if problems:
        raise ConfigError(problems)
    masks = {  # a windowed layer is causal in the draft window, a full one sees all of it
        "sliding_attention": LayerMask(causal=True, window=v.get("sliding_window")),
        "full_attention": LayerMask(causal=False, window=None),
    }
    return DraftConfig(
        architecture="DSparkDraftModel",
        attention=GQAShape(v["num_attention_heads"], v["num_key_value_heads"], v["head_dim"]),
        layers=tuple(masks[kind] for kind in v["layer_types"]),
        rope=Rope(v["rope_theta"], fixed.interleaved_rope),
        taps=tuple(i + fixed.tap_offset for i in v["aux_hidden_state_layer_ids"]),
        target_num_hidden_layers=None,
        block_size=v["block_size"],
        owns_vocab=fixed.owns_vocab,
        **{n: v[n] for n in SAME_NAMES},
    )


def check_windows(v: dict[str, Any], path: str, problems: list[str]) -> None:
    """The three fields that say which layers are windowed must say the same."""
    kinds, window = v["layer_types"], v.get("sliding_window")
    if len(kinds) != v["num_hidden_layers"]:
        expected = f"expected {v['num_hidden_layers']} entries, one a layer"
        problems.append(f"{path}.layer_types: {expected}, found {len(kinds)}")
    slides = "sliding_attention" in kinds
    if slides and window is None:
        problems.append(f"{path}.sliding_window: missing, though layer_types has windowed layers")
    if slides and not v["use_sliding_window"]:
        why = "must be true where layer_types has windowed layers"
        problems.append(f"{path}.use_sliding_window: {why}")
    if v["num_attention_heads"] % v["num_key_value_heads"]:
        why = f"must divide num_attention_heads {v['num_attention_heads']}"
        problems.append(f"{path}.num_key_value_heads: {why}; found {v['num_key_value_heads']}")
    if 0 in v["aux_hidden_state_layer_ids"]:
        problems.append("config.aux_hidden_state_layer_ids: expected at least 1 layer to have run")


def agree(values: dict[str, Any], problems: list[str], pairs: tuple[tuple[str, str], ...]) -> None:
    for name, other in pairs:
        a, b = values.get(name), values.get(other)
        if a is not None and b is not None and a != b:
            problems.append(f"config.{name}: must equal {other} {show(b)}, found {show(a)}")


def check_rope_dim(dim: int | None, name: str, problems: list[str]) -> None:
    if dim is not None and dim % 2:
        problems.append(f"config.{name}: expected an even number, as pairs turn; found {dim}")
