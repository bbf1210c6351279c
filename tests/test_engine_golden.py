"""The engine against what the published model code computes (tests/data/golden_expected.npz)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanok3.config import EngineConfig, GenerationDefaults
from nanok3.engine import Engine
from nanok3.sampling import SamplingParams

DATA = Path(__file__).parent / "data"
EXPECTED: dict[str, NDArray[Any]] = dict(np.load(DATA / "golden_expected.npz"))
LENGTHS = (1, 7, 70, 200)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)

# Chunks that end one token before, at and after a border of blocks; token by token; whole.
CUTS = [(16, 15), (16, 16), (16, 17), (64, 63), (64, 64), (64, 65), (7, 1), (1, 5), (64, 256)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden")
    script = str(DATA / "make_golden_k3.py")
    subprocess.run([sys.executable, script, "golden", str(path)], check=True, capture_output=True)
    fingerprint = (path / "fingerprint.txt").read_text().strip()
    assert fingerprint == str(EXPECTED["fingerprint"]), "the checkpoint is not the stored one's"
    return path


@pytest.fixture(scope="module")
def loaded(directory: Path) -> dict[str, Engine]:
    return {name: Engine.load(directory, dtype=name) for name in ("float32", "bfloat16")}


def engine_with(loaded: Engine, **settings: Any) -> Engine:
    """Other settings over the same weights."""
    chosen = EngineConfig(dtype=loaded.settings.dtype, debug=True, **settings)
    return Engine(loaded.config, loaded._runner.weights, None, chosen, GenerationDefaults())


def ids_of(length: int) -> list[int]:
    return EXPECTED[f"ids_{length}"].tolist()


def check_logits(logits: Tensor, length: int, what: str) -> None:
    """All rows' best ids and the last row's values, within the stored bounds of float32."""
    assert logits.shape == (length, 608) and logits.dtype == torch.float32
    right = torch.from_numpy(EXPECTED[f"last_logits_{length}"])
    error = logits[-1] - right
    relative, largest = float(error.norm() / right.norm()), float(error.abs().max())
    print(f"{what}: relative L2 {relative:.1e}, largest error {largest:.1e}")
    assert relative <= EXPECTED["tol_fp32_rel_l2"], what
    assert largest <= EXPECTED["tol_fp32_max_abs"], what
    clear = EXPECTED[f"argmax_gap_{length}"] >= EXPECTED["tol_fp32_argmax_gap"]
    best = logits.argmax(-1).numpy()
    assert (best == EXPECTED[f"argmax_{length}"])[clear].all(), what


@pytest.mark.parametrize(
    "length, strict", [(1, False), (7, False), (70, False), (200, False), (7, True)]
)
def test_logits_and_greedy_ids_as_loaded(
    directory: Path, loaded: dict[str, Engine], length: int, strict: bool
) -> None:
    engine = engine_with(loaded["float32"], strict=strict)
    check_logits(engine.logits(ids_of(length)), length, f"{length} ids, strict {strict}")
    for reused in (0, length - 1):  # the second time from a snapshot
        result = engine.generate(ids_of(length), GREEDY)
        assert result.token_ids == EXPECTED[f"greedy_{length}"].tolist()
        assert result.usage.cached_tokens == reused


@pytest.mark.parametrize("block_size, chunk", CUTS)
def test_any_cut_of_the_prompt_gives_the_same(
    loaded: dict[str, Engine], block_size: int, chunk: int
) -> None:
    engine = engine_with(loaded["float32"], block_size=block_size, prefill_chunk=chunk)
    length = 200 if chunk >= 15 else 70
    what = f"{length} ids, blocks of {block_size}, chunks of {chunk}"
    check_logits(engine.logits(ids_of(length)), length, what)
    result = engine.generate(ids_of(length), replace(GREEDY, max_tokens=8))
    assert result.token_ids == EXPECTED[f"greedy_{length}"].tolist()[:8], what


@pytest.mark.parametrize("strict", [False, True])
def test_all_lengths_at_once(loaded: dict[str, Engine], strict: bool) -> None:
    engine = engine_with(loaded["float32"], strict=strict, max_num_reqs=3, prefill_chunk=33)
    lengths = LENGTHS[:3] if strict else LENGTHS
    requests = [engine.submit(ids_of(length), GREEDY) for length in lengths]
    engine.run(requests)
    for length, request in zip(lengths, requests, strict=True):
        assert request.result().token_ids == EXPECTED[f"greedy_{length}"].tolist()


@pytest.mark.parametrize(
    "length, block_size, chunk",
    [(1, 64, 256), (7, 64, 256), (70, 16, 15), (70, 16, 17), (200, 16, 17), (200, 64, 256)],
)
def test_bf16(loaded: dict[str, Engine], length: int, block_size: int, chunk: int) -> None:
    engine = engine_with(loaded["bfloat16"], block_size=block_size, prefill_chunk=chunk)
    logits = engine.logits(ids_of(length))
    right = torch.from_numpy(EXPECTED[f"last_logits_{length}"])
    relative = float((logits[-1] - right).norm() / right.norm())
    ids = engine.generate(ids_of(length), GREEDY).token_ids
    expected = EXPECTED[f"greedy_{length}"].tolist()
    differing = [i for i in range(24) if ids[i] != expected[i]][:1]
    gaps = [float(EXPECTED[f"greedy_gap_{length}"][i]) for i in differing]
    print(f"{length} ids: relative L2 {relative:.3f}; first difference {differing}, gap {gaps}")
    assert relative <= EXPECTED["tol_bf16_last_rel_l2"]
    assert all(gap < EXPECTED["tol_bf16_greedy_gap"] for gap in gaps)


def test_float64_agrees_more_closely(directory: Path) -> None:
    engine = Engine.load(directory, dtype="float64")
    logits = engine.logits(ids_of(70))
    right = torch.from_numpy(EXPECTED["last_logits_70"]).double()
    assert logits.dtype == torch.float64
    assert float((logits[-1] - right).norm() / right.norm()) < 1e-5
