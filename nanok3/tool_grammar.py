"""The tools channel as grammar rules: calls of declared tools, with arguments as their schemas say.

    tools = open(tools) call+ close(tools)
    call = open(call, tool, index) argument* close(call)
    argument = open(argument, key, type) value close(argument)

Arguments come in the order in which the schema declares its properties; one that is not required
may be left out, one that is not declared does not come. A string stands raw between its markers,
so of what a schema can say of strings only enum, const and lengths are enforced; `format` is taken
as a comment, and what else would be lost is refused by name. Any other value is JSON, enforced as a
response's is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CALLS = 16  # in one reply: a call's number is part of its marker, so each has its own rules
TEXT = "/(?s:.*)/"

_SPACE = r"[ \n]{0,32}"  # between JSON tokens: room for an indent, but not for a flood
_COMMENTS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("format", "$comment", "$schema", "$id", "$defs", "definitions", "$anchor"),
}
_OF_PARAMETERS = _COMMENTS | {"type", "properties", "required", "additionalProperties", "strict"}
_OF_STRINGS = _COMMENTS | {"type", "enum", "const", "minLength", "maxLength"}
_OF_OTHERS = {  # say nothing of a string
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties"),
}


@dataclass(frozen=True)
class Markers:
    """How a grammar names the special ids of markers."""

    open: str
    close: str
    sep: str


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that satisfies a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})


def tool_rules(
    tools: Sequence[Mapping[str, Any]], m: Markers, problem_of: Callable[[str], str]
) -> list[str]:
    """The rule `tools` and those that it needs; `problem_of` says what is wrong with a grammar."""

    def tag(verb: str, text: str) -> str:
        return f"{verb} {literal(text)} {m.sep}"

    rules = [f"tools: {tag(m.open, 'tools')} calls_1 {tag(m.close, 'tools')}"]
    functions = [_function(tool) for tool in tools]
    names = [function["name"] for function in functions]
    for number in range(1, MAX_CALLS + 1):
        more = f" calls_{number + 1}?" if number < MAX_CALLS else ""
        calls = [
            f"{tag(m.open, _header('call', tool=name, index=str(number)))} call_{i}"
            for i, name in enumerate(names)
        ]
        rules.append(f"calls_{number}: ({' | '.join(calls)}){more}")
    for i, function in enumerate(functions):
        arguments: list[str] = []
        for key, types, is_required in _arguments(function, problem_of):
            forms = [
                f"{tag(m.open, _header('argument', key=key, type=kind))} ({value})"
                for kind, value in types
            ]
            rules.append(
                f"argument_{i}_{len(arguments)}: ({' | '.join(forms)}) {tag(m.close, 'argument')}"
            )
            arguments.append(f"argument_{i}_{len(arguments)}{'' if is_required else '?'}")
        rules.append(f"call_{i}: {' '.join(arguments)} {tag(m.close, 'call')}")
    return rules


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("to enforce calls, every tool must have a function with a name")
    return function


def _header(tag: str, **attributes: str) -> str:
    pairs = {k: v.replace("&", "&amp;").replace('"', "&quot;") for k, v in attributes.items()}
    return tag + "".join(f' {key}="{value}"' for key, value in pairs.items())


def _arguments(
    function: Mapping[str, Any], problem_of: Callable[[str], str]
) -> list[tuple[str, list[tuple[str, str]], bool]]:
    """For each argument its key, its types with a rule each, and whether it must come."""
    tool, schema = function["name"], function.get("parameters") or {}
    where = f"the parameters of tool {tool}"
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"{where} must be a schema of type object")
    if unknown := sorted(schema.keys() - _OF_PARAMETERS):
        raise ValueError(f"{where}: {', '.join(unknown)} is not supported beside properties")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        raise ValueError(f"{where} need an object of properties and a list of those required")
    others = schema.get("additionalProperties", True)
    out = []
    for key in dict.fromkeys([*properties, *map(str, required)]):
        place = f"argument {key} of tool {tool}"
        types = _types(properties.get(key, others), schema, place, problem_of)
        if types:
            out.append((key, types, key in required))
        elif key in required:
            raise ValueError(f"{place} is required, but its schema allows no value")
    return out


def _types(
    schema: Any, root: Mapping[str, Any], place: str, problem_of: Callable[[str], str]
) -> list[tuple[str, str]]:
    """K3's types that a value of the schema can have, each with the rule for such values."""
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"the schema of {place} must be an object, true or false")
    try:
        strings = _raw_strings(schema, root, place)
    except RecursionError:
        raise ValueError(f"the schema of {place} refers to itself without end") from None
    except (TypeError, AttributeError):
        raise ValueError(f"the schema of {place} has a keyword of the wrong type") from None
    found = [("string", " | ".join(strings))] if strings else []
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    for kind in ("number", "boolean", "null", "object", "array"):
        rule = json_rule({"allOf": [schema, {"type": kind}], **shared})
        problem = problem_of(f"start: {rule}")
        if not problem:
            found.append((kind, rule))
        elif not problem.startswith("Unsatisfiable"):
            raise ValueError(f"the schema of {place} is not supported: {problem}")
    return found


def _raw_strings(schema: Any, root: Mapping[str, Any], place: str) -> list[str]:
    """Rules for the strings among a schema's values, without quotes or escapes."""
    if isinstance(schema, bool):
        return [TEXT] if schema else []
    keys = schema.keys() - _COMMENTS - _OF_OTHERS
    for key in ("$ref", "anyOf", "oneOf"):
        if key not in schema:
            continue
        if beside := sorted(keys - {key}):
            raise ValueError(f"the schema of {place}: {beside[0]} beside {key} is not supported")
        if key == "$ref":
            return _raw_strings(_resolve(schema["$ref"], root, place), root, place)
        parts = [rules for s in schema[key] if (rules := _raw_strings(s, root, place))]
        if key == "oneOf" and len(parts) > 1:
            raise ValueError(f"the schema of {place}: oneOf with several strings is not supported")
        return [rule for rules in parts for rule in rules]
    kinds = schema.get("type", "string")
    if "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        return []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None):
        raise TypeError
    fixed = [schema["const"]] if "const" in schema else schema.get("enum")
    if fixed is not None:
        strings = [s for s in fixed if isinstance(s, str)]
        return [
            literal(s) for s in strings if least <= len(s) <= (len(s) if most is None else most)
        ]
    if unknown := sorted(keys - _OF_STRINGS):
        raise ValueError(f"the schema of {place}: {unknown[0]} of a string is not supported")
    if not least and most is None:
        return [TEXT]
    return [f"/(?s:.{{{least},{'' if most is None else most}}})/"]


def _resolve(ref: Any, root: Mapping[str, Any], place: str) -> Any:
    found: Any = root
    parts = str(ref).split("/")
    for part in parts[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    if parts[0] != "#" or found is None:
        raise ValueError(f"the schema of {place} refers to {ref!r}, which the parameters lack")
    return found
