"""A draft that is in order passes in both layouts, and each damage fails its own check."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import make_draft, random_draft_fields, tiny_inferact, tiny_redhat
from safetensors.torch import load_file, save_file
from test_check import by_hand, by_name, report_of, run
from tiny import TINY, make_checkpoint
from torch import Tensor

from nanok3.check_draft import DRAFT_CHECKS
from nanok3.exits import MODEL, USAGE
from nanok3.spec.config import draft_config

FILE = "model.safetensors"
RAW = {"inferact": tiny_inferact(), "redhat": tiny_redhat()}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=3)


def draft_in(path: Path, layout: str, copy: bool = True) -> Path:
    config = draft_config(RAW[layout])
    return make_draft(path, RAW[layout], config, random_draft_fields(config, 1), copy)


@pytest.mark.parametrize(
    "layout, copy", [("inferact", True), ("inferact", False), ("redhat", True)]
)
def test_both_layouts_pass(
    layout: str, copy: bool, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Also the copy of an embedding that nobody reads, of NaN here."""
    draft = draft_in(tmp_path / "draft", layout, copy)
    code, report = report_of(capsys, "--model", model, "--draft", draft)
    checks = by_name(report)
    assert code == 0 and report["verdict"] == "this checkpoint and its draft can be loaded"
    assert list(checks)[-4:] == list(DRAFT_CHECKS) and report["draft"] == str(draft)
    assert all(checks[name]["status"] == "ok" for name in DRAFT_CHECKS)
    assert not any(checks[name]["warnings"] for name in DRAFT_CHECKS)
    _, plain = report_of(capsys, "--model", model)
    assert plain["draft"] is None and not any(n in by_name(plain) for n in DRAFT_CHECKS)
    tensors = {n: t for n, t in load_file(draft / FILE).items() if t.isfinite().all()}
    read = sum(tensor.nbytes for tensor in tensors.values())  # all of them are small
    assert report["sampled_bytes"] == plain["sampled_bytes"] + read


# ---- each damage fails its own check ----


def edit_tensors(draft: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(draft / FILE).items()}
    edit(tensors)
    save_file(tensors, draft / FILE, {"format": "pt"})


def edit_config(draft: Path, **changes: Any) -> None:
    raw = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(raw | changes))


def widen(tensors: dict[str, Tensor]) -> None:
    name = "markov_head.markov_w1.weight"
    tensors[name] = tensors[name].float()


DOWN = "layers.1.mlp.down_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "config": (lambda d: (d / "config.json").write_text("{}"), "draft config", "architectures"),
    "of another model": (
        lambda d: edit_config(d, target_num_hidden_layers=93),
        "draft config",
        "the draft is of a model with 93, this one has 7",
    ),
    "no file": (lambda d: (d / FILE).unlink(), "draft files", "found neither"),
    "short": (lambda d: os.truncate(d / FILE, 9999), "draft files", "shorter than its header says"),
    "missing": (
        lambda d: edit_tensors(d, lambda t: t.pop(DOWN)),
        "draft tensors",
        f"{DOWN}: missing",
    ),
    "shape": (
        lambda d: edit_tensors(d, lambda t: t.update({DOWN: t[DOWN].T.contiguous()})),
        "draft tensors",
        f"{DOWN}: expected BF16 [64, 48], found BF16 [48, 64]",
    ),
    "dtype": (
        lambda d: edit_tensors(d, widen),
        "draft tensors",
        "markov_w1.weight: expected BF16 [512, 8], found F32 [512, 8]",
    ),
    "stranger": (
        lambda d: edit_tensors(d, lambda t: t.update(extra=torch.ones(1).bfloat16())),
        "draft tensors",
        "extra: not a tensor of this model",
    ),
    "nan": (
        lambda d: edit_tensors(d, lambda t: t[DOWN].__setitem__((5, 1), float("nan"))),
        "draft values",
        f"{DOWN} in {FILE}: expected finite values, found nan in row 5",
    ),
    "norm": (
        lambda d: edit_tensors(d, lambda t: t["layers.0.input_layernorm.weight"].zero_()),
        "draft values",
        "found zeros throughout",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_fails_its_own_check(
    damage: str, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    draft = draft_in(tmp_path / "draft", "inferact")
    spoil, name, sentence = DAMAGE[damage]
    spoil(draft)
    code, report = report_of(capsys, "--model", model, "--draft", draft)
    failed = {c["name"]: c["problems"] for c in report["checks"] if c["status"] == "failed"}
    assert code == MODEL and list(failed) == [name], failed
    assert sentence in failed[name][0], failed[name]
    assert report["verdict"] == f"refused: {name} failed"


def test_zero_rows_are_a_warning(model: Path, tmp_path: Path, capsys: Capture) -> None:
    draft = draft_in(tmp_path / "draft", "redhat")
    edit_tensors(draft, lambda t: t[DOWN].zero_())
    code, report = report_of(capsys, "--model", model, "--draft", draft)
    warnings = by_name(report)["draft values"]["warnings"]
    assert code == 0 and warnings == [f"{DOWN} in {FILE}: rows 0 to 63 are zero throughout"]


def test_a_draft_is_checked_where_the_model_is_not(tmp_path: Path, capsys: Capture) -> None:
    """A config that cannot be run says nothing of the draft beside it."""
    (tmp_path / "model").mkdir()
    draft = draft_in(tmp_path / "draft", "inferact")
    code, report = report_of(capsys, "--model", tmp_path / "model", "--draft", draft)
    assert code == MODEL and report["verdict"] == "refused: config failed"
    assert by_name(report)["draft values"]["status"] == "ok"


# ---- the hash ----


def test_a_draft_is_hashed_too(model: Path, tmp_path: Path, capsys: Capture) -> None:
    draft, state = draft_in(tmp_path / "draft", "redhat"), tmp_path / "state"
    arguments = ("--model", model, "--draft", draft, "--hash", "--state", state)
    code, report = report_of(capsys, *arguments)
    assert code == 0 and report["draft_content_sha256"] == by_hand(draft)
    assert report["draft_file_sha256"].keys() == {FILE}
    assert report["content_sha256"] == by_hand(model)
    _, again = report_of(capsys, *arguments)
    assert f", 1 as {state} has them" in by_name(again)["draft hash"]["summary"]
    assert again["draft_content_sha256"] == report["draft_content_sha256"]
    os.truncate(draft / FILE, 9999)
    _, spoilt = report_of(capsys, *arguments)
    assert by_name(spoilt)["draft hash"]["status"] == "skipped"
    assert spoilt["draft_content_sha256"] is None and spoilt["content_sha256"]


def test_wrong_options(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, "--model", model, "--draft", tmp_path / "none")
    assert code == MODEL and not out and "no such directory" in err
    draft = Path(shutil.copytree(draft_in(tmp_path / "a", "inferact"), tmp_path / "draft"))
    monkeypatch.chdir(draft)
    code, out, err = run(capsys, "--model", model, "--draft", ".", "--hash")
    assert code == USAGE and not out and "--state" in err
