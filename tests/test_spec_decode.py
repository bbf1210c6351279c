"""A step with drafts on the device: nothing reads a value, and its parts against plain Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from drafts import draft_weights, tiny_inferact, tiny_redhat
from test_decode import to_meta
from tiny import TINY, tiny_weights
from torch import Tensor

from nanok3.decode import ENDED, NO_ID, NOT_FINITE
from nanok3.reference.kda_records import KDARecords, commit_masked
from nanok3.spec.budget import Fallback
from nanok3.spec.config import draft_config
from nanok3.spec.drafter import Drafter
from nanok3.spec_decode import (
    FACTS,
    SpecMemory,
    SpecState,
    accept,
    commit,
    compute,
    counts_of_rows,
    fill_rows,
    propose,
)

R, K, V, BLOCK, COLUMNS = 3, 3, 512, 4, 6
FALLBACK = Fallback(0.0)
RECORDS = KDARecords(*(torch.zeros(2, R + 1, K + 1, 1, 2) for _ in range(4)))


def make_memory() -> SpecMemory:
    logits = torch.full((R * (K + 1), V), float("nan"))
    return SpecMemory(COLUMNS, BLOCK, R, K, logits, RECORDS)


def moved(record: Any) -> Any:
    """To the device "meta", weights and all."""
    if isinstance(record, Tensor):
        return record.to("meta")
    if isinstance(record, tuple):
        return tuple(moved(part) for part in record)
    if not is_dataclass(record) or isinstance(record, type):
        return record
    return replace(record, **{f.name: moved(getattr(record, f.name)) for f in fields(record)})


@pytest.mark.parametrize("raw", [tiny_inferact(), tiny_redhat()])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_drafting_reads_no_value_on_the_host(
    raw: dict[str, Any], adaptive: bool, is_greedy: bool
) -> None:
    """On the device "meta" there is none: `item`, `tolist` and a branch on a tensor would fail."""
    c = draft_config(raw)
    weights = draft_weights(c, 1, tiny_weights(TINY, 5, torch.float32), torch.float32)
    drafter = Drafter(
        c, moved(weights), num_blocks=9, block_size=BLOCK, max_num_reqs=R,
        max_context_rows=R * (K + 1), dtype=torch.float32, device="meta",
    )  # fmt: skip
    state = to_meta(make_memory().first(R, K + 1, True, True))
    propose(state, lambda *args: drafter.propose(*args, K, is_greedy), adaptive)
    taps = torch.empty(R * (K + 1), len(c.taps) * c.hidden_size, device="meta")
    drafter.keep(taps, state.rows.positions, state.rows.slot_mapping)


@pytest.mark.parametrize("num_rows", [1, 2, K + 1])
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_step_reads_no_value_on_the_host(
    num_rows: int, sort: bool, counts: bool, rule: Any
) -> None:
    state = to_meta(make_memory().first(R, num_rows, sort, counts))
    with pytest.raises(RuntimeError):
        bool(state.finite.any())
    compute(state, lambda step: None)
    accept(state, rule, FALLBACK)
    records, caches = moved(RECORDS), torch.empty(2, R + 1, 2, 2, device="meta")
    windows = torch.empty(2, R + 1, 3, 1, 2, device="meta").flatten(-2)
    records = replace(records, qkv=records.qkv.flatten(-2))

    def fold(slots: Tensor, stand: Tensor) -> None:
        commit_masked(windows, caches.unsqueeze(2), records, slots, stand)

    commit(state, fold if num_rows > 1 else None, lambda positions, slots: None)


def test_views_are_of_the_same_memory() -> None:
    memory = make_memory()
    whole = {name: t.data_ptr() for name, t in vars(memory.state).items() if isinstance(t, Tensor)}
    for num_reqs, num_rows in ((1, 1), (2, K + 1), (R, 2)):
        state = memory.first(num_reqs, num_rows, False, True)
        assert state.num_rows == num_rows and len(state.positions) == num_reqs
        assert {n: t.data_ptr() for n, t in vars(state).items() if isinstance(t, Tensor)} == whole
        assert (state.rows.records is None) == (num_rows == 1)


def written(memory: SpecMemory, **values: list[int]) -> SpecState:
    """Three requests; the last one is padding unless told otherwise."""
    memory.clear()
    defaults = {
        "anchors": [11, 12, 0],
        "positions": [6, 3, -1],
        "state_slots": [2, 1, 0],
        "max_output": [50, 50, 0],
        "most_drafts": [K, K, K],
    }
    for name, numbers in (defaults | values).items():
        memory.host[name][:] = torch.tensor(numbers)
    memory.host["block_table"][:2] = torch.tensor([[5, 7, 2, 0, 0, 0], [3, 4, 0, 0, 0, 0]])
    memory.upload()
    return memory.state


def test_rows_of_drafts_and_padding() -> None:
    state = written(make_memory())
    state.drafts.copy_(torch.arange(R * K).view(R, K) + 100)
    state.lengths.copy_(torch.tensor([1, 3, 2]))
    fill_rows(state)
    rows = state.rows
    assert rows.input_ids.view(R, -1).tolist() == [[11, 100, 0, 0], [12, 103, 104, 105], [0] * 4]
    assert rows.positions.view(R, -1).tolist() == [[6, 7, 7, 7], [3, 4, 5, 6], [-1] * 4]
    assert rows.slot_mapping.view(R, -1).tolist() == [
        [7 * BLOCK + 2, 7 * BLOCK + 3, -1, -1],
        [3 * BLOCK + 3, 4 * BLOCK, 4 * BLOCK + 1, 4 * BLOCK + 2],
        [-1] * 4,
    ]


def one_hot(tokens: list[list[int]]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), V).double()


def stepped(
    memory: SpecMemory, drafts: list[list[int]], likely: list[list[int]], lengths: list[int]
) -> SpecState:
    """A greedy step whose rows find `likely` likeliest, up to `accept`."""
    state = memory.state
    state.drafts.copy_(torch.tensor(drafts))
    state.laws.copy_(one_hot(drafts))
    state.lengths.copy_(torch.tensor(lengths))
    state.limits.copy_(state.lengths)
    compute(state, lambda step: state.logits.copy_(5 * one_hot(likely).flatten(0, 1)))
    return state


def facts(state: SpecState, name: str) -> list[int]:
    return state.result[:, K + 1 + FACTS.index(name)].tolist()


def test_drafts_stand_up_to_the_first_wrong_one() -> None:
    memory = make_memory()
    written(memory)
    state = stepped(
        memory,
        [[20, 21, 22], [30, 31, 32], [0, 0, 0]],
        [[20, 21, 9, 9], [30, 31, 32, 33], [1, 1, 1, 1]],
        [3, 2, 0],
    )
    accept(state, "block", FALLBACK)
    ids = state.result[:, : K + 1].tolist()
    assert ids == [[20, 21, 9, ENDED], [30, 31, 32, ENDED], [ENDED] * 4]
    assert facts(state, "accepted")[:2] == [2, 2] and facts(state, "stand") == [3, 3, 0]
    seen: list[Any] = []
    folded: list[Any] = []
    commit(
        state,
        lambda slots, counts: folded.append((slots.tolist(), counts.tolist())),
        lambda positions, slots: seen.append((positions.view(R, -1), slots.view(R, -1))),
    )
    assert folded == [([2, 1, 0], [3, 3, 0])]
    ((positions, slots),) = seen
    assert (slots >= 0).sum(1).tolist() == [3, 3, 0] and positions[0].tolist() == [6, 7, 8, 9]
    assert state.anchors.tolist() == [9, 32, 0] and state.positions.tolist() == [9, 6, -1]
    assert state.num_output.tolist() == [3, 3, 0] and state.state_slots.tolist() == [2, 1, 0]


def test_a_stop_id_ends_a_reply_inside_its_block() -> None:
    """What was accepted after it is dropped; so is what the next step would be."""
    memory = make_memory()
    written(memory)
    memory.host["stop_ids"][0, :2] = torch.tensor([21, 77])
    memory.host["stop_ids"][1, 0] = 33
    memory.upload()
    drafts = [[20, 21, 22], [30, 31, 32], [0, 0, 0]]
    state = stepped(memory, drafts, [[20, 21, 22, 23], [30, 31, 32, 33], [1] * 4], [3, 3, 0])
    accept(state, "block", FALLBACK)
    assert state.result[0, : K + 1].tolist() == [20, 21, ENDED, ENDED]
    assert state.result[1, : K + 1].tolist() == [30, 31, 32, 33]
    assert facts(state, "stand") == [2, 4, 0] and facts(state, "accepted")[:2] == [3, 3]
    commit(state, lambda slots, counts: None, lambda positions, slots: None)
    assert state.positions.tolist() == [-1] * R and state.state_slots.tolist() == [0] * R
    fill_rows(state)
    accept(state, "block", FALLBACK)
    assert state.result[:, : K + 1].tolist() == [[ENDED] * (K + 1)] * R
    assert state.num_output.tolist() == [2, 4, 0]


def test_logits_that_are_not_finite_end_a_reply_only_where_it_gets_to_them() -> None:
    memory = make_memory()
    written(memory, positions=[6, 3, 2], max_output=[50, 50, 50])
    drafts = [[20, 21, 22], [30, 31, 32], [40, 41, 42]]
    likely = [[20, 21, 22, 23], [30, 9, 32, 33], [40, 41, 42, 43]]
    state = stepped(memory, drafts, likely, [3, 3, 3])
    bad = state.logits.view(R, K + 1, V)
    bad[0, 2, 5] = bad[1, 2, 5] = bad[2, 0, 5] = float("nan")
    state.finite.copy_(state.logits.isfinite().all(-1))
    accept(state, "block", FALLBACK)
    assert state.result[:, : K + 1].tolist() == [
        [20, 21, NOT_FINITE, ENDED],
        [30, 9, ENDED, ENDED],
        [NOT_FINITE, ENDED, ENDED, ENDED],
    ]
    commit(state, lambda slots, counts: None, lambda positions, slots: None)
    assert state.positions.tolist() == [-1, 5, -1]


def test_no_id_is_left_where_all_are_forbidden() -> None:
    memory = make_memory()
    written(memory)
    state = stepped(memory, [[0] * K] * R, [[1] * (K + 1)] * R, [0, 0, 0])
    state.logits.view(R, K + 1, V)[0, 0] = -torch.inf  # as a grammar does, after the check
    accept(state, "standard", FALLBACK)
    assert state.result[0, : K + 1].tolist() == [NO_ID, ENDED, ENDED, ENDED]
    assert state.result[1, 0] == 1


def test_the_last_allowed_id_ends_a_reply() -> None:
    """Drafts stop one short of it; the id after them is the last."""
    memory = make_memory()
    written(memory, num_output=[10, 10, 0], max_output=[13, 14, 0], most_drafts=[K, 1, K])
    found: list[Any] = []

    def draw(*args: Any) -> Any:
        from nanok3.spec.propose import Proposal

        found.append(args)
        ids = torch.tensor([[20, 21, 22], [30, 31, 32], [0, 0, 0]])
        return Proposal(ids, torch.full((R,), K), one_hot(ids.tolist()), torch.ones(R, K))

    propose(memory.state, draw, False)
    assert memory.state.limits.tolist() == memory.state.lengths.tolist() == [2, 1, 0]
    state = stepped(
        memory,
        memory.state.drafts.tolist(),
        [[20, 21, 22, 23], [30, 31, 32, 33], [1] * 4],
        memory.state.lengths.tolist(),
    )
    accept(state, "block", FALLBACK)
    assert state.result[0, : K + 1].tolist() == [20, 21, 22, ENDED]
    commit(state, lambda slots, counts: None, lambda positions, slots: None)
    assert state.num_output.tolist() == [13, 12, 0] and state.positions.tolist() == [-1, 5, -1]


def test_penalties_count_what_stands_before_each_row() -> None:
    memory = make_memory()
    state = written(memory)
    generator = torch.Generator().manual_seed(0)
    state.counts.copy_(torch.randint(0, 3, (R, V), generator=generator))
    state.prompt_seen.copy_(torch.rand(R, V, generator=generator) < 0.2)
    drafts = torch.tensor([[5, 5, 7], [8, 9, 8], [1, 2, 3]])
    counts, seen = counts_of_rows(state, drafts)
    counts, seen = counts.view(R, K + 1, V), seen.view(R, K + 1, V)
    for r in range(R):
        expected = Counter({i: n for i, n in enumerate(state.counts[r].tolist())})
        for row in range(K + 1):
            assert counts[r, row].tolist() == [expected[i] for i in range(V)]
            assert seen[r, row].equal(state.prompt_seen[r])
            if row < K:
                expected[int(drafts[r, row])] += 1
