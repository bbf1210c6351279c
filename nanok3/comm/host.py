"""Ranks as processes: where this one stands, what all agree on, and one small message a step.

Before serving, every phase is a `gather`: each rank leaves a value in rank 0's store and waits for
those of the others, at most until a deadline that names who is missing. While serving, rank 0 sends
and the others receive, over gloo, which tells at once of a connection that breaks; while rank 0 has
nothing to say it sends empty messages, so that no one waits for a machine that has gone.

What the messages mean is for `lockstep.py`, who starts the processes for `launch.py` or torchrun.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanok3.comm.exchange import CHECK_S, DEADLINE_S, PeerLost, nobody_is_gone

JOIN_S = 300.0  # until all processes have been started
HEARTBEAT_S = 2.0  # between two empty messages
POLL_S = 0.02
GRACE_S = 1.0  # from a broken connection to the end of the process being seen
FIRST_BYTES = 4096  # of a message in its first part, its length included
LENGTH_BYTES = 8
LOWEST_PORT = 20000  # of those that Slurm jobs use, by their number


@dataclass(frozen=True)
class Place:
    """Of one process among all ranks."""

    rank: int
    size: int
    local_rank: int  # on its machine
    local_size: int
    address: str  # of the store
    port: int
    hosts_store: bool  # this process does, else another one
    prefix: str = ""  # of the store's keys, new for every restart


def place_from(environment: Mapping[str, str]) -> Place | None:
    """Where torchrun or srun have put this process; None where neither has started it."""
    e = environment
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= e.keys():
        rank, size = int(e["RANK"]), int(e["WORLD_SIZE"])
        has_agent = e.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Place(
            rank,
            size,
            int(e.get("LOCAL_RANK", rank)),
            int(e.get("LOCAL_WORLD_SIZE", size)),
            e["MASTER_ADDR"],
            int(e["MASTER_PORT"]),
            hosts_store=rank == 0 and not has_agent,
            prefix=f"nanok3/{e.get('TORCHELASTIC_RESTART_COUNT', 0)}",
        )
    if {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"} <= e.keys():
        rank, size = int(e["SLURM_PROCID"]), int(e["SLURM_NTASKS"])
        job = int(e.get("SLURM_JOB_ID", 0))
        return Place(
            rank,
            size,
            int(e.get("SLURM_LOCALID", 0)),
            size // int(e.get("SLURM_STEP_NUM_NODES", 1)),
            e.get("MASTER_ADDR", first_host(e["SLURM_STEP_NODELIST"])),
            int(e.get("MASTER_PORT", LOWEST_PORT + job % 10000)),
            hosts_store=rank == 0,
        )
    return None


def first_host(node_list: str) -> str:
    """Of Slurm's form: "a", "a,b", "n[03-07,9]", "n[1-2].cluster"."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", node_list)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def host_store() -> dist.TCPStore:
    """Rank 0's, on this machine, at a free port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Host:
    """One rank's connection to the others. The first error is the last thing it does."""

    def __init__(
        self,
        place: Place,
        *,
        store: dist.Store | None = None,
        check_peers: Callable[[], None] = nobody_is_gone,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """store: if this process hosts it already. check_peers: raises PeerLost if a process is
        known to be gone."""
        self.place = place
        self._check_processes = check_peers
        self._deadline = timedelta(seconds=deadline_s)
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._lost: str | None = None
        self._heart: threading.Thread | None = None
        joining = timedelta(seconds=JOIN_S)
        try:
            if store is None:
                store = dist.TCPStore(
                    place.address,
                    place.port,
                    is_master=place.hosts_store,
                    timeout=joining,
                    wait_for_workers=False,
                )
            self._store = dist.PrefixStore(place.prefix, store) if place.prefix else store
            self.gather("start", "", JOIN_S)  # so that gloo below waits for nobody
            steps = dist.PrefixStore("steps", self._store)
            self._group = dist.ProcessGroupGloo(steps, place.rank, place.size, joining)
        except PeerLost:
            raise
        except RuntimeError as error:
            raise self._no_store(error, "while the ranks met") from error

    # ---- before serving ----

    def gather(self, phase: str, value: str, deadline_s: float) -> list[str]:
        """What each rank gave for this phase, all of which have reached it then."""
        place = self.place
        names = [f"{phase}/{rank}" for rank in range(place.size)]
        start = looked = time.monotonic()
        try:
            self._store.set(names[place.rank], value)
            while not self._store.check(names):
                now = time.monotonic()
                if now - looked > CHECK_S:
                    looked = now
                    self.check()
                if now - start > deadline_s:
                    missing = [r for r, name in enumerate(names) if not self._store.check([name])]
                    ranks = ", ".join(map(str, missing))
                    told = f"ranks that have not reached it after {deadline_s:g} s: {ranks}"
                    raise PeerLost(f"phase {phase}: {told}")
                time.sleep(POLL_S)
            return [self._store.get(name).decode() for name in names]
        except PeerLost:
            raise
        except RuntimeError as error:
            raise self._no_store(error, f"in the phase {phase}") from error

    def fail(self, reason: str) -> None:
        """Leaves word for the others of why this rank does not go on."""
        with suppress(RuntimeError):
            self._store.set("failed", f"rank {self.place.rank}: {reason}")

    def check(self) -> None:
        """Raises PeerLost if a rank is known not to go on."""
        self._check_processes()
        try:
            failed = self._store.check(["failed"]) and self._store.get("failed").decode()
        except RuntimeError as error:
            raise PeerLost(f"rank 0 is gone, says rank {self.place.rank}") from error
        if failed:
            raise PeerLost(failed)

    # ---- while serving ----

    def start_heartbeat(self) -> None:
        """Rank 0 calls this when the others are about to receive."""
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    def busy(self) -> AbstractContextManager[bool]:
        """Rank 0 is in here from a message until its own part is done, so that no empty message
        waits for those who are at work."""
        return self._busy

    def send(self, message: bytes) -> None:
        """From rank 0 to all; within `busy`."""
        assert self._busy.locked() and self.place.rank == 0
        if self._lost is not None:
            raise PeerLost(self._lost)
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        framed = len(message).to_bytes(LENGTH_BYTES, "little") + message
        head = framed[:FIRST_BYTES]
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._post(first)
        if rest := framed[FIRST_BYTES:]:
            self._post(torch.frombuffer(bytearray(rest), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Rank 0's next message that is not empty."""
        message = b""
        while not message:
            first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
            self._fetch(first)
            framed = first.numpy().tobytes()
            length = int.from_bytes(framed[:LENGTH_BYTES], "little")
            message = framed[LENGTH_BYTES : LENGTH_BYTES + length]
            if length > len(message):
                rest = torch.zeros(length - len(message), dtype=torch.uint8)
                self._fetch(rest)
                message += rest.numpy().tobytes()
        return message

    def stop(self) -> None:
        """No empty message goes from now on; within `busy`."""
        self._closed.set()

    def close(self) -> None:
        self._closed.set()
        if self._heart is not None:
            self._heart.join()

    def _post(self, data: Tensor) -> None:
        """To every other rank."""
        others = range(1, self.place.size)
        for rank, work in [(r, self._begin(self._group.send, data, r)) for r in others]:
            self._wait(rank, work)

    def _fetch(self, data: Tensor) -> None:
        """From rank 0."""
        self._wait(0, self._begin(self._group.recv, data, 0))

    def _begin(self, start: Callable[..., dist.Work], data: Tensor, rank: int) -> dist.Work | None:
        try:
            return start([data], rank, 0)
        except RuntimeError:  # the connection is closed, which `_wait` tells
            return None

    def _wait(self, rank: int, work: dist.Work | None) -> None:
        try:
            if work is None:
                raise RuntimeError("its connection is closed")
            work.wait(self._deadline)
        except RuntimeError as error:
            for _ in range(int(GRACE_S / POLL_S)):  # who knows more may know it a little later
                self.check()
                time.sleep(POLL_S)
            cause = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])[:100]
            raise PeerLost(
                f"rank {rank} does not answer rank {self.place.rank} between two steps: {cause}"
            ) from error

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with self._busy:
                if self._closed.is_set():
                    return
                try:
                    self.send(b"")
                except PeerLost as error:
                    self._lost = str(error)
                    return

    def _no_store(self, error: RuntimeError, when: str) -> PeerLost:
        cause = str(error).splitlines()[0][:100]
        return PeerLost(f"rank {self.place.rank} cannot reach the store of rank 0 {when}: {cause}")
