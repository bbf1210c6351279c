"""`scripts/bench_ranks.py`: short runs on a GPU; its loop of sums on the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare import check_equal

pytest.importorskip("cutlass")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import bench_ranks  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_fake_stream  # noqa: E402
from ptx.launch import ARCH, Emulator  # noqa: E402
from ptx.memory import buffer_of  # noqa: E402

from nanok3.comm.words import virtual_peers  # noqa: E402


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments",
    [
        ["reduce"],
        ["steps", "--ranks", "2", "--steps", "100"],
        ["layers", "--ranks", "2", "4", "8", "--layers", "4", "--experts", "16"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_values_are_right(arguments: list[str]) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_ranks.py"), *arguments]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_its_sums_on_the_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CTAS", 2), ("THREADS", 32), ("COLUMNS", 256)):
        monkeypatch.setattr(bench_ranks.Sums, name, value)
    emulator = Emulator(str(tmp_path))
    args = (Int64(0), Int64(0), Int64(0), Int32(1), make_fake_stream())
    kernel = emulator.compile(bench_ranks.Sums(4), args, ARCH)
    data = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    right = bench_ranks.sums_by_torch(data, 3)
    peers, health = virtual_peers(4, 2 * 4 * 4 * 256, "cpu"), torch.zeros(5, dtype=torch.int32)
    mail = [buffer_of(own.mail, False, "mail", unordered=True) for own in peers]
    others = [buffer_of(data, False), buffer_of(peers[0].bases, True), buffer_of(health, False)]
    numbers = (data.data_ptr(), peers[0].bases.data_ptr(), health.data_ptr(), 3)
    emulator.run(kernel, numbers, [*mail, *others])
    check_equal(data, right)
    assert not health.any()
