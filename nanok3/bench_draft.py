"""`nanok3 bench decode --draft`: what a draft gives and what it costs, for one request at a time.

Values come first, as in `bench.py`. Then the same conversations with and without the draft take
turns, at temperatures 0 and 1: tokens a second, how often the draft in each place stood, the mean
acceptance length (tokens a step, the one that is not a draft included). From the time of a step
with and without drafts come break-even, the acceptance length at which drafting costs as much as it
gives, and the tokens a second at other acceptance lengths; the parts of a step with drafts are
measured by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nanok3.bench import check_values, machine_name, make_prompt
from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.spec_loop import Acceptance, SpecLoop

TEMPERATURES = (0.0, 1.0)
QUESTIONS = (
    *("What does os.path.join do?", "Tell me about the function json.dumps.", "What is 347 + 85?"),
    *("How do I read a file line by line?", "What is the module itertools for?", "Thank you!"),
    *("What does str.partition return?", "Which module has the function deepcopy?"),
)


@dataclass(frozen=True)
class Spell:
    """Replies at one temperature."""

    temperature: float
    plain_tokens_per_s: tuple[float, ...]  # one a repeat
    draft_tokens_per_s: tuple[float, ...]
    stands: tuple[float, ...]  # share of steps in which drafts up to this place stood
    mean_length: float
    num_tokens: int
    plain_step_s: float  # all that a step takes, the mean
    draft_step_s: float

    @property
    def speed_up(self) -> float:
        return median(self.draft_tokens_per_s) / median(self.plain_tokens_per_s)

    @property
    def break_even(self) -> float:
        return self.draft_step_s / self.plain_step_s


@dataclass(frozen=True)
class DraftReport:
    model: str
    draft: str
    device: str
    dtype: str
    threads: int
    machine: str
    torch: str
    date: str
    num_drafts: int
    model_s: float  # the model over one row
    verify_s: float  # the model over K + 1 rows, with the commit and the draft's context
    draft_s: float  # K drafts
    spells: tuple[Spell, ...]

    def table(self) -> str:
        k = self.num_drafts
        lines = [
            f"decode {self.model} with {self.draft}, K = {k}: {self.dtype} on {self.device}, "
            f"threads {self.threads}, {self.machine}, torch {self.torch}, {self.date}",
            f"model alone: T(1) {1e3 * self.model_s:.2f} ms, T({k + 1}) "
            f"{1e3 * self.verify_s:.2f} ms; T(draft) {1e3 * self.draft_s:.2f} ms",
        ]
        for s in self.spells:
            stands = " ".join(f"{share:.2f}" for share in s.stands)
            lines += [
                "",
                f"temperature {s.temperature:g}: {s.mean_length:.2f} tokens a step over "
                f"{s.num_tokens} tokens; drafts up to each place stood {stands}",
                f"tokens/s {median(s.draft_tokens_per_s):.1f} with drafts "
                f"({min(s.draft_tokens_per_s):.1f} .. {max(s.draft_tokens_per_s):.1f}), "
                f"{median(s.plain_tokens_per_s):.1f} without "
                f"({min(s.plain_tokens_per_s):.1f} .. {max(s.plain_tokens_per_s):.1f}): "
                f"{s.speed_up:.2f} times as fast",
                f"a step takes {1e3 * s.draft_step_s:.2f} ms with drafts and "
                f"{1e3 * s.plain_step_s:.2f} ms without: break-even at {s.break_even:.2f} tokens a "
                f"step; tokens/s by tokens a step: "
                + ", ".join(f"{n}: {n / s.draft_step_s:.0f}" for n in range(1, k + 2)),
            ]
        return "\n".join(lines)

    def json(self) -> str:
        record: dict[str, Any] = {"bench": "draft"} | asdict(self)
        for spell, entry in zip(self.spells, record["spells"], strict=True):
            entry |= {"speed_up": spell.speed_up, "break_even": spell.break_even}
        return json.dumps(record)


def bench_draft(
    settings: EngineConfig,
    model_dir: Path,
    draft_dir: Path,
    max_tokens: int = 128,
    repeats: int = 3,
    questions: Sequence[str] = QUESTIONS,
) -> DraftReport:
    """Loads the model with and without the draft, checks both and measures both."""
    settings = replace(settings, max_num_reqs=1, num_snapshots=0, break_even=0.0)
    plain = Engine.load(model_dir, device=settings.device, dtype=settings.dtype, settings=settings)
    drafted = Engine.load(
        model_dir,
        device=settings.device,
        dtype=settings.dtype,
        settings=settings,
        draft=draft_dir,
    )
    loop = drafted._runner.loop
    assert isinstance(loop, SpecLoop)
    for engine in (plain, drafted):
        check_values(engine, make_prompt(engine.config, 16, seed=0))
    spells = []
    for temperature in TEMPERATURES:
        ask(drafted, questions[:1], temperature, max_tokens)  # warm-up
        loop.acceptance = Acceptance.empty(loop.num_drafts)
        runs = [
            (
                ask(plain, questions, temperature, max_tokens),
                ask(drafted, questions, temperature, max_tokens),
            )
            for _ in range(repeats)
        ]
        without, with_drafts = zip(*runs, strict=True)
        seen = loop.acceptance
        spells.append(
            Spell(
                temperature=temperature,
                plain_tokens_per_s=tuple(a.num_tokens / a.seconds for a in without),
                draft_tokens_per_s=tuple(a.num_tokens / a.seconds for a in with_drafts),
                stands=tuple(n / max(seen.num_steps, 1) for n in seen.accepted),
                mean_length=seen.mean_length,
                num_tokens=sum(a.num_tokens for a in with_drafts),
                plain_step_s=median(a.seconds / a.num_steps for a in without),
                draft_step_s=median(a.seconds / a.num_steps for a in with_drafts),
            )
        )
    costs = loop.measure()
    return DraftReport(
        model=Path(model_dir).name,
        draft=Path(draft_dir).name,
        device=settings.device,
        dtype=settings.dtype,
        threads=torch.get_num_threads(),
        machine=machine_name(settings.device),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
        num_drafts=loop.num_drafts,
        model_s=costs.verify(1),
        verify_s=costs.verify(loop.num_drafts + 1),
        draft_s=costs.draft(1),
        spells=tuple(spells),
    )


@dataclass(frozen=True)
class Asked:
    """From after the first step of each reply to its end."""

    seconds: float
    num_tokens: int
    num_steps: int


def ask(engine: Engine, questions: Sequence[str], temperature: float, max_tokens: int) -> Asked:
    """One by one."""
    seconds, count, steps = 0.0, 0, 0
    for seed, question in enumerate(questions):
        params = engine.sampling(
            temperature=temperature, top_p=1.0, max_tokens=max_tokens, seed=seed
        )
        request = engine.submit(question, params)
        while request.num_output == 0:
            engine.step()
        before, start = request.num_output, time.perf_counter()
        while not request.done:
            engine.step()
            steps += 1
        seconds += time.perf_counter() - start
        count += request.num_output - before
    return Asked(seconds, count, steps)
