"""A file of requests: what a line may ask, what answers it, and that nothing is lost on the way."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import make_checkpoint, tiny_config

from nanok3 import batch, batch_input, batch_lines, journal
from nanok3.batch import Overrides, run_batch
from nanok3.batch_files import check_paths
from nanok3.batch_input import InputError
from nanok3.batch_lines import Line, error_record, failed, names, read_lines, result_record
from nanok3.config import EngineConfig
from nanok3.console import OutputError
from nanok3.engine import Engine
from nanok3.reply import ToolCall
from nanok3.request import Result, Usage
from nanok3.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,))
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), config, seed=3)
    defaults = {"temperature": 0.7, "top_p": 0.8, "eos_token_id": 258}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine.load(model, settings=EngineConfig(max_num_reqs=3, strict=True))


def plain(text: str, **options: Any) -> dict[str, Any]:
    """Without thinking the prompt of a byte tokenizer is short."""
    return {"prompt": text, "reasoning_effort": "none", "max_tokens": 3, "seed": 1} | options


def openai(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"messages": HI, "reasoning_effort": "none", "max_tokens": 3, "seed": 1} | body
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    """Objects as JSON, bytes as they are."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    assert not raw or raw.endswith(b"\n"), "a torn line"
    return [json.loads(line) for line in raw.splitlines()]


def run(engine: Engine, source: Path, target: Path, **options: Any) -> Any:
    options = {"model": "tiny", "overrides": Overrides()} | options
    return run_batch(engine, str(source), str(target), **options)


def line_of(value: Any) -> Line:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return next(read_lines([raw]))


# ---- answers ----


def mixed_lines() -> list[dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning_content": "greet"},
        {"role": "user", "content": "né 你好"},
    ]
    lines: list[dict[str, Any]] = []
    for i in range(4):
        lines += [
            plain("a" * (1 + 9 * i), seed=i, max_tokens=2 + 3 * (3 - i)),
            openai(f"id{i}", messages=talk, temperature=0, top_k=3, logprobs=True, top_logprobs=2),
            plain(f"b{i}", temperature=1.3, min_p=0.05, repetition_penalty=1.2, stop=["e", "\n"]),
            openai(f"tool{i}", tools=tools, tool_choice="none", presence_penalty=0.5, seed=i),
        ]
    lines[5]["body"]["reasoning_effort"] = "low"
    return lines


def test_sixteen_lines_get_what_each_gets_alone(
    model: Path, engine: Engine, tmp_path: Path
) -> None:
    lines = mixed_lines()
    target = tmp_path / "out.jsonl"
    counts = run(engine, write(tmp_path / "in.jsonl", lines), target)
    assert (counts.done, counts.failed) == (16, 0)
    together = records(target)
    assert [record.get("custom_id") for record in together] == [
        line.get("custom_id") for line in lines
    ]
    settings = EngineConfig(max_num_reqs=1, strict=True, num_snapshots=0, num_blocks=20)
    alone_engine = Engine.load(model, settings=settings)
    assert alone_engine.tokenizer is not None
    for raw, record in zip(target.read_bytes().splitlines(), together, strict=True):
        assert json.loads(raw) == record
    for place, (line, record) in enumerate(zip(lines, together, strict=True)):
        body = line.get("body", line)
        params = {k: v for k, v in body.items() if k in batch_lines.SAMPLING or k == "max_tokens"}
        params |= {"stop": tuple(body["stop"])} if "stop" in body else {}
        params |= {"logprobs": 2} if "logprobs" in body else {}
        effort = body["reasoning_effort"]
        result = alone_engine.generate(
            body.get("prompt") or body["messages"],
            alone_engine.sampling(**params),
            tools=body.get("tools"),
            tool_choice=body.get("tool_choice"),
            thinking=effort != "none",
            thinking_effort=None if effort == "none" else effort,
        )
        if "body" not in line:
            assert record["index"] == place
            got = (record["text"], record["reasoning"], record["finish_reason"])
            assert record["usage"]["completion_tokens"] == len(result.token_ids)
        else:
            (choice,) = record["response"]["body"]["choices"]
            message = choice["message"]
            got = (
                message["content"],
                message.get("reasoning_content", ""),
                choice["finish_reason"],
            )
            if result.logprobs is not None:
                entries = choice["logprobs"]["content"]
                assert [e["logprob"] for e in entries] == [e.logprob for e in result.logprobs]
                assert all(len(e["top_logprobs"]) == 2 for e in entries)
        assert got == (result.text, result.reasoning, result.finish_reason), line


