"""The `MEGA` reading: the text of the model traced into one launch of the persistent kernel.

`texts` calls the functions of `model.py` with names where other readings have tensors; the kernel
calls the texts while it is traced. `Mega` holds the table of weights and caches, the workspace and
the compiled programs, and runs a step. Imports CuTe DSL, like `kernel_ops`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache
from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.graph import Health
from nanok3.kernels.mega import fields
from nanok3.kernels.mega.kernel import Program, Text
from nanok3.kernels.mega.launch import (
    Arguments,
    clear,
    launch_mega,
    stamps_of,
    sync_of,
    sync_part,
    work_of,
)
from nanok3.kernels.mega.role import HEALTH, NEXT_SIGNAL, PROGRAMS, SYNC_SHIFT, WORDS
from nanok3.kernels.mega.sizes import PASS, Sizes
from nanok3.mega_sizes import sizes_of
from nanok3.step import Buffers, Step
from nanok3.weights import DenseWeights, LayerWeights, MoEWeights, Weights

MAX_ROWS = PASS  # `config.MEGA_ROWS`
MASK = 0xFFFFFFFF  # counters are unsigned


class MegaError(RuntimeError):
    """A wait of the persistent kernel gave up; what it computed is not used."""


# ---- the text ----


def names_of(record: type) -> Any:
    """A record whose fields are their own names."""
    names: Any = {name: name for name in record.__dataclass_fields__}  # type: ignore[attr-defined]
    return record(**names)


def texts(config: ModelConfig, recorded: bool = False, tapped: bool = False) -> dict[str, Text]:
    """The functions of the model that this model's layers need, each of a record of ops. recorded:
    KDA's rows may be rolled back; tapped: a draft reads some layers' streams."""
    step, buf = names_of(Step), names_of(Buffers)

    def layer(kind: str) -> Any:
        own = {"in_proj": f"{kind}.in_proj", "q_b": f"{kind}.q_b", "o_proj": f"{kind}.o_proj"}
        return LayerWeights(attn_res="attn", attn=kind, mlp_res="mlp", mlp=kind, **own)  # type: ignore[arg-type]

    moe: Any = {name: f"moe.{name}" for name in MoEWeights.__dataclass_fields__}
    dense: Any = {name: f"dense.{name}" for name in DenseWeights.__dataclass_fields__}
    ends: Any = {"embed": "embed", "layers": (), "output_res": "output", "lm_head": "lm_head"}

    name: Any = str  # a name where other readings have a tensor

    def tap(ops: Any) -> None:  # each layer's entry of the table says whether it is tapped
        if tapped:
            ops.tap(buf.delta, name("streams"), out=buf.taps)

    def kda(ops: Any) -> None:
        tap(ops)
        conv_state, state, streams = name("conv_state"), name("state"), name("streams")
        fresh, records = name("attn.fresh"), name("records") if recorded else None
        model.kda_layer(layer("kda"), conv_state, state, streams, fresh, step, buf, ops, records)

    def mla(ops: Any) -> None:
        tap(ops)
        latent, streams, fresh = name("latent"), name("streams"), name("attn.fresh")
        model.mla_layer(layer("mla"), latent, streams, fresh, step, buf, ops)

    def moe_text(ops: Any) -> None:
        streams, fresh = name("streams"), name("mlp.fresh")
        model.latent_moe(layer("moe"), MoEWeights(**moe), streams, fresh, buf, ops)

    def dense_text(ops: Any) -> None:
        streams, fresh = name("streams"), name("mlp.fresh")
        model.dense_mlp(layer("dense"), DenseWeights(**dense), streams, fresh, buf, ops)

    def head(ops: Any) -> None:
        model.head(Weights(**ends), buf.streams, step, buf, ops)

    def embed(ops: Any) -> None:
        model.embedding(Weights(**ends), step, buf, ops)

    numbers = range(config.num_hidden_layers)
    made: dict[str, Text] = {"head": head, "embed": embed}
    if any(config.is_kda(i) for i in numbers):
        made["kda"] = kda
    if not all(config.is_kda(i) for i in numbers):
        made["mla"] = mla
    if any(config.is_moe(i) for i in numbers):
        made["moe"] = moe_text
    if not all(config.is_moe(i) for i in numbers):
        made["dense"] = dense_text
    return made


# ---- the table ----


def table_of(
    config: ModelConfig,
    w: Weights,
    cache: Cache,
    numbers: Sequence[int] | None = None,
    taps: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Rows of `fields` for the layers of `w` and for the head -> [L + 1, 32] i64, and the tensors
    whose addresses it holds. `numbers` of the layers in the model; packed weights; `taps` as
    `model.forward` takes them."""
    kept: list[Tensor] = []
    rows = []
    numbers = range(len(w.layers)) if numbers is None else numbers
    size = config.attn_res_block_size
    streams = [-(-i // size) + 1 for i in numbers] + [n // size + 2 for n in numbers[-1:]]
    following = [*(layer.attn_res for layer in w.layers[1:]), w.output_res]
    for at, (i, layer) in enumerate(zip(numbers, w.layers, strict=True)):
        entries = layer_entries(config, i, layer, cache)
        entries |= {"next.score": following[at].score, "next.streams": streams[at + 1]}
        entries["tap"] = taps.index(i) * config.hidden_size if i in taps else -1
        rows.append(row_of(entries, kept))
    head: dict[str, Any] = {
        "output.norm": w.output_res.norm,
        "output.streams": config.num_res_blocks,
        "lm_head": w.lm_head,
    }
    if not w.layers:
        head["attn.score"] = w.output_res.score
    rows.append(row_of(head, kept))
    return torch.tensor(rows, dtype=torch.int64, device=w.output_res.score.device), kept


def row_of(entries: dict[str, Any], kept: list[Tensor]) -> list[int]:
    row = [0] * fields.ENTRIES
    for name, value in entries.items():
        if not isinstance(value, int):
            tensor = getattr(value, "tensor", None)  # Packed
            tensor = getattr(value, "tiles", None) if tensor is None else tensor  # PackedExperts
            tensor = value if tensor is None else tensor
            assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0, name
            kept.append(tensor)
            value = tensor.data_ptr()
        row[fields.entry(name)] = value
    return row


def layer_entries(config: ModelConfig, i: int, w: LayerWeights, cache: Cache) -> dict[str, Any]:
    res_block, is_kda = config.attn_res_block_size, config.is_kda(i)
    mlp: Any = w.mlp
    is_moe = not isinstance(mlp, DenseWeights)
    attn: Any = w.attn
    entries = {
        "kind": fields.KDA * is_kda + fields.MOE * is_moe,
        "attn.score": w.attn_res.score,
        "attn.norm": w.attn_res.norm,
        "attn.streams": -(-i // res_block) + 1,
        "attn.fresh": int(i == 0),
        "mlp.score": w.mlp_res.score,
        "mlp.norm": w.mlp_res.norm,
        "mlp.streams": i // res_block + 2,
        "mlp.fresh": int(i % res_block == 0),
        "o_proj": w.o_proj,
    }
    if is_kda:
        k = config.kda_layer_ids.index(i)
        entries |= {"kda.in_proj": w.in_proj, "kda.conv_state": cache.conv_state[k]}
        entries |= {"kda.state": cache.state[k], "kda.index": k}
        for name in ("conv", "f_b", "A_log", "dt_bias", "o_norm"):
            entries[f"kda.{name}"] = getattr(attn, name)
    else:
        m = config.mla_layer_ids.index(i)
        entries |= {"mla.in_proj": w.in_proj, "mla.q_b": w.q_b, "mla.cache": cache.latent[m]}
        for name in ("q_norm", "kv_norm", "absorb", "value"):
            entries[f"mla.{name}"] = getattr(attn, name)
    if is_moe:
        entries |= {
            "moe.in_proj": mlp.in_proj,
            "moe.bias": mlp.router.bias,
            "moe.w13": mlp.experts.w13,
            "moe.w2": mlp.experts.w2,
            "moe.shared_down": mlp.shared_down,
            "moe.latent_up": mlp.latent_up.weight,
        }
        if mlp.latent_up.norm is not None:
            entries["moe.routed_norm"] = mlp.latent_up.norm
    else:
        entries |= {"dense.gate_up": mlp.gate_up.weight, "dense.down": mlp.down}
    return entries


# ---- running ----


@functools.cache
def program_of(
    config: ModelConfig, sizes: Sizes, whole: bool, recorded: bool, tapped: bool, **options: Any
) -> Program:
    """One for all that run the same: it takes some seconds to compile."""
    text = texts(config, recorded, tapped)
    return Program(sizes, text, whole=whole, recorded=recorded, tapped=tapped, **options)


@dataclass(frozen=True)
class Space:
    """A program and what it writes to."""

    program: Program
    place: int  # of its part of the sync area
    work: Tensor  # bytes
    stamps: Tensor | None  # [SMs, events, 4] i32, of a program that has them


class Mega:
    """Runs steps of up to 8 rows of a rank; `whole`: embedding to logits, else layers only.

    Steps of one row, of more, and of rows that are recorded are three programs, with counters and
    words of their own. All steps run on one stream.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        cache: Cache,
        block_size: int,
        max_blocks: int,
        *,
        shard: Shard = WHOLE,
        whole: bool = True,
        layers: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """w: packed (`packing.py`); layers: their numbers in the model, all of them if
        not given; taps: as `model.forward` takes them; options: of `Program`."""
        self.config, self.weights, self.cache, self.shard = config, w, cache, shard
        self.numbers = list(range(len(w.layers)) if layers is None else layers)
        self._block_size, self._max_blocks = block_size, max_blocks
        self._whole, self._options = whole, options
        self._num_taps = len(taps)
        self._table, self._kept = table_of(config, w, cache, layers, taps)
        self.sync = sync_of(str(self._table.device))
        self._spaces: list[Space] = []
        self.space = functools.cache(self._space)

    def _space(self, pass_rows: int, recorded: bool = False) -> Space:
        device = self._table.device
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        sizes = sizes_of(self.config, self.shard, pass_rows, sms, self._block_size)
        variant = self._whole, recorded, self._num_taps > 0
        program = program_of(self.config, sizes, *variant, **self._options)
        place, work = int(pass_rows > 1) + recorded, work_of(program, str(device))
        space = Space(program, place, work, stamps_of(program, str(device)))
        self._spaces.append(space)
        clear(self.sync, *(space.work for space in self._spaces))
        return space

    def refusal(self, most_rows: int) -> str:
        """Why steps of up to so many rows cannot run; empty if they can. Takes their memory."""
        try:
            for rows in {1, min(most_rows, MAX_ROWS)}:
                self.space_of(rows)
        except AssertionError as error:  # what sizes and programs say of themselves
            return str(error)
        return ""

    def space_of(self, num_rows: int, recorded: bool = False) -> Space:
        return self.space(PASS, True) if recorded else self.space(1 if num_rows == 1 else PASS)

    def run(self, step: Step, buf: Buffers) -> None:
        """One launch. Logits go to `buf.logits_part`; with layers only, `buf.delta` is read and
        left as the last layer's. With `step.records` KDA's states are only read; taps go to
        `buf.taps`."""
        tokens = len(step.input_ids)
        assert 1 <= tokens <= MAX_ROWS, f"{tokens} rows; the persistent kernel takes up to 8"
        assert step.block_table.shape[1] <= self._max_blocks and step.block_table.is_contiguous()
        assert isinstance(buf.streams, Tensor)
        assert buf.taps.shape[1] == self._num_taps * self.config.hidden_size
        space = self.space_of(tokens, step.records is not None)
        if space.stamps is not None:
            space.stamps.zero_()
        arguments = Arguments(
            table=self._table,
            embed_table=self.weights.embed.table,
            input_ids=step.input_ids,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            block_table=step.block_table,
            state_slots=step.state_slots,
            streams=buf.streams,
            delta=buf.delta,
            router_logits=buf.router_logits,
            latent=buf.latent,
            topk_ids=buf.topk_ids,
            topk_weights=buf.topk_weights,
            logits=buf.logits_part,
            taps=buf.taps,
            records=step.records,
            num_layers=len(self.weights.layers),
            num_blocks=self.cache.latent.shape[1] // self._block_size,
        )
        sync = sync_part(self.sync, space.place)
        launch_mega(space.program, space.work, sync, arguments, space.stamps)

    # ---- waits that gave up ----

    def check(self) -> None:
        """MegaError if a wait gave up since the last call; waits for the device. Afterwards the
        next step starts clean."""
        health = self.health()
        failure = health.failure(health.words.tolist())
        if failure is not None:
            health.clear()
            raise MegaError(failure)

    def health(self) -> Health:
        """For a loop that looks at it after each step."""

        def failure(words: list[int]) -> str | None:
            for space in self._spaces:
                own = words[space.place * SYNC_SHIFT // 4 :]
                if own[HEALTH // 4]:
                    return self.describe(space.program, own)
            return None

        words = self.sync[: PROGRAMS * SYNC_SHIFT].view(torch.int32)
        return Health(words, failure, self.clear)

    def clear(self) -> None:
        clear(self.sync, *(space.work for space in self._spaces))

    def describe(self, program: Program, words: list[int]) -> str:
        """What the first words of the sync area say after a step with a wait that gave up."""
        op, cta, number, goal, seen = (w & MASK for w in words[HEALTH // 4 :][:5])
        if op & WORDS:
            return (
                f"the persistent kernel gave up waiting: rank {self.shard.rank} of "
                f"{self.shard.size}, CTA {cta}, op {program.op_names[(op & ~WORDS) - 1]}: words of "
                f"epoch {goal % 256} expected, of {seen} seen; this step's results are dropped"
            )
        blocks = self.blocks(program)
        first = (words[NEXT_SIGNAL // 4] - sum(len(program.signals[b]) for b, _ in blocks)) & MASK
        where, buffer = place_of(program, blocks, (number - first) & MASK)
        sms = program.sizes.sms
        return (
            f"the persistent kernel gave up waiting: rank {self.shard.rank} of {self.shard.size}, "
            f"CTA {cta}, {where}, op {program.op_names[op - 1]}, buffer {buffer}: epoch "
            f"{goal // sms} expected, {seen // sms} seen, and {seen % sms} of {sms} CTAs arrived "
            "for the next; this step's results are dropped"
        )

    def blocks(self, program: Program) -> list[tuple[str, int | None]]:
        """The blocks of a launch in order, as `program.signals` names them, and their layers."""
        config, found = self.config, list[tuple[str, int | None]]()
        for i in self.numbers:
            found.append(("kda" if config.is_kda(i) else "mla", i))
            found.append(("moe" if config.is_moe(i) else "dense", i))
        return [("start", None), *found, ("head" if self._whole else "stop", None)]


def place_of(
    program: Program, blocks: list[tuple[str, int | None]], offset: int
) -> tuple[str, str]:
    """-> (layer, buffer) of a signal, counted from a launch's first."""
    for name, layer in blocks:
        signals = program.signals[name]
        if offset < len(signals):
            return name if layer is None else f"layer {layer}", signals[offset]
        offset -= len(signals)
    return "layer not known", "not known"  # a later step's words
