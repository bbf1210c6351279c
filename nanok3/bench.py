"""`nanok3 bench decode`: tokens a second while requests decode, beside what memory would allow.

Values come first: a greedy reply must agree with the logits of the prefill, or `CheckFailed` is
raised and there is no figure. Then come repeats in which the batch sizes take turns, so that a
change of the machine's load meets all of them. Prompts and a warm-up run are not in the times; all
that a step does is, sampling and text included. The bytes are COUNT's, for experts that tokens pick
uniformly.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from nanok3.config import EngineConfig, ModelConfig
from nanok3.count import count_step, total
from nanok3.engine import Engine
from nanok3.runner import DTYPES
from nanok3.sampling import SamplingParams

CHECKED_TOKENS = 16
# A greedy id may differ from the prefill's only where the two best logits nearly tie.
LARGEST_GAP = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 0.5}
WARM_UP_STEPS = 4
SMALLEST_READ = 256 * 2**20  # bytes
TIMES_CACHE = 4  # a buffer this many times the last cache comes from memory


class CheckFailed(RuntimeError):
    """The engine's values are wrong, so no speed is reported."""


@dataclass(frozen=True)
class Bandwidth:
    """How fast the machine reads memory, by summing a large float32 buffer, the best of several."""

    bytes_per_s: float
    buffer_bytes: int
    cache_bytes: int  # the last cache; 0 where the system does not say


@dataclass(frozen=True)
class Batch:
    """Decode steps with `num_reqs` requests, one figure a repeat."""

    num_reqs: int
    tokens_per_s: tuple[float, ...]
    context: int  # tokens a request has cached, the mean over steps and requests
    step_bytes: float  # weights, states and latents that a step must read

    @property
    def median_tokens_per_s(self) -> float:
        return median(self.tokens_per_s)

    @property
    def bytes_per_s(self) -> float:
        return self.step_bytes * self.median_tokens_per_s / self.num_reqs


@dataclass(frozen=True)
class Report:
    """What was measured, where and how; `table` for people, `json` (one line) for programs."""

    model: str
    device: str
    dtype: str
    threads: int
    machine: str
    torch: str
    date: str
    prompt_tokens: int
    decode_tokens: int
    largest_gap: float  # of the check: the prefill's best logit above that of the reply's id
    bandwidth: Bandwidth
    batches: tuple[Batch, ...]

    def table(self) -> str:
        memory, repeats = self.bandwidth, len(self.batches[0].tokens_per_s)
        lines = [
            f"decode {self.model}: {self.dtype} on {self.device}, threads {self.threads}, "
            f"{self.machine}, torch {self.torch}, {self.date}",
            f"{self.decode_tokens} steps after {self.prompt_tokens} prompt tokens, "
            f"median of {repeats} (least .. most)",
            f"values checked: greedy ids are the prefill's within a logit gap of "
            f"{self.largest_gap:.1e}",
            f"memory reads {memory.bytes_per_s / 1e9:.1f} GB/s "
            f"(sum over {memory.buffer_bytes / 2**20:.0f} MiB)",
            "",
            f"{'requests':>8} {'tokens/s':>9} {'(least .. most)':>19} {'ms/step':>8} "
            f"{'MB/step':>8} {'GB/s':>6} {'of memory':>10}",
        ]
        for b in self.batches:
            spread = f"({min(b.tokens_per_s):.1f} .. {max(b.tokens_per_s):.1f})"
            lines.append(
                f"{b.num_reqs:8d} {b.median_tokens_per_s:9.1f} {spread:>19} "
                f"{1e3 * b.num_reqs / b.median_tokens_per_s:8.2f} {b.step_bytes / 1e6:8.1f} "
                f"{b.bytes_per_s / 1e9:6.2f} {b.bytes_per_s / memory.bytes_per_s:10.1%}"
            )
        if any(b.step_bytes < memory.cache_bytes for b in self.batches):
            size = f"{memory.cache_bytes / 2**20:.0f} MiB"
            lines.append(f"A step of less than {size} may be read from the last cache.")
        return "\n".join(lines)

    def json(self) -> str:
        record = asdict(self)
        for batch, entry in zip(self.batches, record["batches"], strict=True):
            entry["median_tokens_per_s"] = batch.median_tokens_per_s
            entry["share_of_bandwidth"] = batch.bytes_per_s / self.bandwidth.bytes_per_s
        return json.dumps({"bench": "decode"} | record)


