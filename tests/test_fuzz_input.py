"""Headers, request lines and conversations gone wrong at random: told in a sentence, never worse.

10,000 of each of the first two. Every one is read or refused as documented, in bounded memory, and
none takes long; what is read of a header lies in the file as its own arithmetic says.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engines import check_released, make_engine
from fuzzing import BIG, STRINGS, bounded, mutated, to_json, torn
from tiny import SMALLEST

from nanok3.batch import Overrides, run_batch
from nanok3.batch_ask import submit
from nanok3.batch_lines import LineReader, error_record, failed, names, read_lines
from nanok3.chat_session import ChatSession
from nanok3.checkpoint import Checkpoint, CheckpointError
from nanok3.console import TextError
from nanok3.engine import RequestError
from nanok3.safetensors_header import DTYPE_BYTES, read_header
from nanok3.sampling import SamplingParams

NUM_HEADERS = NUM_LINES = 10_000
NUM_CHATS = 700
NUM_BATCH = 240
SLOWEST_S = 2.0  # of one input, of this process
PEAK_BYTES = 8 * 2**20


class Clock:
    """No input may take long."""

    def __init__(self) -> None:
        self._start = time.process_time()

    def check(self, what: object) -> None:
        now = time.process_time()
        assert now - self._start < SLOWEST_S, f"{now - self._start:.1f} s for {what!r:.500}"
        self._start = now


# ---- headers ----


def whole_header(chooser: random.Random) -> tuple[dict[str, Any], int]:
    """A right one of a few tensors, and their bytes."""
    place, header = 0, {}
    for i in range(chooser.randrange(1, 6)):
        dtype = chooser.choice(["F32", "BF16", "U8", "F8_E8M0"])
        shape = [chooser.randrange(5) for _ in range(chooser.randrange(4))]
        end = place + DTYPE_BYTES[dtype] * math.prod(shape)
        header[f"model.layers.{i}.w"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [place, end],
        }
        place = end
    if chooser.random() < 0.3:
        header["__metadata__"] = {"format": "pt"}
    return header, place


def spoilt_file(chooser: random.Random) -> bytes:
    header, size = whole_header(chooser)
    how = chooser.randrange(4)
    raw = to_json(mutated(header, chooser) if how < 2 else header)
    if how in (1, 2):
        raw = torn(raw, chooser)
    length = len(raw)
    if how == 3:
        length = chooser.choice([0, 1, length - 1, length + 1, 10**8, 2**31, 2**63, 2**64 - 1])
        size = chooser.choice([0, 1, size, size + 1])
    whole = length.to_bytes(8, "little") + raw + bytes(size)
    return whole[: chooser.randrange(12)] if chooser.random() < 0.02 else whole


def check_laid_out(path: Path) -> None:
    """A header without a problem: its tensors fill the file, by their own account."""
    tensors, _ = read_header(path)
    raw = path.read_bytes()
    at = 8 + int.from_bytes(raw[:8], "little")
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        assert tensor.begin == at
        if tensor.dtype in DTYPE_BYTES:
            assert tensor.end - at == DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape)
        at = tensor.end
    assert at == len(raw)


def test_ten_thousand_headers(tmp_path: Path) -> None:
    chooser, num_clean, num_refused = random.Random(1), 0, 0
    path = tmp_path / "model-00001-of-000001.safetensors"
    with bounded(PEAK_BYTES) as check_memory:
        clock = Clock()
        for i in range(NUM_HEADERS):
            path.write_bytes(spoilt_file(chooser))
            _, problems = read_header(path)
            assert all(problem.startswith(path.name) for problem in problems)
            num_refused += bool(problems)
            if not problems:
                num_clean += 1
                check_laid_out(path)
            clock.check(problems)
            if i % 25 == 0:  # the same through what users call
                with pytest.raises(CheckpointError):
                    Checkpoint.open(tmp_path, {"bf16": {}}, skip_layers_from=None)
            if i % 500 == 0:
                check_memory()
    assert num_clean > 300 and num_refused > 5000


@pytest.mark.parametrize(
    "entry",
    [
        f'{{"dtype":"F32","shape":[{BIG},{BIG}],"data_offsets":[0,4]}}',
        f'{{"dtype":"F32","shape":[1],"data_offsets":[0,{BIG}]}}',
        f'{{"dtype":"F32","shape":[{",".join(["9"] * 300_000)}],"data_offsets":[0,4]}}',
        "[" * 400 + "]" * 400,
        "[" * 100_000 + "]" * 100_000,
        f'{{"dtype":"{"x" * 1_000_000}","shape":3,"data_offsets":[0,4]}}',
    ],
    ids=["size", "offset", "dimensions", "deep", "deeper", "long"],
)
def test_an_entry_that_is_made_to_hurt(tmp_path: Path, entry: str) -> None:
    """Sizes of thousands of digits, products that take minutes, depths beyond recursion."""
    path = tmp_path / "a.safetensors"
    raw = f'{{"t":{entry}}}'.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    clock = Clock()
    tensors, problems = read_header(path)
    clock.check("the entry")
    assert not tensors and len(problems) == 1 and len(problems[0]) < 400, problems


# ---- request lines ----

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0},
                "b": {"type": ["string", "null"], "enum": ["x", None]},
                "c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3},
            },
            "required": ["a"],
            "$defs": {"n": {"anyOf": [{"type": "number"}, {"const": "y"}]}},
        },
    },
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TALK = [
    {"role": "system", "content": "s", "tools": None},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]
OPTIONS = {
    **{"model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 3},
    **{"logprobs": True, "top_logprobs": 2, "presence_penalty": 0.1, "min_tokens": 2, "n": 1},
}
LINES: list[dict[str, Any]] = [
    {
        **{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"},
        "body": {"messages": TALK, "tools": [TOOL], "tool_choice": "auto", **OPTIONS},
    },
    {"prompt": "hi", "custom_id": "b", "reasoning_effort": "low", **OPTIONS},
    {"messages": TALK, "reasoning_effort": "none", "response_format": SCHEMA, "max_tokens": 3},
    {"prompt": "x", "reasoning_effort": "none", "tools": [TOOL], "tool_choice": "required"},
]


def test_ten_thousand_lines() -> None:
    """Each gives one record: what it asks, or what is wrong with it."""
    chooser, reader = random.Random(2), LineReader()
    num_asks = num_problems = 0
    with bounded(PEAK_BYTES) as check_memory:
        clock = Clock()
        for i in range(NUM_LINES):
            value: Any = dict(chooser.choice(LINES))
            if "custom_id" in value:
                value["custom_id"] += str(i)
            how = chooser.randrange(4)
            value = mutated(value, chooser) if how < 3 else value
            raw = to_json(value, ensure_ascii=how % 2 == 0)
            line = reader.read(torn(raw, chooser) if how > 1 else raw)
            if line is not None:
                assert (line.ask is None) != (line.problem is None)
                num_asks += line.ask is not None
            if line is not None and line.problem is not None:
                num_problems += 1
                record = error_record(line, "bad_line", line.problem)
                json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace")
            clock.check(raw)
            if i % 500 == 0:
                check_memory()
    assert num_asks > 800 and num_problems > 4000


@pytest.mark.parametrize("depth", [100, 400, 900, 100_000])
def test_a_line_as_deep_as_may_be(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    for name in (
        b"custom_id",
        b"model",
        b"url",
        b"prompt",
        b"messages",
        b"stop",
        b"tools",
        b"seed",
    ):
        raw = b'{"prompt": "x", "%s": %s}' % (name, deep)
        line = LineReader().read(raw)
        assert line is not None and (line.ask is None) != (line.problem is None)


# ---- conversations ----


def test_conversations_are_taken_or_refused() -> None:
    """Lines that can be read, as requests: refused in one way, or run to an end."""
    pytest.importorskip("llguidance")
    chooser, reader = random.Random(3), LineReader()
    engine = make_engine(strict=False, prefill_chunk=512, num_blocks=2000, max_num_reqs=4)
    num_taken = num_refused = num_run = 0
    with bounded(PEAK_BYTES * 4) as check_memory:
        clock = Clock()
        for i in range(NUM_CHATS):
            line = reader.read(to_json(mutated(chooser.choice(LINES), chooser)))
            if line is None or line.ask is None:
                continue
            try:
                request = submit(engine, line.ask, Overrides())
            except RequestError as error:
                num_refused += 1
                str(error).encode("utf-8", "backslashreplace")
            else:
                num_taken += 1
                if num_taken % 20 == 0 and len(request.ids) < 700:
                    num_run += 1
                    request.max_tokens = min(request.max_tokens, 3)
                    engine.run([request])
                    assert request.error is None
                engine.cancel(request)
            clock.check(line)
            if i % 300 == 0:
                check_memory()
    check_released(engine)
    assert num_taken > 80 and num_refused > 150 and num_run > 2


def test_what_is_typed_into_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and commands of any kind: answered, noted or refused, and the next line is served."""
    monkeypatch.chdir(tmp_path)
    notes = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")  # as Python's own
    monkeypatch.setattr(sys, "stderr", notes)
    chooser = random.Random(5)
    engine = make_engine(config=SMALLEST, strict=False, prefill_chunk=512, num_blocks=300)
    chat = ChatSession(engine, SamplingParams(seed=1, max_tokens=2), thinking=False, effort="low")
    commands = [
        "/reset",
        "/help",
        "/save",
        "/save a",
        "/save ~nobody/a",
        "/save \0",
        "/",
        "/\ud800",
    ]
    num_refused = 0
    for _ in range(150):
        line = "".join(chooser.choice(STRINGS) for _ in range(chooser.randrange(4)))
        if chooser.random() < 0.3:
            line = chooser.choice(commands) + chooser.choice(["", "", "/b", "\ud800", "x" * 300])
        try:
            chat.take(line)
        except (RequestError, TextError):
            num_refused += 1
            chat.take("/reset")
    assert num_refused > 5 and engine.num_unfinished == 0
    chat.take("hi")
    assert chat.messages[-2:][0] == {"role": "user", "content": "hi"}
    notes.seek(0)
    assert "cannot be written" in notes.read()
    check_released(engine)


