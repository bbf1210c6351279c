"""Skips what this machine cannot run, and says why; one thread a process."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start; before torch is imported

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "multigpu" in item.keywords and devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 CUDA devices, found {devices}"))
        elif "gpu" in item.keywords and not devices:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, found none"))
