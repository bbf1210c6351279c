"""Applies the rules of `config_rules.py` to a parsed config.json.

Returns plain values by name; `config.py` makes records of them. Problems are gathered, so that a
user sees all of them at once, each with its JSON path.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from nanok3.config_rules import (
    EITHER_LEVEL,
    IGNORED_FIELDS,
    LINEAR_FIELDS,
    OPTIONAL_FIELDS,
    QUANT_FIELDS,
    QUANT_GROUP_FIELDS,
    QUANT_IGNORED,
    QUANT_MAY_LACK,
    QUANT_WEIGHT_FIELDS,
    QUANT_WEIGHT_IGNORED,
    RELATIONS,
    TEXT_FIELDS,
    Kind,
    show,
)


class ConfigError(ValueError):
    """Reasons why a config cannot be run, one a line, each with its JSON path."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def path_of(name: str) -> str:
    return (
        f"text_config.linear_attn_config.{name}" if name in LINEAR_FIELDS else f"text_config.{name}"
    )


def checked_fields(raw: object) -> dict[str, Any]:
    """Values of all fields of both tables, by name; ConfigError if anything is refused."""
    if not isinstance(raw, dict):
        raise ConfigError([f"config.json: expected an object, found {show(raw)}"])
    text = raw.get("text_config")
    if not isinstance(text, dict):
        found = "missing" if "text_config" not in raw else f"expected an object, found {show(text)}"
        hint = "the fields of the text model are read from there, as K3 publishes them"
        raise ConfigError([f"text_config: {found}; {hint}, not from the top level"])

    problems: list[str] = []
    values = read_fields(with_top_level(raw, text, problems), "text_config", TEXT_FIELDS, problems)
    read_fields(text, "text_config", OPTIONAL_FIELDS, problems, may_lack=set(OPTIONAL_FIELDS))
    known = {*TEXT_FIELDS, *OPTIONAL_FIELDS, "linear_attn_config", "quantization_config"}
    refuse_unknown(text, "text_config", known | IGNORED_FIELDS, problems)

    path = "text_config.linear_attn_config"
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict):
        values |= read_fields(linear, path, LINEAR_FIELDS, problems)
        refuse_unknown(linear, path, set(LINEAR_FIELDS), problems)
    else:
        problems.append(f"{path}: expected an object, found {show(linear)}")

    for names, holds, why in RELATIONS:
        if all(name in values for name in names) and not holds(*(values[name] for name in names)):
            found = ", ".join(f"{name} {show(values[name])}" for name in names)
            problems.append(f"{path_of(names[0])}: {why}; found {found}")
    check_layer_lists(values, problems)
    check_quantization(text.get("quantization_config"), "text_config.quantization_config", problems)
    check_quantization(raw.get("quantization_config"), "quantization_config", problems)
    if problems:
        raise ConfigError(problems)
    return values


def with_top_level(
    raw: dict[str, Any], text: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    """`text` with what only the top level gives; a top level that says otherwise is refused."""
    merged = dict(text)
    for name in [*TEXT_FIELDS, "dtype", "torch_dtype"]:
        if name not in raw:
            continue
        if name not in text:
            if name in EITHER_LEVEL:
                merged[name] = raw[name]
        elif type(raw[name]) is not type(text[name]) or raw[name] != text[name]:
            found = f"found {show(raw[name])} and {show(text[name])}"
            problems.append(f"{name}: must agree with text_config.{name}; {found}")
    for name, expected in (("model_type", "kimi_k3"), ("rope_theta", None), ("rope_scaling", None)):
        if name in raw and raw[name] != expected:
            problems.append(f"{name}: expected {show(expected)}, found {show(raw[name])}")
    return merged


def read_fields(
    source: dict[str, Any],
    path: str,
    kinds: Mapping[str, Kind],
    problems: list[str],
    may_lack: set[str] | frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The fields that are as they should be; the others become problems."""
    values = {}
    for name, kind in kinds.items():
        why = f"; {kind.why}" if kind.why else ""
        if name not in source:
            if name not in may_lack:
                problems.append(f"{path}.{name}: missing; expected {kind.expected}{why}")
        elif not kind.accepts(source[name]):
            found = f"found {show(source[name])}"
            problems.append(f"{path}.{name}: expected {kind.expected}, {found}{why}")
        else:
            values[name] = kind.convert(source[name])
    return values


def refuse_unknown(
    source: dict[str, Any], path: str, known: set[str] | frozenset[str], problems: list[str]
) -> None:
    why = "unknown field; this version of nanok3 cannot know whether it changes the result"
    problems.extend(f"{path}.{name}: {why}" for name in source if name not in known)


def check_layer_lists(values: dict[str, Any], problems: list[str]) -> None:
    """Every layer 1..L is in exactly one of the two lists."""
    if not {"full_attn_layers", "kda_layers", "num_hidden_layers"} <= values.keys():
        return
    full, kda = set(values["full_attn_layers"]), set(values["kda_layers"])
    named, num_layers = full | kda, values["num_hidden_layers"]
    path = "text_config.linear_attn_config"
    beyond = f"beyond num_hidden_layers {num_layers}"
    unnamed = (layer for layer in range(1, num_layers + 1) if layer not in named)
    for name, wrong, what in (
        ("kda_layers", sorted(full & kda), "also in full_attn_layers"),
        ("kda_layers", sorted(layer for layer in kda if layer > num_layers), beyond),
        ("full_attn_layers", sorted(layer for layer in full if layer > num_layers), beyond),
        ("kda_layers", list(islice(unnamed, 20)), "in neither kda_layers nor full_attn_layers"),
    ):
        if wrong:
            problems.append(f"{path}.{name}: layers {show(wrong)} are {what}")


def check_quantization(quant: object, path: str, problems: list[str]) -> None:
    """Experts are MXFP4 in groups of 32, or not quantised at all."""
    if quant is None:
        return
    if not isinstance(quant, dict):
        problems.append(f"{path}: expected an object, found {show(quant)}")
        return
    check_quantization_level(quant, path, QUANT_FIELDS, QUANT_IGNORED, problems)
    groups = quant.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        problems.append(f"{path}.config_groups: expected a group of weights, found {show(groups)}")
        return
    for label, group in groups.items():
        where = f"{path}.config_groups.{label}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            problems.append(f"{where}.weights: expected an object, found {show(weights)}")
            continue
        check_quantization_level(group, where, QUANT_GROUP_FIELDS, frozenset({"weights"}), problems)
        check_quantization_level(
            weights, f"{where}.weights", QUANT_WEIGHT_FIELDS, QUANT_WEIGHT_IGNORED, problems
        )


def check_quantization_level(
    source: dict[str, Any],
    path: str,
    kinds: Mapping[str, Kind],
    ignored: frozenset[str],
    problems: list[str],
) -> None:
    may_lack = QUANT_MAY_LACK | {name for name, kind in kinds.items() if kind.accepts(None)}
    read_fields(source, path, kinds, problems, may_lack)
    said = {name: value for name, value in source.items() if value not in (None, {}, [])}
    refuse_unknown(said, path, {*kinds, *ignored}, problems)
