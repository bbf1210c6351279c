"""What the commands do once their options are read: load a model, run it, say how it went.

Every function returns an exit code or raises Refused, OutputError or TextError; `cli.py` reads
options and prints errors.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nanok3 import bench
from nanok3.batch import Overrides, run_batch
from nanok3.batch_files import check_paths
from nanok3.batch_input import InputError
from nanok3.bench_draft import DraftReport, bench_draft
from nanok3.chat_session import ChatSession, follow
from nanok3.check import check_model
from nanok3.checkpoint import CheckpointError
from nanok3.comm.exchange import PeerLost
from nanok3.config import K3, TP_SIZES, EngineConfig, Shard, default_dtype, load_config
from nanok3.console import Interrupts, Printer, note, parse_json, read_file, write_out
from nanok3.content_hash import StateError
from nanok3.device import device_problems
from nanok3.engine import Engine, RequestError
from nanok3.exits import (
    DIFFERS,
    DONE,
    FAILED,
    INTERRUPTED,
    LOST,
    MODEL,
    PARTIAL,
    REQUEST,
    USAGE,
    Refused,
)
from nanok3.join import too_many
from nanok3.options import NO_DRAFT, PACKAGED_DRAFT, PACKAGED_MODEL, settings_in_force
from nanok3.options import Options as Options
from nanok3.packing import layout_problems
from nanok3.plan import lines, make_plan, verdict
from nanok3.progress import ProgressLine
from nanok3.record import (
    Asked,
    Recorder,
    RecordError,
    Run,
    check_free,
    describe_run,
    identity,
    read_records,
    recording,
)
from nanok3.replay import changes
from nanok3.replay import replay as run_again
from nanok3.sampling import SamplingParams

BUILT_IN = "k3"  # as a model's name in `plan`: K3's published config, without any files
LONG_CONTEXT = 32768  # tokens that a single conversation has room for, where the model allows it

MAX_PROBLEMS = 20
CHECK_STATE = "nanok3-check.jsonl"  # where `check --hash` keeps finished files, if not told


@contextmanager
def _peers_lost() -> Iterator[None]:
    """The loss of a rank becomes Refused."""
    try:
        yield
    except PeerLost as error:
        raise Refused(LOST, str(error)) from error


@_peers_lost()
def chat(options: Options, record: Path | None = None) -> int:
    if record is not None:
        check_free(record)
    engine = load(options, is_single=True)
    effort = options.effort_in_force
    note(
        f"{options.model_dir.name}, {options.dtype} on {options.device}, room for "
        f"{engine.max_context} tokens, "
        + (f"thinking on, effort {effort}" if options.is_thinking else "thinking off")
        + "; /help"
    )
    params = engine.sampling(**options.sampling)
    with _recorder(record, engine, options) as recorder:
        session = ChatSession(
            engine, params, thinking=options.is_thinking, effort=effort, recorder=recorder
        )
        try:
            return DONE if session.run() else INTERRUPTED
        except RequestError as error:
            raise Refused(REQUEST, str(error)) from error


@_peers_lost()
def generate(
    options: Options,
    prompt: str | list[Any],
    *,
    tools: list[Any] | None,
    show_thinking: bool,
    as_json: bool,
    record: Path | None = None,
) -> int:
    if record is not None:
        check_free(record)
    engine = load(options, is_single=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    with _recorder(record, engine, options) as recorder, Interrupts() as interrupts:
        try:
            request = engine.submit(
                prompt,
                engine.sampling(**options.sampling),
                tools=tools,
                thinking=options.is_thinking,
                thinking_effort=options.effort_in_force,
            )
        except RequestError as error:
            raise Refused(REQUEST, str(error)) from error
        printer = None if as_json else Printer(show_thinking)
        with recording(recorder, request, Asked(messages, tools, options.is_thinking)):
            result = follow(engine, request, printer, interrupts)
    if as_json:
        write_out(json.dumps(asdict(result), ensure_ascii=False) + "\n")
    for warning in result.warnings:
        note(f"nanok3: {warning}")
    if result.finish_reason == "length":
        note(f"nanok3: cut off after {result.usage.completion_tokens} tokens; see --max-tokens")
    if result.error is not None:
        raise Refused(FAILED, f"the reply ended early: {result.error}")
    return INTERRUPTED if result.finish_reason == "cancelled" else DONE


@_peers_lost()
def replay(
    path: Path, model: Path | None, *, draft: str | None, device: str | None, strict: bool
) -> int:
    """Runs the records of a file again: DONE if all replies are as they were, else DIFFERS."""
    try:
        records = read_records(path)
    except RecordError as error:
        raise Refused(USAGE, str(error)) from error
    then = records[0].run
    if model is None and then.model != PACKAGED_MODEL.name:
        raise Refused(USAGE, f"{path} is of the model {then.model}; name its directory by --model")
    model_dir = model or PACKAGED_MODEL
    on, dtype = device or then.engine.device, then.engine.dtype
    if on.startswith("cuda") != then.engine.device.startswith("cuda"):
        dtype = default_dtype(on)
    _check_device(on, dtype)
    draft_dir = _draft_of(path, then, draft) if on == "cpu" else None
    with _model_refused(model_dir):
        load_config(model_dir)  # says what is wrong with a directory, before it is compared
        if identity(model_dir)[0] != then.config_sha256:
            reason = "is not that of the record; name the checkpoint that was recorded"
            raise Refused(MODEL, f"{model_dir}: config.json {reason}")
        if on == "cpu":
            torch.set_num_threads(max(then.threads, 1))  # they cut sums, so they change last bits
        settings = replace(then.engine, strict=strict or then.engine.strict)
        if on == "cpu":
            settings = replace(settings, ops="auto")  # the others run on a GPU only
        engine = Engine.load(
            model_dir,
            device=on,
            dtype=dtype,
            settings=settings,
            draft=draft_dir,
            progress=ProgressLine("loading"),
        )
        for change in changes(then, describe_run(engine, model_dir, draft_dir)):
            note(f"nanok3: {change}")
    same = True
    try:
        for number, verdict in enumerate(run_again(engine, records), start=1):
            title = f"reply {number}: " if len(records) > 1 else ""
            write_out(f"{title}{verdict.text}\n")
            same = same and verdict.same
    except RequestError as error:
        raise Refused(REQUEST, f"{path}: {error}") from error
    return DONE if same else DIFFERS


def _draft_of(path: Path, then: Run, named: str | None) -> Path | None:
    """The draft to replay with: the one named, or the record's if it is the packaged one."""
    if named is not None:
        return None if named == NO_DRAFT else Path(named)
    if then.draft in (None, PACKAGED_DRAFT.name):
        return PACKAGED_DRAFT if then.draft else None
    raise Refused(USAGE, f"{path} is of the draft {then.draft}; name its directory by --draft")


