"""`nanok3 bench layer | step`: layers of real size on a GPU, as one rank of many, random weights.

The rank runs alone: what its peers would send stands in the whole buffers, as random numbers, so
that every byte of its own share is read and routing spreads over all experts. Values come first: a
layer of each variant against the reference in float32, with torch in bf16 as the yardstick; when a
variant errs more than twice as much there is no figure for it. Then the variants take turns, each
as one CUDA graph; figures are medians with the spread.

    chain     one launch an op (`KERNELS`), programmatic dependent launch
    plain     the same graph with full dependencies in place of programmatic ones
    mega      one launch (`MEGA`)
    torch     the reference ops in bf16 by torch: cuBLAS and plain kernels, experts dense
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache, allocate_cache
from nanok3.cards import CARDS
from nanok3.config import ModelConfig, Shard
from nanok3.count import count_step, total
from nanok3.kernel_ops import Kernels
from nanok3.kernels.mega.sizes import PASS
from nanok3.mega_ops import Mega
from nanok3.ops import REFERENCE, Ops
from nanok3.rank_weights import packed_ends, packed_layer, plain_layer
from nanok3.step import Buffers, Step, allocate_buffers
from nanok3.weights import LayerWeights, Weights

STREAM_BYTES_PER_S = CARDS["h200"].bandwidth  # the floor
BLOCK_SIZE = 64
REPEATS = 15
SEED = 0
ALLOWED = 2.0  # times torch's own error in bf16


@dataclass(frozen=True)
class Case:
    """What runs: some layers of a rank, `num_reqs` requests of `num_rows` rows each."""

    layers: tuple[int, ...]  # numbers, of one res_block
    tp: int
    rank: int
    num_reqs: int
    num_rows: int
    context: int  # tokens cached, these rows included

    @property
    def tokens(self) -> int:
        return self.num_reqs * self.num_rows


@dataclass(frozen=True)
class Figure:
    """One variant of one case; times are of a layer, or of a step."""

    variant: str
    us: float
    least_us: float
    most_us: float
    gbytes: float  # that must be read, by COUNT, with as many experts as were chosen
    share: float  # of the floor at STREAM_BYTES_PER_S
    launches: float
    error: float | None  # relative L2 to float32, where it was checked


@dataclass(frozen=True)
class Report:
    what: str
    case: Case
    device: str
    torch: str
    date: str
    distinct_experts: float
    torch_error: float | None
    figures: tuple[Figure, ...]
    refused: dict[str, str]  # variant -> why there is no figure

    def table(self) -> str:
        c = self.case
        lines = [
            f"{self.what}: rank {c.rank} of {c.tp}, {c.num_reqs} x {c.num_rows} rows, context "
            f"{c.context}, {self.distinct_experts:.1f} distinct experts; {self.device}, torch "
            f"{self.torch}, {self.date}; alone (no communication), no sampling",
            f"{'variant':8} {'us':>9} {'(least .. most)':>21} {'of floor':>8} {'GB/s':>6} "
            f"{'launches':>8} {'error':>9}",
        ]
        for f in self.figures:
            error = "" if f.error is None else f"{f.error:9.2e}"
            lines.append(
                f"{f.variant:8} {f.us:9.2f} {f'({f.least_us:.2f} .. {f.most_us:.2f})':>21} "
                f"{f.share:8.1%} {f.gbytes * 1e6 / f.us:6.0f} {f.launches:8.2f} {error:>9}"
            )
        lines += [f"{name:8} no figure: {why}" for name, why in self.refused.items()]
        if self.torch_error is not None:
            lines.append(f"torch's own error in bf16: {self.torch_error:.2e}")
        return "\n".join(lines)

    def json(self) -> str:
        return json.dumps({"bench": self.what} | asdict(self))


# ---- what a case runs on ----


@dataclass
class World:
    """Buffers, caches and integers of a case, and how they were at the start."""

    step: Step
    buf: Buffers
    cache: Cache
    saved: list[tuple[Tensor, Tensor]]

    def restore(self) -> None:
        for tensor, value in self.saved:
            tensor.copy_(value)


def make_world(
    config: ModelConfig, case: Case, device: str, dtype: torch.dtype = torch.bfloat16
) -> World:
    """Random but the same for every dtype, up to rounding."""
    shard, generator = Shard(case.rank, case.tp), torch.Generator(device=device)
    generator.manual_seed(SEED)
    blocks = -(-case.context // BLOCK_SIZE)
    num_blocks = case.num_reqs * blocks + 1
    cache = allocate_cache(config, case.num_reqs + 1, num_blocks, BLOCK_SIZE, dtype, device, shard)
    buf = allocate_buffers(config, case.tokens, case.tokens, dtype, device, shard)

    def fill(tensor: Tensor, std: float) -> None:
        for part in tensor.split(1):  # so that no large random tensor is made beside it
            values = torch.empty(part.shape, dtype=torch.float32, device=device)
            part.copy_(values.normal_(0.0, std, generator=generator).bfloat16())

    assert isinstance(buf.streams, Tensor)
    for tensor, std in (
        *((buf.streams, 1.0), (buf.delta, 0.3), (buf.router_logits, 1.0), (buf.latent, 1.0)),
        *((cache.conv_state, 1.0), (cache.state, 0.1), (cache.latent, 1.0)),
    ):
        fill(tensor, std)
    integers: dict[str, Any] = {"dtype": torch.int64, "device": device}
    first = case.context - case.num_rows
    positions = torch.arange(first, case.context, **integers).repeat(case.num_reqs)
    table = 1 + torch.randperm(num_blocks - 1, generator=generator, device=device)
    table = table.view(case.num_reqs, blocks).contiguous()
    owner = torch.arange(case.num_reqs, **integers).repeat_interleave(case.num_rows)
    slots = table[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    step = Step(
        input_ids=torch.zeros(case.tokens, **integers),
        positions=positions,
        slot_mapping=slots,
        block_table=table,
        state_slots=torch.arange(1, case.num_reqs + 1, **integers),
        logit_rows=torch.arange(case.tokens, **integers),
        block_size=BLOCK_SIZE,
    )
    changed = [buf.streams, buf.delta, buf.router_logits, buf.latent]
    changed += [cache.conv_state, cache.state]
    return World(step, buf, cache, [(t, t.clone()) for t in changed])


def run_layers(
    config: ModelConfig,
    numbers: Sequence[int],
    layers: Sequence[LayerWeights],
    world: World,
    ops: Ops,
) -> None:
    for i, layer in zip(numbers, layers, strict=True):
        model.one_layer(config, i, layer, world.cache, world.step, world.buf, ops)


def make_mega(
    config: ModelConfig, case: Case, numbers: tuple[int, ...], w: Weights, world: World, whole: bool
) -> Mega:
    blocks = world.step.block_table.shape[1]
    shard = Shard(case.rank, case.tp)
    return Mega(
        *(config, w, world.cache, BLOCK_SIZE, blocks), shard=shard, whole=whole, layers=numbers
    )


# ---- values ----


def outcome(config: ModelConfig, case: Case, i: int, world: World) -> Tensor:
    """What a layer leaves, as one vector: this rank's columns of delta, the stream it added to, and
    its states."""
    k = config.kda_layer_ids.index(i) if config.is_kda(i) else None
    streams = world.buf.streams[i // config.attn_res_block_size + 1]
    parts = [world.buf.delta_part, streams]
    if k is not None:
        parts += [world.cache.state[k, 1:], world.cache.conv_state[k, 1:]]
    return torch.cat([p.float().flatten() / p.float().norm() for p in parts])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def check_layer(
    config: ModelConfig, case: Case, variants: Sequence[str], device: str
) -> tuple[dict[str, float], float, float]:
    """-> error of each variant, torch's in bf16, and distinct experts of the reference."""
    i, shard = case.layers[0], Shard(case.rank, case.tp)
    truth = make_world(config, case, device, torch.float32)
    run_layers(
        config,
        (i,),
        (plain_layer(config, shard, device, torch.float32, SEED, i),),
        truth,
        REFERENCE,
    )
    right = outcome(config, case, i, truth)
    distinct = len(truth.buf.topk_ids.unique())
    del truth
    torch.cuda.empty_cache()
    world = make_world(config, case, device)
    run_layers(
        config,
        (i,),
        (plain_layer(config, shard, device, torch.bfloat16, SEED, i),),
        world,
        REFERENCE,
    )
    torch_error = relative(outcome(config, case, i, world), right)
    packed = packed_layer(config, shard, device, SEED, i)
    errors = {}
    for variant in variants:
        world.restore()
        if variant == "mega":
            w = packed_ends(config, shard, device, SEED, (packed,))
            mega = make_mega(config, case, (i,), w, world, False)
            mega.run(world.step, world.buf)
            mega.check()
        else:
            ops = Kernels(config, case.tokens, device, shard).record()
            run_layers(config, (i,), (packed,), world, ops)
        torch.cuda.synchronize()
        errors[variant] = relative(outcome(config, case, i, world), right)
    return errors, torch_error, distinct


