"""docs/scaling.md shows what its script computes, and the script's sums are those of its parts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "scripts" / "scaling.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables(scaling: ModuleType) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    between = page.partition(scaling.BEGIN)[2].partition(scaling.END)[0]
    assert between == scaling.tables()


def test_a_step_of_one_rank_of_sixteen_is_the_measured_one(scaling: ModuleType) -> None:
    """Without exchanges the model gives back what it was made of: 4372 us at one row."""
    step = scaling.step_of(scaling.WORKS[0], scaling.CARDS[0], 16)
    assert step.stream + step.latency == pytest.approx(4.372, rel=0.01)


def test_hops_are_three_a_layer_with_experts(scaling: ModuleType) -> None:
    assert scaling.hops() == 1 + 92 * 3 + 2
