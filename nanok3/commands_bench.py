"""What `nanok3 bench` and `nanok3 trace` do once their options are read.

Every function returns an exit code or raises Refused.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from nanok3 import bench
from nanok3.bench_draft import DraftReport, bench_draft
from nanok3.config import K3, TP_SIZES, EngineConfig, Shard
from nanok3.console import write_out
from nanok3.exits import DONE, FAILED, USAGE, Refused
from nanok3.loading import check_device, model_refused
from nanok3.options import PACKAGED_DRAFT, PACKAGED_MODEL


def bench_decode(
    model: Path | None,
    device: str,
    dtype: str,
    *,
    requests: tuple[int, ...],
    prompt_tokens: int,
    decode_tokens: int,
    repeats: int,
    draft: str | None,
    as_json: bool,
) -> int:
    """draft: a directory, or the name of the packaged one; then one request at a time."""
    check_device(device, dtype)
    model_dir = model or PACKAGED_MODEL
    report: bench.Report | DraftReport
    try:
        with model_refused(model_dir):
            if draft is not None:
                is_packaged = draft == PACKAGED_DRAFT.name
                report = bench_draft(
                    EngineConfig(device=device, dtype=dtype),
                    model_dir,
                    PACKAGED_DRAFT if is_packaged else Path(draft),
                    max_tokens=decode_tokens,
                    repeats=repeats,
                )
            else:
                report = bench.bench_decode(
                    EngineConfig(device=device, dtype=dtype),
                    model_dir,
                    requests,
                    prompt_tokens=prompt_tokens,
                    decode_tokens=decode_tokens,
                    repeats=repeats,
                )
    except bench.CheckFailed as error:
        raise Refused(FAILED, f"no speed is reported: {error}") from error
    write_out(("" if as_json else report.table() + "\n") + report.json() + "\n")
    return DONE


def bench_layers(
    kind: str,
    *,
    tp: int,
    rank: int,
    requests: tuple[int, ...],
    rows: tuple[int, ...],
    context: tuple[int, ...],
    ops: tuple[str, ...],
    json_file: Path | None,
) -> int:
    """kind: "kda", "mla" or "step". A case for every combination."""
    _check_rank(tp, rank, min(context), max(rows))
    from nanok3 import bench_layer  # here, for it brings CuTe DSL

    layers = () if kind == "step" else bench_layer.layers_of_kind(K3, kind)
    run = bench_layer.bench_step if kind == "step" else bench_layer.bench_layer
    refused = False
    for num_reqs, num_rows, cached in itertools.product(requests, rows, context):
        report = run(K3, bench_layer.Case(layers, tp, rank, num_reqs, num_rows, cached), ops)
        write_out(report.table() + "\n" + report.json() + "\n")
        if json_file is not None:
            with json_file.open("a", encoding="utf-8") as file:
                file.write(report.json() + "\n")
        refused = refused or bool(report.refused)
    return FAILED if refused else DONE


def trace(
    out: Path, kind: str, *, tp: int, rank: int, requests: int, rows: int, context: int
) -> int:
    """kind: "kda" or "mla"."""
    _check_rank(tp, rank, context, rows)
    from nanok3 import bench_layer  # here, for these bring CuTe DSL
    from nanok3.mega_ops import MAX_ROWS
    from nanok3.trace import trace_layers

    if requests * rows > MAX_ROWS:
        raise Refused(USAGE, f"{requests} x {rows} rows: the persistent kernel takes {MAX_ROWS}")
    if not out.absolute().parent.is_dir():
        raise Refused(USAGE, f"{out}: there is no such directory; name an existing one")
    layers = bench_layer.layers_of_kind(K3, kind)
    case = bench_layer.Case(layers, tp, rank, requests, rows, context)
    write_out(trace_layers(K3, case, out) + "\n")
    return DONE


def _check_rank(tp: int, rank: int, least_context: int, most_rows: int) -> None:
    """Refused, if the real K3 has no such rank or there is no GPU for it."""
    if tp not in TP_SIZES:
        raise Refused(USAGE, f"--tp {tp}: choose one of {', '.join(map(str, TP_SIZES))}")
    if rank >= tp:
        raise Refused(USAGE, f"--rank {rank}: {tp} ranks are numbered from 0")
    if problems := Shard(rank, tp).problems(K3):
        raise Refused(USAGE, f"--tp {tp}: {problems[0]}")
    if least_context < most_rows:
        raise Refused(USAGE, f"--context {least_context}: it includes the {most_rows} rows")
    check_device("cuda", "bfloat16")
