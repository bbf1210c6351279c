"""A batch that ends at any moment, with an engine whose replies cost nothing.

`Dying` stands for the system calls of `journal.py`: at the nth one the process dies, before it,
after it, or half way through a write; or the machine loses power, and with it all that no fsync
had put on the disk.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tiny import make_checkpoint, tiny_config

from nanok3 import batch_files, journal
from nanok3.batch import Counts, Overrides, run_batch
from nanok3.config import EngineConfig
from nanok3.console import OutputError
from nanok3.engine import RequestError
from nanok3.request import Result, Usage
from nanok3.sampling import SamplingParams
from nanok3.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent


class Job:
    def __init__(self, prompt: str, steps: int) -> None:
        self.prompt, self.left, self.done = prompt, steps, False
        self.slot: int | None = None

    def result(self) -> Result:
        return Result([1], self.prompt[::-1], "", [], "stop", Usage(3, 0, 2))


class FakeEngine:
    """Three requests at once, each for as many steps as its max_tokens says."""

    def __init__(self) -> None:
        self.config = self.defaults = None
        self.tokenizer = Tokenizer([bytes([i]) for i in range(256)])
        self.settings = EngineConfig(max_num_reqs=3)
        self.max_context = 100
        self.jobs: list[Job] = []
        self.submitted: list[str] = []

    def sampling(self, **options: Any) -> SamplingParams:
        return SamplingParams(**options)

    def submit(self, prompt: str, params: SamplingParams, **options: Any) -> Job:
        if prompt == "refuse":
            raise RequestError("no")
        job = Job(prompt, params.max_tokens or 1)
        self.jobs.append(job)
        self.submitted.append(prompt)
        return job

    def cancel(self, job: Job) -> None:
        if not job.done:
            self.jobs.remove(job)

    def step(self) -> None:
        for job in self.jobs[:3]:
            job.slot = 0
            job.left -= 1
            if job.left == 0:
                job.done = True
                self.jobs.remove(job)


def start(engine: FakeEngine, folder: Path, name: str, **options: Any) -> Counts:
    options = {"errors": str(folder / f"{name}.errors"), "model": "m"} | options
    options = {"overrides": Overrides({"stop": ("x",)})} | options
    source = options.pop("source", folder / "in.jsonl")
    return run_batch(engine, str(source), str(folder / name), **options)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a batch whose lines end out of order, and what answers it."""
    steps = [5, 1, 2, 9, 1, 1, 3, 1, 4, 2]
    lines: list[Any] = [{"prompt": f"line {i}", "max_tokens": n} for i, n in enumerate(steps)]
    lines[2:2] = [{"prompt": "refuse"}, {"bad": 1}]
    lines += [{"custom_id": "a", "prompt": "né"}, {"custom_id": "a", "prompt": "again"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = start(FakeEngine(), tmp_path, "right")
    assert (counts.done, counts.failed, counts.waiting) == (14, 3, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "right", "right.errors"]
    return tmp_path


def check_whole(folder: Path, name: str) -> None:
    right = (folder / "right").read_bytes()
    assert (folder / name).read_bytes() == right
    failed = [line for line in right.splitlines(keepends=True) if json.loads(line).get("error")]
    assert (folder / f"{name}.errors").read_bytes() == b"".join(failed)
    assert not list(folder.glob("*.journal*"))


class Died(BaseException):
    pass


class Dying:
    """`os` for journal.py, until call number `last`."""

    def __init__(self, last: int | None, how: str) -> None:
        self.last, self.how = last, how
        self.calls = 0
        self.is_dead = False
        self.synced: dict[int, int] = {}  # inode -> bytes on the disk

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("write", "fsync", "replace", "unlink", "truncate"):
            return real

        def call(*args: Any) -> Any:
            if self.is_dead:
                raise Died
            self.calls += 1
            if self.calls - 1 != self.last:
                result = real(*args)
                if name == "fsync":
                    self.synced[os.fstat(args[0]).st_ino] = os.fstat(args[0]).st_size
                return result
            self.is_dead = True
            if self.how == "after":
                real(*args)
            elif self.how == "half" and name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            raise Died

        return call

    def cut_power(self, folder: Path, name: str) -> None:
        for path in folder.glob(f"{name}*"):
            os.truncate(path, min(path.stat().st_size, self.synced.get(path.stat().st_ino, 0)))


@pytest.mark.parametrize("journal_bytes", [batch_files.JOURNAL_BYTES, 0])
def test_death_at_every_system_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, journal_bytes: int
) -> None:
    monkeypatch.setattr(batch_files, "JOURNAL_BYTES", journal_bytes)
    monkeypatch.setattr(batch_files.Journal, "append", noted_append(kept := []))
    right = (folder / "right").read_bytes()
    total = Dying(None, "")
    monkeypatch.setattr(journal, "os", total)
    start(FakeEngine(), folder, "count")
    check_whole(folder, "count")
    assert total.calls > 30
    places = {json.loads(line)["index"]: line for line in right.splitlines()}
    for last in range(total.calls):
        for how in ("before", "half", "after", "power"):
            name = f"out-{last}-{how}"
            kept.clear()
            dying = Dying(last, how)
            monkeypatch.setattr(journal, "os", dying)
            with pytest.raises(Died):
                start(FakeEngine(), folder, name)
            if how == "power":
                dying.cut_power(folder, name)
            if (folder / name).exists():
                assert right.startswith((folder / name).read_bytes())
            # A second death, on the way back; then a run that gets through.
            monkeypatch.setattr(journal, "os", Dying(last // 2, how if how != "power" else "half"))
            known = set(kept)
            for engine in (FakeEngine(), FakeEngine()):
                with suppress(Died):
                    start(engine, folder, name, resume=True)
                monkeypatch.setattr(journal, "os", os)
                again = {
                    place
                    for place in known
                    for prompt in engine.submitted
                    if f'"{prompt[::-1]}"'.encode() in places[place]
                }
                assert not again, "what was kept is computed again"
            check_whole(folder, name)
            for path in folder.glob(f"{name}*"):
                path.unlink()


def noted_append(kept: list[int]) -> Any:
    append = journal.Journal.append

    def noted(self: journal.Journal, entries: Any) -> None:
        append(self, entries)
        kept.extend(entry.place for entry in entries)

    return noted


@pytest.mark.parametrize("finish", [True, False])
def test_interrupt(folder: Path, finish: bool) -> None:
    """Nothing new begins; what runs is finished if asked, and what is finished is kept."""
    for polls in range(8):
        name, engine = f"out-{polls}", FakeEngine()
        running: list[Job] = []
        count = 0

        def should_stop(polls: int = polls, engine: Any = engine, running: Any = running) -> bool:
            nonlocal count
            count += 1
            if count == polls + 1:
                running.extend(job for job in engine.jobs if job.slot is not None)
            return count > polls

        counts = start(engine, folder, name, should_stop=should_stop, finish_running=finish)
        assert counts.interrupted and engine.jobs == [], "the engine is left empty"
        assert running or not polls
        assert all(job.done == finish for job in running)
        assert counts.done == (folder / name).read_bytes().count(b"\n") < 14
        again = FakeEngine()
        resumed = start(again, folder, name, resume=True)
        assert resumed.resumed == counts.done + counts.waiting
        assert not {job.prompt for job in running if job.done} & set(again.submitted)
        check_whole(folder, name)


def test_second_interrupt_ends_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    steps = iter(range(100))

    def step() -> None:
        if next(steps) == 3:
            raise KeyboardInterrupt
        FakeEngine.step(engine)

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        start(engine, folder, "out")
    assert engine.jobs == []
    start(FakeEngine(), folder, "out", resume=True)
    check_whole(folder, "out")


def interrupted(folder: Path) -> bytes:
    """A run that ended while line 3, the sixth of the file, held others back; what it left."""
    asked = iter(range(1000))
    counts = start(
        FakeEngine(), folder, "out", should_stop=lambda: next(asked) == 6, finish_running=False
    )
    assert counts.interrupted and counts.done == 5 and counts.waiting
    return (folder / "out").read_bytes() + (folder / "out.journal").read_bytes()


@pytest.mark.parametrize("journal_bytes", [batch_files.JOURNAL_BYTES, 0])
def test_resume_refuses_another_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, journal_bytes: int
) -> None:
    monkeypatch.setattr(batch_files, "JOURNAL_BYTES", journal_bytes)
    left = interrupted(folder)
    lines = (folder / "in.jsonl").read_bytes().splitlines(keepends=True)
    source = folder / "other.jsonl"
    for place in (0, 1, 2, 3, 4, 6):  # in the output, and in the journal alone
        source.write_bytes(b"".join([*lines[:place], b'{"prompt": "x"}\n', *lines[place + 1 :]]))
        with pytest.raises(OutputError, match="--resume needs the input that the output was made"):
            start(FakeEngine(), folder, "out", resume=True, source=source)
        assert (folder / "out").read_bytes() + (folder / "out.journal").read_bytes() == left
    start(FakeEngine(), folder, "out", resume=True)
    check_whole(folder, "out")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"model": "n"}, 'begun with model "m", and this run has "n"'),
        ({"draft": "d"}, 'begun with draft null, and this run has "d"'),
        ({"overrides": Overrides({"seed": 1})}, "begun with sampling"),
        ({"overrides": Overrides({"stop": ("x",)}, False)}, "begun with thinking null"),
    ],
)
def test_resume_refuses_other_options(folder: Path, option: dict[str, Any], reason: str) -> None:
    left = interrupted(folder)
    with pytest.raises(OutputError, match=reason):
        start(FakeEngine(), folder, "out", resume=True, **option)
    assert (folder / "out").read_bytes() + (folder / "out.journal").read_bytes() == left


