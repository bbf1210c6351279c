"""The fixture that runs kernels on the emulator of `tests/ptx`, in place of a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ptx.launch import CudaIsCpu, Emulator

# Which of the addresses that a launcher passes are weights, and so may be read before
# griddepcontrol.wait.
KERNELS = {
    "attn_res": {2, 3},
    "embed": {1},
    "expert_down": {5},
    "expert_prefill": {3},
    "expert_up": {4},
    "gemv": {1},
    "kda_commit": set[int](),
    "kda_decode": {1, 2, 3, 4, 5},
    "mla_decode": set[int](),
    "mla_latent": {1, 2},
    "mla_merge": set[int](),
    "rms_norm": {1},
    "route": {1},
    "tap": set[int](),
}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Emulator]:
    """Launchers run on the emulator; what asks for a CUDA device gets the CPU."""
    emulator = Emulator(str(tmp_path))
    for name, weights in KERNELS.items():
        emulator.install(monkeypatch, importlib.import_module(f"nanok3.kernels.{name}"), weights)
    with CudaIsCpu():
        yield emulator
