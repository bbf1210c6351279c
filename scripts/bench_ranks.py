"""Virtual ranks on one GPU: values over many steps, and what the exchanges cost.

    python scripts/bench_ranks.py steps [--model DIR] [--ranks 2] [--steps 10000] [--seed 0]
    python scripts/bench_ranks.py layers [--ranks 2 4 8] [--experts 32] [--layers 8]
    python scripts/bench_ranks.py reduce [--ranks 2 4 8]

steps   A model (one like it where the kernels cannot split its dense width), with changing batches,
        all ranks in one launch of the persistent kernel. All ranks must have the same bits, two
        runs from the same caches too (a run is one order of things out of many), and in some steps
        those of the chain. Against one rank a row may differ where two experts nearly tie, as in
        `soak_mega.py`.
layers  Layers of K3's own widths, with few experts, random weights, one row. Values as above; then
        the time of a step of all ranks together, beside that of the same ranks as programs of
        their own, which exchange nothing, on as many streams: the difference, a layer, is what the
        exchanges cost here. NVLink is not in it.
reduce  Sums of 7168 bf16 over ranks in a loop inside one kernel, by the functions that both
        readings use.

Prints what it finds; exits with 1 if values are wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from soak_mega import BLOCK, BLOCKS, FAR, MANY, MODEL, RECOMPOSE, REQUESTS, WRONG, Batch
from torch import Tensor

from nanok3 import model
from nanok3.cache import Cache, allocate_cache
from nanok3.checkpoint import Checkpoint
from nanok3.comm.words import await_words, packed, send, sum_of_ranks, virtual_peers
from nanok3.config import K3, WHOLE, ModelConfig, Shard, load_config
from nanok3.dsl import (
    address,
    arch_of,
    compile_kernel,
    launch,
    ld_global_i64,
    ld_global_u32x2,
    st_global_u32x2,
)
from nanok3.kernel_ops import Kernels
from nanok3.kernel_ranks import ChainRanks, most_items
from nanok3.mega_ops import MAX_ROWS, Mega
from nanok3.mega_ranks import MegaRanks, gathered
from nanok3.packing import empty_weights, layout_problems, packed_weights
from nanok3.random_weights import random_shard
from nanok3.rank_weights import unpacked
from nanok3.step import Buffers, Step, allocate_buffers
from nanok3.weight_table import Filler, expected_tensors, table, to_checkpoint
from nanok3.weights import Weights

DEVICE = "cuda"
CHAIN_EVERY = 50  # steps
Fill = Callable[[Filler], None]


# ---- models ----


def weights_of(config: ModelConfig, shard: Shard, fill: Fill) -> Weights:
    places = empty_weights(config, shard, DEVICE)
    filler = Filler(config, torch.bfloat16, DEVICE, shard, places.puts)
    fill(filler)
    return packed_weights(config, (places.packed | filler.finish()).__getitem__, shard)


def from_directory(path: Path, config: ModelConfig) -> Fill:
    checkpoint = Checkpoint.open(path, {"mxfp4": expected_tensors(config)})
    return lambda filler: checkpoint.load(checkpoint.in_file_order(checkpoint.specs), filler.take)


def random_model(config: ModelConfig, seed: int) -> Fill:
    """A whole model, which ranks take their parts of."""
    fields = random_shard(config, WHOLE, DEVICE, torch.bfloat16, seed)
    get = unpacked(fields, torch.bfloat16)
    made = {field.name: get(field.name).float() for field in table(config)}
    tensors: Iterable[tuple[str, Tensor]] = list(to_checkpoint(config, made))

    def fill(filler: Filler) -> None:
        for name, tensor in tensors:
            filler.take(name, tensor)

    return fill


def wider(config: ModelConfig, size: int) -> ModelConfig:
    """With a dense width that the kernels can split."""
    unit = 32 * size
    width = -(-config.intermediate_size // unit) * unit
    print(f"{size} ranks: random weights, a dense width of {width} for {config.intermediate_size}")
    return replace(config, intermediate_size=width)


def of_rank(config: ModelConfig, cache: Cache, shard: Shard) -> Cache:
    """What a rank has of the whole model's cache."""
    kda = config.linear_attn_config
    heads = shard.slice(kda.num_heads)
    by_kind = cache.conv_state.unflatten(-1, (3, kda.num_heads, kda.head_dim))
    return Cache(
        conv_state=by_kind[..., heads, :].flatten(-3).clone(),
        state=cache.state[:, :, heads].clone(),
        latent=cache.latent.clone(),
    )


