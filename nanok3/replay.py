"""Runs the records of a run again and says where each reply first differs.

The replies go through one engine in their order, from the ids of their prompts, with their seeds:
what a turn of a chat found in a snapshot is found there again. Nothing is run past the first id
that differs.

A greedy reply without penalties picks the best logit, so another id is no fault where the two best
were a near tie. `NEAR_TIE` is float32's: two orders of sums move a logit of k3-mini by up to 4e-5
(CPU, 2026-12-01, strict against chunked prefill). What bfloat16 rounds is more, and not excused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nanok3.engine import Engine, RequestError
from nanok3.grammar import Grammar, TokenTable
from nanok3.record import Record, Run
from nanok3.sampling import rows_of

NEAR_TIE = 1e-3  # logits closer than this


@dataclass(frozen=True)
class Verdict:
    """Of one reply."""

    same: bool
    text: str


def replay(engine: Engine, records: Sequence[Record]) -> Iterator[Verdict]:
    """A verdict a record; RequestError where one cannot be served (it was changed by hand)."""
    table: TokenTable | None = None
    for record in records:
        if record.grammar is not None and table is None:
            if engine.tokenizer is None:
                raise RequestError("the reply had a form, and without tiktoken.model it has none")
            table = TokenTable(engine.tokenizer)
        if record.finish_reason == "cancelled" and not record.output_ids:
            yield Verdict(True, "nothing to compare: it was stopped before its first token")
        else:
            yield _replay_one(engine, record, table)


def changes(then: Run, now: Run) -> list[str]:
    """What is not as it was and may change the last bits, a sentence each."""
    pairs = [
        *(("nanok3", then.nanok3, now.nanok3), ("torch", then.torch, now.torch)),
        *(("machine", then.machine, now.machine), ("threads", then.threads, now.threads)),
        ("device", then.engine.device, now.engine.device),
        ("dtype", then.engine.dtype, now.engine.dtype),
        ("gpus", then.engine.gpus, now.engine.gpus),
        ("strict", then.engine.strict, now.engine.strict),
        ("the draft", then.draft or "none", now.draft or "none"),
    ]
    found = [f"{name} was {old} and is {new}" for name, old, new in pairs if old != new]
    if then.weights_sha256 != now.weights_sha256:
        found.append("the weights' files are others (names, sizes or headers)")
    if then.draft == now.draft and then.draft_sha256 != now.draft_sha256:
        found.append("the draft's files are others (config, names, sizes or headers)")
    return found


def _replay_one(engine: Engine, record: Record, table: TokenTable | None) -> Verdict:
    """table: where the reply was held to a grammar."""
    had = record.output_ids
    thinking = None if engine.tokenizer is None else record.asked.thinking
    grammar = None
    if record.grammar is not None and table is not None:
        if problem := table.problem(record.grammar):
            raise RequestError(f"the grammar is none: {problem}")
        grammar = Grammar(table, table.matcher(record.grammar), bool(thinking), record.grammar)
    request = engine.submit_ids(record.prompt_ids, record.sampling, thinking, grammar)
    cut = record.finish_reason == "cancelled"
    place = 0  # up to here the ids are equal
    try:
        while not request.done:
            engine.step()
            now = request.ids[request.num_prompt :]
            while place < min(len(now), len(had)) and now[place] == had[place]:
                place += 1
            if place < len(now) or (cut and place == len(had)):
                engine.cancel(request)
    finally:
        engine.cancel(request)
    now = request.ids[request.num_prompt :]
    if place < max(len(now), len(had)):
        before = _shown(engine, had, place, record.finish_reason)
        after = _shown(engine, now, place, request.error or request.finish_reason or "")
        text = f"first differs at token {place} (from 0): had {before}, now {after}"
        return Verdict(False, f"{text}; {_judged(record, place)}")
    if not cut and request.finish_reason != record.finish_reason:
        return Verdict(
            False,
            f"all {len(had)} tokens are equal, but it ended by {record.finish_reason}, now by "
            f"{request.finish_reason}" + (f": {request.error}" if request.error else ""),
        )
    note = ", as far as it came" if cut else ""
    return Verdict(True, f"identical ({len(had)} tokens{note})")


def _shown(engine: Engine, ids: list[int], place: int, end: str) -> str:
    if place >= len(ids):
        return f"the end ({end})"
    text = "" if engine.tokenizer is None else f" ({engine.tokenizer.decode([ids[place]])!r})"
    return f"{ids[place]}{text}"


def _judged(record: Record, place: int) -> str:
    """What the recorded gap says of a difference."""
    if place >= len(record.gaps):
        return "no gap was recorded there"
    gap = record.gaps[place]
    if gap is None:
        return "its form left one id there"
    said = f"recorded gap {gap:.3g}"
    params = record.sampling
    if params.temperature != 0:
        return f"{said}, of a sampled reply"
    if rows_of([params], "cpu").uses_counts:
        return f"{said}, before penalties"
    if gap < NEAR_TIE:
        return f"{said} is below {NEAR_TIE:g}: a near tie that rounding excuses"
    return f"{said} is not below {NEAR_TIE:g}: rounding does not excuse it"
