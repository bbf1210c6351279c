"""Peak memory of a batch of a million lines with ids, each answered at once by a stand-in engine.

What is measured is the batch itself, journal and fsync included: the model's memory is another
matter and does not depend on the number of lines. Prints the growth of the process's peak.

    python scripts/million_lines.py --lines 1000000
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nanok3.batch import run_batch
from nanok3.batch_ask import Overrides
from nanok3.config import EngineConfig
from nanok3.request import Result, Usage
from nanok3.sampling import SamplingParams
from nanok3.tokenizer import Tokenizer


class Job:
    """A request that is done after one step."""

    slot: int | None = None
    done = False

    def result(self) -> Result:
        return Result([1], "forty-two", "", [], "stop", Usage(3, 0, 1))


class Instant:
    """What a batch needs of an engine."""

    def __init__(self, num_reqs: int) -> None:
        self.config = self.defaults = None
        self.tokenizer = Tokenizer([bytes([i]) for i in range(256)])
        self.settings = EngineConfig(max_num_reqs=num_reqs)
        self.max_context = 100
        self._jobs: list[Job] = []

    def sampling(self, **options: Any) -> SamplingParams:
        return SamplingParams(**options)

    def submit(self, prompt: str, params: SamplingParams, **options: Any) -> Job:
        self._jobs.append(Job())
        return self._jobs[-1]

    def cancel(self, job: Job) -> None:
        job.done = True

    def step(self) -> None:
        for job in self._jobs:
            job.slot, job.done = 0, True
        self._jobs = []


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=256, help="at once")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "in.jsonl", Path(name) / "out.jsonl"
        with source.open("w") as file:
            for i in range(options.lines):
                body = {"messages": [{"role": "user", "content": f"What is {i} + {i}?"}]}
                line = {"custom_id": f"request-{i}", "url": "/v1/chat/completions", "body": body}
                file.write(json.dumps(line) + "\n")
        engine: Any = Instant(options.requests)
        before, begin = peak(), time.monotonic()
        counts = run_batch(engine, str(source), str(target), model="m", overrides=Overrides())
        seconds, grown = time.monotonic() - begin, peak() - before
        assert (counts.done, counts.failed) == (options.lines, 0)
        with target.open("rb") as file:
            assert sum(1 for _ in file) == options.lines
        written = f"{options.lines:,} lines, {target.stat().st_size / 1e6:.0f} MB of answers"
        speed = f"{options.lines / seconds:.0f} lines/s"
        print(f"{written}: peak memory grew by {grown / 1e6:.0f} MB, {speed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