class World:
    """One rank and P ranks of a model, with the same caches."""

    def __init__(self, config: ModelConfig, size: int, fill: Fill) -> None:
        self.config, self.shards = config, [Shard(rank, size) for rank in range(size)]
        blocks = REQUESTS * BLOCKS + 1
        cut = REQUESTS + 1, blocks, BLOCK, torch.bfloat16, DEVICE
        self.cache = allocate_cache(config, *cut)
        for tensor in vars(self.cache).values():
            tensor.zero_()
        self.caches = [of_rank(config, self.cache, shard) for shard in self.shards]
        self.weights = [weights_of(config, shard, fill) for shard in self.shards]
        self.ranks = MegaRanks(config, self.weights, self.caches, BLOCK, BLOCKS)
        self.one = Mega(config, weights_of(config, WHOLE, fill), self.cache, BLOCK, BLOCKS)
        self.chain = ChainRanks(size, most_items(config, size, MAX_ROWS), DEVICE)
        kernels = [Kernels(config, MAX_ROWS, DEVICE, shard).record() for shard in self.shards]
        self.ops = [self.chain.ops(s, ops) for s, ops in zip(self.shards, kernels, strict=True)]
        self._buffers: dict[tuple[int, Shard], Buffers] = {}

    def buffers(self, rows: int, shard: Shard) -> Buffers:
        """Always the same ones, with nothing of an earlier step in what is compared."""
        if (rows, shard) not in self._buffers:
            made = allocate_buffers(self.config, rows, rows, torch.bfloat16, DEVICE, shard)
            self._buffers[rows, shard] = made
        buf = self._buffers[rows, shard]
        buf.logits.fill_(torch.nan)
        buf.streams.fill_(torch.nan)  # type: ignore[union-attr]
        return buf

    def restore(self) -> None:
        """The ranks' caches from the whole one."""
        for cache, shard in zip(self.caches, self.shards, strict=True):
            for name, tensor in vars(of_rank(self.config, self.cache, shard)).items():
                getattr(cache, name).copy_(tensor)

    def together(self, step: Step, by_chain: bool = False) -> list[Tensor]:
        """-> streams and logits of each rank, one behind the other."""
        self.restore()
        rows = len(step.positions)
        buffers = [self.buffers(rows, shard) for shard in self.shards]
        if by_chain:

            def forward(shard: Shard) -> None:
                of = self.weights[shard.rank], self.caches[shard.rank]
                model.forward(self.config, *of, step, buffers[shard.rank], self.ops[shard.rank])

            self.chain.run(forward)
            failures = self.chain.failures()
            assert not failures, failures
        else:
            self.ranks.run(step, buffers)
            self.ranks.check()
            parts = [buf.logits_part.clone() for buf in buffers]
            gathered(parts, out=[buf.logits for buf in buffers])
        real = step.positions >= 0
        return [
            torch.cat([buf.logits[real].flatten(), buf.streams[:, real].flatten().float()])  # type: ignore[call-overload]
            for buf in buffers
        ]

    def alone(self, step: Step) -> Tensor:
        """-> logits of one rank; the caches go on."""
        buf = self.buffers(len(step.positions), WHOLE)
        self.one.run(step, buf)
        self.one.check()
        return buf.logits[step.positions >= 0]


# ---- values ----


