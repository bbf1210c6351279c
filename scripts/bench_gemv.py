"""`gemv` beside torch's product, one rank's shapes at TP16, in CUDA graphs of many matrices.

    python scripts/bench_gemv.py [JSON_FILE]

Values are checked first. Every matrix of a graph is another one (2 GB of them), so nothing is in
L2; variants take turns; medians of 15 replays with the spread, GB/s over the bytes that must be
read and the share of 4.64 TB/s.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from nanok3.kernels.gemv import gemv
from nanok3.kernels.gemv_layout import Shape, pack_gemv

STREAM_BYTES_PER_S = 4.64e12  # a bulk-copy ring on an H200
REPLAYS = 15
SITU = {"finish": "situ", "beta": 4.0, "linear_beta": 25.0}
SHAPES = {
    "in_proj": Shape(3220, 7168, 7168),
    "in_proj split 2": Shape(3220, 7168, 7168, split=2),
    "in_proj split 4": Shape(3220, 7168, 7168, split=4),
    "o_proj": Shape(7168, 768, 768),
    "latent_down": Shape(224, 7168, 7168),
    "latent_down split 4": Shape(224, 7168, 7168, split=4),
    "latent_down split 7": Shape(224, 7168, 7168, split=7),
    "shared gate_up": Shape(768, 7168, 7168, **SITU),
    "gate_up split 4": Shape(768, 7168, 7168, split=4, **SITU),
    "front split 4": Shape(1048, 7168, 7168, split=4),
    "shared down": Shape(7168, 384, 384),
    "lm_head": Shape(10240, 7168, 7168, finish="f32"),
}


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def bench(name: str, shape: Shape, tokens: int) -> dict[str, object]:
    num_bytes = 2 * shape.rows * shape.k
    count = max(4, int(2e9) // num_bytes)
    count = min(count, 64)
    weights = [
        (torch.randn(shape.rows, shape.k, device="cuda") * shape.k**-0.5).bfloat16()
        for _ in range(count)
    ]
    packed = [pack_gemv(w, situ=shape.finish == "situ") for w in weights]
    x = torch.randn(tokens, shape.k, device="cuda").bfloat16()
    dtype = torch.float32 if shape.finish == "f32" else torch.bfloat16
    out = torch.empty(tokens, shape.out_width, dtype=dtype, device="cuda")
    gemv(x, packed[0], shape, out=out)
    if shape.finish != "situ":
        right = linear(x.float(), weights[0].float())
        error = float((out.float() - right).abs().max() / right.abs().max())
        assert error < 1e-2, f"{name}: values are wrong by {error}"
    library = torch.empty(tokens, shape.rows, dtype=torch.bfloat16, device="cuda")

    def ours() -> None:
        for p in packed:
            gemv(x, p, shape, out=out)

    def torchs() -> None:
        for w in weights:
            torch.mm(x, w.t(), out=library)

    graphs = {"gemv": captured(ours), "torch.mm": captured(torchs)}
    times: dict[str, list[float]] = {key: [] for key in graphs}
    for _ in range(REPLAYS):
        for key, graph in graphs.items():
            times[key].append(replay_us(graph) / count)
    result: dict[str, object] = {"shape": name, "tokens": tokens, "bytes": num_bytes}
    for key, values in times.items():
        median = statistics.median(values)
        share = num_bytes / (median * 1e-6) / STREAM_BYTES_PER_S
        result[key] = {"us": median, "least": min(values), "most": max(values), "share": share}
        spread = f"({min(values):.2f} .. {max(values):.2f})"
        speed = f"{num_bytes / median / 1e3:7.0f} GB/s {100 * share:5.1f} %"
        print(f"{name:20} T={tokens} {key:9} {median:7.2f} us {spread} {speed}", flush=True)
    return result


def main() -> None:
    results = [bench(n, s, t) for n, s in SHAPES.items() for t in (1, 8)]
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