def batch(
    options: Options,
    source: str,
    target: str,
    *,
    resume: bool,
    errors: str | None,
    finish_running: bool,
) -> int:
    how = "nothing can go on with it" if target == "-" else "--resume goes on"
    try:
        check_paths(source, target, resume, errors)
        engine = load(options, is_single=False)
        with Interrupts() as interrupts:
            counts = run_batch(
                engine,
                source,
                target,
                model=options.model_dir.name,
                overrides=Overrides(options.sampling, options.thinking, options.effort),
                resume=resume,
                errors=errors,
                should_stop=lambda: interrupts.count > 0,
                finish_running=finish_running,
            )
    except InputError as error:
        raise Refused(USAGE, str(error)) from error
    except KeyboardInterrupt:
        raise Refused(INTERRUPTED, f"stopped at once; {how}") from None
    except PeerLost as error:
        raise Refused(LOST, f"{error}\n{how}") from error
    if counts.interrupted:
        waiting = f", {counts.waiting} more wait in the journal" if counts.waiting else ""
        raise Refused(INTERRUPTED, f"interrupted after {counts.done} lines{waiting}; {how}")
    return PARTIAL if counts.failed else DONE


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
    _check_device(device, dtype)
    model_dir = model or PACKAGED_MODEL
    report: bench.Report | DraftReport
    try:
        with _model_refused(model_dir):
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
    _check_device("cuda", "bfloat16")


def plan(
    model: str | None,
    *,
    gpus: int,
    context: int | None,
    requests: int,
    gpu_memory: int,
    as_json: bool,
) -> int:
    """Reads config.json alone, and not even that for the built-in K3."""
    model_dir = PACKAGED_MODEL if model is None else Path(model)
    with _model_refused(model_dir):
        config = K3 if model == BUILT_IN else load_config(model_dir)
    context = context or min(LONG_CONTEXT, config.max_position_embeddings)
    base = EngineConfig(device="cuda", dtype="bfloat16", max_num_reqs=requests)
    settings = replace(base, num_blocks=base.blocks_for(context), max_context=context)
    shard = Shard(0, gpus)
    problems = settings.problems(config) + shard.problems(config)
    if problems := problems or layout_problems(config, shard):
        raise Refused(USAGE, f"{model_dir.name} on {gpus} GPUs: " + "\n  ".join(problems))
    chosen = make_plan(config, shard, settings)
    said = verdict(config, chosen, gpu_memory)
    if as_json:
        report = {
            "model": model_dir.name,
            "gpus": gpus,
            "context": context,
            "requests": requests,
            "bytes_a_gpu": chosen.nbytes,
            "total_bytes_a_gpu": chosen.total_bytes,
            "gpu_memory_bytes": gpu_memory,
            "fits": chosen.total_bytes <= gpu_memory,
            "verdict": said,
        }
        write_out(json.dumps(report) + "\n")
        return DONE
    title = f"{model_dir.name}, GPUs: {gpus}, requests: {requests} of {context} tokens; each GPU:"
    write_out("\n".join([title, *lines(chosen), said]) + "\n")
    return DONE


