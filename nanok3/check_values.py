"""A seeded sample of a checkpoint's values, and what may be wrong with them.

Vectors whole, a run of rows of each matrix and of a few experts a layer: about a thousandth of K3.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.check_files import Check, judged
from nanok3.checkpoint import Checkpoint, CheckpointError, TensorSpec, open_file, read_tensor
from nanok3.checkpoint_check import LAYERS
from nanok3.config import ModelConfig
from nanok3.progress import ProgressLine
from nanok3.reference import mxfp4

A_LOG, NORMS, VOCAB = "A_log", "norms", "embedding and head"
EXPERTS, MATRICES = "experts", "matrices"
# kind of a tensor -> how its name ends; the first that fits, and none: MATRICES
KINDS = {
    A_LOG: ("A_log",),
    "dt_bias and conv": ("dt_bias", "conv1d.weight"),
    "correction bias": ("e_score_correction_bias",),
    NORMS: ("norm.weight",),
    VOCAB: ("embed_tokens.weight", "lm_head.weight"),
}
VALUE_CHECKS = (*KINDS, EXPERTS, MATRICES)
SEED = 0
SAMPLE_BYTES = 512 << 10  # a tensor up to this size is read whole, of others rows of this size
EXPERTS_PER_LAYER = 4
VOCAB_RUNS = 16  # places in the embedding and the head
LARGEST_SCALE = 128  # what the GPU kernels take (kernels/mxfp4.py)


@dataclass(frozen=True)
class Sample:
    """Rows of a tensor, or of an expert's packed values together with their scales."""

    kind: str
    names: tuple[str, ...]
    first: int
    rows: int


