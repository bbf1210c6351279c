"""The two published files to the byte, and small ones of both that load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compare import check_equal
from drafts import (
    INFERACT,
    REDHAT,
    make_draft,
    random_draft_fields,
    tiny_inferact,
    tiny_redhat,
)
from safetensors.torch import load_file, save_file
from tiny import TINY, tiny_weights

from nanok3.checkpoint import CheckpointError
from nanok3.spec.config import draft_config, load_draft_config
from nanok3.spec.draft_weights import EMBED, build_draft, expected_draft_tensors, load_draft


def test_inferact_to_the_byte() -> None:
    whole = expected_draft_tensors(draft_config(INFERACT))["with a copy of the embedding"]
    assert len(whole) == 68
    assert sum(spec.nbytes for spec in whole.values()) == 7_124_625_922
    layer = [spec for name, spec in whole.items() if name.startswith("layers.3.")]
    assert sum(spec.nbytes for spec in layer) == 2 * 409_419_776
    own = expected_draft_tensors(draft_config(INFERACT))["without"]
    assert sum(spec.nbytes for spec in own.values()) == 4_775_815_682
    assert whole["context_proj.weight"].shape == (7168, 35840)
    assert whole["layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 7168)
    assert whole["confidence_head.proj.weight"].shape == (1, 7424)


def test_redhat_to_the_byte() -> None:
    (whole,) = expected_draft_tensors(draft_config(REDHAT)).values()
    assert len(whole) == 64
    assert sum(spec.nbytes for spec in whole.values()) == 9_489_800_962
    assert whole["fc.weight"].shape == (7168, 35840)
    assert whole["layers.4.self_attn.k_norm.weight"].shape == (64,)


@pytest.mark.parametrize("raw", [tiny_inferact(), tiny_redhat()], ids=["inferact", "redhat"])
@pytest.mark.parametrize("copy", [True, False])
def test_a_saved_draft_loads(raw: dict[str, Any], copy: bool, tmp_path: Path) -> None:
    fields = random_draft_fields(draft_config(raw), 1)
    make_draft(tmp_path, raw, draft_config(raw), fields, copy)
    c = load_draft_config(tmp_path)
    loaded = load_draft(tmp_path, c, torch.float32, "cpu")
    assert loaded.keys() == fields.keys()
    for name, value in fields.items():
        check_equal(loaded[name], value, name)
    target = tiny_weights(TINY, 5)
    w = build_draft(c, loaded.__getitem__, target.embed, target.lm_head)
    assert (w.embed is target.embed) == (not c.owns_vocab)
    stored = load_file(tmp_path / "model.safetensors")
    if c.owns_vocab:
        k, v = (stored[f"layers.1.self_attn.{n}_proj.weight"] for n in "kv")
        check_equal(w.layers[1].kv, torch.cat([k, v]).float(), "k above v")
    gate, up = (stored[f"layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    check_equal(w.layers[1].gate_up, torch.cat([gate, up]).float(), "gate above up")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    raw = tiny_inferact()
    c = draft_config(raw)
    make_draft(tmp_path, raw, c, random_draft_fields(c, 1))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    first = "layers.0.mlp.down_proj.weight"
    wrong: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "missing": ({n: t for n, t in tensors.items() if n != first}, f"{first}: missing"),
        "extra": (tensors | {"d2t": torch.zeros(3).bfloat16()}, "d2t: not a tensor"),
        "shape": (tensors | {first: tensors[first][:, :-1].contiguous()}, f"{first}: expected"),
        "dtype": (tensors | {first: tensors[first].float()}, f"{first}: expected"),
        "embedding": (tensors | {EMBED: tensors[EMBED][:-1].contiguous()}, f"{EMBED}: expected"),
    }
    for changed, message in wrong.values():
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=message):
            load_draft(tmp_path, c, torch.float32, "cpu")
