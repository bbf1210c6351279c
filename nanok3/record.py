"""The record of a reply: all that is needed to draw it again, as one line of JSON.

A file has a line for each reply of one run, in order; a run that was killed leaves whole lines, and
perhaps a torn one, which is refused by name. Running a record again is `replay.py`'s.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from types import NoneType, TracebackType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from nanok3.checkpoint_check import CheckpointError, read_index
from nanok3.config import EngineConfig, read_json
from nanok3.console import OutputError, TextError, decode_text, parse_json
from nanok3.engine import Engine
from nanok3.options import REQUEST, Setting
from nanok3.request import Request
from nanok3.safetensors_header import MAX_HEADER_BYTES
from nanok3.sampling import SamplingParams

SCHEMA = 2


class RecordError(ValueError):
    """A file that holds no records; the message names it and says why."""


@dataclass(frozen=True)
class Run:
    """What the replies of one run have in common."""

    nanok3: str
    torch: str
    machine: str  # the processor's architecture
    threads: int
    model: str  # name of the checkpoint's directory
    config_sha256: str
    weights_sha256: str
    engine: EngineConfig
    draft: str | None = None  # name of the draft's directory; it decides what a sampled reply draws
    draft_sha256: str | None = None  # of its config and its files' headers


@dataclass(frozen=True)
class Asked:
    """For people: a replay goes by the prompt's ids."""

    messages: list[Any]
    tools: list[Any] | None
    thinking: bool
    line: int | None = None  # of a batch's input, from 1


@dataclass(frozen=True)
class Record:
    schema: int
    run: Run
    options: list[Setting]  # each with where it came from
    asked: Asked
    sampling: SamplingParams  # as in force: with the seed, all stop ids and the room for the reply
    grammar: str | None  # what the reply may be, as `grammar.Grammar` has it; None: anything
    prompt_ids: list[int]
    cached_tokens: int  # of the prompt, found in a snapshot
    output_ids: list[int]
    # Of each output id: the best logit of its row less the second best; None: a form left but one.
    gaps: list[float | None]
    finish_reason: str
    error: str | None


# ---- who runs ----


def describe_run(engine: Engine, model_dir: Path, draft_dir: Path | None = None) -> Run:
    config, weights = identity(model_dir)
    try:
        own_version = version("nanok3")
    except PackageNotFoundError:
        own_version = "not installed"
    return Run(
        nanok3=own_version,
        torch=torch.__version__,
        machine=platform.machine(),
        threads=torch.get_num_threads(),
        model=model_dir.resolve().name,
        config_sha256=config,
        weights_sha256=weights,
        engine=engine.settings,
        draft=None if draft_dir is None else draft_dir.resolve().name,
        draft_sha256=None if draft_dir is None else "".join(identity(draft_dir)),
    )


def identity(model_dir: Path) -> tuple[str, str]:
    """(sha256 of config.json's values, sha256 of the shards' names, sizes and headers).

    Cheap, and blind to the values of weights: `nanok3 check --hash` reads those.
    """
    config = json.dumps(
        read_json(model_dir / "config.json"), sort_keys=True, separators=(",", ":")
    ).encode()
    weights = hashlib.sha256()
    for name in sorted(set(read_index(model_dir).values())):
        path = model_dir / name
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = hashlib.sha256(file.read(min(length, MAX_HEADER_BYTES))).hexdigest()
        except OSError as error:
            message = f"{name}: the file cannot be read: {error.strerror}"
            raise CheckpointError(model_dir, [message]) from error
        weights.update(f"{name}\t{path.stat().st_size}\t{header}\n".encode())
    return hashlib.sha256(config).hexdigest(), weights.hexdigest()


# ---- out ----


def check_free(path: Path) -> None:
    """What can be refused before a model is loaded."""
    if path.exists():
        raise OutputError(f"{path} exists; name another file for the record")
    if not path.parent.is_dir():
        raise OutputError(f"{path} cannot be written: {path.parent} is no directory")


class Recorder:
    """Owns the file of a run's records; one that got none is removed."""

    def __init__(self, path: Path, run: Run, options: list[Setting]) -> None:
        self._path = path
        self._run = run
        self._options = options
        self._end = 0  # of the last whole line
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise OutputError(f"{path} exists; name another file for the record") from error
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if not self._end:
            self._path.unlink(missing_ok=True)

    def write(self, request: Request, asked: Asked, own: Mapping[str, Any] | None = None) -> None:
        """The record of a request that is done, however it ended; own: settings that it made."""
        assert request.finish_reason is not None and request.gaps is not None
        own = own or {}
        options = [
            Setting(setting.name, own[setting.name], REQUEST) if setting.name in own else setting
            for setting in self._options
        ]
        options = [
            replace(setting, value=request.params.seed) if setting.name == "seed" else setting
            for setting in options
        ]
        record = Record(
            schema=SCHEMA,
            run=self._run,
            options=options,
            asked=asked,
            sampling=replace(request.params, max_tokens=request.max_tokens),
            grammar=None if request.grammar is None else request.grammar.lark,
            prompt_ids=request.ids[: request.num_prompt],
            cached_tokens=request.num_reused,
            output_ids=request.ids[request.num_prompt :],
            gaps=[gap if isfinite(gap) else None for gap in request.gaps],
            finish_reason=request.finish_reason,
            error=request.error,
        )
        left = memoryview((json.dumps(asdict(record)) + "\n").encode())
        size = len(left)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise OutputError(f"{self._path} cannot be written: {error.strerror}") from error
        self._end += size


@contextmanager
def recording(recorder: Recorder | None, request: Request, asked: Asked) -> Iterator[None]:
    """Follow the request inside, to its end: it is recorded, also where that raised."""
    if recorder is None:
        yield
        return
    request.gaps = []
    try:
        yield
    finally:
        recorder.write(request, asked)


# ---- in ----


def read_records(path: Path) -> list[Record]:
    """All of a file, which must be of one run. RecordError names the line that is wrong."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        what = f"{path} line {number}"
        try:
            raw = parse_json(decode_text(line, what), what)
        except TextError as error:
            raise RecordError(str(error)) from error
        if not isinstance(raw, dict) or "schema" not in raw:
            raise RecordError(f"{what} is no record; name a file that --record wrote")
        if raw["schema"] != SCHEMA:
            raise RecordError(
                f"{what} has schema {raw['schema']!r}, and this nanok3 reads {SCHEMA}; replay it "
                "with the nanok3 that wrote it"
            )
        record = _convert(raw, Record, what)
        if len(record.gaps) != len(record.output_ids):
            raise RecordError(f"{what} needs as many gaps as output_ids")
        records.append(record)
        if record.run != records[0].run:
            raise RecordError(f"{what} is of another run than line 1; replay them apart")
    if not records:
        raise RecordError(f"{path} holds no record; the run did not end by itself")
    return records


def _convert(value: Any, kind: Any, what: str) -> Any:
    """A value of JSON as the type that a record's field has; RecordError if it has another."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        if not isinstance(value, dict) or sorted(value) != sorted(names):
            raise RecordError(f"{what}: expected an object with {', '.join(names)}")
        hints = get_type_hints(kind)
        return kind(**{n: _convert(value[n], hints[n], f"{what}: {n}") for n in names})
    if origin is UnionType:
        (kind,) = (k for k in inner if k is not NoneType)
        return None if value is None else _convert(value, kind, what)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_convert(item, inner[0], what) for item in value)
    fits = kind is Any or type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise RecordError(f"{what}: expected {getattr(kind, '__name__', kind)}, found {value!r}")
    return value
