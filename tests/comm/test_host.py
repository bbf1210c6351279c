"""Ranks that meet, agree and take messages: as threads here, for a `Host` knows no process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from nanok3.comm import host as host_module
from nanok3.comm.exchange import PeerLost
from nanok3.comm.host import FIRST_BYTES, Host, Place, first_host, host_store, place_from

Found = TypeVar("Found")


def meet(size: int, deadline_s: float = 20) -> list[Host]:
    store = host_store()

    def join(rank: int) -> Host:
        place = Place(rank, size, rank, size, "127.0.0.1", store.port, rank == 0, "test")
        return Host(place, store=store if rank == 0 else None, deadline_s=deadline_s)

    return on_all(range(size), join)


def on_all(ranks: list[Host] | range, work: Callable[..., Found]) -> list[Found]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def send(host: Host, message: bytes) -> None:
    with host.busy():
        host.send(message)


def test_place_of_torchrun_and_of_srun() -> None:
    torchrun = {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    assert place_from(torchrun) == Place(9, 16, 1, 8, "node-a", 29500, False, "nanok3/2")
    first = torchrun | {"RANK": "0"}
    assert place_from(first).hosts_store  # type: ignore[union-attr]
    assert not place_from(first | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store  # type: ignore[union-attr]
    srun = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_JOB_ID": "123456",
    }
    assert place_from(srun) == Place(0, 16, 0, 8, "gpu07", 23456, True)
    assert place_from(srun | {"MASTER_ADDR": "x", "MASTER_PORT": "5"}).port == 5  # type: ignore[union-attr]
    del srun["SLURM_STEP_ID"]  # a batch script, which srun has not started
    assert place_from(srun) is None
    assert place_from({}) is None


@pytest.mark.parametrize(
    "nodes, first",
    [("a", "a"), ("a,b", "a"), ("n[03-07,9]", "n03"), ("n[1,4],m2", "n1"), ("n[1-2].x", "n1.x")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_gather_and_messages_of_all_lengths() -> None:
    hosts = meet(3)
    values = on_all(hosts, lambda h: h.gather("plan", f"of {h.place.rank}", 20))
    assert values == [["of 0", "of 1", "of 2"]] * 3
    lengths = [1, FIRST_BYTES - 9, FIRST_BYTES - 8, FIRST_BYTES - 7, 100_000]
    messages = [bytes([n % 251]) * n for n in lengths]

    def work(host: Host) -> list[bytes]:
        if host.place.rank:
            return [host.receive() for _ in messages]
        for message in messages:
            send(host, message)
        return messages

    assert on_all(hosts, work) == [messages] * 3


def test_who_is_missing_in_a_phase_is_named() -> None:
    hosts = meet(3)

    def work(host: Host) -> str:
        if host.place.rank == 2:
            return ""
        with pytest.raises(PeerLost) as told:
            host.gather("loaded", "", 0.3)
        return str(told.value)

    expected = "phase loaded: ranks that have not reached it after 0.3 s: 2"
    assert on_all(hosts, work) == [expected, expected, ""]


def test_a_rank_that_fails_in_a_phase_ends_the_wait_of_all() -> None:
    hosts = meet(3)

    def work(host: Host) -> str:
        if host.place.rank == 1:
            host.fail("no such file")
            return ""
        with pytest.raises(PeerLost) as told:
            host.gather("loaded", "", 60)
        return str(told.value)

    start = time.monotonic()
    assert on_all(hosts, work) == ["rank 1: no such file", "", "rank 1: no such file"]
    assert time.monotonic() - start < 10


def test_silence_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for longer than the deadline hears empty messages, which it does not show."""
    monkeypatch.setattr(host_module, "HEARTBEAT_S", 0.1)
    hosts = meet(2, deadline_s=0.8)

    def work(host: Host) -> bytes:
        if host.place.rank:
            return host.receive()
        host.start_heartbeat()
        time.sleep(2)
        send(host, b"at last")
        host.close()
        return b""

    assert on_all(hosts, work) == [b"", b"at last"]


def test_deadlines_of_both_sides() -> None:
    """Rank 0 that says nothing, then a follower that does not listen."""
    hosts = meet(2, deadline_s=0.5)
    with pytest.raises(PeerLost, match="rank 0 does not answer rank 1 between two steps"):
        hosts[1].receive()
    hosts = meet(2, deadline_s=0.5)
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 does not answer rank 0 between two steps"):
        for _ in range(3):
            send(hosts[0], b"x")
    assert time.monotonic() - start < 5


def test_a_loss_seen_by_the_heartbeat_is_told_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_module, "HEARTBEAT_S", 0.05)
    hosts = meet(2, deadline_s=0.3)
    hosts[1].fail("out of memory")
    hosts[0].start_heartbeat()
    deadline = time.monotonic() + 10
    while hosts[0]._lost is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(PeerLost, match="rank 1: out of memory"):
        send(hosts[0], b"x")
    hosts[0].close()


def test_heartbeats_wait_while_rank_0_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "HEARTBEAT_S", 0.05)
    hosts = meet(2, deadline_s=0.5)
    hosts[0].start_heartbeat()
    done = threading.Event()

    def listen() -> bytes:
        first = hosts[1].receive()
        time.sleep(1.2)  # a long step
        done.set()
        return first + hosts[1].receive()

    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(listen)
        with hosts[0].busy():
            hosts[0].send(b"step ")
            done.wait()
        send(hosts[0], b"step")
        assert heard.result() == b"step step"
    hosts[0].close()
