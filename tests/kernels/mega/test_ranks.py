"""Virtual ranks of the persistent kernel on the emulator: steps of several ranks in one launch.

All ranks must have the same bits, and together what one rank has, within what bf16 leaves open: the
whole model in float32 is right, in bfloat16 torch it is the yardstick. Mailboxes are poisoned, so
what is used before it has come is seen in the results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import check_bf16, check_close, check_equal
from tiny import random_fields, tiny_config, tiny_weights
from torch import Tensor

pytest.importorskip("cutlass")

from ptx.instructions import Statement
from ptx.memory import Fault, lanes_of
from ptx.races import Lanes
from ptx.warp import Cluster, Warp

from kernels.mega.harness import OnEmulator, on_a_device
from kernels.mega.test_step import BLOCK, MAX_BLOCKS, filled_cache, poisoned, step_of
from nanok3.cache import Cache
from nanok3.config import Shard
from nanok3.mega_ops import MegaError
from nanok3.mega_ranks import MegaRanks, gathered
from nanok3.model import forward
from nanok3.ops import REFERENCE
from nanok3.packing import empty_weights, packed_weights
from nanok3.step import Buffers, Step
from nanok3.weight_table import Filler, to_checkpoint
from nanok3.weights import Weights

# KDA and dense, MLA and MoE, of sizes that four ranks can split; two tiles and a half of columns
# are a rank's of four
CONFIG = tiny_config(
    hidden_size=160,
    num_hidden_layers=2,
    full_attn_layers=(2,),
    kda_layers=(1,),
    num_attention_heads=4,
    num_heads=4,
    head_dim=128,
    intermediate_size=128,
    q_lora_rank=32,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    attn_res_block_size=1,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=128,
    routed_expert_hidden_size=64,
    num_shared_experts=1,
)
LIMIT = 60  # looks of a wait
ONE, MORE = 3, 9  # seeds of models of which no row nearly ties, in steps of one row and of more
F32, BF16 = torch.float32, torch.bfloat16
POISON = 0x7E  # of mailboxes: no tag, and as bf16 and float32 a large number


@functools.cache
def checkpoint(seed: int) -> list[tuple[str, Tensor]]:
    return list(to_checkpoint(CONFIG, random_fields(CONFIG, seed)))


def packed_rank(shard: Shard, seed: int) -> Weights:
    places = empty_weights(CONFIG, shard, "cpu")
    filler = Filler(CONFIG, BF16, "cpu", shard, places.puts)
    for name, tensor in checkpoint(seed):
        filler.take(name, tensor)
    return packed_weights(CONFIG, (places.packed | filler.finish()).__getitem__, shard)


def of_rank(cache: Cache, shard: Shard) -> Cache:
    """What a rank has of the whole model's cache: its heads' states, all latents."""
    kda = CONFIG.linear_attn_config
    heads = shard.slice(kda.num_heads)
    by_kind = cache.conv_state.unflatten(-1, (3, kda.num_heads, kda.head_dim))
    return Cache(
        conv_state=by_kind[..., heads, :].flatten(-3).clone(),
        state=cache.state[:, :, heads].clone(),
        latent=cache.latent.clone(),
    )


@dataclass(frozen=True)
class Left:
    """By steps in a row: logits, streams of the last one, the whole model's cache."""

    logits: Tensor
    streams: Tensor
    cache: Cache


def by_reference(steps: list[Step], dtype: torch.dtype, seed: int) -> Left:
    w, cache = tiny_weights(CONFIG, seed, dtype), filled_cache(CONFIG, dtype, 2)
    for step in steps:
        buf = poisoned(CONFIG, len(step.positions), dtype)
        forward(CONFIG, w, cache, step, buf, REFERENCE)
    assert isinstance(buf.streams, Tensor)
    return Left(buf.logits, buf.streams, cache)


class Virtual:
    """P ranks of `sms` CTAs each."""

    def __init__(self, on_emulator: OnEmulator, size: int, sms: int, seed: int) -> None:
        self.on_emulator, self.sms = on_emulator, sms
        self.shards = [Shard(rank, size) for rank in range(size)]
        self.caches = [of_rank(filled_cache(CONFIG, BF16, 2), shard) for shard in self.shards]
        weights = [packed_rank(shard, seed) for shard in self.shards]
        self.ranks = MegaRanks(CONFIG, weights, self.caches, BLOCK, MAX_BLOCKS, limit=LIMIT)

    def restart(self, rows: int = 1) -> None:
        """From the first caches, with poison in the mailboxes and no step before."""
        with on_a_device(self.sms * len(self.shards)):
            space = self.ranks.ranks[0].space_of(rows)
        self.ranks.peers(space.place, space.program.sizes.mail_bytes)
        for cache, shard in zip(self.caches, self.shards, strict=True):
            for name, tensor in vars(of_rank(filled_cache(CONFIG, BF16, 2), shard)).items():
                getattr(cache, name).copy_(tensor)
        self.ranks.clear()
        for peers in self.ranks._peers.values():
            for own in peers:
                own.mail.fill_(POISON)

    def run(self, step: Step) -> list[Buffers]:
        buffers = [poisoned(CONFIG, len(step.positions), BF16, shard) for shard in self.shards]
        self.on_emulator.step_of_ranks(self.ranks, self.sms, step, buffers)
        parts = [buf.logits_part.clone() for buf in buffers]
        gathered(parts, out=[buf.logits for buf in buffers])
        return buffers