def test_resume_without_the_output_or_with_less_input(folder: Path) -> None:
    interrupted(folder)
    output = (folder / "out").read_bytes()
    (folder / "out").write_bytes(output[:9])  # it was begun anew by the time of the journal's mark
    short = folder / "short.jsonl"
    short.write_bytes(b"".join((folder / "in.jsonl").read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(OutputError, match="the journal has more lines than the input"):
        start(FakeEngine(), folder, "out", resume=True, source=short)
    start(FakeEngine(), folder, "out", resume=True)
    check_whole(folder, "out")


def test_output_that_lost_what_the_journal_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "JOURNAL_BYTES", 0)
    interrupted(folder)
    (folder / "out").write_bytes((folder / "out").read_bytes()[:9])
    with pytest.raises(OutputError, match="has lost records that its journal counts"):
        start(FakeEngine(), folder, "out", resume=True)


def test_errors_can_be_asked_for_later(folder: Path) -> None:
    start(FakeEngine(), folder, "out", errors=None)
    start(FakeEngine(), folder, "out", resume=True)
    check_whole(folder, "out")


def test_slow_pipe_does_not_hold_up_what_runs(folder: Path) -> None:
    """The first line is answered while the second one has yet to come."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    first, *others = (folder / "in.jsonl").read_bytes().splitlines(keepends=True)

    def feed() -> None:
        with open(pipe, "wb", buffering=0) as file:
            file.write(first)
            deadline = time.monotonic() + 10
            while not (folder / "out").exists() or not (folder / "out").stat().st_size:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            file.write(b"".join(others))

    thread = threading.Thread(target=feed)
    thread.start()
    start(FakeEngine(), folder, "out", source=pipe)
    thread.join()
    check_whole(folder, "out")


def test_memory_does_not_grow_with_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal.os, "fsync", lambda fd: None)
    monkeypatch.setattr(batch_files, "JOURNAL_BYTES", 2**16)
    peaks = []
    for count in (1000, 8000):
        (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n{"bad": 1}\n' * count)
        tracemalloc.start()
        counts = start(FakeEngine(), tmp_path, str(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert counts.done == 2 * count
    assert peaks[1] < 1.2 * peaks[0] + 50_000, peaks


def test_progress_has_tokens_a_rate_and_the_time_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr; of a pipe nobody knows how much is left."""
    monkeypatch.setattr("nanok3.progress.StatusLine.is_due", True)
    counted = r"\d+ lines done, \d+ failed, \d+ tokens, \d+\.\d tok/s"
    packed = folder / "in.gz"
    packed.write_bytes(gzip.compress((folder / "in.jsonl").read_bytes()))
    for source in (folder / "in.jsonl", packed):
        start(FakeEngine(), folder, f"from-{source.name}", source=source)
        shown = capsys.readouterr()
        lines = shown.err.splitlines()
        assert not shown.out and all(re.match(counted, line) for line in lines)
        assert any(re.fullmatch(rf"{counted}, \d+ s left *", line) for line in lines)
        assert lines[-1].startswith("14 lines done, 3 failed, 22 tokens, ")
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    feeder = threading.Thread(target=pipe.write_bytes, args=((folder / "in.jsonl").read_bytes(),))
    feeder.start()
    start(FakeEngine(), folder, "from-pipe", source=pipe)
    feeder.join()
    assert "s left" not in capsys.readouterr().err


def test_twenty_thousand_lines_of_the_script() -> None:
    """`scripts/million_lines.py`, whose default takes minutes."""
    command = [sys.executable, "scripts/million_lines.py", "--lines", "20000"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = re.search(r"^20,000 lines, .* peak memory grew by (\d+) MB", done.stdout)
    assert grown is not None and int(grown[1]) < 20, done.stdout


def test_random_kills(tmp_path: Path) -> None:
    """Real processes and SIGKILL; the script's default is 100 kills over 300 lines."""
    config = tiny_config(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,))
    model = make_checkpoint(tmp_path, config, seed=3)
    command = ["scripts/kill_batch.py", "--model", str(model), "--lines", "60", "--kills", "12"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 kills over 60 lines")
