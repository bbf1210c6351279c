"""What can be said of a checkpoint without reading a tensor: index, headers, sizes, tokenizer.

`Check` is one line of the report that `check.py` puts together. The comparisons of names, shapes
and sizes are those that loading makes; here they are told apart and all shown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanok3.checkpoint import Checkpoint, CheckpointError
from nanok3.checkpoint_check import INDEX, TEXT_ROOT, is_skipped, official_name, read_index
from nanok3.config import ModelConfig, load_generation_defaults, read_json
from nanok3.config_rules import is_int, not_taken
from nanok3.safetensors_header import read_header
from nanok3.tokenizer import (
    CONFIG_FILE,
    NAMED_SPECIALS,
    RANK_FILE,
    Tokenizer,
    check_config,
    special_names,
)
from nanok3.weight_table import expected_tensors

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
FILE_CHECKS = ("index", "files", "tensors", "F32 tensors", "total size")
TEXT_CHECKS = ("tokenizer", "special tokens", "generation config")
KINDS_SKIPPED = {"vision_tower.": "vision", "mm_projector.": "projector"}  # others: draft layers


@dataclass(frozen=True)
class Check:
    """What one check found."""

    name: str
    status: str  # OK, FAILED or SKIPPED
    summary: str  # what was looked at, or why nothing was
    problems: Sequence[str] = ()  # sentences that name the file or the tensor
    warnings: Sequence[str] = ()  # what does not stand in the way of loading


def judged(name: str, summary: str, problems: Sequence[str], warnings: Sequence[str] = ()) -> Check:
    return Check(name, FAILED if problems else OK, summary, problems, warnings)


def all_skipped(names: Iterable[str], why: str) -> list[Check]:
    return [Check(name, SKIPPED, why) for name in names]


# ---- index and headers ----


@dataclass(frozen=True)
class Files:
    """The checks of a checkpoint's files, and what those of its values need."""

    checks: list[Check]
    checkpoint: Checkpoint | None  # None where it cannot be loaded
    others: tuple[str, ...]  # files that are there without a tensor of the text model


def check_files(model_dir: Path, config: ModelConfig) -> Files:
    """FILE_CHECKS, in their order."""
    try:
        listed = read_index(model_dir)
    except CheckpointError as error:
        failed = judged("index", "cannot be read", error.problems)
        return Files([failed, *all_skipped(FILE_CHECKS[1:], "the index failed")], None, ())
    drafts_from = config.num_hidden_layers if config.num_nextn_predict_layers else None
    root = "" if any(name.startswith(TEXT_ROOT) for name in listed) else TEXT_ROOT
    unused = {name for name in listed if is_skipped(official_name(name, root), drafts_from)}
    needed = {file for name, file in listed.items() if name not in unused}
    others = sorted(set(listed.values()) - needed)
    others = [file for file in others if (model_dir / file).is_file()]  # need not be there

    checkpoint, problems = None, []
    tables = {form: expected_tensors(config, form) for form in ("mxfp4", "bf16")}
    try:
        checkpoint = Checkpoint.open(model_dir, tables, skip_layers_from=drafts_from)
    except CheckpointError as error:
        problems = error.problems
    of_files, of_wide, of_tensors = told_apart(problems)
    for file in others:
        of_files += other_problems(model_dir, file, listed)

    present = [file for file in {*needed, *others} if (model_dir / file).is_file()]
    held = sum((model_dir / file).stat().st_size for file in present)
    of_index = f"{len(listed):,} tensors in {len(set(listed.values()))} files{counted(unused)}"
    experts = f", experts as {checkpoint.expert_format}" if checkpoint else ""
    checks = [
        judged("index", of_index, [], strangers(model_dir, listed)),
        judged("files", f"headers and lengths of {len(present)} files, {held:,} bytes", of_files),
        judged("tensors", f"names, shapes, dtypes and places{experts}", of_tensors),
        judged("F32 tensors", "those that must be stored wide", of_wide),
        check_total(model_dir, listed, is_sound=not of_files),
    ]
    return Files(checks, checkpoint, tuple(others))


