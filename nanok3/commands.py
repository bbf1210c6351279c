"""What chat, generate, replay and batch do once their options are read: load a model, run it, say
how it went. The others are in `commands_plan.py` and `commands_bench.py`.

Every function returns an exit code or raises Refused, OutputError or TextError; `cli.py` reads
options and prints errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nanok3.batch import run_batch
from nanok3.batch_ask import Overrides
from nanok3.batch_files import check_paths
from nanok3.batch_input import InputError
from nanok3.chat_session import ChatSession, follow
from nanok3.comm.exchange import PeerLost
from nanok3.config import default_dtype, load_config
from nanok3.console import Interrupts, Printer, note, parse_json, read_file, write_out
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
from nanok3.loading import check_device, load, model_refused
from nanok3.options import NO_DRAFT, PACKAGED_DRAFT, PACKAGED_MODEL, settings_in_force
from nanok3.options import Options as Options
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
    check_device(on, dtype)
    draft_dir = _draft_of(path, then, draft) if on == "cpu" else None
    with model_refused(model_dir):
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
            line = records[number - 1].asked.line
            of_line = "" if line is None else f" (line {line})"
            title = f"reply {number}{of_line}: " if len(records) > 1 else ""
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
    record: Path | None = None,
) -> int:
    how = "nothing can go on with it" if target == "-" else "--resume goes on"
    draft = options.draft_dir
    try:
        check_paths(source, target, resume, errors)
        if record is not None:
            check_free(record)
        engine = load(options, is_single=False)
        with _recorder(record, engine, options) as recorder, Interrupts() as interrupts:
            counts = run_batch(
                engine,
                source,
                target,
                model=options.model_dir.name,
                draft=None if draft is None else draft.name,
                overrides=Overrides(options.sampling, options.thinking, options.effort),
                resume=resume,
                errors=errors,
                should_stop=lambda: interrupts.count > 0,
                finish_running=finish_running,
                recorder=recorder,
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


def read_json_list(path: Path, what: str) -> list[Any]:
    """A list of objects, as tools and messages are."""
    value = parse_json(read_file(path), str(path))
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused(REQUEST, f"{path} must hold a JSON list of {what}, each an object")
    if not value:
        raise Refused(REQUEST, f"{path} holds no {what}; give at least one")
    return value


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
