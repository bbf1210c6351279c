"""Every kernel of the packaged model and of K3's shards compiles for every arch, without spills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_all_kernels_compile(arch: str) -> None:
    script = ROOT / "scripts" / "compile_all.py"
    env = {k: v for k, v in os.environ.items() if k != "CUTE_DSL_ARCH"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), "--arch", arch], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    assert int(last.split()[0]) > 100 and ", 0 failed or spilled" in last
