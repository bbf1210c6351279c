"""Weights of one rank at real sizes, with random values made on the device in seconds.

For benches and kernel tests where no checkpoint is at hand: 1.5 TB of values need not exist for one
rank's layer to run. Values are of a size that keeps every activation finite through all layers.
Experts are made directly as MXFP4 bytes, `<field>.packed` and `<field>.scale`; unpacked, those of
one layer would not fit. A field does not depend on which others are made with it, and what ranks
hold in common is the same on all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from nanok3.config import ModelConfig, Shard
from nanok3.reference import mxfp4
from nanok3.weight_table import Field, Piece, ends_table, layer_table, table

OUTPUTS = ("o_proj", "down", "shared_down", "latent_up")  # what they give is added to a stream
SCALES = 3  # neighbouring powers of two among the scales of a matrix
# Root mean square of E2M1 under random bits, times that of the factors 1/2, 1 and 2.
PACKED_RMS = math.sqrt(sum(v * v for v in mxfp4.E2M1) / 8 * (0.25 + 1 + 4) / SCALES)


def random_shard(
    config: ModelConfig,
    shard: Shard,
    device: str,
    dtype: torch.dtype,
    seed: int,
    layers: Collection[int] | None = None,
    ends: bool = False,
) -> dict[str, Tensor]:
    """Fields of `table(config, shard)` by name; with `layers` those of these layers only, and with
    `ends` of the embedding and the head."""
    assert not shard.problems(config), shard.problems(config)
    values: dict[str, Tensor] = {}
    for field in wanted_fields(config, shard, layers, ends):
        std = matrix_std(config, field)
        if field.kind == "experts":
            packed, scale = random_mxfp4(field, std, generator_of(seed, shard, field, 0, device))
            values[f"{field.name}.packed"], values[f"{field.name}.scale"] = packed, scale
            continue
        value = torch.empty(field.shape, dtype=field.dtype(dtype), device=device)
        row = 0
        for i, piece in enumerate(field.pieces[: 1 if field.kind == "product" else None]):
            count = value.shape[0] if len(field.pieces) == 1 else piece.local_rows(shard)
            generator = generator_of(seed, shard, field, i, device)
            fill(value[row : row + count], field, std, generator)
            row += count
        values[field.name] = value
    return values


def wanted_fields(
    config: ModelConfig, shard: Shard, layers: Collection[int] | None, ends: bool
) -> Iterator[Field]:
    if layers is None:
        yield from table(config, shard)
        return
    for i in layers:
        yield from layer_table(config, i, shard)
    if ends:
        yield from ends_table(config, shard)


def generator_of(seed: int, shard: Shard, field: Field, index: int, device: str) -> torch.Generator:
    """Random numbers of one piece: other ones on every rank, unless ranks hold it in common."""
    piece: Piece = field.pieces[index]
    rank = "all" if piece.axis is None else f"{shard.rank} of {shard.size}"
    digest = hashlib.sha256(f"{seed}/{piece.name}/{rank}".encode()).digest()
    generator = torch.Generator(device=device)
    return generator.manual_seed(int.from_bytes(digest[:7], "little"))


def matrix_std(config: ModelConfig, field: Field) -> float:
    """1 / sqrt(inputs), of all ranks together; smaller where outputs of all layers add up."""
    last = field.name.rpartition(".")[2]
    if last == "embed":
        return 1.0
    inputs = field.pieces[0].shape[-1]
    smaller = 2 * config.num_hidden_layers if last in OUTPUTS else 1
    return (inputs * smaller) ** -0.5


def fill(value: Tensor, field: Field, std: float, generator: torch.Generator) -> None:
    """In place, so that making a field needs no second one beside it."""
    last = field.name.rpartition(".")[2]
    if last == "A_log":
        value.uniform_(0.0, 1.1, generator=generator)  # rates from 1 to 3
    elif last == "dt_bias":
        value.uniform_(-3.0, 0.0, generator=generator)
    elif last == "bias":
        value.normal_(0.0, 0.05, generator=generator)
    elif last == "score" or value.dim() > 1:
        value.normal_(0.0, std, generator=generator)
    else:
        value.normal_(1.0, 0.1, generator=generator)  # a norm


def random_mxfp4(field: Field, std: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random bytes -> packed [E, rows, columns / 2] u8, scale [E, rows, columns / 32] u8."""
    n, rows, columns = field.shape
    device = generator.device
    packed = torch.empty(n, rows, columns // 2, dtype=torch.uint8, device=device)
    packed.random_(generator=generator)
    scale = torch.empty(n, rows, columns // mxfp4.GROUP, dtype=torch.uint8, device=device)
    middle = 127 + round(math.log2(std / PACKED_RMS))
    scale.random_(middle - SCALES // 2, middle + SCALES // 2 + 1, generator=generator)
    return packed, scale
