"""The command line: what goes to which stream, every kind of bad input, every exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import make_checkpoint, tiny_config

from nanok3 import cli, commands, commands_bench
from nanok3.exits import EXIT_CODES

ROOT = Path(__file__).parent.parent
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SHORT = ["--thinking", "off", "--max-tokens", "4", "--seed", "1"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,))
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), config, seed=3)
    defaults = {"temperature": 0.7, "eos_token_id": 258}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """In this process: (exit code, stdout, stderr)."""
    capsys.readouterr()
    code = cli.run([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def spawn(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "nanok3.cli", *map(str, arguments)]
    return subprocess.run(command, env=ENV, **({"capture_output": True} | options))


# ---- generate ----


def test_text_is_on_stdout_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "hi", "--model", model, *SHORT)
    assert code == 0 and out.endswith("\n") and len(out) > 1
    assert "cut off after 4 tokens; see --max-tokens" in err
    code, text, _ = run(capsys, "generate", "hi", "--model", model, *SHORT, "--json")
    result = json.loads(text)
    assert code == 0 and text.count("\n") == 1
    assert result["text"].rstrip("\n") == out.rstrip("\n")
    assert result["finish_reason"] == "length" and result["usage"]["completion_tokens"] == 4


def test_prompt_from_everywhere_is_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files and pipes end in a line end that nobody meant."""
    (tmp_path / "prompt").write_bytes("né\n".encode())
    (tmp_path / "talk.json").write_text('[{"role": "user", "content": "n\\u00e9"}]')
    options = ["--model", model, *SHORT, "--json"]
    _, expected, _ = run(capsys, "generate", "né", *options)
    assert run(capsys, "generate", "--file", tmp_path / "prompt", *options)[1] == expected
    assert run(capsys, "generate", "--messages", tmp_path / "talk.json", *options)[1] == expected
    for dash in (["-"], []):
        piped = spawn("generate", *dash, *options, input="né\r\n".encode())
        assert piped.stdout.decode() == expected, piped.stderr


def test_thinking_and_tool_calls(tmp_path: Path, model: Path) -> None:
    """Each on its stream; the call is a line of JSON."""
    think = {"reasoning": "hm", "content": "done\n"}
    (tmp_path / "replies.json").write_text(json.dumps([think]))
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "add"}}]')
    command = [sys.executable, "tests/scripted.py", tmp_path / "replies.json", "generate", "hi"]
    options = ["--model", model, "--tools", tmp_path / "tools.json"]
    hidden = subprocess.run([*command, *options], env=ENV, capture_output=True, cwd=ROOT)
    shown = subprocess.run(
        [*command, *options, "--show-thinking"], env=ENV, capture_output=True, cwd=ROOT
    )
    assert hidden.stdout == shown.stdout == b"done\n"
    assert hidden.stderr == b"" and shown.stderr == b"hm\n\n"


def test_printer_puts_each_tool_call_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    from nanok3.console import Printer
    from nanok3.reply import ContentDelta, ToolCall

    printer = Printer(show_thinking=True)
    call = ToolCall(0, "call_0", "add", '{"a": "é"}')
    for event in (ContentDelta("well"), call):
        printer.show(event)
    printer.finish()
    line = {"index": 0, "id": "call_0", "name": "add", "arguments": '{"a": "é"}'}
    assert capsys.readouterr().out == "well\n" + json.dumps(line, ensure_ascii=False) + "\n"


def test_ctrl_c_ends_an_answer_with_what_there_is(tmp_path: Path, model: Path) -> None:
    reply = {"reasoning": "", "content": "0123456789" * 50, "delay": 0.02}
    (tmp_path / "replies.json").write_text(json.dumps([reply]))
    command = [sys.executable, "tests/scripted.py", tmp_path / "replies.json", "generate", "hi"]
    process = subprocess.Popen(
        [*command, "--model", model],
        env=ENV,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=20)
    assert first == b"012" and rest.endswith(b"\n") and len(rest) < 500
    assert process.returncode == 130 and b"Traceback" not in err


# ---- options ----


