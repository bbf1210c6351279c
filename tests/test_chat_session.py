"""The conversation: what is kept and reused, the commands, and Ctrl-C at a real terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
from scripted import Script, reply_ids
from tiny import TINY, make_checkpoint

from nanok3 import commands
from nanok3 import decode as decode_module
from nanok3.chat import Segment
from nanok3.chat_session import ChatSession
from nanok3.config import EngineConfig
from nanok3.engine import Engine, RequestError
from nanok3.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "dumb"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=3)


def load(model: Path, **settings: Any) -> Engine:
    return Engine.load(model, settings=EngineConfig(max_num_reqs=1, **settings))


def session(engine: Engine, **sampling: Any) -> ChatSession:
    params = engine.sampling(temperature=0.0, **sampling)
    return ChatSession(engine, params, thinking=True, effort="low")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(decode_module, "sample", script)
    return script


# ---- what is kept and reused ----


def test_second_turn_computes_only_what_is_new(model: Path, script: Script) -> None:
    engine = load(model, debug=True)
    assert engine.tokenizer is not None
    chat = session(engine)
    script.ids = reply_ids(engine.tokenizer, "they greet", "hello")
    first = chat.answer("hi")
    assert (first.text, first.reasoning, first.usage.cached_tokens) == ("hello", "they greet", 0)
    script.ids = reply_ids(engine.tokenizer, "a sum", "4")
    second = chat.answer("2+2?")
    before = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.cached_tokens == before - 1, "all but the id that was sampled last"
    assert chat.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning_content": "they greet"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "a sum"},
    ]


@pytest.mark.parametrize("told", [4, 40, 70])  # in the thinking, in a marker, in the content
def test_answer_cut_by_its_length_is_reused(model: Path, script: Script, told: int) -> None:
    engine = load(model)
    assert engine.tokenizer is not None
    chat = session(engine, max_tokens=told)
    script.ids = reply_ids(engine.tokenizer, "thoughts " * 3, "words " * 9)
    first = chat.answer("hi")
    assert first.finish_reason == "length" and not first.well_formed
    script.ids = reply_ids(engine.tokenizer, "x" * 70, "")
    second = chat.answer("go on")
    if told != 40:  # a half marker is not part of the conversation
        assert second.usage.cached_tokens == first.usage.prompt_tokens + told - 1
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - 1


def test_answer_that_ended_in_the_wrong_place_is_reused(model: Path, script: Script) -> None:
    engine = load(model)
    assert engine.tokenizer is not None
    chat = session(engine)
    script.ids = [*b"only thoughts", engine.tokenizer.special_id("[EOS]")]
    first = chat.answer("hi")
    script.ids = reply_ids(engine.tokenizer, "", "x")
    second = chat.answer("go on")
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len("only thoughts")


def test_turns_are_reused_where_a_reply_may_fill_the_context(model: Path, script: Script) -> None:
    """A request then reserves the whole context; a snapshot needs room beside it."""
    options = commands.Options(model, "cpu", "float32", {}, None, None, 1000, None, False, False)
    engine = commands.load(options, is_single=True)
    assert engine.tokenizer is not None
    chat = session(engine, max_tokens=1000)
    for turn in range(3):
        script.ids = reply_ids(engine.tokenizer, "", "words")
        cached = chat.answer("go on").usage.cached_tokens
        assert (cached > 0) == (turn > 0)


def test_reuse_changes_no_answer(model: Path) -> None:
    """Against an engine that sees the same conversation for the first time."""
    engine = load(model, strict=True)
    params = engine.sampling(temperature=0.0, max_tokens=12)
    chat = ChatSession(engine, params, thinking=False, effort="max")  # a short prompt
    for text in ("first", "second", "third"):
        asked = [*chat.messages, {"role": "user", "content": text}]
        result = chat.answer(text)
        fresh = load(model, num_snapshots=0, strict=True)
        alone = fresh.generate(asked, params, thinking=False)
        assert alone.token_ids == result.token_ids and alone.text == result.text
        assert alone.usage.prompt_tokens == result.usage.prompt_tokens


def test_ids_of_the_model_stand_for_the_text_that_they_spell() -> None:
    ranks = [bytes([i]) for i in range(256)] + [b"ab", b"abab"]
    tokenizer = Tokenizer(ranks)
    sep = tokenizer.special_id("<|sep|>")
    segments = [Segment("text", "abab"), Segment("control", "<|sep|>"), Segment("text", "ab")]
    assert tokenizer.encode_segments(segments) == [257, sep, 256]
    a, b = b"ab"
    for before, expected in [
        ([256, a, b], [256, a, b, sep, 256]),
        ([256, 256, sep], [256, 256, sep, 256]),
        ([], [257, sep, 256]),
        ([256], [257, sep, 256]),  # not a whole segment
        ([a, a, b], [257, sep, 256]),  # another text
        ([257, sep, 256, 256], [257, sep, 256]),  # more than there is
    ]:
        assert tokenizer.continue_segments(segments, before) == expected


def test_turn_that_does_not_fit_changes_nothing(model: Path, script: Script) -> None:
    engine = load(model, num_blocks=12)
    assert engine.tokenizer is not None
    chat = session(engine, max_tokens=100)
    script.ids = reply_ids(engine.tokenizer, "a", "b")
    chat.answer("hi")
    kept = list(chat.messages)
    with pytest.raises(RequestError, match="the prompt has 1448 tokens"):
        chat.answer("long " * 200)
    assert chat.messages == kept
    script.ids = reply_ids(engine.tokenizer, "", "fine")
    assert chat.answer("short").usage.cached_tokens > 0


# ---- commands ----


def test_save_reset_and_unknown_commands(
    model: Path, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = load(model)
    assert engine.tokenizer is not None
    chat = session(engine)
    script.ids = reply_ids(engine.tokenizer, "a", "né")
    chat.take(" /etc is a directory")
    saved = tmp_path / "a file.json"
    chat.take(f"/save {saved}")
    assert json.loads(saved.read_text(encoding="utf-8")) == chat.messages
    assert chat.messages[0]["content"] == " /etc is a directory"
    content = saved.read_bytes()
    capsys.readouterr()
    for line, told in [
        (f"/save {saved}", "exists"),
        ("/save", "needs the name"),
        (f"/save {tmp_path}/no/where.json", "No such file"),
        ("/etc", "no command is called /etc"),
        ("/help", "/reset"),
        ("   ", ""),
    ]:
        chat.take(line)
        shown = capsys.readouterr()
        assert told in shown.err and shown.out == ""
    assert saved.read_bytes() == content and len(chat.messages) == 2
    chat.take("/reset")
    assert chat.messages == []


def test_save_on_a_full_disk_leaves_no_half_file(model: Path, tmp_path: Path) -> None:
    limit = "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (1, 1)); "
    run = (
        "from nanok3.cli import main; sys.argv = ['nanok3', 'chat', '--model', sys.argv[1]]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limit + run, str(model)],
        input=f"/save {tmp_path}/x.json\n/help\n",
        capture_output=True,
        text=True,
        env=ENV,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be written: File too large; the conversation goes on" in done.stderr
    assert not (tmp_path / "x.json").exists()


# ---- at a pipe ----


def run_piped(model: Path, tmp_path: Path, replies: list[Any], text: bytes) -> Any:
    (tmp_path / "replies.json").write_text(json.dumps(replies))
    command = [sys.executable, "tests/scripted.py", tmp_path / "replies.json", "chat"]
    return subprocess.run(
        [*command, "--model", model, "--effort", "high"],
        input=text,
        capture_output=True,
        env=ENV,
        cwd=ROOT,
    )


def test_piped_answers_alone_are_on_stdout(model: Path, tmp_path: Path) -> None:
    replies = [
        {"reasoning": "hm\x1b[31m", "content": "one"},
        {"reasoning": "", "content": "two\n"},
    ]
    done = run_piped(model, tmp_path, replies, b"hi\n\nagain")
    assert done.stdout == b"one\ntwo\n" and done.returncode == 0
    assert b"thinking on, effort high" in done.stderr and b"hm" in done.stderr
    assert b"\x1b[2m" not in done.stderr, "dimmed on a terminal only"


def test_piped_line_that_is_not_utf8(model: Path, tmp_path: Path) -> None:
    done = run_piped(model, tmp_path, [{"reasoning": "", "content": "one"}], b"hi\nab\xff\n")
    assert (done.returncode, done.stdout) == (4, b"one\n")
    last = done.stderr.splitlines()[-1]
    assert last == b"nanok3: a line of stdin is not valid UTF-8: byte 0xff at offset 2"


# ---- Ctrl-C ----


@pytest.fixture
def terminal(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., pexpect.spawn]:
    def start(replies: list[Any]) -> pexpect.spawn:
        (tmp_path / "replies.json").write_text(json.dumps(replies))
        arguments = ["tests/scripted.py", str(tmp_path / "replies.json"), "chat"]
        child = pexpect.spawn(
            sys.executable,
            [*arguments, "--model", str(model), "--effort", "low"],
            cwd=str(ROOT),
            env=ENV,
            timeout=20,
            encoding="utf-8",
        )
        request.addfinalizer(lambda: child.close(force=True))
        child.expect_exact("> ")
        return child

    return start


def test_ctrl_c_stops_an_answer_and_keeps_what_it_said(
    terminal: Callable[..., pexpect.spawn], tmp_path: Path
) -> None:
    child = terminal(
        [
            {"reasoning": "hm", "content": "count " + "0123456789" * 50, "delay": 0.01},
            {"reasoning": "", "content": "all well"},
        ]
    )
    child.sendline("count")
    child.expect_exact("\x1b[2mhm")  # thinking is dimmed
    child.expect_exact("\x1b[0m")
    child.expect_exact("count 0123")
    child.sendintr()
    child.expect_exact("(stopped; ")
    child.expect_exact("> ")
    child.sendline("and now?")
    child.expect_exact("all well")
    child.expect(r"(\d+) of (\d+) prompt tokens were cached")
    cached, prompt = map(int, child.match.groups())
    assert 0 < prompt - cached < 200, "the stopped answer is not computed again"
    child.expect_exact("> ")
    child.sendline(f"/save {tmp_path}/talk.json")
    child.expect_exact("(saved 4 messages")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    said = json.loads((tmp_path / "talk.json").read_text())[1]
    assert said["content"].startswith("count 0123") and len(said["content"]) < 400
    assert said["reasoning_content"] == "hm"


def test_ctrl_c_in_prefill_drops_the_question(
    terminal: Callable[..., pexpect.spawn], tmp_path: Path
) -> None:
    child = terminal(
        [
            {"reasoning": "a", "content": "b", "delay": 0.6},
            {"reasoning": "", "content": "fine"},
        ]
    )
    child.sendline("a question")
    time.sleep(0.3)
    child.sendintr()
    child.expect_exact("(stopped; 0 tokens")
    child.expect_exact("the question is dropped")
    child.expect_exact("> ")
    child.sendline("another")
    child.expect_exact("fine")
    child.sendline(f"/save {tmp_path}/talk.json")
    child.expect_exact("(saved 2 messages")
    child.sendeof()
    child.expect(pexpect.EOF)


def test_second_ctrl_c_leaves(terminal: Callable[..., pexpect.spawn]) -> None:
    child = terminal([{"reasoning": "", "content": "fine"}])
    child.sendintr()
    child.expect_exact("(Ctrl-C again leaves; /help)")
    child.expect_exact("> ")
    child.sendline("hi")  # a line between them: the next one is a first one again
    child.expect_exact("fine")
    child.expect_exact("> ")
    child.sendintr()
    child.expect_exact("(Ctrl-C again leaves; /help)")
    child.expect_exact("> ")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


def test_two_ctrl_c_in_an_answer_leave(terminal: Callable[..., pexpect.spawn]) -> None:
    child = terminal([{"reasoning": "", "content": "x" * 100, "delay": 1.0}])
    child.sendline("hi")
    time.sleep(0.3)
    child.sendintr()
    time.sleep(0.2)
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