def check_steps(world: World, num_steps: int, seed: int, one_row: bool = False) -> bool:
    rng = random.Random(seed)
    batch, rows, far, worst = Batch([0], 1), 0, 0, 0.0
    started = time.monotonic()
    for number in range(num_steps):
        if rng.random() < RECOMPOSE and not one_row:
            batch.recompose(rng)
        for r in batch.requests:
            if batch.lengths[r] + batch.rows > BLOCKS * BLOCK or rng.random() < 0.002:
                batch.lengths[r] = 0
                world.cache.state[:, 1 + r].zero_()
                world.cache.conv_state[:, 1 + r].zero_()
        step = batch.step(world.config.vocab_size, rng)
        runs = [world.together(step), world.together(step)]
        if not all(bits.equal(runs[0][0]) for run in runs for bits in run):
            print(f"step {number}: ranks or runs differ; {batch}")
            return False
        if number % CHAIN_EVERY == 0:
            by_chain = world.together(step, by_chain=True)
            if not all(bits.equal(by_chain[0]) for bits in by_chain):
                print(f"step {number}: the chain's ranks differ; {batch}")
                return False
        right = world.alone(step)
        found = runs[0][0][: right.numel()].view_as(right)
        error = (found - right).norm(dim=-1) / right.norm(dim=-1)  # [rows]
        top = float(error.max())
        if not top < WRONG:
            print(f"step {number}: logits differ from one rank's by {top:.3f}; {batch}")
            return False
        far, rows, worst = far + int((error > FAR).sum()), rows + len(error), max(worst, top)
        for r in batch.requests:
            batch.lengths[r] += batch.rows
        if (number + 1) % 1000 == 0:
            print(f"{number + 1} steps, {far} of {rows} rows beyond {FAR}", flush=True)
    print(
        f"{len(world.shards)} ranks, {num_steps} steps, {rows} rows, "
        f"{time.monotonic() - started:.0f} s: the same bits in all ranks; {far} rows beyond {FAR} "
        f"of one rank's, at most {worst:.3f}"
    )
    return far * 1000 <= MANY * max(rows, 1000)


# ---- time of layers ----


def shrunk(num_layers: int, num_experts: int) -> ModelConfig:
    """K3's widths: a dense layer, then experts, every fourth layer MLA."""
    numbers = range(1, num_layers + 1)
    linear = replace(
        K3.linear_attn_config,
        full_attn_layers=tuple(i for i in numbers if i % 4 == 0),
        kda_layers=tuple(i for i in numbers if i % 4),
    )
    return replace(
        K3,
        num_hidden_layers=num_layers,
        linear_attn_config=linear,
        num_experts=num_experts,
        vocab_size=4096,
    )


def us_of(runs: dict[str, Callable[[], None]], repeats: int = 15) -> dict[str, list[float]]:
    """The variants take turns, each as a graph."""
    graphs = {}
    for name, run in runs.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 2):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return times