def bench_decode(
    settings: EngineConfig,
    model_dir: Path,
    requests: tuple[int, ...] = (1, 8),
    prompt_tokens: int = 64,
    decode_tokens: int = 64,
    repeats: int = 5,
) -> Report:
    """Loads a checkpoint, checks it and measures it; `requests` lists the batch sizes.

    The caches are made to fit, whatever `settings` says of them. Raises what `Engine.load` raises,
    ValueError for a figure below 1, and CheckFailed.
    """
    if not requests or min(*requests, prompt_tokens, decode_tokens, repeats) < 1:
        raise ValueError("requests, prompt tokens, decode tokens and repeats must be at least 1")
    # While the last prompt is computed, the first request decodes already.
    chunks = -(-prompt_tokens // settings.prefill_chunk)
    most_output = max(requests) * chunks + max(decode_tokens, WARM_UP_STEPS, CHECKED_TOKENS) + 1
    settings = replace(
        settings,
        max_num_reqs=max(requests),
        num_blocks=max(requests) * -(-(prompt_tokens + most_output) // settings.block_size),
        num_snapshots=0,
    )
    bandwidth = read_bandwidth(settings.device)
    engine = Engine.load(model_dir, device=settings.device, dtype=settings.dtype, settings=settings)
    if prompt_tokens + most_output > engine.max_context:
        raise ValueError(
            f"{prompt_tokens} prompt and {decode_tokens} decode tokens, with what the start of "
            f"{max(requests)} requests takes, are more than the {engine.max_context} tokens of "
            f"this model's context; ask for fewer"
        )
    gap = check_values(engine, make_prompt(engine.config, prompt_tokens, seed=0))
    for num_reqs in requests:
        measure(engine, num_reqs, prompt_tokens, most_output, WARM_UP_STEPS)
    runs = [
        [measure(engine, n, prompt_tokens, most_output, decode_tokens) for n in requests]
        for _ in range(repeats)
    ]
    batches = []
    for num_reqs, column in zip(requests, zip(*runs, strict=True), strict=True):
        context = column[0][1]
        nbytes = step_bytes(engine.config, num_reqs, context, settings.dtype)
        batches.append(Batch(num_reqs, tuple(rate for rate, _ in column), context, nbytes))
    return Report(
        model=Path(model_dir).name,
        device=settings.device,
        dtype=settings.dtype,
        threads=torch.get_num_threads(),
        machine=machine_name(settings.device),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        largest_gap=gap,
        bandwidth=bandwidth,
        batches=tuple(batches),
    )


def read_bandwidth(device: str, repeats: int = 7) -> Bandwidth:
    """With torch's threads, all of them."""
    cache = last_cache_bytes()
    size = max(SMALLEST_READ, TIMES_CACHE * cache)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return Bandwidth(size / best, size, cache)


def last_cache_bytes() -> int:
    """Of the first processor, where Linux tells; else 0."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")  # such as 32768K
    return max((int(size.read_text().strip().rstrip("K")) * 1024 for size in sizes), default=0)


def make_prompt(config: ModelConfig, length: int, seed: int) -> list[int]:
    """Random ids: what a step costs hardly depends on them, but which experts it needs does."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (length,), generator=generator).tolist()


def check_values(engine: Engine, prompt: list[int]) -> float:
    """Decodes greedily and returns the largest gap between the prefill's best logit and the one of
    the id that decoding chose; raises CheckFailed if that is no near tie."""
    result = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=CHECKED_TOKENS))
    if result.finish_reason == "error":
        raise CheckFailed(f"the reply that is checked ended in an error: {result.error}")
    reply = torch.tensor(result.token_ids, device=engine.settings.device)
    logits = engine.logits([*prompt, *result.token_ids])[len(prompt) - 1 : -1]  # [reply, V]
    gaps = logits.amax(-1) - logits.gather(1, reply[:, None])[:, 0]
    worst, allowed = float(gaps.max()), LARGEST_GAP[engine.settings.dtype]
    if not worst <= allowed:  # NaN too
        place = int(gaps.nan_to_num(nan=float("inf")).argmax())
        raise CheckFailed(
            f"greedy decoding chose id {int(reply[place])} at output {place}, whose logit in the "
            f"prefill is {float(gaps[place]):.3g} below the best (allowed: {allowed:g}); no speed "
            f"is reported for wrong values"
        )
    return worst


def measure(
    engine: Engine, num_reqs: int, prompt_tokens: int, most_output: int, num_steps: int
) -> tuple[float, int]:
    """(Tokens a second over `num_steps` steps of `num_reqs` requests, their mean cached length).

    most_output: what the cache has room for, enough for the steps before the last prompt is done.
    """
    params = SamplingParams(temperature=0.0, max_tokens=most_output)
    requests = []
    for seed in range(num_reqs):
        request = engine.submit(make_prompt(engine.config, prompt_tokens, seed), params)
        request.stop_ids = frozenset()  # the end of a message would end the measurement
        requests.append(request)
    try:
        while any(request.num_output == 0 for request in requests):
            engine.step()
        before = sum(len(r.ids) for r in requests)
        start = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        seconds = time.perf_counter() - start
        after = sum(len(r.ids) for r in requests)
        if after - before != num_steps * num_reqs:
            raise CheckFailed(f"a request ended early: {[r.error for r in requests if r.error]}")
        return (after - before) / seconds, round((before + after) / 2 / num_reqs)
    finally:
        for request in requests:
            engine.cancel(request)


def step_bytes(config: ModelConfig, num_reqs: int, context: int, dtype: str) -> float:
    """Weights, states and latents that one decode step reads; this engine unpacks its experts."""
    kind = DTYPES[dtype]
    counts = count_step(
        config, num_reqs, 1, context, dtype=kind, expert_bytes_per_value=kind.itemsize
    )
    sums = total(counts)
    return sums.weight_bytes + sums.cache_read_bytes


def machine_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
