"""What is in force and where it came from, as `--show-config` and a record say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_checkpoint, tiny_config

from nanok3 import cli
from nanok3.config import EngineConfig
from nanok3.loading import use_one_thread_if_small
from nanok3.sampling import SamplingParams

ENGINE_NAMES = {"max_num_reqs": "requests", "max_context": "context"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,))
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), config, seed=3)
    (path / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": 300}')
    return path


def generate(model: Path, record: Path, *options: Any) -> dict[str, tuple[Any, str]]:
    """The options of the record: name -> (value, origin)."""
    command = ["generate", "hi", "--model", model, "--max-tokens", 2, "--record", record, *options]
    assert cli.run([str(part) for part in command]) == 0
    found = json.loads(record.read_text())["options"]
    return {entry["name"]: (entry["value"], entry["origin"]) for entry in found}


def test_every_setting_has_an_origin(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = generate(model, tmp_path / "a", "--show-config")
    names = set(vars(SamplingParams())) | {ENGINE_NAMES.get(n, n) for n in vars(EngineConfig())}
    assert found.keys() == names | {
        *("thinking", "effort", "model", "draft", "threads", "eos_token_id")
    }
    shown = capsys.readouterr().err.splitlines()
    for name, (_, origin) in found.items():
        assert any(s.startswith(f"{name} ") and s.endswith(f" ({origin})") for s in shown), name
    assert found["model"] == (str(model), "command line")
    assert found["temperature"] == (0.7, "generation_config.json")
    assert found["eos_token_id"] == ([258, 300], "config.json, generation_config.json")
    assert found["max_tokens"] == (2, "command line")
    assert found["top_p"] == (1.0, "built in") and found["thinking"] == ("on", "built in")
    assert found["strict"] == (False, "built in") and found["device"] == ("cpu", "built in")
    assert found["dtype"] == ("float32", "built in") and found["requests"] == (1, "built in")
    assert found["context"][1] == found["num_blocks"][1] == found["threads"][1] == "worked out"
    seed, origin = found["seed"]
    assert isinstance(seed, int) and origin == "drawn for each reply"


def test_the_command_line_goes_first(model: Path, tmp_path: Path) -> None:
    """Also where it says what would be in force without it."""
    options = ["--temperature", 0.5, "--seed", 7, "--thinking", "off", "--strict", "--top-p", 1]
    options += ["--device", "cpu", "--dtype", "float32", "--context", 300, "--requests", 1]
    found = generate(model, tmp_path / "a", *options)
    expected = {"temperature": 0.5, "seed": 7, "thinking": "off", "strict": True, "top_p": 1.0}
    expected |= {"device": "cpu", "dtype": "float32", "context": 300, "requests": 1}
    assert {n: found[n] for n in expected} == {n: (v, "command line") for n, v in expected.items()}
    assert generate(model, tmp_path / "b", "--gpus", 1)["gpus"] == (1, "command line")
    assert found["gpus"] == (1, "built in")
    assert "effort" not in found


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"ops": "eager"}, "ops: expected auto, mega or chain, found 'eager'"),
        ({"ops": "mega"}, "ops: mega runs on a GPU only"),
        ({"ops": "chain"}, "ops: chain runs on a GPU only"),
        ({"ops": "mega", "device": "cuda", "max_num_reqs": 9}, "mega takes steps of up to 8"),
        ({"ops": "mega", "device": "cuda", "max_num_reqs": 8}, ""),
        ({"ops": "mega", "device": "cuda", "max_num_reqs": 9, "strict": True}, ""),
        ({"ops": "auto", "device": "cuda", "max_num_reqs": 64}, ""),
    ],
)
def test_ops_that_cannot_run_are_refused(settings: dict[str, Any], sentence: str) -> None:
    problems = EngineConfig(**settings).problems(tiny_config())
    assert len(problems) == bool(sentence) and sentence in "".join(problems)


def test_a_proposal_that_is_not_taken_is_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's others are in force, and the command line goes before them."""
    (tmp_path / "model").symlink_to(model)
    found = generate(tmp_path / "model", tmp_path / "a", "--top-k", 3)
    assert found["top_k"] == (3, "command line")
    assert found["temperature"] == (0.7, "generation_config.json")
    assert "is not taken" not in capsys.readouterr().err
    config = model / "generation_config.json"
    before = config.read_text()
    try:
        config.write_text('{"top_k": 9, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.2}')
        found = generate(model, tmp_path / "b")
    finally:
        config.write_text(before)
    assert found["top_k"] == (9, "generation_config.json")
    assert found["top_p"] == (0.5, "generation_config.json")
    assert found["min_p"] == (0.1, "generation_config.json")
    assert found["repetition_penalty"] == (1.0, "built in")
    assert "generation_config.json: typical_p 0.2 is not taken" in capsys.readouterr().err


def test_ops_are_in_force(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "hi", "--model", model, "--ops", "mega", "--device", "cpu"]
    assert cli.run([str(part) for part in command]) != 0
    assert "ops: mega runs on a GPU only" in capsys.readouterr().err


def test_a_small_model_takes_one_thread(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says how many; a large one keeps what torch takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr("nanok3.loading.SMALL_BYTES", 1)
        use_one_thread_if_small(model)
        assert torch.get_num_threads() == 2
        monkeypatch.undo()
        use_one_thread_if_small(model)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