def time_layers(world: World) -> None:
    config, size = world.config, len(world.shards)
    step = Batch([0], 1, [300] * REQUESTS).step(config.vocab_size, random.Random(1))
    world.restore()
    buffers = [world.buffers(1, shard) for shard in world.shards]
    apart = [
        Mega(config, w, cache, BLOCK, BLOCKS, shard=shard, share=size)
        for shard, w, cache in zip(world.shards, world.weights, world.caches, strict=True)
    ]
    for buf in buffers:  # what peers would have sent
        buf.router_logits.normal_()
        buf.latent.normal_()
    streams = [torch.cuda.Stream() for _ in apart]

    def alone() -> None:
        main = torch.cuda.current_stream()
        for mega, buf, stream in zip(apart, buffers, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                mega.run(step, buf)
        for stream in streams:
            main.wait_stream(stream)

    times = us_of({"together": lambda: world.ranks.run(step, buffers), "apart": alone})
    world.ranks.check()
    for mega in apart:
        mega.check()
    middle = {name: median(t) for name, t in times.items()}
    layers = config.num_hidden_layers
    spread = ", ".join(f"{n} {min(t):.1f} .. {max(t):.1f}" for n, t in times.items())
    print(
        f"{size} ranks of {layers} layers, one row: together {middle['together']:.1f} us, apart "
        f"{middle['apart']:.1f} (least .. most: {spread}): exchanges "
        f"{(middle['together'] - middle['apart']) / layers:+.2f} us a layer"
    )


# ---- time of a sum ----


class Sums:
    """`rounds` sums of 7168 bf16 over ranks, each of the one before, halved."""

    CTAS, THREADS, COLUMNS = 7, 256, 7168

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    @cute.jit
    def __call__(self, data: Int64, bases: Int64, health: Int64, rounds: Int32, stream):  # type: ignore[no-untyped-def]
        self.kernel(data, bases, health, rounds).launch(
            grid=(self.CTAS, self.ranks, 1),
            block=(self.THREADS, 1, 1),
            stream=stream,
            cooperative=True,
        )

    @cute.kernel
    def kernel(self, data: Int64, bases: Int64, health: Int64, rounds: Int32):  # type: ignore[no-untyped-def]
        tid, _, _ = cute.arch.thread_idx()
        cta, rank, _ = cute.arch.block_idx()
        item = cta * self.THREADS + tid  # 4 columns
        at = data + Int64(rank * (2 * self.COLUMNS) + item * 8)
        boxes = [ld_global_i64(bases + Int64(8 * r)) for r in range(self.ranks)]
        mine = ld_global_i64(bases + Int64(rank) * 8)
        row = 4 * self.COLUMNS  # bytes of a message
        words = cute.make_rmem_tensor((2,), Uint32)
        first = ld_global_u32x2(at)
        words[0], words[1] = first[0], first[1]
        for i in cutlass.range(rounds, unroll=1):
            epoch = Uint32(i + 1)
            place = Int64((i % 2) * (self.ranks * row) + item * 16)
            for r in cutlass.range_constexpr(self.ranks):
                to = boxes[r] + place + Int64(rank * row)
                send(to, words[0], words[1], epoch, "gpu")
            sources = [mine + place + Int64(r * row) for r in range(self.ranks)]
            found = await_words(
                *(sources, [Int32(r) for r in range(self.ranks)], epoch, 2, health, 1, cta),
                *(tid & 31, 1 << 22, "gpu"),
            )
            total = [v * (1.0 / self.ranks) for v in sum_of_ranks(found, self.ranks)]
            low, high = packed(total)
            words[0] = low
            words[1] = high
        st_global_u32x2(at, (words[0], words[1]))


def sums_by_torch(data: Tensor, rounds: int) -> Tensor:
    """data [P, 7168] bf16 on a CPU."""
    for _ in range(rounds):
        total = data[0].float()
        for part in data[1:]:
            total = total + part.float()
        data = (total / len(data)).bfloat16().expand(len(data), -1)
    return data


def time_reduce(size: int) -> bool:
    """Long loops minus short ones."""
    args = (Int64(0), Int64(0), Int64(0), Int32(1), make_fake_stream())
    kernel = compile_kernel(Sums(size), args, arch_of(0))
    start = torch.randn(size, Sums.COLUMNS).bfloat16()
    health = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    peers = virtual_peers(size, 2 * size * 4 * Sums.COLUMNS, DEVICE)

    def run(rounds: int) -> tuple[float, Tensor]:
        for own in peers:
            own.mail.zero_()
        data = start.cuda()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch(kernel, address(data), address(peers[0].bases), address(health), rounds)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3, data.cpu()

    right = all(run(rounds)[1].equal(sums_by_torch(start, rounds)) for rounds in (1, 2, 9))
    times = [(run(2200)[0] - run(200)[0]) / 2000 for _ in range(15)]
    given_up = bool(health[0])
    print(
        f"{size} ranks: a sum of {Sums.COLUMNS} bf16 {median(times):.2f} us "
        f"({min(times):.2f} .. {max(times):.2f}); values {'right' if right else 'WRONG'}"
        f"{', a wait gave up' if given_up else ''}"
    )
    return right and not given_up


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("steps", "layers", "reduce"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    right = True
    with torch.inference_mode():
        for size in args.ranks:
            if args.what == "reduce":
                right &= time_reduce(size)
                continue
            if args.what == "steps":
                config = load_config(args.model)
                if problems := Shard(0, size).problems(config):
                    print(f"{size} ranks: {problems[0]}")
                    continue
                fill = from_directory(args.model, config)
                if layout_problems(config, Shard(0, size)):
                    config = wider(config, size)
                    fill = random_model(config, args.seed)
                world = World(config, size, fill)
                right &= check_steps(world, args.steps, args.seed)
            else:
                config = shrunk(args.layers, args.experts)
                world = World(config, size, random_model(config, args.seed))
                right &= check_steps(world, 20, args.seed, one_row=True)
                time_layers(world)
            del world
            torch.cuda.empty_cache()
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