@functools.cache
def virtual(on_emulator: OnEmulator, size: int, sms: int, seed: int = ONE) -> Virtual:
    return Virtual(on_emulator, size, sms, seed)


@pytest.fixture(scope="module")
def on_emulator(tmp_path_factory: pytest.TempPathFactory) -> OnEmulator:
    return OnEmulator(Path(tmp_path_factory.mktemp("ptx")))


def check_same(buffers: list[Buffers], right: list[Buffers]) -> None:
    """The same bits in all ranks, and as in the first of `right`."""
    for rank, buf in enumerate(buffers):
        check_equal(buf.streams, right[0].streams, f"streams of rank {rank}")
        check_equal(buf.logits, right[0].logits, f"logits of rank {rank}")
        check_equal(buf.topk_ids, right[0].topk_ids, f"experts of rank {rank}")


@pytest.mark.parametrize(
    "size, sms, rows",
    [
        (2, 2, 1),
        pytest.param(2, 4, 3, marks=pytest.mark.long),
        pytest.param(4, 2, 1, marks=pytest.mark.long),
        pytest.param(4, 2, 8, marks=pytest.mark.long),
    ],
)
def test_ranks_have_the_same_bits_and_give_what_one_gives(
    on_emulator: OnEmulator, size: int, sms: int, rows: int
) -> None:
    steps = [step_of(CONFIG, [length], rows) for length in (5, 5 + rows)]
    seed = ONE if rows == 1 else MORE
    exact, plain = by_reference(steps, F32, seed), by_reference(steps, BF16, seed)
    v = virtual(on_emulator, size, sms, seed)
    v.restart(rows)
    for step in steps:
        buffers = v.run(step)
        check_same(buffers, buffers)
    logits = buffers[0].logits, plain.logits, exact.logits
    check_bf16(*logits, "logits")
    for i, stream in enumerate(buffers[0].streams):
        check_bf16(stream, plain.streams[i], exact.streams[i], f"stream {i}")
    for cache, shard in zip(v.caches, v.shards, strict=True):
        right, usual = of_rank(exact.cache, shard), of_rank(plain.cache, shard)
        check_close(cache.state[:, 1:], right.state[:, 1:], 0.05, "state")
        conv = usual.conv_state[:, 1:], right.conv_state[:, 1:]
        check_bf16(cache.conv_state[:, 1:], *conv, "conv_state")
        latent = usual.latent[:, BLOCK:], right.latent[:, BLOCK:]
        check_bf16(cache.latent[:, BLOCK:], *latent, "latent")


# ---- what goes wrong ----

# mailbox -> what a wait for its words is called
BOXES = {
    "attn": "all_reduce of delta, attn",
    "mlp": "all_reduce of delta, mlp",
    "embed": "all_reduce of delta, embed",
    "logits": "all_gather of router",
    "latent": "all_gather of latent",
    "routed": "reduce_moe, routed",
    "latent_up": "all_gather of delta",
}


def place_of(v: Virtual, rank: int, box: str) -> range:
    """Addresses of a rank's mailbox."""
    sizes = v.ranks.ranks[0].space(1).program.sizes
    mail = v.ranks._peers[0][rank].mail
    begin = mail.data_ptr() + sizes.box_offsets[box]
    return range(begin, begin + sizes.boxes[box])


@contextmanager
def losing(box: range, source: int, size: int) -> Iterator[None]:
    """What rank `source` sends there is lost."""
    each = len(box) // size
    lost = range(box.start + source * each, box.start + (source + 1) * each)
    store = Warp.store_global

    def drops(self: Warp, at: Lanes, values: list[Lanes], mask: Lanes | None) -> None:
        kept = np.ones(32, bool) if mask is None else mask.copy()
        kept &= (at < lost.start) | (at >= lost.stop)
        if kept.any():
            store(self, at, values, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Warp, "store_global", drops)
        yield


LONG = pytest.mark.long


