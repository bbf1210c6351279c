"""A DSpark draft in either published layout: its config, headers, and a sample of its values.

What it must be for a model is said by the model's config: widths, ids and layers that are tapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanok3.check_files import Check, all_skipped, judged, strangers, told_apart
from nanok3.check_values import (
    MATRICES,
    NORMS,
    VOCAB_RUNS,
    Sample,
    finite_problems,
    read_rows,
    rows_of,
    runs_of,
)
from nanok3.checkpoint import Checkpoint, CheckpointError
from nanok3.checkpoint_check import read_index
from nanok3.config import ConfigError, ModelConfig
from nanok3.progress import ProgressLine
from nanok3.spec.config import DraftConfig, load_draft_config
from nanok3.spec.draft_weights import EMBED, expected_draft_tensors

DRAFT_CHECKS = ("draft config", "draft files", "draft tensors", "draft values")
CONFIG, FILES, TENSORS, VALUES = DRAFT_CHECKS


@dataclass(frozen=True)
class Draft:
    checks: list[Check]  # DRAFT_CHECKS, in their order
    checkpoint: Checkpoint | None  # None where it cannot be loaded
    sampled_bytes: int


def check_draft(draft_dir: Path, target: ModelConfig | None) -> Draft:
    """target: the model that it has to serve, as far as that is known."""
    try:
        config = load_draft_config(draft_dir)
    except ConfigError as error:
        failed = judged(CONFIG, "cannot be run", error.problems)
        return Draft([failed, *all_skipped(DRAFT_CHECKS[1:], "the draft's config failed")], None, 0)
    checks = [judged(CONFIG, described(config), config.problems(target) if target else [])]
    try:
        listed = read_index(draft_dir)
    except CheckpointError as error:
        failed = judged(FILES, "the index cannot be read", error.problems)
        skipped = all_skipped(DRAFT_CHECKS[2:], "the draft's files failed")
        return Draft([*checks, failed, *skipped], None, 0)
    checkpoint, problems = None, []
    try:
        checkpoint = Checkpoint.open(draft_dir, expected_draft_tensors(config), root="")
    except CheckpointError as error:
        problems = error.problems
    of_files, of_wide, of_tensors = told_apart(problems)
    files = set(listed.values())
    held = sum((draft_dir / f).stat().st_size for f in files if (draft_dir / f).is_file())
    looked_at = f"headers and lengths of {len(files)} files, {held:,} bytes"
    layout = f", {checkpoint.expert_format}" if checkpoint else ""
    named = f"{len(listed)} names, shapes, dtypes and places{layout}"
    checks.append(judged(FILES, looked_at, of_files, strangers(draft_dir, listed)))
    checks.append(judged(TENSORS, named, [*of_wide, *of_tensors]))
    if checkpoint is None:
        return Draft([*checks, *all_skipped((VALUES,), "the draft's headers failed")], None, 0)
    sampled, of_values = draft_values(checkpoint)
    return Draft([*checks, of_values], checkpoint, sampled)


def described(c: DraftConfig) -> str:
    vocabulary = "its own" if c.owns_vocab else "the model's"
    counts = f"{len(c.layers)} layers, {c.block_size} drafts a step, taps {list(c.taps)}"
    return f"{c.architecture}: {counts}, {vocabulary} embedding and head"


def draft_samples(checkpoint: Checkpoint) -> Iterator[Sample]:
    """Of all that is read: the copy of an embedding that nobody reads may hold anything."""
    is_copy = not any(name.startswith("lm_head.") for name in checkpoint.specs)
    for name, spec in checkpoint.specs.items():
        if name == EMBED and is_copy:
            continue
        kind = NORMS if name.endswith("norm.weight") else MATRICES
        is_wide = len(spec.shape) == 2 and spec.shape[0] > 8 * spec.shape[1]  # a row an id
        yield from runs_of(checkpoint, kind, (name,), VOCAB_RUNS if is_wide else 1)


def draft_values(checkpoint: Checkpoint) -> tuple[int, Check]:
    """Bytes read, and whether they can be weights."""
    samples = sorted(draft_samples(checkpoint), key=lambda s: checkpoint.places[s.names[0]])
    total = sum(rows_of(checkpoint.specs[s.names[0]], s.rows).nbytes for s in samples)
    progress, done = ProgressLine("checking the draft's values"), 0
    problems: list[str] = []
    warnings: list[str] = []
    for sample in samples:
        name = sample.names[0]
        where = f"{name} in {checkpoint.files[checkpoint.places[name][0]]}"
        try:
            values = read_rows(checkpoint, name, sample)
        except CheckpointError as error:
            problems += error.problems
            continue
        problems += finite_problems(where, sample.first, values)
        if not values.any() and sample.rows > 1:
            if sample.kind == NORMS:
                problems.append(f"{where}: expected a norm's weights, found zeros throughout")
            else:
                last = sample.first + sample.rows - 1
                warnings.append(f"{where}: rows {sample.first} to {last} are zero throughout")
        done += values.nbytes
        progress(done, total)
    names = len({sample.names[0] for sample in samples})
    return total, judged(VALUES, f"{names} tensors, {total:,} bytes read", problems, warnings)
