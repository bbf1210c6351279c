"""The CPU's exchanges: values against their references, then everything that can go wrong.

Ranks are threads over one mapped file, each with its own `Exchange`; where a message has to come
slowly, torn or not at all, the test writes its words by hand, as the table in `exchange.py` says.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compare import check_equal
from torch import Tensor

from nanok3.comm.exchange import (
    Exchange,
    PeerLost,
    all_gather_ref,
    all_reduce_ref,
    create_memory,
    map_memory,
    pack,
    reduce_moe_ref,
    sum_in_order,
    tag_of,
    unpack,
)

WORDS = 64  # a mailbox: most messages here take several epochs


def ranks_of(path: Path, size: int, epoch: int = 0, deadline_s: float = 20) -> list[Exchange]:
    file = path / "mailboxes"
    create_memory(file, size, WORDS)
    map_memory(file, size, WORDS).fill_(tag_of(epoch) << 32)
    maps = [map_memory(file, size, WORDS) for _ in range(size)]
    return [Exchange(m, r, deadline_s=deadline_s, epoch=epoch) for r, m in enumerate(maps)]


def on_all(ranks: list[Exchange], work: Callable[[Exchange], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def random_parts(size: int, rows: int, columns: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(size, rows, columns, generator=generator, dtype=torch.float64)
    return list((wide * 10 ** torch.arange(size).view(-1, 1, 1)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size, rows", [(2, 1), (4, 3), (2, 0)])
def test_values(tmp_path: Path, size: int, rows: int, dtype: torch.dtype) -> None:
    """Odd widths, so that a bf16 part does not fill its last word; 0 rows are no message."""
    ranks = ranks_of(tmp_path, size)
    sums = random_parts(size, rows, 35, dtype, 1)
    logits = random_parts(size, rows, 5, torch.float32, 2)
    latents = random_parts(size, rows, 3, dtype, 3)
    shared = random_parts(size, rows, 7 * size, dtype, 4)

    def work(exchange: Exchange) -> Tensor:
        rank = exchange.rank
        whole = sums[rank].clone()  # the part lies where the whole goes
        exchange.all_reduce(whole, out=whole)
        gathered = [torch.empty(rows, 5 * size), torch.empty(rows, 3 * size, dtype=dtype)]
        own = [whole_.chunk(size, dim=1)[rank] for whole_ in gathered]
        own[0].copy_(logits[rank])
        own[1].copy_(latents[rank])
        exchange.all_gather(own, out=gathered)
        routed, columns = sums[rank].clone(), shared[rank].clone()
        exchange.reduce_moe((routed, columns), out=(routed, columns.chunk(size, dim=1)[rank]))
        check_equal(columns.chunk(size, dim=1)[rank], reduce_moe_ref(sums, shared, rank)[1])
        check_equal(routed, whole)
        return torch.cat([whole.double(), gathered[0].double(), gathered[1].double()], dim=1)

    parts = [all_reduce_ref(sums), all_gather_ref(logits), all_gather_ref(latents)]
    right = torch.cat([part.double() for part in parts], dim=1)
    for got in on_all(ranks, work):
        check_equal(got, right)


def test_sums_are_in_rank_order_and_rounded_once() -> None:
    big, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    check_equal(sum_in_order([big, small, small]), torch.tensor([2.0**24]))  # 1 is lost, twice
    check_equal(sum_in_order([small, small, big]), torch.tensor([2.0**24 + 2]))
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    check_equal(all_reduce_ref(parts), torch.tensor([258.0], dtype=torch.bfloat16))  # not 256


def test_packing_by_hand() -> None:
    parts = [torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16), torch.tensor([1.5])]
    raw = struct.pack("<HHHxx", 0x3F80, 0x4000, 0x4040) + struct.pack("<f", 1.5)
    words = pack(parts)
    assert words.numpy().tobytes() == raw
    for got, part in zip(unpack(words, parts), parts, strict=True):
        check_equal(got, part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delay_changes_nothing_but_time(tmp_path: Path, dtype: torch.dtype) -> None:
    """Ranks fall behind at random, by more than two exchanges if nothing held the others up."""
    ranks = ranks_of(tmp_path, 3)
    rounds = [random_parts(3, 2, 50, dtype, seed) for seed in range(30)]

    def work(exchange: Exchange) -> Tensor:
        chance = random.Random(exchange.rank)
        found = []
        for parts in rounds:
            if chance.random() < 0.3:
                time.sleep(chance.choice([1e-4, 1e-3, 1e-2]))
            whole = parts[exchange.rank].clone()
            exchange.all_reduce(whole, out=whole)
            found.append(whole)
        return torch.stack(found)

    right = torch.stack([all_reduce_ref(parts) for parts in rounds])
    for got in on_all(ranks, work):
        check_equal(got, right)


@pytest.mark.parametrize("before", [2**31 - 7, 2**32 - 7, 2**33 - 7], ids=hex)
def test_epochs_go_round(tmp_path: Path, before: int) -> None:
    ranks = ranks_of(tmp_path, 2, before)
    rounds = [random_parts(2, 1, n, torch.float32, n) for n in (50, 3, 64, 1, 130, 64, 2, 9, 64, 5)]

    def work(exchange: Exchange) -> Tensor:
        wholes = [parts[exchange.rank].clone() for parts in rounds]
        for whole in wholes:
            exchange.all_reduce(whole, out=whole)
        return torch.cat(wholes, dim=1)

    right = torch.cat([all_reduce_ref(parts) for parts in rounds], dim=1)
    for got in on_all(ranks, work):
        check_equal(got, right)
    assert ranks[0].epoch > before + 7


def test_a_tag_of_the_last_round_is_forgotten(tmp_path: Path) -> None:
    """A long message, then only short ones until the tags have gone round: what the long one left
    must not pass for the next long one."""
    ranks = ranks_of(tmp_path, 2, 1)
    swap_all(ranks, 60)  # epoch 2
    for exchange in ranks:
        exchange.epoch = 2**31 - 2
    for _ in range(4):  # 2**31 - 1 to 2**31 + 2
        swap_all(ranks, 3)
    for exchange in ranks:
        exchange.epoch = 2**32 + 1
    late = ranks[0]
    late._deadline_s = 0.05
    with pytest.raises(PeerLost, match="rank 1 did not answer rank 0"):  # at epoch 2 of 2^32 more
        late.swap([torch.zeros(60, dtype=torch.int32)] * 2)


def swap_all(ranks: list[Exchange], count: int) -> None:
    message = torch.ones(count, dtype=torch.int32)
    on_all(ranks, lambda exchange: exchange.swap([message] * len(ranks)))


def words_by_hand(values: list[int], epoch: int) -> list[Tensor]:
    raw = [struct.unpack("<q", struct.pack("<II", v, epoch % 2**32))[0] for v in values]
    return [torch.tensor(word) for word in raw]


@pytest.mark.parametrize("missing", [None, 0, 7, 19])
def test_order_and_loss(tmp_path: Path, missing: int | None) -> None:
    """Words of a peer that come in any order count when all have come; a lost one ends the wait."""
    ranks = ranks_of(tmp_path, 2, 40, deadline_s=20 if missing is None else 0.3)
    values = [random.Random(5).getrandbits(32) for _ in range(20)]
    box = ranks[1]._memory[0, 41 % 2, 1]

    def write_slowly() -> None:
        places = list(range(20))
        random.Random(6).shuffle(places)
        for i in places:
            if i != missing:
                box[i] = words_by_hand(values, 41)[i]
                time.sleep(2e-3)

    writer = threading.Thread(target=write_slowly)
    writer.start()
    message = torch.arange(20, dtype=torch.int32)
    try:
        if missing is None:
            got = ranks[0].swap([message, message])
            signed = [v - 2**32 if v >= 2**31 else v for v in values]
            check_equal(got, torch.stack([message, torch.tensor(signed, dtype=torch.int32)]))
        else:
            told = r"rank 1 did not answer rank 0 within 0.3 s: expected epoch 41, found tags 40"
            with pytest.raises(PeerLost, match=told):
                ranks[0].swap([message, message])
    finally:
        writer.join()
    check_equal(ranks[1]._memory[1, 41 % 2, 0, :20] & 0xFFFFFFFF, message.long())


def test_who_is_late_is_named(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, 4, deadline_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(swap_one, ranks[2])
        with pytest.raises(PeerLost, match="ranks 1, 3 did not answer rank 0"):
            swap_one(ranks[0])
        with pytest.raises(PeerLost, match="ranks 1, 3 did not answer rank 2"):
            other.result()


def swap_one(exchange: Exchange) -> None:
    exchange.swap([torch.zeros(5, dtype=torch.int32)] * exchange.size)


def test_a_known_death_does_not_wait_for_the_deadline(tmp_path: Path) -> None:
    def check() -> None:
        raise PeerLost("rank 1 was killed")

    ranks_of(tmp_path, 2)
    lonely = Exchange(map_memory(tmp_path / "mailboxes", 2, WORDS), 0, check_peers=check)
    start = time.monotonic()
    with pytest.raises(PeerLost, match="was killed"):
        swap_one(lonely)
    assert time.monotonic() - start < 2


PEER = """
import sys, torch
from pathlib import Path
from nanok3.comm.exchange import Exchange, map_memory
exchange = Exchange(map_memory(Path(sys.argv[1]), 2, 64), 1)
while True:
    whole = torch.full((1, 40), 2.0)
    exchange.all_reduce(whole, out=whole)
"""


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """What it sent before its end still counts."""
    path = tmp_path / "mailboxes"
    create_memory(path, 2, WORDS)
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, str(path)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        exchange = Exchange(map_memory(path, 2, WORDS), 0, deadline_s=60)
        for _ in range(20):
            whole = torch.full((1, 40), 0.5)
            exchange.all_reduce(whole, out=whole)
            check_equal(whole, torch.full((1, 40), 2.5))
        exchange._deadline_s = 0.5
        peer.send_signal(signal.SIGKILL)
        peer.wait()
        with pytest.raises(PeerLost, match="rank 1"):
            for _ in range(3):
                exchange.all_reduce(whole, out=whole)
    finally:
        peer.kill()
        peer.wait()
