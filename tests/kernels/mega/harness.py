"""Steps of `mega_ops.Mega`, or launches of any Program, on the emulator of `tests/ptx`.

Every buffer has a name, so a fault says what it is in. What CTAs exchange must be handed over by
signals; the words of the health record are the only ones read and written without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ptx.instructions import Statement
from ptx.launch import ARCH, Compiled, Emulator
from ptx.memory import Buffer, buffer_of
from ptx.races import Lanes
from ptx.warp import Warp
from torch import Tensor

from nanok3.kernels.mega import launch as launcher
from nanok3.kernels.mega.fields import ATTENTION, COMMON, ENTRIES, KDA, MLP, MOE, entry
from nanok3.kernels.mega.kernel import ADDRESSES, Program, compile_mega
from nanok3.kernels.mega.launch import Arguments, launch_mega
from nanok3.kernels.mega.role import COUNTER_BYTES, HEALTH, SYNC_HEAD
from nanok3.kernels.mega.sizes import SHARED_BYTES
from nanok3.mega_ops import Mega
from nanok3.step import Buffers, Step

SMS = 4
Row = Mapping[str, Tensor | int]
WRITTEN = ("conv_state", "state", "cache")  # fields that a launch writes to
INPUTS = (
    *("table", "embed_table", "input_ids", "positions", "slot_mapping"),
    *("block_table", "state_slots"),
)


# ---- what a launch may touch ----


def table_of(rows: Sequence[Row]) -> Tensor:
    """[rows, ENTRIES] i64; a row is field -> tensor or number. Other entries are no address."""
    table = torch.full((len(rows), ENTRIES), 16, dtype=torch.int64)
    for i, row in enumerate(rows):
        for name, value in row.items():
            table[i, entry(name)] = value if isinstance(value, int) else value.data_ptr()
    return table


def fields_of(rows: Sequence[Row], one_row: bool) -> list[Buffer]:
    """The tensors that a table points to; one that several rows name is there once.

    In a step of one row an old window is overwritten when the words of all heads have been seen,
    which were made of it: no signal says so, but who wrote such a word has read the window.
    """
    found: dict[int, Buffer] = {}
    for i, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(value, Tensor):
                constant = name.rpartition(".")[2] not in WRITTEN
                free = one_row and name == "kda.conv_state"
                title = f"{name} of layer {i}"
                found[value.data_ptr()] = buffer_of(value, constant, title, unordered=free)
    return list(found.values())


def rows_of(table: Tensor, tensors: Sequence[Tensor]) -> list[Row]:
    """A table read back: tensors and numbers by field."""
    by_address = {t.data_ptr(): t for t in tensors}
    rows: list[Row] = []
    for numbers in table.tolist():
        attention = "kda" if numbers[0] & KDA else "mla"
        mlp = "moe" if numbers[0] & MOE else "dense"
        names = [
            *COMMON,
            *(f"{attention}.{own}" for own in ATTENTION[attention]),
            *(f"{mlp}.{own}" for own in MLP[mlp]),
        ]
        values = {name: numbers[entry(name)] for name in names}
        rows.append({name: by_address.get(n, n) for name, n in values.items()})
    return rows


def exchanged(program: Program, work: Tensor) -> list[Buffer]:
    sizes = program.sizes
    return [
        buffer_of(work[at : at + sizes.buffers[name]], False, name, unordered=sizes.is_words(name))
        for name, at in sizes.offsets.items()
        if sizes.buffers[name]
    ]


def counters(sync: Tensor) -> list[Buffer]:
    parts = {"next signal": (0, HEALTH), "health": (HEALTH, SYNC_HEAD)}
    parts["counters"] = (SYNC_HEAD, len(sync))
    return [
        buffer_of(sync[begin:end].view(torch.int32), False, name, unordered=name == "health")
        for name, (begin, end) in parts.items()
    ]


# ---- launches ----


class OnEmulator:
    """Compiles a program once; launches may differ in layers, rows and seed."""

    def __init__(self, folder: Path) -> None:
        self.emulator = Emulator(str(folder))
        self.kernels: dict[object, tuple[Compiled, Program]] = {}

    def compiled(self, program: Program, arch: str = ARCH) -> Compiled:
        """Programs of the same sizes and options share a kernel."""
        texts = program.whole, program.recorded, program.tapped
        options = texts, program.stamps, program.limit
        key = program.sizes, tuple(program.texts), options
        if key not in self.kernels:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("nanok3.kernels.mega.kernel.compile_kernel", self.emulator.compile)
                kernel: Compiled = compile_mega(program, ARCH)
            assert program.area_bytes < kernel.shared_bytes <= SHARED_BYTES
            self.kernels[key] = kernel, program
        kernel, traced = self.kernels[key]
        program.op_names, program.signals = traced.op_names, traced.signals
        return kernel

    def launch(
        self,
        program: Program,
        rows: Sequence[Row],
        work: Tensor,
        sync: Tensor,
        arguments: Arguments,
        stamps: Tensor | None = None,
    ) -> None:
        """`rows`: what `arguments.table` was made of."""

        def run(kernel: Compiled, *numbers: int) -> None:
            tensors = {t.data_ptr(): t for t in self.emulator.tensors}
            self.emulator.tensors.clear()
            named = {name: tensors.get(at) for name, at in zip(ADDRESSES, numbers, strict=False)}
            given = [
                buffer_of(t, name in INPUTS, name)
                for name, t in named.items()
                if name not in ("work", "sync") and t is not None and t.numel()
            ]
            parts = exchanged(program, work) + counters(sync)
            self.emulator.run(
                kernel, numbers, [*given, *parts, *fields_of(rows, program.sizes.pass_rows == 1)]
            )

        with on_a_device(program.sizes.sms), pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher, "compiled", self.compiled)
            patch.setattr(launcher, "arch_of", lambda index: ARCH)
            patch.setattr(launcher, "address", self.emulator.address)
            patch.setattr(launcher, "launch", run)
            launch_mega(program, work, sync, arguments, stamps)

    @contextmanager
    def launches(self, mega: Mega) -> Iterator[None]:
        """What it runs, runs here."""

        def launch(
            program: Program,
            work: Tensor,
            sync: Tensor,
            arguments: Arguments,
            stamps: Tensor | None = None,
        ) -> None:
            rows = rows_of(arguments.table, mega._kept)
            self.launch(program, rows, work, sync, arguments, stamps)

        with on_a_device(SMS), pytest.MonkeyPatch.context() as patch:
            patch.setattr("nanok3.mega_ops.launch_mega", launch)
            yield

    def step(self, mega: Mega, step: Step, buf: Buffers) -> None:
        """`Mega.run` and `Mega.check`."""
        with self.launches(mega):
            mega.run(step, buf)
            mega.check()


@contextmanager
def on_a_device(sms: int) -> Iterator[None]:
    properties = SimpleNamespace(multi_processor_count=sms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        yield


# ---- hand-offs that are left out ----


def counter_of(sync: Tensor, number: int) -> int:
    """Address of the counter of a signal in the first launch since the counters stood at zero."""
    return sync.data_ptr() + SYNC_HEAD + number * COUNTER_BYTES


@contextmanager
def without_wait(sync: Tensor, number: int) -> Iterator[None]:
    """Looks for this signal of a first launch find it there, and hand nothing over."""
    counter, look = counter_of(sync, number), Warp.look

    def passes(self: Warp, s: Statement, active: Lanes) -> None:
        name, _, offset = s.operands[1].strip("[]").partition("+")
        at = int(self.value(name)[active][0]) + int(offset or 0)
        if at != counter:
            look(self, s, active)
            return
        register = self.cluster.program.names[s.operands[0]]
        self.registers[register][active] = SMS
        self.state = "look"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Warp, "look", passes)
        yield


@contextmanager
def without_signal(sync: Tensor, number: int) -> Iterator[None]:
    """Nobody gives this signal of a first launch."""
    counter, red_add = counter_of(sync, number), Warp.red_add

    def drops(self: Warp, at: Lanes, word: Lanes, mask: Lanes | None) -> None:
        if counter not in (at if mask is None else at[mask]):
            red_add(self, at, word, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Warp, "red_add", drops)
        yield
