"""What a machine lacks is said before anything is loaded; the CUDA calls are replaced."""

from __future__ import annotations

import pytest
import torch

from nanok3.device import device_problems

GB = 10**9


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one good GPU of which 100 GB are free."""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 * GB, 141 * GB))
    return monkeypatch


def test_nothing_is_wrong_with_a_cpu_or_a_good_gpu(hopper: pytest.MonkeyPatch) -> None:
    assert device_problems("cpu", "float32", 10**15) == []
    assert device_problems("cuda", "bfloat16", 90 * GB) == []


def test_too_little_memory_says_how_much_is_needed(hopper: pytest.MonkeyPatch) -> None:
    (reason,) = device_problems("cuda", "bfloat16", 120 * GB)
    assert reason == "cuda has 100.0 of 141.0 GB free, but 122.1 GB are needed"


def test_an_old_gpu_is_named(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    hopper.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    (reason,) = device_problems("cuda:0", "bfloat16", 0)
    assert reason.startswith("NVIDIA A100 has compute capability 8.0; 9.0 (Hopper)")


def test_other_lacks(hopper: pytest.MonkeyPatch) -> None:
    assert device_problems("cuda", "float32", 0)[0].startswith("dtype float32")
    assert device_problems("cuda:3", "bfloat16", 0)[0].startswith("cuda:3: only 1 GPUs are here")
    hopper.setattr(torch.cuda, "is_available", lambda: False)
    assert "working NVIDIA driver" in device_problems("cuda", "bfloat16", 0)[0]
    hopper.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in device_problems("cuda", "bfloat16", 0)[0]
    hopper.setattr(torch, "__version__", "2.9.1+cpu")
    assert device_problems("cuda", "bfloat16", 0)[0].startswith("torch 2.9.1+cpu: 2.11")
