"""Spans, files and tables of traces, from stamps written by hand."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from nanok3.kernels.mega.role import BEGIN, DONE, READY
from nanok3.trace import Span, chrome_trace, events_of, spans_of, summary

OPS = ["in_proj", "kda"]


def stamps(*events: tuple[int, int, int]) -> torch.Tensor:
    """(ns, kind, op) of one CTA -> [1, 8, 4] i32, a clock beyond 32 bits."""
    made = torch.zeros(1, 8, 4, dtype=torch.int64)
    for i, (ns, kind, op) in enumerate(events):
        clock = (5 << 32) + ns
        made[0, i] = torch.tensor([clock & 0xFFFFFFFF, clock >> 32, kind << 16 | op, 0])
    return made.to(torch.int32)  # wraps, as the kernel's words do


def test_waits_and_work_of_each_op() -> None:
    given = stamps(
        (0xFFFFFF00, BEGIN, 0),
        (0xFFFFFF00 + 400, READY, 0),
        (0xFFFFFF00 + 1000, DONE, 0),
        (0xFFFFFF00 + 1000, BEGIN, 1),
        (0xFFFFFF00 + 1000, READY, 1),
        (0xFFFFFF00 + 1300, DONE, 1),
    )
    spans = spans_of(events_of(given, OPS))
    found = [(s.op, s.waits, s.end - s.begin) for s in spans]
    assert found == [
        ("in_proj", True, 400),
        ("in_proj", False, 600),
        ("kda", True, 0),
        ("kda", False, 300),
    ]


def test_a_cta_without_events_has_no_spans() -> None:
    assert spans_of(events_of(stamps(), OPS)) == []


def test_the_file_has_a_track_a_cta_and_one_for_the_host() -> None:
    spans = [Span(0, "kda", True, 2000, 3000), Span(3, "kda", False, 3000, 4500)]
    made = chrome_trace(spans, [("launch 0", 10_000, 12_000)])
    events = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events] == [
        (0, 0, "wait", 0.0, 1.0),
        (0, 3, "kda", 1.0, 1.5),
        (1, 0, "launch 0", 0.0, 2.0),
    ]


def test_the_table_has_means_and_extremes_a_layer() -> None:
    spans = [
        *(Span(0, "kda", True, 0, 2000), Span(0, "kda", False, 2000, 3000)),
        *(Span(1, "kda", True, 0, 1000), Span(1, "kda", False, 1000, 4000)),
    ]
    line = next(line for line in summary(spans, 2).splitlines() if line.startswith("kda"))
    assert line.split() == ["kda", "0.75", "(0.50)", "1.00", "(1.50)"]