def told_apart(problems: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Sentences about files, about tensors that should be F32, about other tensors."""
    of_files: list[str] = []
    of_wide: list[str] = []
    of_tensors: list[str] = []
    for problem in problems:
        subject, _, rest = problem.partition(": ")
        if subject.endswith(".safetensors"):
            of_files.append(problem)
        elif rest.startswith("expected F32 ") and "found F32 " not in rest:
            of_wide.append(problem)
        else:
            of_tensors.append(problem)
    return of_files, of_wide, of_tensors


def other_problems(model_dir: Path, file: str, listed: Mapping[str, str]) -> list[str]:
    """What is wrong with a file of skipped tensors."""
    stored, problems = read_header(model_dir / file)
    lost = [name for name, where in listed.items() if where == file and name not in stored]
    if stored and lost:
        problems.append(f"{file}: lacks {lost[0]} and {len(lost) - 1} more that the index names")
    return problems


def counted(unused: set[str]) -> str:
    """How many tensors are skipped, by kind."""
    counts = Counter(KINDS_SKIPPED.get(name.partition(".")[0] + ".", "draft") for name in unused)
    return "".join(f", {count} skipped ({kind})" for kind, count in sorted(counts.items()))


def strangers(model_dir: Path, listed: Mapping[str, str]) -> list[str]:
    files = {path.name for path in model_dir.glob("*.safetensors")} - set(listed.values())
    return [f"{file}: not in the index, so it is not read" for file in sorted(files)]


def check_total(model_dir: Path, listed: Mapping[str, str], is_sound: bool) -> Check:
    """The index's own count of bytes; sound files hold nothing but a header and tensors."""
    name, files = "total size", set(listed.values())
    metadata = None
    if (model_dir / INDEX).is_file():
        metadata = json.loads((model_dir / INDEX).read_bytes()).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if stated is None:
        return Check(name, SKIPPED, "no index states one")
    if absent := sum(not (model_dir / file).is_file() for file in files):
        return Check(name, SKIPPED, f"{absent} of {len(files)} files are not here")
    if not is_sound:
        return Check(name, SKIPPED, "the files failed")
    held = sum(tensor_bytes(model_dir / file) for file in files)
    wrong = f"{INDEX}: metadata.total_size says {stated} bytes, expected {held} as in the files"
    problems = [] if stated == held else [f"{wrong}; take the index from the checkpoint again"]
    return judged(name, f"{held:,} bytes of tensors", problems)


def tensor_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


# ---- tokenizer ----


def check_text(model_dir: Path, config: ModelConfig) -> list[Check]:
    """TEXT_CHECKS, in their order."""
    checks = [check_generation(model_dir, config)]
    path = model_dir / RANK_FILE
    if not path.is_file():
        return all_skipped(TEXT_CHECKS[:2], f"there is no {RANK_FILE}") + checks
    try:
        tokenizer = Tokenizer.load(path)
    except (ValueError, OSError) as error:
        failed = judged("tokenizer", "cannot be read", [str(error)])
        return [failed, *all_skipped(TEXT_CHECKS[1:2], "the tokenizer failed"), *checks]
    wrong = f"{RANK_FILE}: has {tokenizer.vocab_size} ids with the specials, expected"
    wrong = f"{wrong} {config.vocab_size}, config.json's vocab_size; take both from one checkpoint"
    problems = [] if tokenizer.vocab_size == config.vocab_size else [wrong]
    summary = f"{tokenizer.num_ranks:,} ranks, {tokenizer.vocab_size:,} ids"
    checks.insert(0, judged("tokenizer", summary, problems))
    if problems:  # the specials follow the ranks, so they are off alike
        checks[1:1] = all_skipped(TEXT_CHECKS[1:2], "the tokenizer failed")
    else:
        checks.insert(1, check_specials(model_dir, config, tokenizer))
    return checks


def check_specials(model_dir: Path, config: ModelConfig, tokenizer: Tokenizer) -> Check:
    problems = []
    path = model_dir / CONFIG_FILE
    if path.exists():
        try:
            check_config(path, special_names(tokenizer.num_ranks))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    for field, special in (
        ("bos_token_id", "[BOS]"),
        ("eos_token_id", "<|end_of_msg|>"),
        ("pad_token_id", "[PAD]"),
    ):
        found, expected = getattr(config, field), tokenizer.special_id(special)
        if found != expected:
            problems.append(f"config.json: {field}: expected {expected}, {special}, found {found}")
    sources = f"config.json and {CONFIG_FILE}" if path.exists() else "config.json"
    return judged("special tokens", f"{len(NAMED_SPECIALS)} named ones, {sources}", problems)


def check_generation(model_dir: Path, config: ModelConfig) -> Check:
    name, file = "generation config", "generation_config.json"
    if not (model_dir / file).is_file():
        return Check(name, SKIPPED, f"there is no {file}")
    try:
        defaults = load_generation_defaults(model_dir)
        raw = read_json(model_dir / file)
    except ValueError as error:
        return judged(name, "cannot be read", [str(error)])
    ids = [("eos_token_id", id) for id in defaults.eos_token_id]
    singles = ("bos_token_id", "pad_token_id")
    ids += [(field, raw[field]) for field in singles if raw.get(field) is not None]
    problems = [
        f"{file}: {field}: expected an id below {config.vocab_size}, found {id!r}"
        for field, id in ids
        if not is_int(id) or not 0 <= id < config.vocab_size
    ]
    return judged(name, f"{len(ids)} ids", problems, not_taken(raw))
