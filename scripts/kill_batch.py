"""Kills `nanok3 batch` with SIGKILL at random moments and checks that nothing is lost or doubled.

A run without kills gives the right answer. Then the same batch is begun, killed and resumed, again
and again, each time as a process of its own; whenever it gets through, it begins anew. After every
kill the output must be a prefix of the right one, and output and journal together must have every
line that they had before. In the end everything must be there, byte by byte.

    python scripts/kill_batch.py --kills 100 --lines 300
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from nanok3.cli import run
from nanok3.commands import PACKAGED_MODEL
from nanok3.journal import Journal, journal_path


def write_lines(path: Path, count: int, rng: random.Random) -> None:
    """Greedy and seeded requests of many lengths, so that they end out of order; some bad ones."""
    lines = []
    for i in range(count):
        body = {"max_tokens": rng.choice([1, 2, 5, 20]), "reasoning_effort": "none"}
        body |= {"temperature": 0} if i % 3 else {"temperature": 1, "seed": i}
        if i % 17 == 5:
            lines.append({"prompt": 7})
        elif i % 2:
            lines.append({"prompt": f"What is {i} + {i}?", **body})
        else:
            body["messages"] = [{"role": "user", "content": f"Write {i}."}]
            lines.append({"custom_id": f"id-{i}", "url": "/v1/chat/completions", "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def start(arguments: list[str], log: Path) -> int:
    """The command as a process, forked so that it need not import torch again."""
    pid = os.fork()
    if pid == 0:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 2)
        os._exit(run(arguments))
    return pid


def state(target: Path, whole: bytes) -> tuple[set[int], int]:
    """The places that are finished, and how many of them only the journal has."""
    lines = whole.splitlines(keepends=True)
    found = target.read_bytes() if target.exists() else b""
    assert whole.startswith(found), "the output is no prefix of the right one"
    places = set(range(found.count(b"\n")))
    in_output = len(places)
    if journal_path(str(target)).exists():
        copy = target.with_name("copy")  # reading cuts off a torn end, which is for the next run
        shutil.copy(journal_path(str(target)), copy)
        with Journal(copy) as journal:
            mark, entries = journal.read()
        assert mark.written <= in_output
        for entry in entries:
            assert entry.data == lines[entry.place], f"the journal has a wrong line {entry.place}"
        journaled = [entry.place for entry in entries]
        assert len(journaled) == len(set(journaled)), "the journal has a line twice"
        places |= set(journaled)
    return places, len(places) - in_output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=PACKAGED_MODEL)
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads would not survive the fork
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, right, target = folder / "in.jsonl", folder / "right.jsonl", folder / "out.jsonl"
        right_errors, errors, log = folder / "right-errors", folder / "errors", folder / "log"
        write_lines(source, options.lines, rng)
        common = ["--model", str(options.model), "--strict"]
        begin = time.monotonic()
        first = start(
            ["batch", str(source), str(right), "--errors", str(right_errors), *common], log
        )
        while not right.exists():
            ended = os.waitpid(first, os.WNOHANG)[0]
            assert not ended, f"it ended without an output: {log.read_text()}"
            time.sleep(0.001)
        loading = time.monotonic() - begin
        assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 6, log.read_text()
        running = time.monotonic() - begin - loading
        whole = right.read_bytes()
        assert whole.count(b"\n") == options.lines
        again = ["batch", str(source), str(target), "--errors", str(errors), "--resume", *common]
        kills = rounds = kills_with_waiting = 0
        known: set[int] = set()
        while True:
            is_last = kills == options.kills
            pid = start(again, log)
            if not is_last:
                time.sleep(rng.uniform(0, loading + 4 * running / options.kills))
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in (6, -signal.SIGKILL), log.read_text()
            places, waiting = state(target, whole)
            assert known <= places, f"lost: lines {sorted(known - places)}"
            known = places
            if code == -signal.SIGKILL:
                kills += 1
                kills_with_waiting += waiting > 0
                continue
            rounds += 1
            assert target.read_bytes() == whole and errors.read_bytes() == right_errors.read_bytes()
            assert not list(folder.glob("*.journal*")), "the journal was not removed"
            if is_last:
                break
            target.unlink()
            errors.unlink()
            known = set()
    print(
        f"{kills} kills over {options.lines} lines in {rounds} rounds, {kills_with_waiting} while "
        "the journal had lines that the output had not: nothing lost, nothing twice, bytes equal"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
