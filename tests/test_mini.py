"""The packaged model: what the README shows, and a sample of `scripts/check_mini.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nanok3.engine import Engine
from nanok3.sampling import SamplingParams

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from check_mini import HELD_OUT, MODEL_DIR, calls_right, is_whole, replies  # noqa: E402


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(MODEL_DIR)


def test_it_says_what_os_path_join_does(engine: Engine) -> None:
    greedy = SamplingParams(temperature=0)
    first = engine.generate("What does os.path.join do?", greedy)
    again = engine.generate("What does os.path.join do?", greedy)
    assert first.text.startswith("os.path.join joins one or more path components")
    assert (again.text, again.token_ids) == (first.text, first.token_ids)
    assert first.finish_reason == "stop" and first.well_formed


def test_replies_are_well_formed_and_stop(engine: Engine) -> None:
    prompts = json.loads(HELD_OUT.read_text())["prompts"][::10]
    whole = [is_whole(reply) for reply in replies(engine, prompts)]
    assert sum(whole) >= 0.95 * len(prompts)


def test_sums_call_the_tool(engine: Engine) -> None:
    sums = json.loads(HELD_OUT.read_text())["sums"][::10]
    answered = zip(sums, replies(engine, sums), strict=True)
    right = [calls_right(reply, s["a"], s["b"], s["op"]) for s, reply in answered]
    assert sum(right) >= 0.9 * len(sums)


def test_the_package_stays_small() -> None:
    assert sum(f.stat().st_size for f in MODEL_DIR.iterdir()) <= 20_000_000