def test_two_runs_write_the_same_bytes(engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", mixed_lines()[:4])
    for name in ("a", "b"):
        run(engine, source, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_records_have_the_documented_shape() -> None:
    call = ToolCall(0, "call_0", "add", '{"a": 1}')
    result = Result([1, 2], "4", "sum", [call], "tool_calls", Usage(10, 3, 2))
    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    line = line_of(openai("a", model="k3"))
    record = result_record(line, result, "tiny", tokenizer)
    calls = [
        {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    assert record == {
        "id": f"batch_req_{line.digest}",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{line.digest}",
            "body": {
                "id": f"chatcmpl-{line.digest}",
                "object": "chat.completion",
                "created": 0,
                "model": "k3",
                "choices": [
                    {
                        "index": 0,
                        "message": {
                            "role": "assistant",
                            "content": "4",
                            "reasoning_content": "sum",
                            "tool_calls": calls,
                        },
                        "logprobs": None,
                        "finish_reason": "tool_calls",
                    }
                ],
                "usage": usage,
            },
        },
        "error": None,
    }
    unclean = replace(result, warnings=["odd"], finish_reason="length")
    assert result_record(line_of(plain("hi")), unclean, "tiny", tokenizer) == {
        "index": 0,
        "text": "4",
        "reasoning": "sum",
        "tool_calls": calls,
        "finish_reason": "length",
        "usage": usage,
        "warnings": ["odd"],
    }
    problem = error_record(line_of(plain("hi")), "refused", "too long")
    assert problem == {
        "index": 0,
        "error": {"code": "refused", "message": "too long", "line": 1},
    }
    assert failed(problem) and not failed(record)


# ---- lines ----

BAD_LINES: list[tuple[Any, str]] = [
    (b'{"prompt": "hi"', "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"prompt": "a\xff"}', "byte 0xff at offset 13"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN is no JSON value"),
    (b"[1]", "must be a JSON object, not list"),
    ({}, "needs messages, or on a plain line a prompt"),
    ({"prompt": "a", "messages": HI}, "and not both"),
    ({"prompt": ["a"]}, "prompt must be a string, not list"),
    ({"messages": []}, "at least one message"),
    ({"messages": [1, 2]}, "list of objects"),
    ({"custom_id": 7, "prompt": "a"}, "custom_id must be a string"),
    ({"body": {"messages": HI}}, "custom_id is missing"),
    ({"custom_id": "x", "body": 3}, "body must be an object"),
    ({"custom_id": "x", "body": {"prompt": "a"}}, "takes messages"),
    ({"custom_id": "x", "url": "/v1/embeddings", "body": {}}, "expected POST /v1/chat"),
    ({"custom_id": "x", "bdy": 1, "body": {"messages": HI}}, "unknown field 'bdy'"),
    ({"prompt": "a", "temprature": 0}, "unknown field 'temprature'"),
    ({"prompt": "a", "stream": True}, "stream must be false"),
    ({"prompt": "a", "n": 2}, "n must be 1"),
    ({"prompt": "a", "n": True}, "n must be 1"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias must be {}"),
    ({"prompt": "a", "max_tokens": 3, "max_completion_tokens": 4}, "differ"),
    ({"prompt": "a", "stop": ["x", ""]}, "stop must be"),
    ({"prompt": "a", "tools": "x"}, "tools must be a list"),
    ({"prompt": "a", "tools": [5, {}], "tool_choice": {"type": "function"}}, "tool_choice must"),
    (
        {
            "prompt": "a",
            "tools": [5, {"function": {"name": "g"}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
        "names 'f', which is none of the tools",
    ),
    ({"prompt": "a", "top_logprobs": 3}, "logprobs must be true"),
    ({"prompt": "a", "model": 7}, "model must be a string"),
    *(
        ({"prompt": "a", "reasoning_effort": effort}, "none, low, high or max")
        for effort in ("medium", "", 7, ["low"], "NONE")
    ),
]


@pytest.mark.parametrize(("value", "reason"), BAD_LINES)
def test_line_that_is_no_request(value: Any, reason: str) -> None:
    line = line_of(value)
    assert line.ask is None and line.problem is not None and reason in line.problem
    assert "\n" not in line.problem


def test_null_and_harmless_fields_change_nothing() -> None:
    nulls = {"temperature": None, "tools": None, "stop": None, "n": None, "stream": False}
    harmless = {"user": "me", "metadata": {"a": 1}, "n": 1, "logit_bias": {}}
    ask = line_of({"prompt": "a"}).ask
    assert ask is not None and ask.sampling == {}
    assert line_of({"prompt": "a"} | nulls).ask == ask
    assert line_of({"prompt": "a"} | harmless).ask == ask


@pytest.mark.parametrize(
    ("effort", "thinking", "expected"),
    [("none", False, None), ("low", True, "low"), ("high", True, "high"), ("max", True, "max")],
)
def test_effort_of_a_line(effort: str, thinking: bool, expected: str | None) -> None:
    ask = line_of({"prompt": "a", "reasoning_effort": effort}).ask
    assert ask is not None and (ask.thinking, ask.effort) == (thinking, expected)


def test_lines_are_counted_with_the_blank_ones() -> None:
    first, second, again = read_lines(
        [
            b'\xef\xbb\xbf{"prompt": "a"}\r\n',
            b" \n",
            b'{"custom_id": "x", "prompt": "b"}\n',
            b'{"custom_id": "x", "prompt": "c"}',
        ]
    )
    assert (first.place, first.number, first.problem) == (0, 1, None)
    assert (second.place, second.number, second.end) == (1, 3, 20 + 2 + 34)
    assert again.problem == "custom_id 'x' stands on line 3 already"


def test_bad_lines_become_records_and_the_others_run(engine: Engine, tmp_path: Path) -> None:
    """One of every kind of trouble between lines that are well."""
    trouble = [
        b"no json",
        {"custom_id": "b", "body": {}},
        openai("c", messages=[]),
        openai("d", messages=[{"role": "alien", "content": "x"}]),
        openai("e", messages=[{"role": "user", "content": "long " * 20_000}]),
        plain(""),
        plain("a", temperature="hot"),
        plain("a", max_tokens=0),
        plain("a", max_tokens=10**30),
        openai("f", tool_choice={"type": "function"}),
        openai("g", response_format={"type": "xml"}),
        openai("h", tools=[3]),
        openai("good0"),
    ]
    lines: list[Any] = []
    for i, bad in enumerate(trouble):
        lines += [openai(f"good{i}"), bad]
    target = tmp_path / "out.jsonl"
    counts = run(engine, write(tmp_path / "in.jsonl", lines), target)
    got = records(target)
    assert (counts.done, counts.failed) == (26, 13) and len(got) == 26
    for i, record in enumerate(got):
        assert failed(record) == bool(i % 2), record
        if i % 2:
            assert record["error"]["line"] == i + 1 and record["error"]["message"]
            assert "\n" not in record["error"]["message"]
    assert "custom_id" not in got[1] and got[3]["custom_id"] == "b"
    assert [got[i]["error"]["code"] for i in (1, 5, 9, 11)] == ["bad_line"] * 2 + ["refused"] * 2
    assert "tokens, but" in got[9]["error"]["message"]
    assert "line 1 already" in got[25]["error"]["message"]


def test_huge_max_tokens_ends_with_the_cache(engine: Engine, tmp_path: Path) -> None:
    lines = [plain("a", max_tokens=2**31 - 1, stop=["x", "y", "e", "t"]), plain("b")]
    run(engine, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert not any(map(failed, records(tmp_path / "out.jsonl")))


def test_command_line_before_line_before_generation_config(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    submit = engine.submit

    def spy(prompt: Any, params: Any, **options: Any) -> Any:
        asked.append((params, options["thinking"], options["thinking_effort"]))
        return submit(prompt, params, **options)

    monkeypatch.setattr(engine, "submit", spy)
    lines = [
        plain("a", temperature=0.25, seed=5, reasoning_effort="low", max_tokens=1),
        plain("a", reasoning_effort=None, max_tokens=1),
        plain("a", reasoning_effort="none", max_tokens=1),
    ]
    source = write(tmp_path / "in.jsonl", lines)
    run(engine, source, tmp_path / "1")
    run(engine, source, tmp_path / "2", overrides=Overrides({"seed": 9, "top_k": 4}, True, "high"))
    run(engine, source, tmp_path / "3", overrides=Overrides({}, False, None))
    values = [(p.temperature, p.top_p, p.top_k, p.seed, *rest) for p, *rest in asked]
    assert values == [
        (0.25, 0.8, 0, 5, True, "low"),
        (0.7, 0.8, 0, 1, True, "max"),
        (0.7, 0.8, 0, 1, False, "max"),
        (0.25, 0.8, 4, 9, True, "high"),
        (0.7, 0.8, 4, 9, True, "high"),
        (0.7, 0.8, 4, 9, True, "high"),
        (0.25, 0.8, 0, 5, False, "low"),
        (0.7, 0.8, 0, 1, False, "max"),
        (0.7, 0.8, 0, 1, False, "max"),
    ]


# ---- the files ----


def test_reading_stays_a_bounded_way_ahead(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow first line holds everything back, so the rest of the file waits on the disk."""
    monkeypatch.setattr(batch, "MAX_AHEAD", 5)
    ahead = []
    written = 0

    def spy(self: Any, record: Any) -> None:
        nonlocal written
        written += 1
        write_record(self, record)

    def counted(self: Any, raw: bytes) -> Line | None:
        line = read_line(self, raw)
        assert line is not None
        ahead.append(line.place - written)
        return line

    write_record, read_line = journal.RecordFile.write, batch.LineReader.read
    monkeypatch.setattr(journal.RecordFile, "write", spy)
    monkeypatch.setattr(batch.LineReader, "read", counted)
    lines = [plain("a", max_tokens=40)] + [plain("b", max_tokens=1), b"bad"] * 20
    run(engine, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert max(ahead) == 4 and written == 41
    assert [record["index"] for record in records(tmp_path / "out.jsonl")] == list(range(41))


def test_resume_from_every_place_gives_the_same_file(engine: Engine, tmp_path: Path) -> None:
    lines = [openai("a"), plain("b"), b"bad", b"", openai("a"), plain("c", custom_id="c")]
    source = write(tmp_path / "in.jsonl", lines)
    whole = tmp_path / "whole"
    run(engine, source, whole)
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    places = {0, 1, len(data), *ends, *(end - 1 for end in ends), *(end + 7 for end in ends[:-1])}
    for place in sorted(places):
        torn = tmp_path / "torn"
        torn.write_bytes(data[:place])
        counts = run(engine, source, torn, resume=True)
        assert torn.read_bytes() == data, place
        assert (counts.done, counts.failed) == (5, 2)
        assert counts.resumed == data[:place].count(b"\n")


def test_resume_leaves_nothing_of_a_torn_line(engine: Engine, tmp_path: Path) -> None:
    """Without a seed the line that follows may be shorter than what was torn off."""
    source, target = write(tmp_path / "in.jsonl", [plain("a"), b"bad"]), tmp_path / "out.jsonl"
    run(engine, source, target)
    whole = target.read_bytes()
    first, _ = whole.splitlines(keepends=True)
    target.write_bytes(first + b'{"index": 1, "text": "' + b"x" * 5000)
    run(engine, source, target, resume=True)
    assert target.read_bytes() == whole


def test_resume_goes_on_with_lines_that_were_added(engine: Engine, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [plain("a")]), tmp_path / "out.jsonl"
    run(engine, source, target, resume=True)  # nothing there yet is fine
    first = target.read_bytes()
    write(source, [plain("a"), plain("b")])
    run(engine, source, target, resume=True)
    assert target.read_bytes().startswith(first) and len(records(target)) == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"index": 0}\n{"index": 1}\n{"index": 2}\n', "line 3 is one too many"),
        (b'{"index": 0}\n{"index": 7}\n', "line 2 does not answer line 2"),
        (b'{"custom_id": "x"}\n', "line 1 does not answer line 1"),
        (b"my thesis\n", "line 1 is not valid JSON"),
        (b"[]\n", "line 1 is no record"),
    ],
)
def test_resume_leaves_another_file_as_it_is(
    engine: Engine, tmp_path: Path, content: bytes, reason: str
) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(content)
    with pytest.raises(OutputError, match=reason):
        source = write(tmp_path / "in.jsonl", [plain("a"), plain("b")])
        run(engine, source, target, resume=True)
    assert target.read_bytes() == content


def test_record_of_another_line_is_not_taken_for_this_one() -> None:
    line = line_of(openai("a"))
    assert names({"custom_id": "a", "id": "changed since"}, line)
    assert not names({"custom_id": "b"}, line) and not names({"index": 0}, line)


def test_paths_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [plain("a")])
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "out.jsonl").write_text("mine")
    os.link(source, tmp_path / "hard")
    for target, resume, kind, reason in [
        ("in.jsonl", False, InputError, "is the input too"),
        ("in.jsonl", True, InputError, "is the input too"),
        ("link", True, InputError, "is the input too"),
        ("hard", True, InputError, "is the input too"),
        ("out.jsonl", False, OutputError, "exists; name another file, or add --resume"),
        (".", False, OutputError, "is a directory"),
        ("no/where", False, OutputError, "no is no directory"),
    ]:
        with pytest.raises(kind, match=reason):
            check_paths(str(source), str(tmp_path / target), resume)
    for name, reason in [("none", "no such file"), (".", "is a directory")]:
        with pytest.raises(InputError, match=reason):
            check_paths(str(tmp_path / name), "-", False)
    for target in ("-", "/dev/null"):
        with pytest.raises(InputError, match="--resume needs"):
            check_paths(str(source), target, True)
    check_paths(str(source), str(tmp_path / "out.jsonl"), True)
    check_paths(str(source), str(tmp_path / "new"), False)
    assert (tmp_path / "out.jsonl").read_text() == "mine" and not (tmp_path / "new").exists()


def test_stop_leaves_whole_lines_to_resume_from(engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [plain(f"{i}", max_tokens=3) for i in range(8)])
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(engine, source, whole)
    polls = iter(range(1000))
    counts = run(engine, source, part, should_stop=lambda: next(polls) > 6)
    assert counts.interrupted and 0 < len(records(part)) == counts.done < 8
    assert whole.read_bytes().startswith(part.read_bytes())
    for request in [
        *engine._scheduler.running,
        *engine._scheduler.waiting,
    ]:  # the next test's engine is empty
        engine.cancel(request)
    assert not run(engine, source, part, resume=True).interrupted
    assert part.read_bytes() == whole.read_bytes()


def test_full_device(engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [plain("a", max_tokens=1)])
    with pytest.raises(OutputError, match=r"No space left on device$"):
        run(engine, source, Path("/dev/full"))


# ---- as a process ----


def command(model: Path, source: Path, target: Path | str, *options: str) -> list[str]:
    arguments = ["batch", str(source), str(target), "--model", str(model), "--strict", *options]
    return [sys.executable, "-m", "nanok3.cli", *arguments]


def test_full_disk_keeps_whole_lines(model: Path, engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [plain(f"{i}", max_tokens=2) for i in range(9)])
    whole, target = tmp_path / "whole", tmp_path / "out.jsonl"
    run(engine, source, whole)
    assert whole.stat().st_size > 1024, "the limit below is a block of 1 KiB"
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "-", *command(model, source, target)],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5, done.stderr
    last = done.stderr.splitlines()[-1]
    # The journal is the first to be full: it has what the output has, and a little more.
    assert last.startswith(f"nanok3: {target}.journal cannot be written: File too large")
    assert last.endswith("--resume goes on")
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert 0 < len(records(target)) < 9
    done = subprocess.run(
        command(model, source, target, "--resume"), env=ENV, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_run_is_resumed(
    model: Path, engine: Engine, tmp_path: Path, number: signal.Signals
) -> None:
    source = write(tmp_path / "in.jsonl", [plain(f"{i}", max_tokens=5) for i in range(25)])
    whole, target = tmp_path / "whole", tmp_path / "out.jsonl"
    run(engine, source, whole)
    process = subprocess.Popen(
        command(model, source, target), env=ENV, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not (target.exists() and target.stat().st_size > 0):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    if number == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in stderr
        assert "--resume goes on" in stderr.splitlines()[-1]
    done_lines = target.read_bytes().count(b"\n")  # a kill may tear the last one
    assert 0 < done_lines < 25, "killed in the middle"
    done = subprocess.run(command(model, source, target, "--resume"), env=ENV, capture_output=True)
    assert done.returncode == 0
    assert target.read_bytes() == whole.read_bytes()


def test_stdin_to_stdout(model: Path, engine: Engine, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [plain("a"), b"bad"])
    run(engine, source, tmp_path / "out.jsonl")
    done = subprocess.run(
        command(model, Path("-"), "-"), env=ENV, input=source.read_bytes(), capture_output=True
    )
    assert done.returncode == 6, "some lines failed"
    assert done.stdout == (tmp_path / "out.jsonl").read_bytes()
    assert b"2 lines done, 1 failed" in done.stderr


def test_gzip_errors_and_a_long_line(
    model: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 1000)
    lines = [plain("a"), plain("b" * 900_000), b"bad", openai("x")]
    source = write(tmp_path / "in.jsonl", lines)
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    for name, path in [("plain", source), ("gz", packed)]:
        counts = run(engine, path, tmp_path / name, errors=str(tmp_path / f"{name}-errors"))
        assert (counts.done, counts.failed) == (4, 2)
    whole = (tmp_path / "plain").read_bytes()
    assert (tmp_path / "gz").read_bytes() == whole
    _, long, bad, _ = whole.splitlines(keepends=True)
    assert json.loads(long)["error"]["code"] == "bad_line" and len(long) < 500
    assert (tmp_path / "gz-errors").read_bytes() == long + bad
    # Cut off: what can be read is answered and kept.
    target = tmp_path / "cut"
    cut = tmp_path / "cut.gz"
    cut.write_bytes(packed.read_bytes()[:-6])
    with pytest.raises(InputError, match="is gzip, but damaged or cut off"):
        run(engine, cut, target)
    assert target.read_bytes() == whole and journal.journal_path(str(target)).exists()
    run(engine, packed, target, resume=True)
    assert target.read_bytes() == whole and not journal.journal_path(str(target)).exists()


def test_paths_of_journal_and_errors(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [plain("a")]), str(tmp_path / "out")
    for errors, reason in [
        (str(source), "is the input too; name another file for the errors"),
        (target, "name another file for the errors"),
        (f"{target}.journal", "name another file for the errors"),
        ("-", "--errors needs a file"),
    ]:
        with pytest.raises(InputError, match=reason):
            check_paths(str(source), target, False, errors)
    (tmp_path / "errors").write_text("mine")
    with pytest.raises(OutputError, match="errors exists; name another file"):
        check_paths(str(source), target, False, str(tmp_path / "errors"))
    (tmp_path / "out.journal").write_text("left")
    with pytest.raises(OutputError, match=r"out.journal exists; add --resume to go on"):
        check_paths(str(source), target, False)
    check_paths(str(source), target, True, str(tmp_path / "errors"))


@pytest.mark.parametrize("how", ["finish", "stop", "twice"])
def test_interrupted_command(model: Path, engine: Engine, tmp_path: Path, how: str) -> None:
    """Three requests at once; the first line is long, so that others wait in the journal."""
    lines = [plain("a", max_tokens=300), *(plain(f"{i}", max_tokens=5) for i in range(40))]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    option = ["--on-interrupt", "stop" if how == "stop" else "finish", "--requests", "3"]
    process = subprocess.Popen(
        command(model, source, target, *option), env=ENV, stderr=subprocess.PIPE, text=True
    )
    kept = journal.journal_path(str(target))
    deadline = time.monotonic() + 30
    while not (kept.exists() and kept.stat().st_size > 1000):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    if how == "twice":
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in stderr, stderr
    last = stderr.splitlines()[-1]
    assert last.endswith("; --resume goes on")
    assert last.startswith("nanok3: stopped at once" if how == "twice" else "nanok3: interrupted")
    with journal.Journal(kept) as file:
        _, entries = file.read()
    assert 0 < len(entries) < 41
    is_whole = len(records(target)) > 0  # the long one stands first
    assert is_whole == (how == "finish")
