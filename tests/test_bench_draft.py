"""`bench decode --draft` on a tiny checkpoint and a draft of random weights: what it reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import make_draft, random_draft_fields, tiny_inferact
from tiny import TINY, make_checkpoint

from nanok3 import bench_draft
from nanok3.bench import CheckFailed
from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.spec.config import draft_config
from nanok3.spec_decode import SpecState, accept
from nanok3.spec_loop import SpecLoop


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny_k3", TINY, seed=0)


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny_inferact()
    c = draft_config(raw)
    path = tmp_path_factory.mktemp("drafts") / "tiny_draft"
    return make_draft(path, raw, c, random_draft_fields(c, 1))


def test_report(model_dir: Path, draft_dir: Path) -> None:
    settings = EngineConfig(block_size=8, num_blocks=200, num_drafts=3)
    report = bench_draft.bench_draft(
        settings, model_dir, draft_dir, max_tokens=12, repeats=2, questions=("a", "b")
    )
    assert report.num_drafts == 3 and [s.temperature for s in report.spells] == [0.0, 1.0]
    assert min(report.model_s, report.verify_s, report.draft_s) > 0
    for spell in report.spells:
        assert len(spell.plain_tokens_per_s) == len(spell.draft_tokens_per_s) == 2
        assert len(spell.stands) == 3 and list(spell.stands) == sorted(spell.stands)[::-1]
        assert spell.mean_length == pytest.approx(1 + sum(spell.stands), abs=0.2)
        assert spell.break_even == spell.draft_step_s / spell.plain_step_s
    record = json.loads(report.json())
    assert record["bench"] == "draft" and record["spells"][1]["speed_up"] > 0
    table = report.table()
    assert "K = 3" in table and "break-even" in table and "\n" not in report.json()


def test_no_figure_for_wrong_values(
    model_dir: Path, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_one(state: SpecState, *others: Any) -> None:
        accept(state, *others)
        ids = state.result[:, : state.num_rows]
        ids.copy_(torch.where(ids >= 0, (ids + 1) % 512, ids))

    monkeypatch.setattr("nanok3.spec_steps.accept", off_by_one)
    with pytest.raises(CheckFailed):
        bench_draft.bench_draft(EngineConfig(num_blocks=200), model_dir, draft_dir, 12, 1, ("a",))


def test_a_draft_directory_is_loaded_and_refused(model_dir: Path, draft_dir: Path) -> None:
    engine = Engine.load(model_dir, draft=draft_dir, settings=EngineConfig(num_blocks=20))
    loop = engine._runner.loop
    assert isinstance(loop, SpecLoop) and loop.num_drafts == 7
    plain = Engine.load(model_dir, settings=EngineConfig(num_blocks=20))
    params = engine.sampling(temperature=0.0, max_tokens=20)
    assert engine.generate("hi", params).token_ids == plain.generate("hi", params).token_ids
    with pytest.raises(ValueError, match="no such file"):
        Engine.load(model_dir, draft=model_dir.parent)
    with pytest.raises(ValueError, match="architectures"):
        Engine.load(model_dir, draft=model_dir)