# ---- time ----


def captured(run: Callable[[], None], full: bool = False) -> tuple[torch.cuda.CUDAGraph, int]:
    """-> the graph, and how many kernels it launches; full: programmatic edges made full ones."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    nodes = edit_edges(graph.raw_cuda_graph(), full)
    graph.instantiate()
    return graph, nodes


def edit_edges(handle: int, full: bool) -> int:
    """Counts nodes; `full`: every programmatic edge is replaced by a full one."""
    from cuda.bindings import runtime as cuda  # type: ignore[import-untyped]

    def ok(result: Any) -> Any:
        assert result[0] == cuda.cudaError_t.cudaSuccess, result[0]
        return result[1:]

    graph = cuda.cudaGraph_t(handle)
    nodes = ok(cuda.cudaGraphGetNodes(graph, 0))[-1]
    if full:
        count = ok(cuda.cudaGraphGetEdges(graph, 0))[-1]
        begins, ends, data, count = ok(cuda.cudaGraphGetEdges(graph, count))
        ok(cuda.cudaGraphRemoveDependencies(graph, begins, ends, data, count))
        default = [cuda.cudaGraphEdgeData() for _ in range(count)]
        ok(cuda.cudaGraphAddDependencies(graph, begins, ends, default, count))
    return int(nodes)


def times_us(
    graphs: dict[str, torch.cuda.CUDAGraph], repeats: int = REPEATS
) -> dict[str, list[float]]:
    """The variants take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(repeats + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) * 1e3)
    return times


