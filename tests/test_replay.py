"""Replays through the command line: what is identical, and where what was changed first differs."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY, make_checkpoint

from nanok3 import cli
from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.record import Asked, Recorder, describe_run, read_records, recording
from nanok3.replay import changes, replay
from nanok3.safetensors_header import read_header
from nanok3.tokenizer import Tokenizer

GREEDY = ["--thinking", "off", "--max-tokens", "12", "--temperature", "0"]
SAMPLED = ["--thinking", "off", "--max-tokens", "24", "--temperature", "1", "--seed", "5"]
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=3)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A command line in this process: (exit code, stdout, stderr)."""

    def run_now(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run_now


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record) + "\n")
    return record


def first_difference(a: list[int], b: list[int]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


# ---- identical ----


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strict", [[], ["--strict"]], ids=["shared", "strict"])
def test_tiny_is_identical(
    model: Path, tmp_path: Path, run: Any, options: list[str], strict: list[str]
) -> None:
    record = tmp_path / "record"
    assert run("generate", "hi", "--model", model, *options, *strict, "--record", record)[0] == 0
    for more in ([], ["--strict"]):
        code, out, err = run("replay", record, "--model", model, *more)
        assert code == 0 and out.startswith("identical (") and out.count("\n") == 1
        assert ("strict was False and is True" in err) == (bool(more) and not strict)


def test_k3_mini_with_tools_is_identical(tmp_path: Path, run: Any) -> None:
    """Without --model; the seed is one that nobody gave."""
    (tmp_path / "tools.json").write_text(json.dumps([CALC]))
    record = tmp_path / "record"
    asked = ["generate", "What is 127 + 85?", "--tools", tmp_path / "tools.json", "--effort", "low"]
    code, out, _ = run(*asked, "--record", record, "--json")
    assert code == 0
    (stored,) = read_records(record)
    assert stored.output_ids == json.loads(out)["token_ids"] and stored.asked.tools == [CALC]
    assert run("replay", record)[:2] == (0, f"identical ({len(stored.output_ids)} tokens)\n")


@pytest.mark.parametrize(
    "options, again",
    [(["--temperature", "0"], ["--strict"]), (["--seed", "3"], [])],
    ids=["greedy", "sampled"],
)
def test_turns_of_k3_mini_are_identical(
    tmp_path: Path,
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    again: list[str],
) -> None:
    """The later ones find in snapshots what they found there when they were recorded."""
    record = tmp_path / "record"
    typed = io.TextIOWrapper(io.BytesIO(b"Hi\nWhat is 12 + 30?\n/reset\nHi\n"))
    monkeypatch.setattr(sys, "stdin", typed)
    options = [*options, "--thinking", "off", "--max-tokens", "20"]
    assert run("chat", *options, "--record", record)[0] == 0
    stored = read_records(record)
    assert [r.cached_tokens > 0 for r in stored] == [False, True, True]
    expected = [
        f"reply {n}: identical ({len(r.output_ids)} tokens)" for n, r in enumerate(stored, 1)
    ]
    code, out, _ = run("replay", record, *again)
    assert code == 0 and out.splitlines() == expected


def test_a_reply_that_a_stop_string_ended(model: Path, tmp_path: Path, run: Any) -> None:
    record = tmp_path / "record"
    whole = json.loads(run("generate", "hi", "--model", model, *SAMPLED, "--json")[1])
    stop = whole["text"][3:5]
    asked = ["generate", "hi", "--model", model, *SAMPLED, "--stop", stop, "--record", record]
    assert run(*asked)[0] == 0
    (stored,) = read_records(record)
    assert stored.finish_reason == "stop" and len(stored.output_ids) < len(whole["token_ids"])
    assert run("replay", record, "--model", model)[0] == 0


def test_a_reply_that_was_stopped_is_compared_as_far_as_it_came(
    model: Path, tmp_path: Path
) -> None:
    engine = Engine.load(model, settings=EngineConfig(max_num_reqs=1))
    path = tmp_path / "record"
    params = engine.sampling(max_tokens=50, seed=2)
    with Recorder(path, describe_run(engine, model), []) as recorder:
        for wanted in (5, 0):
            request = engine.submit("hi", params, thinking=False)
            with recording(recorder, request, Asked([], None, False)):
                while request.num_output < wanted:
                    engine.step()
                engine.cancel(request)
    fresh = Engine.load(model, settings=engine.settings)
    first, second = replay(fresh, read_records(path))
    assert first.same and first.text == "identical (5 tokens, as far as it came)"
    assert second.same and "nothing to compare" in second.text


# ---- different ----


@pytest.mark.parametrize("place", [0, 5, 11])
@pytest.mark.parametrize("gap, excused", [(5e-4, True), (1e-3, False)])
def test_another_id(
    model: Path, tmp_path: Path, run: Any, place: int, gap: float, excused: bool
) -> None:
    path = tmp_path / "record"
    run("generate", "hi", "--model", model, *GREEDY, "--record", path)
    (stored,) = read_records(path)
    now = stored.output_ids[place]
    had = 65 if now != 65 else 66
    change(path, lambda r: r["output_ids"].__setitem__(place, had))
    change(path, lambda r: r["gaps"].__setitem__(place, gap))
    code, out, _ = run("replay", path, "--model", model)
    text = Tokenizer.load(model).decode
    assert code == 7 and out.count("\n") == 1
    assert out.startswith(
        f"first differs at token {place} (from 0): had {had} ({text([had])!r}), now {now} "
        f"({text([now])!r}); recorded gap {gap:.3g} "
    )
    assert ("a near tie that rounding excuses" in out) == excused
    assert ("rounding does not excuse it" in out) == (not excused)


def test_another_length_and_another_end(model: Path, tmp_path: Path, run: Any) -> None:
    path = tmp_path / "record"
    run("generate", "hi", "--model", model, *GREEDY, "--record", path)
    whole = path.read_text()

    def shorten(record: dict[str, Any]) -> None:
        record["output_ids"].pop()
        record["gaps"].pop()

    now = change(path, shorten)
    code, out, _ = run("replay", path, "--model", model)
    assert code == 7 and "first differs at token 11 (from 0): had the end (length), now " in out
    path.write_text(whole)
    change(path, lambda r: r["sampling"].update(max_tokens=11))
    code, out, _ = run("replay", path, "--model", model)
    assert code == 7 and "token 11 (from 0): had " in out and "now the end (length)" in out
    path.write_text(whole)
    change(path, lambda r: r.update(finish_reason="stop"))
    code, out, _ = run("replay", path, "--model", model)
    assert code == 7 and "all 12 tokens are equal, but it ended by stop, now by length" in out
    assert len(now["output_ids"]) == 11


def test_another_seed(model: Path, tmp_path: Path, run: Any) -> None:
    path = tmp_path / "record"
    run("generate", "hi", "--model", model, *SAMPLED, "--record", path)
    other = json.loads(run("generate", "hi", "--model", model, *SAMPLED, "--seed", 6, "--json")[1])
    record = change(path, lambda r: r["sampling"].update(seed=6))
    place = first_difference(record["output_ids"], other["token_ids"])
    code, out, _ = run("replay", path, "--model", model)
    assert code == 7 and f"first differs at token {place} (from 0)" in out
    assert f"now {other['token_ids'][place]} " in out and out.endswith(", of a sampled reply\n")


def test_a_gap_of_a_penalised_reply_judges_nothing(model: Path, tmp_path: Path, run: Any) -> None:
    path = tmp_path / "record"
    asked = ["generate", "hi", "--model", model, *GREEDY, "--frequency-penalty", 1]
    run(*asked, "--record", path)
    assert run("replay", path, "--model", model)[0] == 0
    change(path, lambda r: r["output_ids"].__setitem__(2, 300))
    code, out, _ = run("replay", path, "--model", model)
    assert code == 7 and out.endswith(", before penalties\n")


# ---- another model ----


def test_one_changed_weight(model: Path, tmp_path: Path, run: Any) -> None:
    """No header tells; the reply does, from the first id that the weight decides."""
    path = tmp_path / "record"
    run("generate", "hi", "--model", model, *GREEDY, "--record", path)
    (stored,) = read_records(path)
    place = 4
    row = stored.output_ids[place]
    first = stored.output_ids.index(row)
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    zero_row(copy, "language_model.lm_head.weight", row)
    code, out, err = run("replay", path, "--model", copy)
    assert code == 7 and f"first differs at token {first} (from 0): had {row} " in out
    assert not err


def zero_row(model: Path, name: str, row: int) -> None:
    """Zeroes row `row` of a bf16 matrix where it lies in its file."""
    for shard in model.glob("*.safetensors"):
        tensor = read_header(shard)[0].get(name)
        if tensor is not None:
            width = 2 * tensor.shape[1]
            with shard.open("r+b") as file:
                file.seek(tensor.begin + row * width)
                file.write(bytes(width))
            return
    raise AssertionError(name)


def test_another_checkpoint(model: Path, tmp_path: Path, run: Any) -> None:
    """Another config is refused; other files of weights are told, and tried."""
    path = tmp_path / "record"
    run("generate", "hi", "--model", model, *GREEDY, "--record", path)
    code, out, err = run("replay", path)
    assert (code, out) == (2, "") and f"is of the model {model.name}; name its directory" in err
    config = Path(shutil.copytree(model, tmp_path / "config"))
    raw = json.loads((config / "config.json").read_text())
    raw["text_config"]["rms_norm_eps"] *= 2
    (config / "config.json").write_text(json.dumps(raw))
    code, out, err = run("replay", path, "--model", config)
    assert (code, out) == (3, "") and "config.json is not that of the record" in err
    renamed = Path(shutil.copytree(model, tmp_path / "renamed"))
    index = renamed / "model.safetensors.index.json"
    for shard in renamed.glob("*.safetensors"):
        shard.rename(renamed / f"a-{shard.name}")
    index.write_text(index.read_text().replace('"model-', '"a-model-'))
    code, out, err = run("replay", path, "--model", renamed)
    assert code == 0 and "the weights' files are others" in err


def test_a_file_that_is_no_record(model: Path, tmp_path: Path, run: Any) -> None:
    path = tmp_path / "record"
    for content in (None, b"\xff", b'{"schema": 9}', b"{"):
        if content is not None:
            path.write_bytes(content)
        code, out, err = run("replay", path, "--model", model)
        assert (code, out) == (2, "") and err.startswith(f"nanok3: {path}") and err.count("\n") == 1
    path.unlink()
    run("generate", "hi", "--model", model, *GREEDY, "--record", path)
    whole = path.read_text()
    change(path, lambda r: r["prompt_ids"].append(10**6))
    code, out, err = run("replay", path, "--model", model)
    assert (code, out) == (4, "") and "outside the vocabulary" in err
    path.write_text(whole)
    change(path, lambda r: r["run"]["engine"].update(block_size=-1))
    assert run("replay", path, "--model", model)[0] == 3
    assert run("replay", path, "--model", model, "--device", "tpu")[0] == 2


def test_what_has_changed_is_told(model: Path) -> None:
    engine = Engine.load(model, settings=EngineConfig(max_num_reqs=1))
    now = describe_run(engine, model)
    assert changes(now, now) == []
    then = json.loads(json.dumps(vars(now) | {"engine": None, "torch": "2.0"}))
    found = changes(type(now)(**(then | {"engine": EngineConfig(dtype="float64")})), now)
    assert found == [
        f"torch was 2.0 and is {now.torch}",
        "dtype was float64 and is float32",
    ]
