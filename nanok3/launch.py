"""Starts the other ranks on this machine, through torchrun's own process layer.

Rank 0 is the process that a person has started, so it alone has the terminal and Ctrl-C. The others
run `python -m nanok3.follower` in sessions of their own, each with its log. They stand where
torchrun would have put them: what it sets in the environment is set here.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import start_processes
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nanok3.comm.exchange import PeerLost
from nanok3.exits import LOST

END_S = 10  # until those who were told to end have ended
LOG_LINES = 5  # of a log, in a message
PORT = 29500


class RankLogs(LogsSpecs):
    """What rank i writes goes to rank<i>.log, and results, of which it has none, to nowhere."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._directory = directory

    @property
    def root_log_dir(self) -> str:
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = {i: str(log_of(self._directory, i + 1)) for i in envs}
        nowhere = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=nowhere, stderrs=logs, error_files=nowhere)


def log_of(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.log"


class Followers:
    """The processes of ranks 1 to size - 1; `close` leaves none of them."""

    def __init__(self, size: int, port: int, arguments: Sequence[str]) -> None:
        """port: of rank 0's store. arguments: of every follower."""
        # Its warnings tell of what is told here.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel("CRITICAL")
        self.log_dir = Path(tempfile.mkdtemp(prefix="nanok3-ranks-"))
        self._lost: str | None = None
        threads = max(1, (os.cpu_count() or 1) // size)
        ranks = range(1, size)
        with kept_signals():
            self._processes = start_processes(
                "nanok3",
                sys.executable,
                {r - 1: ("-m", "nanok3.follower", *arguments) for r in ranks},
                {r - 1: environment(r, size, port, threads) for r in ranks},
                RankLogs(self.log_dir),
            )

    def check(self) -> None:
        """Raises PeerLost, and ends the others, if one has ended that should not have."""
        if self._lost is None:
            result = self._processes.wait(0)
            if result is None:
                return
            failures = sorted(result.failures.values(), key=is_consequence)
            self._lost = self._describe(failures[0]) if failures else "all other ranks have ended"
        raise PeerLost(self._lost)

    def close(self, told: bool) -> None:
        """told: they know that they are to end, and do it by themselves."""
        if told:
            self._processes.wait(END_S, period=0.02)
        self._processes.close(signal.SIGKILL)  # one that stands still hears nothing else
        if not any(log.stat().st_size for log in self.log_dir.glob("*")):
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def _describe(self, failure: ProcessFailure) -> str:
        rank, code = failure.local_rank + 1, failure.exitcode
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        log = log_of(self.log_dir, rank)
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        if not lines:
            return f"rank {rank} {how}; its log is empty"
        return f"rank {rank} {how}; its log is {log}, which ends:\n  " + "\n  ".join(lines)


@contextmanager
def kept_signals() -> Iterator[None]:
    """Starting processes takes signals over, where it may: in the main thread."""
    names = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    kept = {number: signal.getsignal(number) for number in names}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                signal.signal(number, handler)


def is_consequence(failure: ProcessFailure) -> bool:
    """Of another rank's end: it says itself that it has lost a peer, or was told to end."""
    return failure.exitcode in (LOST, -signal.SIGTERM)


def environment(rank: int, size: int, port: int, threads: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 hosts it already
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": str(threads),
    }


def spanning_lines(gpus: int, on_node: int, command: Sequence[str]) -> str:
    """How to start more ranks than this node has GPUs for; both are counted in powers of two."""
    each = 1 << (on_node.bit_length() - 1)
    nodes, said = gpus // each, shlex.join(command)
    return (
        f"this node has {on_node} GPUs, not {gpus}; with torchrun, on each of {nodes} nodes, "
        "HOST being the first of them:\n"
        f"  torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:{PORT} --local-ranks-filter 0 -m nanok3.cli {said}\n"
        "or with Slurm, once:\n"
        f"  srun --nodes {nodes} --ntasks-per-node {each} --gpus-per-node {each} --input 0 "
        f"nanok3 {said}"
    )


def started_by(environment: Mapping[str, str]) -> str:
    return "srun" if "SLURM_STEP_ID" in environment and "RANK" not in environment else "torchrun"