def layer_bytes(config: ModelConfig, case: Case, distinct: float) -> float:
    """That the case's layers must read and write, a layer, with that many distinct experts."""
    counts = count_step(
        config, case.num_reqs, case.num_rows, case.context, shard=Shard(case.rank, case.tp)
    )
    ours = [c for c in counts if c.layer in case.layers]
    experts = sum(
        a.nbytes for c in ours if c.op == "experts" for a in c.reads if a.kind == "weight"
    )
    all_ = total(ours)
    expected = config.num_experts * (
        1 - (1 - config.num_experts_per_token / config.num_experts) ** case.tokens
    )
    nbytes = all_.weight_bytes + all_.cache_read_bytes + all_.cache_write_bytes
    return (nbytes + experts * (distinct / expected - 1)) / len(case.layers)


def figures_of(
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]],
    units: int,
    nbytes: float,
    errors: dict[str, float],
) -> tuple[Figure, ...]:
    measured = times_us({name: graph for name, (graph, _) in graphs.items()})
    made = []
    for name, (_, nodes) in graphs.items():
        us = [t / units for t in measured[name]]
        made.append(
            Figure(
                variant=name,
                us=median(us),
                least_us=min(us),
                most_us=max(us),
                gbytes=nbytes / 1e9,
                share=nbytes / STREAM_BYTES_PER_S / (median(us) / 1e6),
                launches=nodes / units,
                error=errors.get(name),
            )
        )
    return tuple(made)