@pytest.mark.parametrize("box", [pytest.param(b, marks=[LONG][: b != "attn"]) for b in BOXES])
def test_lost_words_end_in_a_report_that_names_the_exchange(
    on_emulator: OnEmulator, monkeypatch: pytest.MonkeyPatch, box: str
) -> None:
    monkeypatch.setattr(on_emulator.emulator, "races", False)  # it goes on without the words
    v, step = virtual(on_emulator, 2, 2), step_of(CONFIG, [5], 1)
    v.restart()
    late = r"epoch" if box == "latent_up" else r"rank 1 with tag"
    sentence = rf"rank 0 of 2, CTA [01], op {BOXES[box]}: words of {late} \d+ expected"
    with losing(place_of(v, 0, box), 1, 2), pytest.raises(MegaError, match=sentence):
        v.run(step)
    v.restart()


Look = Callable[[Warp, Statement, Lanes], None]


@contextmanager
def looking(look: Look) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Warp, "look_at_words", look)
        yield


class Tags:
    """The tags that the words of some mailboxes had in turn, for looks that do not wait."""

    def __init__(self, boxes: list[range]) -> None:
        self.boxes, self.known = boxes, dict[int, list[int]]()
        self.next, self.right = dict[tuple[int, int], int](), Warp.look_at_words

    def inside(self, at: int) -> bool:
        return any(at in box for box in self.boxes)

    def listen(self, warp: Warp, s: Statement, active: Lanes) -> None:
        self.right(warp, s, active)
        for at, word in warp.seen:
            own = self.known.setdefault(at, [])
            if self.inside(at) and word not in own:
                own.append(word)

    def forge(self, warp: Warp, s: Statement, active: Lanes) -> None:
        """Every look finds the tag that will come, whatever data is there."""
        self.right(warp, s, active)
        name, _, offset = s.operands[1].strip("[]").partition("+")
        places = warp.value(name).astype(np.int64) + int(offset or 0)
        registers = s.operands[0].strip("{}").split(",")
        size = int(s.name.rpartition(".")[2][1:]) // 8
        looked = set()  # lanes may look at the same word
        for i in lanes_of(active):
            for k, register in enumerate(registers):
                at = int(places[i]) + size * k
                if self.inside(at):
                    index = warp.cluster.program.names[register.strip()]
                    words = warp.registers[index].copy()
                    tag_at = at + 4 if size == 8 else at
                    looked.add((warp.row, tag_at))
                    if size == 8:
                        words[i] = int(words[i]) & 0xFFFFFFFF | self.tag(warp, tag_at) << 32
                    else:
                        words[i] = int(words[i]) & 0xFFFFFF00 | self.tag(warp, tag_at) & 0xFF
                    warp.registers[index] = words
        for key in looked:
            self.next[key] = self.next.get(key, 0) + 1
            warp.state = "run"  # it needs no news

    def tag(self, warp: Warp, at: int) -> int:
        """The high half of a word of 64 bits, or a word of 32 bits."""
        tags = [tag for tag in self.known[at] if tag != POISON * 0x01010101]
        return tags[min(self.next.get((warp.row, at), 0), len(tags) - 1)]


def slow_down(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Its CTAs move only where no others can."""

    def draw(cluster: Cluster, rng: object) -> list[Warp]:
        return [w for cta in cluster.ctas if cta.index[1] == rank for w in cta.warps]

    patch.setattr("ptx.machine.draw_slow", draw)
    patch.setattr("ptx.machine.SLOW", 1.0)


@pytest.mark.long
@pytest.mark.parametrize("box", BOXES)
def test_without_a_wait_results_are_wrong(
    on_emulator: OnEmulator, monkeypatch: pytest.MonkeyPatch, box: str
) -> None:
    """Rank 0 does not wait for rank 1, and rank 1 is so late that the step is over."""
    monkeypatch.setattr(on_emulator.emulator, "races", False)
    v, step = virtual(on_emulator, 2, 2), step_of(CONFIG, [5], 1)
    v.restart()
    tags = Tags([place_of(v, rank, box) for rank in range(2)])
    with looking(lambda *look: tags.listen(*look)):
        right = v.run(step)
    v.restart()
    forged = looking(lambda *look: tags.forge(*look))
    with losing(place_of(v, 0, box), 1, 2), forged:
        try:
            found = v.run(step)
        except Fault:  # warps that read the same words found different ones
            return
    same = torch.equal(found[0].logits, right[0].logits)
    assert not same, f"nobody misses the wait for {box}"


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_rank_changes_nothing(
    on_emulator: OnEmulator, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    v, step = virtual(on_emulator, 2, 2), step_of(CONFIG, [5], 1)
    v.restart()
    right = v.run(step)
    slow_down(monkeypatch, rank)
    v.restart()
    check_same(v.run(step), right)