def samples(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[Sample]:
    for name in checkpoint.specs:
        if ".experts." not in name:
            kind = next((k for k, ends in KINDS.items() if name.endswith(ends)), MATRICES)
            runs = VOCAB_RUNS if kind == VOCAB else 1
            yield from runs_of(checkpoint, kind, (name,), runs)
    ends = ("_packed", "_scale") if checkpoint.expert_format == "mxfp4" else ("",)
    for layer in filter(config.is_moe, range(config.num_hidden_layers)):
        draw = random.Random(f"{SEED} {layer}")
        count = min(EXPERTS_PER_LAYER, config.num_experts)
        for expert in sorted(draw.sample(range(config.num_experts), count)):
            for w in ("w1", "w2", "w3"):
                stem = f"{LAYERS}{layer}.block_sparse_moe.experts.{expert}.{w}.weight"
                yield from runs_of(checkpoint, EXPERTS, tuple(stem + end for end in ends), 1)


def runs_of(
    checkpoint: Checkpoint, kind: str, names: tuple[str, ...], runs: int
) -> Iterator[Sample]:
    """`runs` runs of rows, of all of `names` alike; the whole where that is no more."""
    spec = checkpoint.specs[names[0]]
    total = spec.shape[0]
    rows = max(SAMPLE_BYTES * total // spec.nbytes, 1)
    if rows * runs >= total:
        yield Sample(kind, names, 0, total)
        return
    draw = random.Random(f"{SEED} {names[0]}")
    for _ in range(runs):
        yield Sample(kind, names, draw.randrange(total - rows + 1), rows)


def rows_of(spec: TensorSpec, rows: int) -> TensorSpec:
    return TensorSpec((rows, *spec.shape[1:]), spec.dtype)


def read_rows(checkpoint: Checkpoint, name: str, sample: Sample) -> Tensor:
    spec = checkpoint.specs[name]
    number, begin = checkpoint.places[name]
    path = checkpoint.model_dir / checkpoint.files[number]
    begin += sample.first * (spec.nbytes // spec.shape[0])
    descriptor = open_file(path)
    try:
        return read_tensor(descriptor, path, begin, rows_of(spec, sample.rows))
    finally:
        os.close(descriptor)


def check_values(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, list[Check]]:
    """Bytes read, and VALUE_CHECKS in their order."""
    by_place = sorted(samples(checkpoint, config), key=lambda s: checkpoint.places[s.names[0]])
    nbytes: dict[str, int] = dict.fromkeys(VALUE_CHECKS, 0)
    for sample in by_place:
        for name in sample.names:
            nbytes[sample.kind] += rows_of(checkpoint.specs[name], sample.rows).nbytes
    total, done = sum(nbytes.values()), 0
    progress = ProgressLine("checking values")
    problems: dict[str, list[str]] = defaultdict(list)
    warnings: dict[str, list[str]] = defaultdict(list)
    names: dict[str, set[str]] = defaultdict(set)
    reached = torch.zeros(len(mxfp4.E2M1), dtype=torch.int64)  # groups by their largest code
    for sample in by_place:
        kind, name = sample.kind, sample.names[0]
        names[kind].add(name)
        where = f"{name} in {checkpoint.files[checkpoint.places[name][0]]}"
        try:
            tensors = [read_rows(checkpoint, n, sample) for n in sample.names]
        except CheckpointError as error:
            problems[kind] += error.problems
            continue
        if kind in (EXPERTS, MATRICES) and sample.rows > 1 and not tensors[0].any():
            last = sample.first + sample.rows - 1
            warnings[kind].append(f"{where}: rows {sample.first} to {last} are zero throughout")
        if len(tensors) == 2:
            packed, scale = tensors
            where = where.replace("_packed", "_scale")
            problems[kind] += scale_problems(where, sample.first, packed, scale)
            problems[kind] += range_problems(where, packed)
            warnings[kind] += scale_warnings(where, sample.first, scale)
            reached += torch.bincount(largest_code(packed).flatten(), minlength=len(reached))
        else:
            problems[kind] += value_problems(kind, where, sample, tensors[0], config)
        done += sum(tensor.nbytes for tensor in tensors)
        progress(done, total)
    checks = []
    for kind in VALUE_CHECKS:
        summary = f"{len(names[kind])} tensors, {nbytes[kind]:,} bytes read"
        summary += shares(reached) if kind == EXPERTS and reached.any() else ""
        checks.append(judged(kind, summary, problems[kind], warnings[kind]))
    return total, checks


def first_row(sample_first: int, wrong: Tensor) -> int:
    """The row in the whole tensor of the first true entry."""
    return sample_first + int(wrong.reshape(wrong.shape[0], -1).any(1).int().argmax())


def finite_problems(where: str, first: int, values: Tensor) -> Iterator[str]:
    wrong = ~values.isfinite()
    if wrong.any():
        row = first_row(first, wrong)
        yield f"{where}: expected finite values, found {values[wrong][0].item()} in row {row}"


def value_problems(
    kind: str, where: str, sample: Sample, values: Tensor, config: ModelConfig
) -> Iterator[str]:
    yield from finite_problems(where, sample.first, values)
    heads = config.linear_attn_config.num_heads
    if kind == A_LOG and values[heads:].any():
        row = first_row(heads, values[heads:] != 0)
        found = f"found {values[row].item()} at entry {row}"
        yield f"{where}: expected zeros past the {heads} heads, {found}"
    if kind == NORMS and not values.any():
        yield f"{where}: expected a norm's weights, found zeros throughout"


# ---- MXFP4 ----


def shares(reached: Tensor) -> str:
    """How many groups use their scale: the largest value of 32 is in (3, 6] times the scale before
    it is rounded, so 4 or 6 after, and 3 where it was rounded down."""
    three = mxfp4.E2M1.index(3.0)
    groups, at_three, above = (
        int(n.sum()) for n in (reached, reached[three], reached[three + 1 :])
    )
    share = f"{above / groups:.1%} of {groups:,} groups reach 4 or 6 times their scale"
    return f", {share}, {at_three / groups:.1%} just 3"


def largest_code(packed: Tensor) -> Tensor:
    """packed [R, K / 2] u8 -> [R, K / 32] u8: index into E2M1 of each group's largest value."""
    codes = torch.maximum(packed & 7, (packed >> 4) & 7)
    return codes.unflatten(-1, (-1, mxfp4.GROUP // 2)).amax(-1)


def scale_problems(where: str, first: int, packed: Tensor, scale: Tensor) -> Iterator[str]:
    nan = scale == 255
    if nan.any():
        row = first_row(first, nan)
        yield f"{where}: expected scale bytes of 0 to 254, found 255 (NaN) in row {row}"
    table = torch.tensor(mxfp4.E2M1, dtype=torch.float64)
    largest = torch.ldexp(table[largest_code(packed).int()], scale.int() - 127)
    beyond = (largest > torch.finfo(torch.bfloat16).max) & ~nan
    if beyond.any():
        row = first_row(first, beyond)
        found = f"found {largest[beyond][0].item():.3g} in row {row}"
        yield f"{where}: expected values that bfloat16 can hold, {found}"


def range_problems(where: str, packed: Tensor) -> Iterator[str]:
    """Single groups may leave room below their scale; where most do, the scales are others'."""
    largest = largest_code(packed)
    used = int((largest > 0).sum())
    low = int(((largest > 0) & (largest < mxfp4.E2M1.index(3.0))).sum())
    if low > used // 2:
        expected = "expected the largest value of a group of 32 at 3 to 6 times its scale"
        yield f"{where}: {expected}, found it at 2 or less in {low} of {used} groups"


def scale_warnings(where: str, first: int, scale: Tensor) -> Iterator[str]:
    above = (scale > LARGEST_SCALE) & (scale != 255)
    if above.any():
        row, found = first_row(first, above), int(scale[above][0])
        expected = f"scale bytes above {LARGEST_SCALE} are not for the GPU kernels"
        yield f"{where}: {expected}, found {found} in row {row}"
