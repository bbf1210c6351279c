"""What a machine lacks is said before anything is loaded; the CUDA calls are replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nanok3.config import WHOLE, EngineConfig, load_config
from nanok3.device import SPARE_BYTES, device_problems
from nanok3.engine import Engine
from nanok3.plan import make_plan

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
    monkeypatch.setattr("nanok3.device.find_spec", lambda name: name)
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
    hopper.setattr("nanok3.device.find_spec", lambda name: None)
    assert "nvidia-cutlass-dsl is not installed" in device_problems("cuda", "bfloat16", 0)[0]
    hopper.setattr(torch.cuda, "is_available", lambda: False)
    assert "working NVIDIA driver" in device_problems("cuda", "bfloat16", 0)[0]
    hopper.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in device_problems("cuda", "bfloat16", 0)[0]
    hopper.setattr(torch, "__version__", "2.9.1+cpu")
    assert device_problems("cuda", "bfloat16", 0)[0].startswith("torch 2.9.1+cpu: 2.11")


MINI = Path(__file__).parents[1] / "nanok3" / "models" / "k3_mini"


def load_refused(monkeypatch: pytest.MonkeyPatch, settings: EngineConfig) -> str:
    """Why `Engine.load` refuses k3-mini on this GPU, without opening the checkpoint."""
    monkeypatch.setattr("nanok3.engine.Checkpoint.open", lambda *args, **options: 1 / 0)
    with pytest.raises(ValueError) as caught:
        Engine.load(MINI, device="cuda", settings=settings)
    return str(caught.value)


def test_what_does_not_fit_is_refused_before_the_checkpoint_is_opened(
    hopper: pytest.MonkeyPatch,
) -> None:
    needed = make_plan(load_config(MINI), WHOLE, large_cache(10_000_000)).total_bytes
    reason = load_refused(hopper, large_cache(10_000_000))
    assert f"but {(needed + SPARE_BYTES) / 1e9:.1f} GB are needed (0.0 for weights, " in reason
    assert reason.count("\n") == 0 and "shorter requests need less" in reason


def large_cache(num_blocks: int) -> EngineConfig:
    return EngineConfig(device="cuda", dtype="bfloat16", num_blocks=num_blocks)


def test_a_model_that_just_fits_is_loaded(hopper: pytest.MonkeyPatch) -> None:
    plan = make_plan(load_config(MINI), WHOLE, large_cache(100))
    free = plan.total_bytes + SPARE_BYTES
    hopper.setattr("nanok3.engine.Checkpoint.open", lambda *args, **options: 1 / 0)
    for spare, error in ((0, ZeroDivisionError), (-1, ValueError)):
        hopper.setattr(torch.cuda, "mem_get_info", lambda i, s=spare: (free + s, 141 * GB))
        with pytest.raises(error):
            Engine.load(MINI, device="cuda", settings=large_cache(100))


def test_an_old_gpu_or_none_is_refused_before_loading(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert "compute capability 8.0" in load_refused(hopper, large_cache(100))
    hopper.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in load_refused(hopper, large_cache(100))


def test_widths_that_the_layouts_cannot_have_are_refused(
    hopper: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = json.loads((MINI / "config.json").read_text())
    config["text_config"] |= {"q_lora_rank": 72, "intermediate_size": 200}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as caught:
        Engine.load(tmp_path, device="cuda")
    assert str(caught.value).splitlines() == [
        "text_config.q_lora_rank: the GPU kernels need a multiple of 32 on each GPU, found 72",
        "text_config.intermediate_size: the GPU kernels need a multiple of 32 on each GPU, "
        "found 200",
    ]
