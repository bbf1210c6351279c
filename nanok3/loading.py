"""Loading a model for a command: what options ask for, and what is refused before and meanwhile."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from nanok3.checkpoint import CheckpointError
from nanok3.comm.exchange import PeerLost
from nanok3.config import EngineConfig, load_config, read_json
from nanok3.config_rules import not_taken
from nanok3.console import note
from nanok3.device import device_problems
from nanok3.engine import Engine
from nanok3.exits import MODEL, USAGE, Refused
from nanok3.join import too_many
from nanok3.options import Options, settings_in_force
from nanok3.progress import ProgressLine
from nanok3.sampling import SamplingParams

LONG_CONTEXT = 32768  # tokens that a single conversation has room for, where the model allows it
MAX_PROBLEMS = 20
SMALL_BYTES = 1 << 30  # weights that one thread of a CPU gets through as fast as several


def load(options: Options, *, is_single: bool) -> Engine:
    """The engine, or Refused. `is_single`: one request at a time, with all the room it can use."""
    if problems := SamplingParams(**options.sampling).problems():
        raise Refused(USAGE, "; ".join(problems))
    check_device(options.device, options.dtype)
    if advice := too_many(options.device, options.gpus, sys.argv[1:]):
        raise Refused(USAGE, advice)
    with model_refused(options.model_dir):
        if options.device == "cpu" and options.gpus == 1 and "OMP_NUM_THREADS" not in os.environ:
            use_one_thread_if_small(options.model_dir)
        engine = Engine.load(
            options.model_dir,
            device=options.device,
            dtype=options.dtype,
            settings=settings_of(options, is_single),
            draft=options.draft_dir,
            progress=ProgressLine("loading"),
        )
    for proposal in proposed_in_vain(options.model_dir):
        note(f"nanok3: {proposal}")
    if options.device != "cpu":
        note(f"replies come through {engine.reading}")
    if options.show_config:
        for setting in settings_in_force(engine, options):
            note(str(setting))
    return engine


def use_one_thread_if_small(model_dir: Path) -> None:
    """Threads of an op wait for each other by spinning: a small model gains nothing by them, and
    beside other programs it would be many times slower."""
    if sum(shard.stat().st_size for shard in model_dir.glob("*.safetensors")) < SMALL_BYTES:
        torch.set_num_threads(1)


def proposed_in_vain(model_dir: Path) -> list[str]:
    path = model_dir / "generation_config.json"
    return not_taken(read_json(path)) if path.is_file() else []


@contextmanager
def model_refused(model_dir: Path) -> Iterator[None]:
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


def check_device(device: str, dtype: str) -> None:
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise Refused(USAGE, f"--device must be cpu, cuda or cuda:N, not {device!r}")
    if problems := device_problems(device, dtype, 0):
        raise Refused(MODEL, "; ".join(problems))


def settings_of(options: Options, is_single: bool) -> EngineConfig:
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
