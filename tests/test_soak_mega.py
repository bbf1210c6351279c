"""A short soak of the persistent kernel against the chain; `scripts/soak_mega.py` runs longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.gpu
def test_300_steps() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "soak_mega.py"), "--steps", "300"]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
