"""`nanok3 trace`: where the time of the persistent kernel goes, as a file for Perfetto and a table.

The kernel is built with clock stamps (one clock for all SMs): each CTA notes when an op begins,
when what it waited for is there, and when its part is written. The file has a track for every SM,
with spans "wait" and the op's name, and one for the host.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from nanok3.bench_layer import SEED, Case, make_world
from nanok3.config import ModelConfig, Shard
from nanok3.kernels.mega.role import READY
from nanok3.mega_ops import Mega
from nanok3.rank_weights import packed_ends, packed_layer

LAUNCHES = 3  # the last one is shown: the first ones warm up


@dataclass(frozen=True)
class Event:
    ns: int
    kind: int  # role.BEGIN, READY or DONE
    op: str


@dataclass(frozen=True)
class Span:
    cta: int
    op: str
    waits: bool
    begin: int  # ns
    end: int


def events_of(stamps: Tensor, names: list[str]) -> list[list[Event]]:
    """Of each CTA, in its order; stamps [CTA, events, 4] i32, zero where none was left."""
    made = []
    for rows in stamps.cpu().tolist():
        events = []
        for low, high, code, _ in rows:
            if low == 0 and high == 0:
                break
            ns = (high & 0xFFFFFFFF) << 32 | (low & 0xFFFFFFFF)
            events.append(Event(ns, code >> 16, names[code & 0xFFFF]))
        made.append(events)
    return made


def spans_of(events: list[list[Event]]) -> list[Span]:
    """An op's time up to READY is a wait, the rest is work; it may do both several times."""
    spans = []
    for cta, own in enumerate(events):
        for event, following in zip(own, own[1:] + own[-1:], strict=True):
            waits = following.kind == READY
            if following.ns > event.ns or waits:
                spans.append(Span(cta, event.op, waits, event.ns, following.ns))
    return spans


def chrome_trace(spans: list[Span], host: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Times in us from the first span on; host: (name, begin ns, end ns), on a clock of its own."""
    zero = min(s.begin for s in spans)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "GPU, a track an SM"}},
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "host"}},
    ]
    for s in spans:
        name, begin = ("wait" if s.waits else s.op), (s.begin - zero) / 1e3
        args = {"op": s.op}
        span = {"name": name, "ts": begin, "dur": (s.end - s.begin) / 1e3, "args": args}
        events.append({"ph": "X", "pid": 0, "tid": s.cta} | span)
    for name, begin_ns, end_ns in host:
        ts, dur = (begin_ns - host[0][1]) / 1e3, (end_ns - begin_ns) / 1e3
        events.append({"ph": "X", "pid": 1, "tid": 0, "name": name, "ts": ts, "dur": dur})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def summary(spans: list[Span], num_layers: int) -> str:
    """Per op and layer: mean wait (least of the CTAs) and mean work (most), in us."""
    totals: dict[tuple[str, bool], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    order: list[str] = []
    for s in spans:
        totals[s.op, s.waits][s.cta] += s.end - s.begin
        if s.op not in order:
            order.append(s.op)
    lines = [f"{'op':16} {'wait':>7} {'(least)':>9} {'work':>7} {'(most)':>9}   us a layer"]
    for op in order:
        waits = [ns / 1e3 / num_layers for ns in totals[op, True].values()] or [0.0]
        works = [ns / 1e3 / num_layers for ns in totals[op, False].values()] or [0.0]
        least, most = f"({min(waits):.2f})", f"({max(works):.2f})"
        lines.append(f"{op:16} {mean(waits):7.2f} {least:>9} {mean(works):7.2f} {most:>9}")
    whole = (max(s.end for s in spans) - min(s.begin for s in spans)) / 1e3
    lines.append(f"{'launch':16} {whole:.2f} us, {whole / num_layers:.2f} a layer, with stamps")
    return "\n".join(lines)


def trace_layers(config: ModelConfig, case: Case, path: Path | None, device: str = "cuda") -> str:
    """Runs a case's layers with stamps, writes the file, returns the table."""
    shard = Shard(case.rank, case.tp)
    with torch.no_grad():
        world = make_world(config, case, device)
        layers = tuple(packed_layer(config, shard, device, SEED, i) for i in case.layers)
        w = packed_ends(config, shard, device, SEED, layers)
        blocks = world.step.block_table.shape[1]
        mega = Mega(
            *(config, w, world.cache, world.step.block_size, blocks),
            shard=shard,
            whole=False,
            layers=case.layers,
            stamps=True,
        )
        host = []
        for i in range(LAUNCHES):
            begin = time.perf_counter_ns()
            mega.run(world.step, world.buf)
            launched = time.perf_counter_ns()
            torch.cuda.synchronize()
            host += [(f"launch {i}", begin, launched)]
            host += [(f"wait {i}", launched, time.perf_counter_ns())]
        mega.check()
    space = mega.space_of(case.tokens)
    assert space.stamps is not None
    spans = spans_of(events_of(space.stamps, space.program.op_names))
    if path is not None:
        path.write_text(json.dumps(chrome_trace(spans, host)), encoding="utf-8")
    return summary(spans, len(case.layers))