def test_a_batch_of_them_has_a_record_for_every_line(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    chooser, raw_lines = random.Random(4), []
    for i in range(NUM_BATCH):
        value: Any = {**chooser.choice(LINES), "custom_id": str(i)}
        raw = to_json(mutated(value, chooser) if i % 4 else value)
        raw_lines.append(torn(raw, chooser) if i % 4 == 3 else raw)
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(raw_lines))
    engine = make_engine(
        config=SMALLEST, strict=False, prefill_chunk=512, num_blocks=1000, max_context=900
    )
    few = Overrides(sampling={"max_tokens": 2, "min_tokens": 0})
    source, target = str(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    counts = run_batch(engine, source, str(target), model="tiny", overrides=few)
    lines = list(read_lines(io.BytesIO((tmp_path / "in.jsonl").read_bytes())))
    records = [json.loads(line) for line in target.read_bytes().split(b"\n")[:-1]]
    assert all(names(record, line) for record, line in zip(records, lines, strict=True))
    codes = Counter(r["error"]["code"] if failed(r) else "done" for r in records)
    assert counts.failed == sum(failed(r) for r in records)
    assert set(codes) <= {"done", "bad_line", "refused"} and min(codes.values()) > 15, codes
    check_released(engine)


def test_the_bound_on_memory_sees_what_is_held() -> None:
    with pytest.raises(AssertionError, match="bytes at once"), bounded(2**20) as check:
        held = os.urandom(2 * 2**20)
        check()
    assert held
