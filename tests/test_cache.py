"""Pools, admission and snapshots of `nanok3/cache.py`; the rows are written by hand."""

from __future__ import annotations

import pytest
import tiny
import torch

from nanok3 import cache as cache_module
from nanok3.cache import TRASH, CacheManager, Pool, allocate_cache
from nanok3.reuse import page_keys

BLOCK = 4


def manager(
    num_blocks: int = 8, num_slots: int = 3, max_snapshots: int = 4, poison: bool = True
) -> CacheManager:
    """`num_blocks` and `num_slots` can be given out; trash comes on top."""
    cache = allocate_cache(tiny.TINY, num_slots + 1, num_blocks + 1, BLOCK, torch.float32, "cpu")
    return CacheManager(cache, BLOCK, max_snapshots, poison)


def write(m: CacheManager, slot: int, blocks: list[int], ids: list[int], begin: int = 0) -> None:
    """What a model would leave: latent rows and a state that depend on all ids so far."""
    for p in range(begin, len(ids)):
        m.cache.latent[:, blocks[p // BLOCK] * BLOCK + p % BLOCK] = mark(ids[: p + 1])
    m.cache.state[:, slot] = mark(ids)
    m.cache.conv_state[:, slot] = -mark(ids)


def mark(ids: list[int]) -> float:
    return float(hash(tuple(ids)) % 100_003)


def check_holds(m: CacheManager, slot: int, blocks: list[int], ids: list[int]) -> None:
    """Every row and the state are those of these ids: both at the same position."""
    for p in range(len(ids)):
        row = m.cache.latent[:, blocks[p // BLOCK] * BLOCK + p % BLOCK]
        assert (row == mark(ids[: p + 1])).all(), f"row {p}"
    assert (m.cache.state[:, slot] == mark(ids)).all()
    assert (m.cache.conv_state[:, slot] == -mark(ids)).all()


def produce(m: CacheManager, ids: list[int]) -> None:
    """A request that computes `ids`, leaves a snapshot and goes."""
    taken = m.admit(ids, len(ids) + 1)
    assert taken is not None
    slot, blocks, cached = taken
    write(m, slot, blocks, ids, cached)
    m.snapshot(ids, slot, blocks)
    m.release(slot, blocks)


def check_all_free(m: CacheManager) -> None:
    m.audit([])
    assert m.slots.num_free == m.slots.size and m.blocks.num_free == m.blocks.size


# ---- pools ----


def test_pool_never_gives_trash_and_counts_holders() -> None:
    pool = Pool(4)
    assert pool.size == pool.num_free == 3
    taken = pool.take(3)
    assert sorted(taken) == [1, 2, 3]
    pool.hold(taken[:1])
    assert pool.release(taken) == taken[1:]  # the first has one holder left
    assert pool.num_free == 2
    assert pool.release(taken[:1]) == taken[:1]
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(taken[:1])
    with pytest.raises(AssertionError):
        pool.hold(taken[:1])
    with pytest.raises(AssertionError):
        pool.take(4)


def test_audit_finds_every_kind_of_wrong_owner() -> None:
    m = manager()
    slot, blocks, _ = m.admit([1], 6) or pytest.fail("there is room")
    m.audit([(slot, blocks)])
    for wrong in (
        [],  # a leak
        [(slot, blocks), (slot, [])],  # one slot, two requests
        [(slot, blocks), (2, [])],  # a slot that nobody gave out
        [(slot, blocks[:1])],
        [(slot, [*blocks, 7])],
        [(TRASH, blocks)],
        [(slot, [*blocks, TRASH])],
    ):
        with pytest.raises(AssertionError):
            m.audit(wrong)


# ---- admission ----


def test_slots_are_cleared_and_blocks_are_enough() -> None:
    m = manager()
    m.cache.state.fill_(float("nan"))
    slot, blocks, cached = m.admit([1, 2], 9) or pytest.fail("there is room")
    assert slot != TRASH and TRASH not in blocks and len(blocks) == 3 and cached == 0
    assert (m.cache.state[:, slot] == 0).all() and (m.cache.conv_state[:, slot] == 0).all()


def test_admission_waits_for_a_slot_and_for_blocks() -> None:
    m = manager(num_blocks=4, num_slots=2)
    first = m.admit([1], 12) or pytest.fail("there is room")
    assert m.admit([2], 5) is None  # two blocks, one is left
    second = m.admit([2], 4) or pytest.fail("there is room")
    assert m.admit([3], 1) is None
    m.release(*first[:2])
    third = m.admit([3], 12) or pytest.fail("there is room")
    assert m.admit([4], 1) is None  # no slot
    m.release(*second[:2])
    m.release(*third[:2])
    check_all_free(m)


def test_freed_memory_is_poisoned() -> None:
    m = manager()
    slot, blocks, _ = m.admit([1], 8) or pytest.fail("there is room")
    write(m, slot, blocks, [1, 2, 3, 4, 5])
    m.snapshot([1, 2, 3], slot, blocks)
    m.release(slot, blocks)
    assert m.cache.state[:, slot].isnan().all() and m.cache.conv_state[:, slot].isnan().all()
    assert m.cache.latent[:, blocks[1] * BLOCK : (blocks[1] + 1) * BLOCK].isnan().all()
    assert m.cache.latent[:, blocks[0] * BLOCK].isfinite().all()  # the snapshot's
    m.drop(m.snapshots[0])
    assert m.cache.latent.isnan().all()
    check_all_free(m)


# ---- snapshots ----


@pytest.mark.parametrize("length", range(1, 3 * BLOCK + 2))  # around three borders of blocks
def test_snapshot_goes_on_at_exactly_its_length(length: int) -> None:
    m = manager()
    ids = list(range(100, 100 + length))
    produce(m, ids)
    # The same prompt must leave one id to compute, so it finds nothing; a longer one finds it all.
    slot, blocks, cached = m.admit(ids, length + 1) or pytest.fail("there is room")
    assert cached == 0
    m.release(slot, blocks)
    slot, blocks, cached = m.admit([*ids, 7], length + 3) or pytest.fail("there is room")
    assert cached == length
    check_holds(m, slot, blocks, ids)
    shared = length // BLOCK
    assert blocks[:shared] == m.snapshots[0].blocks[:shared]
    assert not set(blocks[shared:]) & set(m.snapshots[0].blocks)  # a part-full block is copied
    m.audit([(slot, blocks)])
    m.release(slot, blocks)
    m.drop(m.snapshots[0])
    check_all_free(m)


def test_the_longest_prefix_wins_and_an_edit_finds_nothing() -> None:
    m = manager(num_blocks=20)
    ids = list(range(10))
    for length in (3, 9, 6):
        produce(m, ids[:length])
    for prompt, expected in (
        (ids, 9),
        (ids[:9], 6),
        (ids[:4], 3),
        (ids[:3], 0),
        ([*ids[:5], 77, *ids[6:]], 3),  # edited behind the first snapshot, before the others
        ([77, *ids[1:]], 0),
        ([*ids[:9], 77, 78], 9),
    ):
        slot, blocks, cached = m.admit(prompt, 12) or pytest.fail("there is room")
        assert cached == expected, prompt
        if cached:
            check_holds(m, slot, blocks, prompt[:cached])
        m.release(slot, blocks)


def test_two_continuations_do_not_disturb_each_other_or_the_snapshot() -> None:
    m = manager(num_blocks=12)
    ids = [1, 2, 3, 4, 5, 6]
    produce(m, ids)
    (a, a_blocks, _), (b, b_blocks, _) = (
        m.admit([*ids, tail], 9) or pytest.fail("there is room") for tail in (10, 20)
    )
    write(m, a, a_blocks, [*ids, 10, 11], len(ids))
    write(m, b, b_blocks, [*ids, 20, 21], len(ids))
    check_holds(m, a, a_blocks, [*ids, 10, 11])
    check_holds(m, b, b_blocks, [*ids, 20, 21])
    c, c_blocks, _ = m.admit([*ids, 30], 9) or pytest.fail("there is room")
    check_holds(m, c, c_blocks, ids)
    m.audit([(a, a_blocks), (b, b_blocks), (c, c_blocks)])


def test_a_producer_may_go_on_in_its_part_full_block() -> None:
    m = manager()
    ids = [1, 2, 3, 4, 5, 6]
    slot, blocks, _ = m.admit(ids, 12) or pytest.fail("there is room")
    write(m, slot, blocks, ids)
    m.snapshot(ids, slot, blocks)
    write(m, slot, blocks, [*ids, 7, 8, 9], len(ids))
    other, other_blocks, cached = m.admit([*ids, 50], 8) or pytest.fail("there is room")
    assert cached == len(ids)
    check_holds(m, other, other_blocks, ids)
    check_holds(m, slot, blocks, [*ids, 7, 8, 9])


def test_snapshots_are_bounded_and_the_least_used_goes_first() -> None:
    m = manager(num_blocks=20, max_snapshots=2)
    produce(m, [1, 1])
    produce(m, [2, 2])
    slot, blocks, cached = m.admit([1, 1, 5], 4) or pytest.fail("there is room")
    assert cached == 2
    m.release(slot, blocks)
    produce(m, [3, 3])
    assert [s.token_ids for s in m.snapshots] == [(1, 1), (3, 3)]
    produce(m, [3, 3])  # twice the same is one
    assert len(m.snapshots) == 2
    none = manager(max_snapshots=0)
    produce(none, [1, 2])
    check_all_free(none)


def test_the_same_ids_are_kept_once() -> None:
    m = manager(num_blocks=20)
    for ids in ([1, 2, 3], [4, 5, 6], [4, 5, 6], [4, 5, 6]):
        produce(m, ids)
    assert [s.token_ids for s in m.snapshots] == [(1, 2, 3), (4, 5, 6)]
    m.audit([])


def test_snapshots_make_room_oldest_first() -> None:
    m = manager(num_blocks=6)
    for first in (1, 2, 3):
        produce(m, [first] * 5)  # two blocks each
    assert m.blocks.num_free == 0
    slot, blocks, _ = m.admit([9], 8) or pytest.fail("there is room")
    assert [s.token_ids[0] for s in m.snapshots] == [2, 3]
    m.release(slot, blocks)
    # The one that is reused stays, though it is the oldest.
    slot, blocks, cached = m.admit([*[2] * 5, 8], 20) or pytest.fail("there is room")
    assert cached == 5 and [s.token_ids[0] for s in m.snapshots] == [2]
    m.audit([(slot, blocks)])


def test_snapshots_stay_while_dropping_them_would_not_help() -> None:
    m = manager(num_blocks=6)
    produce(m, [1] * 5)
    slot, blocks, _ = m.admit([2], 12) or pytest.fail("there is room")
    assert m.admit([3], 16) is None
    assert m.admit([*[1] * 5, 4], 20) is None
    assert [s.token_ids[0] for s in m.snapshots] == [1]
    m.release(slot, blocks)


def test_blocks_that_a_request_shares_with_a_snapshot_are_no_room() -> None:
    m = manager(num_blocks=6)
    slot, blocks, _ = m.admit([1] * 5, 16) or pytest.fail("there is room")
    m.snapshot([1] * 5, slot, blocks)  # two of the four
    assert m.admit([9], 16) is None
    assert [s.token_ids[0] for s in m.snapshots] == [1]
    m.audit([(slot, blocks)])


def test_a_snapshot_is_given_up_when_it_stands_in_its_own_way() -> None:
    m = manager(num_blocks=3)
    produce(m, [1] * 5)  # a full block and a part of one, which would have to be copied
    slot, blocks, cached = m.admit([*[1] * 5, 2], 12) or pytest.fail("there is room")
    assert cached == 0 and not m.snapshots and len(blocks) == 3
    m.release(slot, blocks)
    check_all_free(m)


def test_forget_drops_what_the_ids_begin_with() -> None:
    m = manager(num_blocks=20)
    for ids in ([1, 2], [1, 2, 3, 4, 5], [1, 9], [1, 2, 3, 4, 5, 6, 7]):
        produce(m, ids)
    m.forget([1, 2, 3, 4, 5, 6])
    assert [s.token_ids for s in m.snapshots] == [(1, 9), (1, 2, 3, 4, 5, 6, 7)]
    m.audit([])


# ---- what a prompt leaves while it is computed ----


def test_a_key_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys collide: ids alone decide."""
    monkeypatch.setattr(cache_module, "page_keys", lambda ids, size: [7] * (len(ids) // size))
    m = manager(num_blocks=30)
    for ids in ([1] * 9, [2] * 9, [1] * 4 + [3] * 4):
        produce(m, ids)
    for prompt, expected in (
        ([2] * 10, 9),
        ([1] * 10, 9),
        ([1] * 4 + [3] * 5, 8),
        ([1] * 4 + [2] * 6, 0),
        ([3] * 10, 0),
    ):
        slot, blocks, cached = m.admit(prompt, 12) or pytest.fail("there is room")
        assert cached == expected, prompt
        if cached:
            check_holds(m, slot, blocks, prompt[:cached])
        m.release(slot, blocks)


def test_a_key_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are compared where keys agree, and nowhere else."""
    compared = []
    begins = cache_module._begins
    monkeypatch.setattr(
        cache_module, "_begins", lambda ids, s: compared.append(s.token_ids) or begins(ids, s)
    )
    m = manager(num_blocks=30)
    for first in range(4):
        produce(m, [first] * 9)
    slot, _, cached = m.admit([2] * 10, 12) or pytest.fail("there is room")
    assert (cached, compared) == (9, [(2,) * 9])
    assert slot


def test_nobody_goes_on_from_what_is_not_vouched_for() -> None:
    m = manager(num_blocks=20)
    ids = list(range(9))
    slot, blocks, _ = m.admit(ids, 12) or pytest.fail("there is room")
    write(m, slot, blocks, ids[:8])
    m.snapshot(ids[:8], slot, blocks, vouched=False)
    other, other_blocks, cached = m.admit(ids, 12) or pytest.fail("there is room")
    assert cached == 0
    m.vouch(other)  # which is not the maker
    assert m.advance(ids, page_keys(ids, 4), other, other_blocks, 0) == 0
    m.vouch(slot)
    assert m.advance(ids, page_keys(ids, 4), other, other_blocks, 0) == 8
    check_holds(m, other, other_blocks, ids[:8])
    m.snapshot(ids, other, other_blocks, vouched=False)
    m.audit([(slot, blocks), (other, other_blocks)])
    m.release(other, other_blocks)  # takes with it what it was not vouched for
    assert [s.token_ids for s in m.snapshots] == [tuple(ids[:8])]
    m.audit([(slot, blocks)])


@pytest.mark.parametrize("own", [0, 1, 4, 6])
@pytest.mark.parametrize("length", [3, 4, 7, 8, 9])
def test_a_prompt_goes_on_from_a_snapshot_that_came_later(own: int, length: int) -> None:
    m = manager(num_blocks=20)
    ids = list(range(12))
    slot, blocks, _ = m.admit(ids, 16) or pytest.fail("there is room")
    write(m, slot, blocks, ids[:own])
    produce(m, ids[:length])
    kept = m.snapshots[-1]
    reached = m.advance(ids, page_keys(ids, 4), slot, blocks, own)
    assert reached == max(own, length) and len(blocks) == 4
    check_holds(m, slot, blocks, ids[:reached])
    m.audit([(slot, blocks)])
    if length > own:
        full = length // 4
        assert blocks[:full] == kept.blocks[:full]
        assert not set(blocks[full:]) & set(kept.blocks)
        # Its next rows disturb nobody.
        write(m, slot, blocks, [*ids[:reached], 90, 91], reached)
        other, other_blocks, cached = m.admit(ids, 12) or pytest.fail("there is room")
        assert cached == length
        check_holds(m, other, other_blocks, ids[:length])


@pytest.mark.parametrize("place", ["slot", "state", "block"])
def test_audit_finds_a_write_to_what_nobody_owns(place: str) -> None:
    m = manager(poison=True)
    produce(m, [1, 2, 3, 4, 5])
    m.audit([])
    if place == "block":
        m.cache.latent[0, m.rows_of(m.blocks.free[0]).start + 1, 0] = 1.0
    else:
        tensor = m.cache.state if place == "state" else m.cache.conv_state
        tensor[0, m.slots.free[0]].view(-1)[3] = 0.0
    with pytest.raises(AssertionError, match="was written"):
        m.audit([])
