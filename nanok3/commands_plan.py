"""What `nanok3 plan` and `nanok3 check` do once their options are read.

Every function returns an exit code or raises Refused or OutputError.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanok3.capacity import capacity, settings_for
from nanok3.cards import CARDS
from nanok3.check import check_model
from nanok3.check_files import check_files
from nanok3.checkpoint import CheckpointError
from nanok3.checkpoint_check import INDEX, SINGLE_FILE, read_index
from nanok3.config import K3, ModelConfig, Shard, load_config
from nanok3.console import write_out
from nanok3.content_hash import StateError
from nanok3.exits import DONE, INTERRUPTED, MODEL, USAGE, Refused
from nanok3.loading import LONG_CONTEXT, model_refused
from nanok3.options import PACKAGED_MODEL
from nanok3.packing import layout_problems
from nanok3.spec.config import load_draft_config

BUILT_IN = "k3"  # as a model's name in `plan`: K3's published config, without any files
CHECK_STATE = "nanok3-check.jsonl"  # where `check --hash` keeps finished files, if not told


def plan(
    model: str | None,
    *,
    gpus: int,
    context: int | None,
    requests: int,
    gpu: str,
    gpu_memory: int | None,
    draft: Path | None,
    as_json: bool,
) -> int:
    """Reads config.json and headers, and nothing at all for the built-in K3."""
    model_dir = PACKAGED_MODEL if model is None else Path(model)
    with model_refused(model_dir):
        config = K3 if model == BUILT_IN else load_config(model_dir)
        found = None if model == BUILT_IN else stored(model_dir, config)
    draft_config = None
    if draft is not None:
        with model_refused(draft):
            draft_config = load_draft_config(draft)
        if problems := draft_config.problems(config):
            raise Refused(MODEL, "\n  ".join(f"{draft}: {problem}" for problem in problems))
    context = context or min(LONG_CONTEXT, config.max_position_embeddings)
    shard = Shard(0, gpus)
    problems = settings_for(context, requests).problems(config) + shard.problems(config)
    if problems := problems or layout_problems(config, shard):
        raise Refused(USAGE, f"{model_dir.name} on {gpus} GPUs: " + "\n  ".join(problems))
    card = CARDS[gpu]
    memory = card.memory if gpu_memory is None else gpu_memory
    answer = capacity(config, gpus, context, requests, draft_config, memory, card.bandwidth)
    if as_json:
        named = {"model": model_dir.name, "draft": draft and draft.name, "gpu": gpu}
        read = {"bandwidth": card.bandwidth, "bandwidth_source": card.source, "stored": found}
        write_out(json.dumps(named | answer.as_dict() | read) + "\n")
        return DONE
    with_draft = "" if draft is None else f", draft: {draft.name}"
    asked = f"requests: {requests} of {context} tokens{with_draft}; each GPU:"
    title = [f"{model_dir.name}, GPUs: {gpus}, {asked}"]
    if found is not None:
        title.insert(0, "headers: {bytes:,} B in {tensors:,} tensors, {experts}".format(**found))
    speed = f"{gpu}: {memory / 1e9:.1f} GB, {card.bandwidth / 1e12:g} TB/s ({card.source})"
    write_out("\n".join([*title, speed, *answer.lines()]) + "\n")
    return DONE


def stored(model_dir: Path, config: ModelConfig) -> dict[str, Any] | None:
    """What headers say of the weights; None where these are not there. CheckpointError where they
    are not those of the config."""
    files = check_files(model_dir, config)
    if files.checkpoint is None:
        if any_absent(model_dir):
            return None
        raise CheckpointError(model_dir, [p for check in files.checks for p in check.problems])
    specs = files.checkpoint.specs
    return {
        "bytes": sum(spec.nbytes for spec in specs.values()),
        "tensors": len(specs),
        "experts": f"experts as {files.checkpoint.expert_format}",
    }


def any_absent(model_dir: Path) -> bool:
    if not any((model_dir / name).is_file() for name in (INDEX, SINGLE_FILE)):
        return True
    try:
        return any(not (model_dir / file).is_file() for file in read_index(model_dir).values())
    except CheckpointError:
        return False


def check(
    model: Path | None,
    *,
    draft: Path | None,
    with_hash: bool,
    state: Path | None,
    as_json: bool,
) -> int:
    """Reads headers and a sample of values; `with_hash` everything."""
    model_dir = model or PACKAGED_MODEL
    if not model_dir.is_dir():
        raise Refused(MODEL, f"{model_dir}: no such directory; name one that holds a K3 checkpoint")
    if draft is not None and not draft.is_dir():
        raise Refused(MODEL, f"{draft}: no such directory; name one that holds a DSpark draft")
    if with_hash and state is None:
        state = Path(CHECK_STATE)
        watched = [model_dir] if draft is None else [model_dir, draft]
        if any(state.resolve().is_relative_to(path.resolve()) for path in watched):
            advice = f"to keep {state} here in the model's directory, name it with --state"
            raise Refused(USAGE, f"{advice}, or give another file or start elsewhere")
    try:
        report = check_model(model_dir, state, draft)
    except StateError as error:
        raise Refused(USAGE, str(error)) from error
    except KeyboardInterrupt:
        later = f"; finished files are in {state}, and the same command goes on" if state else ""
        raise Refused(INTERRUPTED, f"interrupted{later}") from None
    if as_json:
        whole = {"model": str(model_dir), "draft": draft and str(draft), **report.as_dict()}
        write_out(json.dumps(whole, ensure_ascii=False) + "\n")
    else:
        write_out("\n".join(report.lines()) + "\n")
    return MODEL if report.failed else DONE