def test_help_is_quick_and_tells_the_exit_codes() -> None:
    script = (
        "import sys; from nanok3.cli import run; run(['generate', '--help']); "
        "assert run(['generate', 'x', '--effort', 'none']) == 2; "
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", script], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for code, meaning in EXIT_CODES.items():
        assert f"{code:>5}  {meaning}" in done.stdout


def test_only_the_command_line_knows_click() -> None:
    users = sorted(
        path.name
        for path in (ROOT / "nanok3").rglob("*.py")
        if re.search(r"^\s*(import|from) click\b", path.read_text(), re.MULTILINE)
    )
    assert users == ["cli.py", "cli_bench.py", "cli_options.py", "cli_plan.py"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generat"], "No such command 'generat'"),
        (["bench"], "Missing command"),
        (["generate", "x", "--nope"], "No such option"),
        *((["chat", "--effort", e], "'low', 'high', 'max'") for e in ("none", "medium", "", "7")),
        *((["chat", "--thinking", t], "'on', 'off'") for t in ("none", "")),
        (["generate", "x", "--temperature", "hot"], "not a valid float"),
        (["generate", "x", "--temperature", "-1"], "temperature must be"),
        (["generate", "x", "--top-p", "0"], "top_p must be above 0"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be"),
        (["generate", "x", "--stop", ""], "none of them empty"),
        (["generate", "x", "--dtype", "float16"], "'float16' is not one of"),
        (["generate", "x", "--device", "tpu"], "--device must be cpu, cuda or cuda:N"),
        (["generate", "x", "--context", "100000"], "reads at most 4096 tokens"),
        (["generate", "x", "--requests", "0"], "--requests"),
        (["generate", "x", "--file", "y"], "give one of PROMPT, --file and --messages"),
        (["generate", "--file", "/nope"], "/nope cannot be read: No such file"),
        (["generate", "x", "--tools", "/nope"], "/nope cannot be read: No such file"),
        (["batch", "/nope", "-"], "/nope: no such file"),
        (["batch", "x"], "Missing argument"),
        (["bench", "decode", "--repeats", "0"], "--repeats"),
    ],
)
def test_wrong_options(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    options = ["--model", model] if len(arguments) > 1 else []
    code, out, err = run(capsys, *arguments, *options)
    assert (code, out) == (2, ""), err
    assert err.startswith("nanok3: ") and err.count("\n") == 1 and reason in err


@pytest.mark.parametrize("thinking", [None, "on", "off"])
@pytest.mark.parametrize("effort", [None, "low", "high", "max"])
def test_effort_in_force_reaches_the_prompt(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    thinking: str | None,
    effort: str | None,
) -> None:
    prompts = []
    submit = commands.Engine.submit

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        request = submit(self, *args, **options)
        prompts.append(self.tokenizer.decode(request.ids))
        return request

    monkeypatch.setattr(commands.Engine, "submit", spy)
    options = ["--model", model, "--max-tokens", 1, "--show-config"]
    options += ["--thinking", thinking] if thinking else []
    options += ["--effort", effort] if effort else []
    code, _, err = run(capsys, "generate", "hi", *options)
    (prompt,) = prompts
    assert code == 0
    if thinking == "off":
        assert "thinking_effort" not in prompt and prompt.endswith("response<|sep|>")
        assert "thinking off (command line)\n" in err and "effort" not in err
    else:
        assert f"thinking_effort={effort or 'max'}`." in prompt and prompt.endswith("think<|sep|>")
        origin = "command line" if effort else "built in"
        assert f"effort {effort or 'max'} ({origin})\n" in err
        assert f"thinking on ({'command line' if thinking else 'built in'})\n" in err


def test_origin_of_every_value(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "generate", "hi", "--model", model, *SHORT, "--show-config")
    lines = err.splitlines()
    assert "temperature 0.7 (generation_config.json)" in lines
    assert "top_p 1.0 (built in)" in lines
    assert "seed 1 (command line)" in lines and "max_tokens 4 (command line)" in lines
    _, _, err = run(capsys, "generate", "a", "--model", model, "--temperature=0", "--show-config")
    assert "temperature 0.0 (command line)" in err and "max_tokens 1024 (built in)" in err


def test_packaged_model_runs_without_options(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "hi", "--max-tokens", 2, "--json")
    assert code == 0 and json.loads(out)["usage"]["completion_tokens"] <= 2


# ---- a model that cannot be loaded ----


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change_header(path: Path, old: bytes, new: bytes) -> None:
    """In a shard's header, keeping its length."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    assert len(old) == len(new) and old in raw[: 8 + size]
    path.write_bytes(raw[:8] + raw[8 : 8 + size].replace(old, new, 1) + raw[8 + size :])


def shard(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[-1]


def misplace(path: Path) -> None:
    def lie(index: Any) -> None:
        names = index["weight_map"]
        name = next(name for name, file in names.items() if file == shard(path).name)
        names[name] = sorted(path.glob("*.safetensors"))[0].name

    change_json(path / INDEX, lie)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "config.json: no such file"),
    "no index": (lambda p: (p / INDEX).unlink(), "found neither"),
    "no shard": (lambda p: shard(p).unlink(), "model-0000"),
    "truncated shard": (
        lambda p: os.truncate(shard(p), shard(p).stat().st_size - 3),
        "model-0000",
    ),
    "index lies": (misplace, "model-0000"),
    "wrong dtype": (lambda p: change_header(shard(p), b'"BF16"', b'"F16" '), "model-0000"),
    "unknown field": (
        lambda p: change_json(
            p / "config.json", lambda c: c["text_config"].update(attention_bias=True)
        ),
        "attention_bias",
    ),
    "config no JSON": (lambda p: (p / "config.json").write_text("{"), "expected a JSON file"),
    "defaults wrong": (
        lambda p: (p / "generation_config.json").write_text('{"top_p": 7}'),
        "generation_config.json: top_p",
    ),
    "tokenizer cut": (
        lambda p: os.truncate(p / "tiktoken.model", 100),
        "tiktoken.model",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    damage, reason = DAMAGE[kind]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damage(copy)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    for arguments in (["generate", "x"], ["batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl"]):
        code, out, err = run(capsys, *arguments, "--model", copy)
        assert (code, out) == (3, ""), err
        assert err.startswith("nanok3: ") and reason in err
        if kind not in ("index lies", "no shard"):  # one thing wrong is one line
            assert err.count("\n") == 1, err
    assert not (tmp_path / "out.jsonl").exists(), "the next run would find it in its way"


def test_no_such_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "chat", "--model", tmp_path / "none")
    assert code == 3
    assert (
        err == f"nanok3: {tmp_path}/none: no such directory; name one that holds a K3 checkpoint\n"
    )
    (tmp_path / "file").touch()
    assert run(capsys, "bench", "decode", "--model", tmp_path / "file")[0] == 3


def test_cache_that_memory_cannot_hold(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "generate", "x", "--model", model, "--requests", 10**12)
    assert code == 3 and err.count("\n") == 1, err


def test_context_is_the_most_that_prompt_and_reply_have(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever more the cache has room for: other requests, and what snapshots hold beside one."""
    options = ["--thinking", "off", "--temperature", 0, "--model", model, "--context"]
    code, out, _ = run(capsys, "generate", "x", "--max-tokens", 1000, "--json", *options, 200)
    usage = json.loads(out)["usage"]
    assert code == 0 and usage["prompt_tokens"] + usage["completion_tokens"] == 200
    code, _, err = run(capsys, "generate", "x" * 150, *options, 200)
    assert code == 4 and "room for 199 (max_context 200)" in err
    given = {"model": model, "device": "cpu", "dtype": "float32", "sampling": {}, "thinking": None}
    given |= {"effort": None, "context": 200, "requests": 3, "strict": False, "show_config": False}
    assert commands.load(commands.Options(**given), is_single=False).max_context == 200


# ---- a request that cannot be served ----


def test_refused_requests(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes("né".encode("latin-1"))
    (tmp_path / "broken.json").write_text('[{"role": "user"')
    (tmp_path / "number.json").write_text("[1]")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "role.json").write_text('[{"role": "alien", "content": "x"}]')
    for arguments, reason in [
        ([""], "the prompt is empty"),
        (["--file", tmp_path / "empty"], "the prompt is empty"),
        (["--file", tmp_path / "latin"], "latin is not valid UTF-8: byte 0xe9 at offset 1"),
        (["a\udcff"], "the prompt is not valid UTF-8: byte 0xff at offset 1"),
        (["x" * 5000], "tokens, but there is room for"),
        (["x" * 500, "--context", 200], "--context"),
        (["--messages", tmp_path / "broken.json"], "broken.json is not valid JSON"),
        (["--messages", tmp_path / "number.json"], "must hold a JSON list of messages"),
        (["--messages", tmp_path / "none.json"], "holds no messages"),
        (["--messages", tmp_path / "role.json"], "messages[0].role must be"),
        (["x", "--tools", tmp_path / "number.json"], "must hold a JSON list of tools"),
    ]:
        code, out, err = run(capsys, "generate", *arguments, "--model", model)
        assert (code, out) == (4, ""), (arguments, err)
        assert err.startswith("nanok3: ") and err.count("\n") == 1 and reason in err


def test_stdin_that_is_not_utf8(model: Path) -> None:
    done = spawn("generate", "--model", model, input=b"abc\xf0\x9f\n")
    assert (done.returncode, done.stdout) == (4, b"")
    assert done.stderr == b"nanok3: stdin is not valid UTF-8: byte 0xf0 at offset 3\n"


# ---- an output that cannot be written ----


def test_full_output_device(model: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = spawn("generate", "x", "--model", model, *SHORT, stdout=full, capture_output=False,
                     stderr=subprocess.PIPE)  # fmt: skip
    assert done.returncode == 5
    assert done.stderr == b"nanok3: stdout cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_full_output_device_of_help(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = spawn(*arguments, stdout=full, capture_output=False, stderr=subprocess.PIPE)
    assert done.returncode == 5
    assert done.stderr == b"nanok3: stdout cannot be written: No space left on device\n"


def test_reader_that_goes_is_no_fault(model: Path) -> None:
    for as_json in ([], ["--json"]):
        read, write = os.pipe()
        os.close(read)
        done = spawn("generate", "x", "--model", model, *SHORT, *as_json, stdout=write,
                     capture_output=False, stderr=subprocess.PIPE)  # fmt: skip
        os.close(write)
        assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("redirection", "code"), [(">&-", 5), ("2>&-", 0), ("<&- 2>&-", 0), ("2>/dev/full", 0)]
)
def test_closed_streams(model: Path, redirection: str, code: int) -> None:
    command = f'exec "$@" {redirection}'
    arguments = [sys.executable, "-m", "nanok3.cli", "generate", "x", "--model", str(model), *SHORT]
    done = subprocess.run(["bash", "-c", command, "-", *arguments], env=ENV, capture_output=True)
    assert done.returncode == code and b"Traceback" not in done.stderr
    assert (done.stdout == b"") == (code != 0)


def test_existing_output_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    target.write_text("mine")
    code, _, err = run(capsys, "batch", source, target, "--model", model)
    assert code == 5 and err.count("\n") == 1 and "exists" in err
    code, _, err = run(capsys, "batch", source, source, "--model", model, "--resume")
    assert code == 2 and "is the input too" in err
    assert target.read_text() == "mine" and source.read_text() == '{"prompt": "a"}\n'


# ---- bench ----


def test_bench_decode_ends_with_a_line_of_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Report:
        def table(self) -> str:
            return "a table"

        def json(self) -> str:
            return '{"bench": "decode"}'

    asked = []

    def fake(settings: Any, model_dir: Path, requests: Any, **figures: int) -> Report:
        asked.append((settings.dtype, model_dir, requests, figures))
        return Report()

    monkeypatch.setattr(commands_bench.bench, "bench_decode", fake)
    code, out, _ = run(capsys, "bench", "decode", "--dtype", "bfloat16", "--repeats", 2)
    assert (code, out) == (0, 'a table\n{"bench": "decode"}\n')
    figures = {"prompt_tokens": 64, "decode_tokens": 64, "repeats": 2}
    assert asked == [("bfloat16", commands.PACKAGED_MODEL, (1, 8), figures)]
    _, out, _ = run(capsys, "bench", "decode", "--requests", 3, "--json")
    assert out == '{"bench": "decode"}\n' and asked[1][2] == (3,)

    def wrong(*args: Any, **figures: int) -> Report:
        raise commands_bench.bench.CheckFailed("values are off")

    monkeypatch.setattr(commands_bench.bench, "bench_decode", wrong)
    code, out, err = run(capsys, "bench", "decode")
    assert (code, out, err) == (1, "", "nanok3: no speed is reported: values are off\n")


def test_a_gpu_that_is_not_there_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = run(capsys, "generate", "Hello", "--device", "cuda")
    assert (code, out) == (3, "") and err.startswith("nanok3: ") and err.count("\n") == 1
