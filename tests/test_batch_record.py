"""A batch of k3-mini with tools and formats, as OpenAI's batch has them, recorded and replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanok3 import cli
from nanok3.batch_lines import read_lines
from nanok3.exits import DIFFERS, OUTPUT, PARTIAL
from nanok3.record import Record, read_records

URL = "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tool(name: str, key: str) -> dict[str, Any]:
    values = {"type": "string", "enum": ["one", "two"]}
    schema = {"type": "object", "properties": {key: values}, "required": [key]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("first", "a"), tool("second", "b")]


def line(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "reasoning_effort": "none"} | body
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"seed": 4} | body}


FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
NAMED = {"type": "function", "function": {"name": "second"}}
LINES = [
    line("free", "What is 2 + 3?", max_tokens=10, temperature=0),
    line("person", "Who?", response_format=FORMAT, max_completion_tokens=80),
    line("object", "Hi", response_format={"type": "json_object"}, max_tokens=8),
    line("must", "Hi", tools=TOOLS, tool_choice="required", max_tokens=120),
    line("named", "Hi", tools=TOOLS, tool_choice=NAMED, temperature=1.0, max_tokens=120),
    line("bad", "Hi", response_format={"type": "xml"}),
    line("long", "Hi", reasoning_effort="low", max_tokens=10),
]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the batch, its answers and its records."""
    folder = tmp_path_factory.mktemp("batch")
    (folder / "in").write_text("".join(json.dumps(value) + "\n" for value in LINES))
    command = ["batch", folder / "in", folder / "out", "--record", folder / "record", "--strict"]
    assert cli.run([*map(str, command), "--draft", "none", "--top-p", "0.9"]) == PARTIAL
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_now(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run_now


def bodies(folder: Path) -> dict[str, dict[str, Any]]:
    records = [json.loads(raw) for raw in (folder / "out").read_bytes().splitlines()]
    assert [record["custom_id"] for record in records] == [value["custom_id"] for value in LINES]
    return {r["custom_id"]: r["response"] and r["response"]["body"] for r in records}


def test_tools_and_formats_of_lines_are_kept_to(done: Path) -> None:
    answers = bodies(done)
    assert answers.pop("bad") is None
    choices = {name: body["choices"][0] for name, body in answers.items()}
    for body in answers.values():  # what OpenAI's own types of a completion require
        assert body.keys() >= {"id", "choices", "created", "model", "object", "usage"}
    person = json.loads(choices["person"]["message"]["content"])
    assert person.keys() == {"name", "age"} and person["name"] in ("Ada", "Bo")
    assert choices["person"]["finish_reason"] == "stop" and person["age"] <= 99
    for name, allowed in (("must", {"first": "a", "second": "b"}), ("named", {"second": "b"})):
        assert choices[name]["finish_reason"] == "tool_calls"
        calls = choices[name]["message"]["tool_calls"]
        assert calls and all(call["type"] == "function" for call in calls)
        for call in calls:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            assert list(arguments) == [allowed[function["name"]]]
            assert set(arguments.values()) <= {"one", "two"}
    assert choices["object"]["message"]["content"].lstrip().startswith("{")
    assert choices["long"]["message"].get("reasoning_content")


def test_a_named_tool_is_the_only_one_that_is_told() -> None:
    (read,) = read_lines([json.dumps(LINES[4]).encode()])
    assert read.ask is not None
    assert (read.ask.tools, read.ask.tool_choice) == ([TOOLS[1]], "required")


# ---- records ----


def by_line(folder: Path) -> dict[int | None, Record]:
    return {record.asked.line: record for record in read_records(folder / "record")}


def test_each_reply_has_a_record(done: Path) -> None:
    """With what its line said and the command line did not; a refused line has none."""
    found = by_line(done)
    assert sorted(n for n in found if n is not None) == [1, 2, 3, 4, 5, 7]
    usage = [found[n].output_ids for n in (1, 2, 3, 4, 5, 7)]
    counts = [b["usage"]["completion_tokens"] for b in bodies(done).values() if b]
    assert [len(ids) for ids in usage] == counts
    options = {s.name: (s.value, s.origin) for s in found[1].options}
    own = "the request itself"
    assert options["temperature"] == (0, own) and options["seed"] == (4, own)
    assert options["max_tokens"] == (10, own) and options["thinking"] == ("off", own)
    assert options["top_p"] == (0.9, "command line")
    assert options["strict"] == (True, "command line")
    assert {s.name: s.value for s in found[7].options}["effort"] == "low"
    assert found[7].asked.thinking and not found[1].asked.thinking
    assert found[1].grammar is None and "start:" in (found[2].grammar or "")
    assert found[5].asked.tools == [TOOLS[1]]
    assert found[1].sampling.temperature == 0 and found[1].sampling.top_p == 0.9
    assert all(len(record.gaps) == len(record.output_ids) for record in found.values())
    assert None not in found[1].gaps and None in found[5].gaps, "where only one id was left"


def test_a_strict_batch_is_replayed_to_the_id(done: Path, run: Run) -> None:
    """Those with a form too, which their ids alone would not have."""
    code, out, _ = run("replay", done / "record")
    shown = out.splitlines()
    assert code == 0 and len(shown) == 6, out
    lines = [record.asked.line for record in read_records(done / "record")]
    for number, (text, at) in enumerate(zip(shown, lines, strict=True), 1):
        assert text.startswith(f"reply {number} (line {at}): identical ("), text


def test_without_its_form_a_reply_is_another(done: Path, tmp_path: Path, run: Run) -> None:
    (raw,) = (
        text
        for text in (done / "record").read_text().splitlines()
        if json.loads(text)["asked"]["line"] == 5
    )
    record = json.loads(raw)
    (tmp_path / "record").write_text(json.dumps(record | {"grammar": None}) + "\n")
    assert run("replay", tmp_path / "record")[0] == DIFFERS
    (tmp_path / "record").write_text(json.dumps(record | {"grammar": "start: ("}) + "\n")
    code, out, err = run("replay", tmp_path / "record")
    assert code == 4 and not out and "the grammar is none" in err


def test_a_record_is_never_written_over(done: Path, tmp_path: Path, run: Run) -> None:
    before = (done / "record").read_bytes()
    command = ("batch", done / "in", tmp_path / "out", "--record", done / "record")
    code, _, err = run(*command)
    assert code == OUTPUT and f"{done / 'record'} exists" in err
    assert (done / "record").read_bytes() == before and not (tmp_path / "out").exists()


def test_recording_changes_no_answer(done: Path, tmp_path: Path, run: Run) -> None:
    """Nor does resuming with another file for the records of the rest."""
    lines = (done / "in").read_text().splitlines(keepends=True)
    source, target, record = tmp_path / "in", tmp_path / "out", tmp_path / "record"
    common = ("batch", source, target, "--strict", "--draft", "none", "--top-p", 0.9)
    source.write_text(lines[0])
    assert run(*common)[0] == 0
    source.write_text(lines[0] + '{"prompt": "Hi", "max_tokens": 2}\n')
    assert run(*common, "--resume", "--record", record)[0] == 0
    first, _ = target.read_bytes().splitlines(keepends=True)
    assert (done / "out").read_bytes().startswith(first)
    assert [r.asked.line for r in read_records(record)] == [2]
