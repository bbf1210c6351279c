"""What the command line says for chat, generate and batch; what is in force, and where from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nanok3.chat import DEFAULT_EFFORT
from nanok3.engine import DEFAULT_MAX_TOKENS, Engine

PACKAGED_MODEL = Path(__file__).parent / "models" / "k3_mini"
PACKAGED_DRAFT = Path(__file__).parent / "models" / "k3_mini_draft"
NO_DRAFT = "none"

COMMAND_LINE, CHECKPOINT, BUILT_IN = "command line", "generation_config.json", "built in"
DERIVED = "worked out"  # from other settings, the model or the machine
DRAWN = "drawn for each reply"
REQUEST = "the request itself"  # a line of a batch


@dataclass(frozen=True)
class Options:
    """What chat, generate and batch have in common; None where the person said nothing."""

    model: Path | None
    device: str
    dtype: str
    sampling: dict[str, Any]  # fields of SamplingParams, only those that were given
    thinking: bool | None
    effort: str | None
    context: int | None  # tokens of prompt and reply
    requests: int | None  # at once
    strict: bool
    show_config: bool
    ops: str | None = None  # None: the faster one
    gpus: int = 1
    draft: str | None = None  # a directory or NO_DRAFT
    given: frozenset[str] = frozenset()  # of device, dtype and gpus, those that the person named

    @property
    def model_dir(self) -> Path:
        return self.model or PACKAGED_MODEL

    @property
    def draft_dir(self) -> Path | None:
        """The packaged model has a draft of its own, used on a CPU by one process."""
        if self.draft is None:
            serves = self.model is None and self.device == "cpu" and self.gpus == 1
            return PACKAGED_DRAFT if serves and PACKAGED_DRAFT.is_dir() else None
        return None if self.draft == NO_DRAFT else Path(self.draft)

    @property
    def is_thinking(self) -> bool:
        return self.thinking is not False

    @property
    def effort_in_force(self) -> str:
        return self.effort or DEFAULT_EFFORT


@dataclass(frozen=True)
class Setting:
    name: str
    value: Any
    origin: str

    def __str__(self) -> str:
        return f"{self.name} {self.value} ({self.origin})"


def settings_in_force(engine: Engine, options: Options) -> list[Setting]:
    """Every effective setting; a line of a batch may say otherwise of thinking and sampling."""

    def said(is_said: bool, otherwise: str = BUILT_IN) -> str:
        return COMMAND_LINE if is_said else otherwise

    thinking = "on" if options.is_thinking else "off"
    found = [Setting("thinking", thinking, said(options.thinking is not None))]
    if options.is_thinking:
        found.append(Setting("effort", options.effort_in_force, said(options.effort is not None)))
    for name, value in asdict(engine.sampling(**options.sampling)).items():
        otherwise = CHECKPOINT if name in engine.defaults.sampling else BUILT_IN
        origin = said(name in options.sampling, otherwise)
        if name == "max_tokens" and value is None:
            value = DEFAULT_MAX_TOKENS
        if name == "seed" and value is None:
            origin = DRAWN
        found.append(Setting(name, value, origin))
    settings, draft = engine.settings, options.draft_dir
    model = str(options.model or PACKAGED_MODEL.name)
    ends = sorted({engine.config.eos_token_id, *engine.defaults.eos_token_id})
    from_file = set(engine.defaults.eos_token_id) - {engine.config.eos_token_id}
    return [
        *found,
        Setting("eos_token_id", ends, f"config.json{f', {CHECKPOINT}' if from_file else ''}"),
        Setting("model", model, said(options.model is not None)),
        Setting("draft", draft.name if draft else NO_DRAFT, said(options.draft is not None)),
        Setting("device", settings.device, said("device" in options.given)),
        Setting("dtype", settings.dtype, said("dtype" in options.given)),
        Setting("gpus", settings.gpus, said("gpus" in options.given)),
        Setting("threads", torch.get_num_threads(), DERIVED),
        Setting("strict", settings.strict, said(options.strict)),
        Setting("context", engine.max_context, said(options.context is not None, DERIVED)),
        Setting("requests", settings.max_num_reqs, said(options.requests is not None)),
        Setting("num_blocks", settings.num_blocks, DERIVED if settings.num_blocks else BUILT_IN),
        Setting("block_size", settings.block_size, BUILT_IN),
        Setting("prefill_chunk", settings.prefill_chunk, BUILT_IN),
        Setting("num_drafts", settings.num_drafts, BUILT_IN),
        Setting("acceptance", settings.acceptance, BUILT_IN),
        Setting("break_even", settings.break_even, BUILT_IN),
        Setting("adaptive_drafts", settings.adaptive_drafts, BUILT_IN),
        Setting("num_snapshots", settings.num_snapshots, BUILT_IN),
        Setting("ops", settings.ops, said(options.ops is not None)),
        Setting("debug", settings.debug, BUILT_IN),
    ]