def bench_layer(
    config: ModelConfig,
    case: Case,
    variants: Sequence[str],
    device: str = "cuda",
    check: bool = True,
) -> Report:
    """Layers of one kind; a figure is of one layer."""
    shard, distinct = Shard(case.rank, case.tp), 0.0
    errors: dict[str, float] = {}
    torch_error: float | None = None
    refused: dict[str, str] = {}
    own = [v for v in variants if v in ("chain", "mega")]
    if "mega" in own and case.tokens > PASS:
        own.remove("mega")
        refused["mega"] = f"{case.tokens} rows; it takes up to {PASS}"
    with torch.no_grad():
        if check:
            errors, torch_error, distinct = check_layer(config, case, own, device)
            for name in own:
                if not errors[name] <= ALLOWED * torch_error:
                    refused[name] = f"error {errors[name]:.2e}, torch's {torch_error:.2e}"
        torch.cuda.empty_cache()
        world = make_world(config, case, device)
        packed = [packed_layer(config, shard, device, SEED, i) for i in case.layers]
        ops = Kernels(config, case.tokens, device, shard).record()
        runs: dict[str, Callable[[], None]] = {}
        runs["chain"] = runs["plain"] = lambda: run_layers(config, case.layers, packed, world, ops)
        if "mega" in variants and "mega" not in refused:
            w = packed_ends(config, shard, device, SEED, tuple(packed))
            mega = make_mega(config, case, case.layers, w, world, False)
            runs["mega"] = lambda: mega.run(world.step, world.buf)
        if "torch" in variants:
            plain = [
                plain_layer(config, shard, device, torch.bfloat16, SEED, i) for i in case.layers
            ]
            runs["torch"] = lambda: run_layers(config, case.layers, plain, world, REFERENCE)
        graphs = {
            name: captured(runs[name], full=name == "plain")
            for name in variants
            if name in runs and name not in refused
        }
        nbytes = layer_bytes(config, case, distinct or 16.0 * case.tokens)
        figures = figures_of(graphs, len(case.layers), nbytes, errors)
        if "mega" in runs:
            mega.check()
    kind = "KDA" if config.is_kda(case.layers[0]) else "MLA"
    return Report(
        what=f"layer {kind}",
        case=case,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
        distinct_experts=distinct,
        torch_error=torch_error,
        figures=figures,
        refused=refused,
    )


def layers_of_kind(config: ModelConfig, kind: str) -> tuple[int, ...]:
    """MoE layers of a kind, all of one res_block in the middle of the model, and not its first."""
    size = config.attn_res_block_size
    begin = config.num_hidden_layers // 2 // size * size
    numbers = range(begin + 1, min(begin + size, config.num_hidden_layers))
    return tuple(i for i in numbers if config.is_moe(i) and config.is_kda(i) == (kind == "kda"))


def bench_step(
    config: ModelConfig, case: Case, variants: Sequence[str], device: str = "cuda"
) -> Report:
    """All layers, embedding and head, of one rank; a figure is of one step. Values are checked a
    layer at a time by `bench_layer`; here chain and mega must agree."""
    shard = Shard(case.rank, case.tp)
    with torch.no_grad():
        numbers = tuple(range(config.num_hidden_layers))
        layers = tuple(packed_layer(config, shard, device, SEED, i) for i in numbers)
        w = packed_ends(config, shard, device, SEED, layers)
        world = make_world(config, case, device)
        ops = Kernels(config, case.tokens, device, shard).record()
        runs: dict[str, Callable[[], None]] = {}
        runs["chain"] = runs["plain"] = lambda: model.forward(
            config, w, world.cache, world.step, world.buf, ops
        )
        logits = {}
        mega = None
        if "mega" in variants:
            mega = made = make_mega(config, case, numbers, w, world, True)
            runs["mega"] = lambda: made.run(world.step, world.buf)
        for name in ("chain", "mega"):
            if name in runs:
                world.restore()
                runs[name]()
                torch.cuda.synchronize()
                logits[name] = world.buf.logits_part.clone()
        if mega is not None:
            mega.check()
        errors = {}
        if len(logits) == 2:
            errors["mega"] = relative(logits["mega"], logits["chain"])
        distinct = float(len(world.buf.topk_ids.unique()))
        graphs = {name: captured(runs[name], name == "plain") for name in variants if name in runs}
        counts = count_step(config, case.num_reqs, case.num_rows, case.context, shard=shard)
        sums = total(counts)
        nbytes = sums.weight_bytes + sums.cache_read_bytes + sums.cache_write_bytes
        figures = figures_of(graphs, 1, nbytes, errors)
        if mega is not None:
            mega.check()
    return Report(
        what="step",
        case=case,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
        distinct_experts=distinct,
        torch_error=None,
        figures=figures,
        refused={},
    )