def check(model: Path | None, *, with_hash: bool, state: Path | None, as_json: bool) -> int:
    """Reads headers and a sample of values; `with_hash` everything."""
    model_dir = model or PACKAGED_MODEL
    if not model_dir.is_dir():
        raise Refused(MODEL, f"{model_dir}: no such directory; name one that holds a K3 checkpoint")
    if with_hash and state is None:
        state = Path(CHECK_STATE)
        if state.resolve().is_relative_to(model_dir.resolve()):
            advice = f"to keep {state} here in the model's directory, name it with --state"
            raise Refused(USAGE, f"{advice}, or give another file or start elsewhere")
    try:
        report = check_model(model_dir, state)
    except StateError as error:
        raise Refused(USAGE, str(error)) from error
    except KeyboardInterrupt:
        later = f"; finished files are in {state}, and the same command goes on" if state else ""
        raise Refused(INTERRUPTED, f"interrupted{later}") from None
    if as_json:
        whole = {"model": str(model_dir), **report.as_dict()}
        write_out(json.dumps(whole, ensure_ascii=False) + "\n")
    else:
        write_out("\n".join(report.lines()) + "\n")
    return MODEL if report.failed else DONE


def read_json_list(path: Path, what: str) -> list[Any]:
    """A list of objects, as tools and messages are."""
    value = parse_json(read_file(path), str(path))
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused(REQUEST, f"{path} must hold a JSON list of {what}, each an object")
    if not value:
        raise Refused(REQUEST, f"{path} holds no {what}; give at least one")
    return value


def load(options: Options, *, is_single: bool) -> Engine:
    """The engine, or Refused. `is_single`: one request at a time, with all the room it can use."""
    if problems := SamplingParams(**options.sampling).problems():
        raise Refused(USAGE, "; ".join(problems))
    _check_device(options.device, options.dtype)
    if advice := too_many(options.device, options.gpus, sys.argv[1:]):
        raise Refused(USAGE, advice)
    with _model_refused(options.model_dir):
        engine = Engine.load(
            options.model_dir,
            device=options.device,
            dtype=options.dtype,
            settings=_settings(options, is_single),
            draft=options.draft_dir,
            progress=ProgressLine("loading"),
        )
    if options.device != "cpu":
        note(f"replies come through {engine.reading}")
    if options.show_config:
        for setting in settings_in_force(engine, options):
            note(str(setting))
    return engine


@contextmanager
def _recorder(path: Path | None, engine: Engine, options: Options) -> Iterator[Recorder | None]:
    """What records the replies of this run in `path`; None where nobody asked for it."""
    if path is None:
        yield None
        return
    run = describe_run(engine, options.model_dir, options.draft_dir)
    settings = settings_in_force(engine, options)
    with Recorder(path, run, settings) as recorder:
        yield recorder


@contextmanager
def _model_refused(model_dir: Path) -> Iterator[None]:
    """What loading raises becomes Refused: a line where one thing is wrong, else a line a thing."""
    try:
        yield
    except PeerLost:
        raise
    except CheckpointError as error:
        problems = error.problems[:MAX_PROBLEMS]
        if len(problems) < len(error.problems):
            problems = [*problems, f"... and {len(error.problems) - len(problems)} more"]
        raise Refused(MODEL, f"{model_dir}: " + "\n  ".join(problems)) from error
    except (ValueError, OSError) as error:
        raise Refused(MODEL, str(error)) from error
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        message = f"{model_dir}: no memory for it; lower --context or --requests"
        raise Refused(MODEL, message) from error


def _check_device(device: str, dtype: str) -> None:
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise Refused(USAGE, f"--device must be cpu, cuda or cuda:N, not {device!r}")
    if problems := device_problems(device, dtype, 0):
        raise Refused(MODEL, "; ".join(problems))


def _settings(options: Options, is_single: bool) -> EngineConfig:
    """The engine's settings; ValueError if this model cannot have that context."""
    base = EngineConfig()
    num_reqs = options.requests or (1 if is_single else base.max_num_reqs)
    num_blocks = context = None
    if (options.context or is_single) and options.model_dir.is_dir():
        longest = load_config(options.model_dir).max_position_embeddings
        context = options.context or min(LONG_CONTEXT, longest)
        if context > longest:
            raise Refused(USAGE, f"--context {context}: this model reads at most {longest} tokens")
        num_blocks = replace(base, max_num_reqs=num_reqs).blocks_for(context)
    return EngineConfig(
        max_num_reqs=num_reqs,
        num_blocks=num_blocks,
        max_context=context,
        gpus=options.gpus,
        strict=options.strict,
        ops=options.ops or base.ops,
    )
