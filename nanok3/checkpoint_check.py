"""Compares what a checkpoint's index and headers say with the tensors that a model expects.

Names are only ever looked up in tables, never matched one against many: the official checkpoint has
497,220 of them. No tensor is read here; `checkpoint.py` does that once nothing is wrong.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nanok3.safetensors_header import DTYPE_BYTES, read_header

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

TEXT_ROOT = "language_model."  # of the official names; text-only copies leave it out
LAYERS = TEXT_ROOT + "model.layers."
NOT_TEXT = ("vision_tower.", "mm_projector.")

MAX_PROBLEM_LINES = 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a header must say of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # "BF16", "F32" or "U8"

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class CheckpointError(ValueError):
    """What is wrong with a checkpoint, a sentence each; the message shows the first of them."""

    def __init__(self, model_dir: Path, problems: list[str]) -> None:
        shown = problems[:MAX_PROBLEM_LINES]
        if len(problems) > len(shown):
            shown = [*shown, f"... and {len(problems) - len(shown)} more problems"]
        super().__init__("\n".join([f"{model_dir}: this checkpoint cannot be loaded", *shown]))
        self.problems = problems


def read_index(model_dir: Path) -> dict[str, str]:
    """File of each tensor by its name there, from the index or from a single file's header."""
    path = model_dir / INDEX
    if path.is_file():
        try:
            index = json.loads(path.read_bytes())
        except (ValueError, RecursionError, OSError) as error:
            raise CheckpointError(model_dir, [f"{INDEX}: expected JSON, found {error}"]) from error
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            raise CheckpointError(model_dir, [f"{INDEX}: expected an object with a weight_map"])
        for file in set(map(str, files.values())):
            if file != os.path.basename(file) or not file.endswith(".safetensors"):
                found = f"expected names of safetensors files beside it, found {file!r}"
                raise CheckpointError(model_dir, [f"{INDEX}: {found}"])
        return files
    if not (model_dir / SINGLE_FILE).is_file():
        expected = f"expected {INDEX} or {SINGLE_FILE}, found neither"
        raise CheckpointError(model_dir, [f"{expected}; name a directory with a K3 checkpoint"])
    stored, problems = read_header(model_dir / SINGLE_FILE)
    if problems:
        raise CheckpointError(model_dir, problems)
    return dict.fromkeys(stored, SINGLE_FILE)


def official_name(name: str, root: str) -> str:
    """The name in the official root; `root` is what this checkpoint's text tensors lack of it."""
    return root + name if root and name.startswith(("model.", "lm_head.")) else name


def closest_format(
    expected: Mapping[str, Mapping[str, TensorSpec]], indexed: Mapping[str, str]
) -> str:
    """The format of which the smallest share is missing; the first of those that tie."""

    def share_missing(expert_format: str) -> float:
        specs = expected[expert_format]
        return sum(name not in indexed for name in specs) / max(len(specs), 1)

    return min(expected, key=share_missing)


def is_skipped(name: str, skip_layers_from: int | None) -> bool:
    """Whether a tensor is there on purpose, though a text model has no use for it."""
    if name.startswith(NOT_TEXT):
        return True
    if skip_layers_from is None or not name.startswith(LAYERS):
        return False
    layer = name[len(LAYERS) :].partition(".")[0]
    return layer.isdecimal() and int(layer) >= skip_layers_from


@dataclass(frozen=True)
class Scan:
    """What the headers of the files that are needed say."""

    files: tuple[str, ...]
    places: dict[str, tuple[int, int]]  # name -> number in `files`, first byte
    elsewhere: dict[str, str]  # name -> file, for tensors in another file than the index says
    unread: set[str]  # files whose tensors are not known
    problems: list[str]


def scan_headers(
    model_dir: Path, indexed: Mapping[str, str], specs: Mapping[str, TensorSpec], root: str
) -> Scan:
    """Reads the header of each file that should hold a tensor of `specs`."""
    counts = Counter(file for name, file in indexed.items() if name in specs)
    scan = Scan(tuple(sorted(counts)), {}, {}, set(), [])
    mismatched: list[str] = []
    for number, file in enumerate(scan.files):
        if not (model_dir / file).is_file():
            scan.unread.add(file)
            lost = f"the index names it for {counts[file]} tensors"
            scan.problems.append(f"{file}: no such file, though {lost}; download it")
            continue
        stored, problems = read_header(model_dir / file)
        scan.problems.extend(problems)
        if problems and not stored:
            scan.unread.add(file)
        for stored_name, tensor in stored.items():
            name = official_name(stored_name, root)
            if indexed.get(name) != file:
                scan.elsewhere[name] = file
            elif name in specs:
                spec = specs[name]
                scan.places[name] = (number, tensor.begin)
                if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                    found = f"found {tensor.dtype} {list(tensor.shape)}"
                    mismatched.append(f"{name}: expected {spec}, {found} in {file}")
    scan.problems.extend(mismatched)
    return scan


def misplaced(
    scan: Scan,
    indexed: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    skip_layers_from: int | None,
) -> Iterator[str]:
    """Tensors that are in a file for which the index does not name them."""
    for name, file in scan.elsewhere.items():
        if name in scan.places:
            yield f"{name}: held by both {indexed[name]} and {file}"
        elif name in specs and name in indexed:
            yield f"{name}: held by {file}, but the index names {indexed[name]}"
        elif name not in indexed and not is_skipped(name, skip_layers_from):
            yield f"{name}: held by {file}, but not in the index"


def missing(
    scan: Scan, indexed: Mapping[str, str], specs: Mapping[str, TensorSpec]
) -> Iterator[str]:
    """Tensors that no file holds, but for those of files already reported."""
    for name in specs:
        if name in scan.places or name in scan.elsewhere:
            continue
        if name not in indexed:
            yield f"{name}: missing; expected {specs[name]}, and no file holds it"
        elif indexed[name] not in scan.unread:
            yield f"{name}: missing; the index names {indexed[name]}, which does not hold it"
