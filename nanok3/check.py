"""`nanok3 check`: is this the checkpoint that it says it is, and can nanok3 run it?

Headers come first and say most (`check_files.py`), then a seeded sample of values
(`check_values.py`), then a draft, if one is named (`check_draft.py`). Reading everything is for
`content_hash.py`. No GPU is used, and no model is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanok3.check_draft import DRAFT_CHECKS, check_draft
from nanok3.check_files import (
    FAILED,
    FILE_CHECKS,
    TEXT_CHECKS,
    Check,
    all_skipped,
    check_files,
    check_text,
    judged,
)
from nanok3.check_values import VALUE_CHECKS, check_values
from nanok3.checkpoint import Checkpoint, CheckpointError
from nanok3.config import ConfigError, ModelConfig, load_config
from nanok3.content_hash import ContentHash, content_hash
from nanok3.progress import ProgressLine

HASH, DRAFT_HASH = "hash", "draft hash"
MAX_PROBLEMS = 20  # shown of a check


@dataclass(frozen=True)
class Report:
    checks: list[Check]
    sampled_bytes: int
    hashes: ContentHash | None
    draft_hashes: ContentHash | None = None

    @property
    def failed(self) -> list[str]:
        return [check.name for check in self.checks if check.status == FAILED]

    @property
    def verdict(self) -> str:
        names = ", ".join(self.failed)
        if names:
            return f"refused: {names} failed"
        has_draft = any(check.name in DRAFT_CHECKS for check in self.checks)
        return f"this checkpoint{' and its draft' if has_draft else ''} can be loaded"

    def lines(self) -> Iterator[str]:
        """A line a check, what is wrong below it, and the verdict."""
        for check in self.checks:
            yield f"{check.status:8}{check.name}: {check.summary}"
            yield from (f"    {problem}" for problem in capped(check.problems))
            yield from (f"    warning: {warning}" for warning in capped(check.warnings))
        yield self.verdict

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": not self.failed,
            "verdict": self.verdict,
            "checks": [
                {
                    "name": check.name,
                    "status": check.status,
                    "summary": check.summary,
                    "problems": capped(check.problems),
                    "num_problems": len(check.problems),
                    "warnings": capped(check.warnings),
                    "num_warnings": len(check.warnings),
                }
                for check in self.checks
            ],
            "sampled_bytes": self.sampled_bytes,
            "content_sha256": self.hashes and self.hashes.content,
            "file_sha256": self.hashes and self.hashes.files,
            "draft_content_sha256": self.draft_hashes and self.draft_hashes.content,
            "draft_file_sha256": self.draft_hashes and self.draft_hashes.files,
        }


def capped(sentences: Sequence[str]) -> list[str]:
    shown = list(sentences[:MAX_PROBLEMS])
    more = len(sentences) - len(shown)
    return [*shown, f"... and {more} more"] if more else shown


def check_model(model_dir: Path, state: Path | None, draft_dir: Path | None = None) -> Report:
    """All checks; with a state file for `content_hash` everything is read. Raises what it raises
    about that file."""
    try:
        config: ModelConfig | None = load_config(model_dir)
    except ConfigError as error:
        config = None
        names = (*FILE_CHECKS, *TEXT_CHECKS, *VALUE_CHECKS, *([HASH] if state else []))
        failed = judged("config", "cannot be run", error.problems)
        report = Report([failed, *all_skipped(names, "the config failed")], 0, None)
    if config is not None:
        report = check_weights(model_dir, config, state)
    return report if draft_dir is None else with_draft(report, draft_dir, config, state)


def check_weights(model_dir: Path, config: ModelConfig, state: Path | None) -> Report:
    layers = f"{config.num_hidden_layers} layers, {config.num_experts} experts"
    files = check_files(model_dir, config)
    checks = [judged("config", layers, []), *files.checks, *check_text(model_dir, config)]
    if files.checkpoint is None:
        names = (*VALUE_CHECKS, *([HASH] if state else []))
        return Report([*checks, *all_skipped(names, "the headers failed")], 0, None)
    sampled, of_values = check_values(files.checkpoint, config)
    checks += of_values
    hashes = None
    if state is not None:
        hashes, check = hash_all(HASH, files.checkpoint, files.others, state)
        checks.append(check)
    return Report(checks, sampled, hashes)


def with_draft(
    report: Report, draft_dir: Path, config: ModelConfig | None, state: Path | None
) -> Report:
    draft = check_draft(draft_dir, config)
    checks, hashes = [*report.checks, *draft.checks], None
    if state is not None and draft.checkpoint is None:
        checks += all_skipped([DRAFT_HASH], "the draft's headers failed")
    elif state is not None and draft.checkpoint is not None:
        hashes, check = hash_all(DRAFT_HASH, draft.checkpoint, (), state)
        checks.append(check)
    sampled = report.sampled_bytes + draft.sampled_bytes
    return Report(checks, sampled, report.hashes, hashes)


def hash_all(
    name: str, checkpoint: Checkpoint, others: Sequence[str], state: Path
) -> tuple[ContentHash | None, Check]:
    try:
        hashes = content_hash(checkpoint, others, state, ProgressLine(f"{name}ing"))
    except CheckpointError as error:
        return None, judged(name, "not all could be read", error.problems)
    taken = f", {hashes.num_known} as {state} has them" if hashes.num_known else ""
    summary = f"content sha256 {hashes.content}; {len(hashes.files)} files{taken}"
    return hashes, judged(name, summary, [])
