"""One step on the device: what `draw` leaves for the next step, against plain Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from compare import check_equal
from torch import Tensor

from nanok3.decode import (
    ENDED,
    NO_ID,
    NOT_FINITE,
    STOP_WIDTH,
    DecodeState,
    StateMemory,
    compute,
    draw,
    first,
)
from nanok3.sampling import SamplingParams, rows_of, sample
from nanok3.step import Step

V, BLOCK, COLUMNS = 40, 4, 6


def tensors_of(record: Any) -> list[Tensor]:
    """All tensors in a record and in the records in it."""
    found: list[Tensor] = []
    for f in fields(record):
        value = getattr(record, f.name)
        if is_dataclass(value):
            found += tensors_of(value)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def to_meta(state: DecodeState) -> DecodeState:
    """The same record of tensors without values: to read one there is an error."""
    changes = {
        f.name: to_meta(value) if is_dataclass(value) else value.to("meta")
        for f in fields(state)
        if isinstance(value := getattr(state, f.name), Tensor) or is_dataclass(value)
    }
    return replace(state, **changes)


@dataclass
class Plain:
    """A request as plain Python follows it."""

    ids: list[int]
    num_prompt: int
    max_output: int
    slot: int
    blocks: list[int]
    params: SamplingParams
    ended: bool = False
    counts: Counter[int] = field(default_factory=Counter)

    @property
    def position(self) -> int:
        return len(self.ids) - 1


def requests() -> list[Plain]:
    """One that meets a stop id somewhere, one that meets its limit, two that go on for longer."""
    tables = [[3, 9, 1, 5, 2, 7], [4], [6, 8], [10, 11, 12, 13]]
    options: list[dict[str, Any]] = [
        {"stop_token_ids": tuple(range(0, V, 5))},
        {"temperature": 0.0},
        {"frequency_penalty": 1.5, "min_tokens": 3, "stop_token_ids": (1, 2, 3)},
        {"top_k": 4, "repetition_penalty": 1.5},
    ]
    prompts = [[5, 6, 7], [1], [2, 3, 4, 30], [8] * 7]
    limits = [20, 3, 4, 8]
    return [
        Plain(list(prompts[i]), len(prompts[i]), limits[i], i + 1, tables[i], params)
        for i, o in enumerate(options)
        if (params := SamplingParams(seed=i, **o))
    ]


def write(memory: StateMemory, plain: list[Plain]) -> None:
    memory.clear()
    for i, r in enumerate(plain):
        values = {
            "input_ids": r.ids[-1],
            "positions": r.position,
            "slot_mapping": r.blocks[r.position // BLOCK] * BLOCK + r.position % BLOCK,
            "state_slots": r.slot,
            "max_output": r.max_output,
        }
        for name, value in values.items():
            memory.host[name][i] = value
        memory.host["block_table"][i, : len(r.blocks)] = torch.tensor(r.blocks)
        memory.state.prompt_seen[i, r.ids] = True
    options = rows_of([r.params for r in plain], "cpu")
    for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition"):
        memory.host[name][: len(plain)] = getattr(options, name)
    for name in ("top_k", "seeds", "min_tokens"):
        memory.host[name][: len(plain)] = getattr(options, name)
    width = options.stop_ids.shape[1]
    memory.host["stop_ids"][: len(plain), :width] = options.stop_ids
    memory.upload()


def make_memory(rows: int = 5) -> StateMemory:
    return StateMemory(COLUMNS, BLOCK, torch.full((rows, V), float("nan")))


def test_steps_follow_each_other_as_plain_python_says() -> None:
    """Four requests and a row of padding, until all have ended and on from there."""
    plain, memory = requests(), make_memory()
    write(memory, plain)
    state = memory.state
    addresses = [t.data_ptr() for t in tensors_of(state)]
    generator = torch.Generator().manual_seed(0)
    reasons = set()
    for number in range(12):
        step = state.step
        for i, r in enumerate(plain):
            if r.ended:
                found = (step.positions[i], step.slot_mapping[i], step.state_slots[i])
                assert [int(x) for x in found] == [-1, -1, 0]
                continue
            slot = r.blocks[r.position // BLOCK] * BLOCK + r.position % BLOCK
            assert int(step.input_ids[i]) == r.ids[-1]
            assert int(step.positions[i]) == r.position
            assert int(step.slot_mapping[i]) == slot
            assert int(step.state_slots[i]) == r.slot
        logits = torch.randn(5, V, generator=generator) * 2

        def forward(_: Step, logits: Tensor = logits) -> None:
            state.logits.copy_(logits)

        compute(state, forward)
        draw(state)
        for i, r in enumerate(plain):
            result = int(state.result[i])
            if r.ended:
                assert result == ENDED
                continue
            seen = torch.zeros(1, V, dtype=torch.bool)
            seen[0, r.ids[: r.num_prompt]] = True
            counts = torch.tensor([[r.counts[v] for v in range(V)]])
            row = rows_of([r.params], "cpu")
            at = torch.tensor([len(r.ids)])
            assert result == int(sample(logits[i : i + 1], row, at, counts, seen).ids)
            r.ids.append(result)
            r.counts[result] += 1
            num_output = len(r.ids) - r.num_prompt
            if result in r.params.stop_token_ids or num_output == r.max_output:
                r.ended = True
                reasons.add((i, "stop" if result in r.params.stop_token_ids else "length", number))
            assert int(state.num_output[i]) == num_output
            assert state.counts[i].tolist() == [r.counts[v] for v in range(V)]
        assert int(state.result[4]) == ENDED
    print(reasons)
    assert all(r.ended for r in plain) and {reason for _, reason, _ in reasons} == {
        "stop",
        "length",
    }
    assert [t.data_ptr() for t in tensors_of(state)] == addresses


def test_rows_without_an_id_end_and_say_why() -> None:
    """Padding may hold anything; a row of NaN and one whose every id is banned end themselves."""
    plain, memory = requests()[:3], make_memory()
    everything = tuple(range(STOP_WIDTH))
    plain[1].params = SamplingParams(seed=1, min_tokens=2, stop_token_ids=everything)
    write(memory, plain)
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(1))
    logits[0, 7] = float("nan")
    logits[3:] = float("nan")
    memory.state.logits.copy_(logits)
    memory.state.finite.copy_(logits.isfinite().all(-1))
    memory.state.logits[1, STOP_WIDTH:] = float("-inf")  # as a grammar does, after the check
    draw(memory.state)
    assert memory.state.result.tolist()[:2] == [NOT_FINITE, NO_ID]
    assert memory.state.result.tolist()[2] >= 0
    assert memory.state.result.tolist()[3:] == [ENDED, ENDED]
    assert memory.state.step.positions.tolist()[:2] == [-1, -1]
    assert memory.state.step.positions.tolist()[3:] == [-1, -1]
    assert memory.state.num_output.tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_draw_reads_no_value_on_the_host(sort: bool, counts: bool) -> None:
    """On the device "meta" there is none: `item`, `tolist` and a branch on a tensor would fail."""
    state = to_meta(first(make_memory().state, 3, sort, counts))
    with pytest.raises(RuntimeError):
        bool(state.finite.any())
    compute(state, lambda step: None)
    draw(state)


def test_first_rows_are_views() -> None:
    memory = make_memory()
    state = first(memory.state, 2, True, False)
    assert state.options.uses_sort and not state.options.uses_counts
    whole = [t.data_ptr() for t in tensors_of(memory.state)]
    assert [t.data_ptr() for t in tensors_of(state)] == whole
    assert all(len(t) == 2 and t.is_contiguous() for t in tensors_of(state))


def test_upload_fills_the_state_and_clear_makes_padding() -> None:
    memory = make_memory(3)
    names = list(memory.host)
    for i, name in enumerate(names):
        memory.host[name].copy_(torch.arange(memory.host[name].numel()).view_as(memory.host[name]))
        memory.host[name].add_(100 * i)
    memory.upload()
    for i, name in enumerate(names):
        places = (memory.state.step, memory.state, memory.state.options)
        (found,) = [vars(p)[name] for p in places if name in vars(p)]
        expected = torch.arange(found.numel()).view_as(found) + 100 * i
        check_equal(found, expected.to(found.dtype), name)
    memory.clear()
    memory.upload()
    step = memory.state.step
    assert step.positions.tolist() == step.slot_mapping.tolist() == [-1] * 3
    assert step.state_slots.tolist() == [0] * 3 and not step.block_table.any()
