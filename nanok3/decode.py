"""One decode step on the device: the model, a draw for each row, and what the next step reads.

`compute` runs the model on a `DecodeState`; `draw` turns its logits into ids and leaves them, with
positions, latent slots and counts, where the next `compute` reads them. So steps follow each other
without the host, which learns of an id from `result`, whenever it gets to it.

A row ends here at a stop id, at its last allowed id, at logits that are not finite, or where no id
is left to draw. From then on it is padding: position and latent slot -1, state slot 0. It draws
nothing and writes nothing that anyone reads, so its request's caches stay as they were at its end.
Stop strings, grammars and cancels are for the host.

Nothing here waits for the device or branches on its values, and everything lies at addresses that
do not change: both functions can be captured. R rows, B blocks of the longest request, V ids, S
stop ids a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanok3.cache import TRASH
from nanok3.mirror import Mirror
from nanok3.sampling import OPTIONS, SamplingRows, sample
from nanok3.step import Step

# What a row's result says where it is no id.
NO_ID, NOT_FINITE, ENDED = -1, -2, -3
STOP_WIDTH = 32  # S; a row with more stop ids needs options of its own width

# Fields of one whole number and of one float64 a row.
INTS = (
    *("input_ids", "positions", "slot_mapping", "state_slots", "num_output", "max_output"),
    *("top_k", "seeds", "min_tokens"),
)
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


@dataclass(frozen=True)
class DecodeState:
    """What steps read and leave on the device."""

    step: Step  # of the next step; position -1: the row has ended, or is padding
    num_output: Tensor  # [R] i64, ids that the request has drawn
    max_output: Tensor  # [R] i64, ids that it may draw
    options: SamplingRows
    counts: Tensor  # [R, V] i32, of each id in the output; kept while `options.uses_counts`
    prompt_seen: Tensor  # [R, V] bool, whether it stands in the prompt; likewise
    logits: Tensor  # [R, V]
    finite: Tensor  # [R] bool, whether all logits of the row are, as the model gave them
    result: Tensor  # [R] i64, the drawn id, NO_ID, NOT_FINITE or ENDED (before this step)


def compute(state: DecodeState, forward: Callable[[Step], None]) -> None:
    """`forward` takes the step to its logits; the caches hold the step's ids afterwards."""
    forward(state.step)
    state.finite.copy_(state.logits.isfinite().all(-1))


def draw(state: DecodeState) -> None:
    """An id for each row that runs, and the next step."""
    step = state.step
    runs = step.positions >= 0
    counts = (state.counts, state.prompt_seen) if state.options.uses_counts else (None, None)
    ids = sample(state.logits, state.options, step.positions + 1, *counts).ids  # [R]
    result = torch.where(state.finite, ids, NOT_FINITE)
    state.result.copy_(torch.where(runs, result, ENDED))

    drawn = state.result >= 0
    state.num_output.add_(drawn)
    if state.options.uses_counts:
        state.counts.scatter_add_(1, ids.clamp(min=0)[:, None], drawn[:, None].int())
    met_stop = (state.options.stop_ids == ids[:, None]).any(-1)
    goes_on = drawn & ~met_stop & (state.num_output < state.max_output)

    position = step.positions + 1
    column = position.clamp(max=step.block_table.shape[1] * step.block_size - 1)
    block = step.block_table.gather(1, (column // step.block_size)[:, None])[:, 0]
    slot = block * step.block_size + position % step.block_size
    step.input_ids.copy_(torch.where(goes_on, ids, 0))
    step.positions.copy_(torch.where(goes_on, position, -1))
    step.slot_mapping.copy_(torch.where(goes_on, slot, -1))
    step.state_slots.copy_(torch.where(goes_on, step.state_slots, TRASH))


def first(state: DecodeState, num_rows: int, uses_sort: bool, uses_counts: bool) -> DecodeState:
    """Views of the first rows, whose options use what is said of them."""
    step, options = state.step, state.options
    views = {name: getattr(options, name)[:num_rows] for name in OPTIONS}
    return DecodeState(
        step=rows_between(step, 0, num_rows),
        num_output=state.num_output[:num_rows],
        max_output=state.max_output[:num_rows],
        options=SamplingRows(**views, uses_sort=uses_sort, uses_counts=uses_counts),
        counts=state.counts[:num_rows],
        prompt_seen=state.prompt_seen[:num_rows],
        logits=state.logits[:num_rows],
        finite=state.finite[:num_rows],
        result=state.result[:num_rows],
    )


def rows_between(step: Step, begin: int, end: int) -> Step:
    """Views of rows `begin` to `end`, one of each request."""
    names = ("input_ids", "positions", "slot_mapping", "block_table", "state_slots")
    views = {name: getattr(step, name)[begin:end] for name in names}
    return replace(step, **views, logit_rows=step.logit_rows[: end - begin])


class StateMemory:
    """Owns a `DecodeState` of the most rows; `host` is a mirror of its small fields."""

    def __init__(self, max_blocks: int, block_size: int, logits: Tensor) -> None:
        """max_blocks: of one request; logits: [most rows, V], where the model leaves them."""
        device, (max_rows, vocab) = logits.device, logits.shape
        widths = dict.fromkeys((*INTS, *FLOATS)) | {
            "stop_ids": STOP_WIDTH,
            "block_table": max_blocks,
        }
        padding = ("positions", "slot_mapping", "stop_ids")
        self.mirror = mirror = Mirror(widths, FLOATS, padding, max_rows, device)
        self.host, self.clear, self.upload = mirror.host, mirror.clear, mirror.upload
        fields = mirror.fields
        options = {name: fields[name] for name in OPTIONS}
        self.state = DecodeState(
            step=Step(
                input_ids=fields["input_ids"],
                positions=fields["positions"],
                slot_mapping=fields["slot_mapping"],
                block_table=fields["block_table"],
                state_slots=fields["state_slots"],
                logit_rows=torch.arange(max_rows, device=device),
                block_size=block_size,
            ),
            num_output=fields["num_output"],
            max_output=fields["max_output"],
            options=SamplingRows(**options, uses_sort=True, uses_counts=True),
            counts=torch.zeros(max_rows, vocab, dtype=torch.int32, device=device),
            prompt_seen=torch.zeros(max_rows, vocab, dtype=torch.bool, device=device),
            logits=logits,
            finite=torch.zeros(max_rows, dtype=torch.bool, device=device),
            result=torch.full((max_rows,), ENDED, dtype=torch.int64, device=device),
        )
