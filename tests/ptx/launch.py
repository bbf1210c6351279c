"""Lets a kernel's own launcher run on the emulator: what it calls of `nanok3.dsl` is replaced."""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ptx.instructions import Program, read_ptx
from ptx.machine import run_grid
from ptx.memory import Buffer, Global, buffer_of

ARCH = "sm_90a"
SMS = 3  # few, so that persistent kernels have several items a CTA

Edit = Callable[[str], str]


@dataclass(frozen=True)
class Compiled:
    """What stands for a compiled kernel."""

    operator: Any  # an instance of the kernel's class
    program: Program
    shared_bytes: int


@dataclass
class Launch:
    """What `operator.__call__` asks for."""

    numbers: tuple[Any, ...] = ()
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False  # all CTAs run at once, and may wait for each other


def launch_of(operator: Any, numbers: tuple[Any, ...]) -> Launch:
    """Runs the body of `__call__` on plain numbers; a call of `kernel` is only noted."""
    asked = Launch()

    def kernel(*passed: Any) -> SimpleNamespace:
        asked.numbers = passed

        def launch(
            *, grid: Any, cluster: Any = (1, 1, 1), cooperative: bool = False, **_others: Any
        ) -> None:
            asked.grid, asked.cluster, asked.cooperative = grid, cluster, cooperative

        return SimpleNamespace(launch=launch)

    double = copy.copy(operator)
    double.kernel = kernel
    call: Any = type(operator).__call__
    call.__wrapped__(double, *numbers, None)  # the last is the stream
    return asked


def caller_of_dsl(where: Any) -> Any:
    """The place in a kernel's text that calls an instruction, for what nanok3/dsl.py makes."""
    if where is None or "nanok3/dsl.py" not in str(where):
        return where
    frame: FrameType | None = sys._getframe()
    while frame and not frame.f_code.co_filename.endswith("nanok3/dsl.py"):
        frame = frame.f_back
    while frame and frame.f_code.co_filename.endswith(("nanok3/dsl.py", "op.py")):
        frame = frame.f_back
    if frame is None:
        return where
    return type(where).file(frame.f_code.co_filename, frame.f_lineno, 0)


@dataclass
class Emulator:
    folder: str  # where the compiler leaves its PTX
    edit: Edit = field(default=lambda ptx: ptx)  # of the PTX, for tests that break a kernel
    seed: int = 0
    races: bool = True  # whether those on global memory are looked for, in a cooperative grid
    tensors: list[torch.Tensor] = field(default_factory=list)  # passed to the launch being made

    def install(self, patch: pytest.MonkeyPatch, module: ModuleType, weights: set[int]) -> None:
        """In a kernel's module. `weights`: which of the addresses passed are constant.

        What the module compiled before is not used.
        """
        patch.setattr(module, "compile_kernel", self.compile)
        patch.setattr(module, "address", self.address)
        patch.setattr(module, "launch", functools.partial(self.launch, weights))
        patch.setattr(module, "arch_of", lambda index: ARCH)
        name = "compile_" + module.__name__.rpartition(".")[2]
        patch.setattr(module, name, functools.cache(getattr(module, name).__wrapped__))
        properties = SimpleNamespace(multi_processor_count=SMS)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def compile(self, operator: Any, args: Any, arch: str) -> Compiled:
        import cutlass.cute as cute  # here, so that tests without it can be collected
        from cutlass._mlir_helpers.op import loc_transform

        options = f"--gpu-arch={arch} --keep-ptx --dump-dir={self.folder} --generate-line-info"
        with loc_transform(caller_of_dsl):
            made = cute.compile(operator, *args, options=options)
        # the launch's shared memory is the only 64-bit constant of the host's code
        host = str(made.ir_module).partition("llvm.func @cutlass")[2]
        sizes = [int(n) for n in re.findall(r"llvm\.mlir\.constant\((\d+) : i64\)", host)]
        return Compiled(operator, read_ptx(self.edit(made.__ptx__)), max(sizes, default=0))

    def address(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return tensor.data_ptr()

    def launch(self, weights: set[int], kernel: Compiled, *numbers: int | float) -> None:
        buffers = [buffer_of(t, i in weights) for i, t in enumerate(self.tensors)]
        self.tensors.clear()
        self.run(kernel, numbers, buffers)

    def run(self, kernel: Compiled, numbers: Sequence[int | float], buffers: list[Buffer]) -> None:
        """One launch, which may touch `buffers`."""
        asked = launch_of(kernel.operator, tuple(numbers))
        self.seed += 1
        run_grid(
            kernel.program,
            Global(buffers),
            [int(n) for n in asked.numbers],
            asked.grid,
            asked.cluster[0],
            asked.cooperative,
            kernel.shared_bytes,
            self.seed,
            self.races,
        )


class CudaIsCpu(TorchFunctionMode):
    """Tests written for a GPU make their tensors on the CPU; `.cuda()` and `.cpu()` still copy."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            func = torch.Tensor.clone
        return func(*args, **kwargs)
