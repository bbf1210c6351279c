"""Kills one of several ranks at random moments and says how the others ended.

    python scripts/kill_ranks.py --ranks 2 --times 10

Each run is `nanok3 chat` on the packaged model, with questions from a pipe; the rank, 0 included,
and the moment, from the first look at the files to the middle of a reply, are drawn by --seed.
Fails if a process is left after 10 s, if rank 0 lives on without saying which rank was lost, or if
a last run, with nobody killed, does not reply as one process does.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

MOST_S = 10.0
COMMAND = [sys.executable, "-m", "nanok3.cli", "chat", "--temperature", "0", "--strict"]
QUESTION = "What is 27 + 58?\n"
LOST = 8  # the exit code


def followers(pid: int) -> list[int]:
    """Of rank 0, in the order in which they were started."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        lines = {int(n): Path(f"/proc/{n}/cmdline").read_text() for n in pids}
    except OSError:
        return []
    return [n for n, line in lines.items() if "nanok3.follower" in line]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(ranks: int, num_questions: int) -> subprocess.Popen[str]:
    leader = subprocess.Popen(
        [*COMMAND, "--gpus", str(ranks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert leader.stdin is not None
    leader.stdin.write(QUESTION * num_questions)
    leader.stdin.close()
    leader.stdin = None
    return leader


def kill_one(ranks: int, chance: random.Random, longest_s: float) -> bool:
    """Whether the others ended as they should."""
    begin = time.monotonic()
    moment = chance.uniform(0, longest_s)
    leader = start(ranks, 500)
    while len(pids := [leader.pid, *followers(leader.pid)]) < ranks or (
        time.monotonic() - begin < moment
    ):
        time.sleep(0.01)
        if leader.poll() is not None:
            print("it ended before anyone was killed", leader.communicate()[1])
            return False
    rank = chance.randrange(ranks)
    os.kill(pids[rank], signal.SIGKILL)
    killed = time.monotonic()
    while any(is_alive(pid) for pid in pids) and time.monotonic() - killed < MOST_S:
        time.sleep(0.01)
        leader.poll()  # so that it is no zombie
    took = time.monotonic() - killed
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    out, err = leader.communicate()
    last = " | ".join(err[err.rfind("nanok3: ") :].splitlines()) if "nanok3: " in err else ""
    print(
        f"rank {rank} killed after {killed - begin:4.1f} s, in the "
        f"{'reply' if out else 'start'}: all ended in {took:.2f} s, "
        f"code {leader.returncode}: {last}"
    )
    if left:
        print(f"processes left: {len(left)}")
        return False
    if rank == 0:
        return leader.returncode == -signal.SIGKILL
    return leader.returncode == LOST and f"rank {rank} was ended by SIGKILL" in err


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=20.0, help="seconds until a kill, at most")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    good = [kill_one(given.ranks, chance, given.longest) for _ in range(given.times)]
    replies = [start(n, 2).communicate()[0] for n in (1, given.ranks)]
    same = bool(replies[0]) and replies[0] == replies[1]
    print(
        f"{sum(good)} of {len(good)} as they should; started again: {'same' if same else 'differs'}"
    )
    sys.exit(0 if all(good) and same else 1)


if __name__ == "__main__":
    main()
