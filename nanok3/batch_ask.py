"""From a line of a batch to a request: what the command line overrides, what a record says."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from nanok3.batch_lines import Ask, Line
from nanok3.chat import DEFAULT_EFFORT
from nanok3.engine import Engine
from nanok3.record import Asked
from nanok3.request import Request


@dataclass(frozen=True)
class Overrides:
    """What the command line says, for every line and against what it says itself."""

    sampling: dict[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    effort: str | None = None


def submit(engine: Engine, ask: Ask, overrides: Overrides) -> Request:
    thinking = ask.thinking if overrides.thinking is None else overrides.thinking
    return engine.submit(
        ask.prompt,
        engine.sampling(**(ask.sampling | overrides.sampling)),
        tools=ask.tools,
        thinking=thinking is not False,
        thinking_effort=overrides.effort or ask.effort or DEFAULT_EFFORT,
        tool_choice=ask.tool_choice,
        response_format=ask.response_format,
    )


def asked_of(line: Line, overrides: Overrides) -> tuple[Asked, dict[str, Any]]:
    """What a record shows of a line, and the settings that the line itself made."""
    ask = line.ask
    assert ask is not None
    is_text = isinstance(ask.prompt, str)
    messages = [{"role": "user", "content": ask.prompt}] if is_text else list(ask.prompt)
    thinking = ask.thinking if overrides.thinking is None else overrides.thinking
    own = {name: value for name, value in ask.sampling.items() if name not in overrides.sampling}
    if overrides.thinking is None and ask.thinking is not None:
        own["thinking"] = "on" if ask.thinking else "off"
    if overrides.effort is None and ask.effort is not None:
        own["effort"] = ask.effort
    return Asked(messages, ask.tools, thinking is not False, line.number), own


def batch_options(
    engine: Engine, model: str, draft: str | None, overrides: Overrides
) -> dict[str, Any]:
    """What the records depend on, beside the lines and the weights."""
    vocabulary = None if engine.tokenizer is None else engine.tokenizer.vocab_size
    config = repr((engine.config, engine.defaults, vocabulary))
    options = {
        "model": model,
        "draft": draft,  # it decides what a sampled reply draws
        "config": hashlib.sha256(config.encode()).hexdigest()[:12],
        "device": engine.settings.device.partition(":")[0],
        "dtype": engine.settings.dtype,
        "strict": engine.settings.strict,
        "gpus": engine.settings.gpus,
        "context": engine.max_context,
    }
    # As JSON has it, in which a tuple is a list.
    return options | json.loads(json.dumps(asdict(overrides)))
