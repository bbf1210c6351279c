"""Records: what they hold, where they go, and which files are refused."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY, make_checkpoint

from nanok3 import cli
from nanok3.config import EngineConfig
from nanok3.console import OutputError
from nanok3.engine import Engine
from nanok3.record import (
    Asked,
    Recorder,
    RecordError,
    describe_run,
    identity,
    read_records,
    recording,
)
from nanok3.safetensors_header import read_header

ASKED = Asked([{"role": "user", "content": "hi"}], None, False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=3)
    (path / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": [258, 300]}')
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine.load(model, settings=EngineConfig(max_num_reqs=2, strict=True))


def write(engine: Engine, model: Path, path: Path, **sampling: Any) -> list[int]:
    """One record in `path` -> ids of the reply."""
    with Recorder(path, describe_run(engine, model), []) as recorder:
        request = engine.submit("hi", engine.sampling(**sampling), thinking=False)
        with recording(recorder, request, ASKED):
            engine.run([request])
    return request.result().token_ids


def test_what_a_record_holds_comes_back(engine: Engine, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "record"
    ids = write(engine, model, path, max_tokens=6, stop=("never said",))
    (record,) = read_records(path)
    assert record.output_ids == ids and record.asked == ASKED
    assert record.run == describe_run(engine, model) and record.run.engine == engine.settings
    assert record.sampling.temperature == 0.7 and record.sampling.stop == ("never said",)
    assert record.sampling.seed is not None, "the one that was drawn"
    assert {258, 300, TINY.eos_token_id} <= set(record.sampling.stop_token_ids)
    assert record.sampling.max_tokens == 6 and record.finish_reason == "length"


def test_gaps_are_those_of_the_logits(engine: Engine, model: Path, tmp_path: Path) -> None:
    """In strict mode to the bit, whoever else runs and whatever is sampled."""
    path = tmp_path / "record"
    other = engine.submit("somebody else", engine.sampling(max_tokens=30), thinking=False)
    ids = write(engine, model, path, max_tokens=8, seed=3)
    engine.run([other])
    (record,) = read_records(path)
    logits = engine.logits([*record.prompt_ids, *ids])[len(record.prompt_ids) - 1 : -1]
    ordered = torch.sort(logits, dim=-1).values
    assert record.gaps == (ordered[:, -1] - ordered[:, -2]).tolist()
    assert other.gaps is None


def test_recording_changes_no_reply(engine: Engine, model: Path, tmp_path: Path) -> None:
    ids = write(engine, model, tmp_path / "record", max_tokens=20, seed=4)
    again = engine.generate("hi", engine.sampling(max_tokens=20, seed=4), thinking=False)
    assert again.token_ids == ids


def test_a_reply_that_was_cut_or_failed_has_a_record(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "record"
    params = engine.sampling(max_tokens=9, seed=4)
    with Recorder(path, describe_run(engine, model), []) as recorder:
        first = engine.submit("hi", params, thinking=False)
        with pytest.raises(BrokenPipeError), recording(recorder, first, ASKED):
            while first.num_output < 4:
                engine.step()
            engine.cancel(first)
            raise BrokenPipeError
        second = engine.submit("hi", params, thinking=False)
        with recording(recorder, second, ASKED):
            engine.cancel(second)
    cut, empty = read_records(path)
    assert (cut.finish_reason, len(cut.output_ids), len(cut.gaps)) == ("cancelled", 4, 4)
    assert (empty.finish_reason, empty.output_ids, empty.gaps) == ("cancelled", [], [])


def test_nothing_recorded_leaves_no_file(engine: Engine, model: Path, tmp_path: Path) -> None:
    run = describe_run(engine, model)
    with Recorder(tmp_path / "record", run, []):
        assert (tmp_path / "record").exists()
    assert not (tmp_path / "record").exists()
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(OutputError, match="mine exists"):
        Recorder(tmp_path / "mine", run, [])
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_record_that_cannot_be_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("")
    for path, reason in (
        (tmp_path / "there", "exists"),
        (tmp_path / "no" / "where", "is no directory"),
    ):
        code = cli.run(["generate", "hi", "--model", str(model), "--record", str(path)])
        shown = capsys.readouterr()
        assert code == 5 and reason in shown.err and not shown.out, "before anything is run"


def test_a_full_disk_leaves_whole_records(engine: Engine, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "record"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(path, describe_run(engine, model), []) as recorder:
        request = engine.submit("hi", engine.sampling(max_tokens=2), thinking=False)
        with recording(recorder, request, ASKED):
            engine.run([request])
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        try:
            with pytest.raises(OutputError, match="File too large"):
                recorder.write(request, ASKED)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == size and len(read_records(path)) == 1


def test_identity_sees_config_and_headers_but_no_values(model: Path, tmp_path: Path) -> None:
    """And not the way that config.json is written."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=3))
    shard = sorted(copy.glob("*.safetensors"))[0]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert identity(copy) == identity(model)
    config["text_config"]["rms_norm_eps"] *= 2
    (copy / "config.json").write_text(json.dumps(config))
    name = next(iter(read_header(shard)[0])).encode()
    shard.write_bytes(raw.replace(name, name[::-1]))
    assert all(a != b for a, b in zip(identity(copy), identity(model), strict=True))


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda r: r.update(schema=1), "has schema 1, and this nanok3 reads 2"),
        (lambda r: r.pop("schema"), "is no record"),
        (lambda r: r.pop("gaps"), "expected an object with schema, run"),
        (lambda r: r.update(more=1), "expected an object with schema, run"),
        (lambda r: r["gaps"].pop(), "as many gaps as output_ids"),
        (lambda r: r["output_ids"].append("x"), "output_ids: expected int, found 'x'"),
        (lambda r: r["output_ids"].append(True), "output_ids: expected int, found True"),
        (lambda r: r.update(prompt_ids=5), "prompt_ids: expected list"),
        (lambda r: r["run"]["engine"].update(strict=0), "strict: expected bool, found 0"),
        (lambda r: r["sampling"].update(temperature="hot"), "temperature: expected float"),
    ],
)
def test_refused_records(
    engine: Engine, model: Path, tmp_path: Path, change: Any, reason: str
) -> None:
    path = tmp_path / "record"
    write(engine, model, path, max_tokens=1)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(RecordError, match="line 1") as caught:
        read_records(path)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_refused_files(engine: Engine, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(engine, model, path, max_tokens=1)
    line = path.read_bytes()
    other = json.loads(line)
    other["run"]["threads"] += 1
    for content, reason in (
        (b"", "holds no record"),
        (b"\xff\n", "line 1 is not valid UTF-8"),
        (b"[]\n", "line 1 is no record"),
        (line + line[:50], "line 2 is not valid JSON"),
        (line + json.dumps(other).encode(), "line 2 is of another run"),
    ):
        path.write_bytes(content)
        with pytest.raises(RecordError, match=reason):
            read_records(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_records(tmp_path)
