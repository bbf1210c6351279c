"""What the model keeps between steps: latent pages and KDA states, who owns them, and snapshots.

MLA layers keep one row of `kv_lora_rank + qk_rope_head_dim` values a token, in blocks of
`block_size` tokens that a request's block table lists. KDA layers keep one state of fixed size a
request, in a slot. Block 0 and slot 0 are trash: padding writes there and nobody reads it.

A `Snapshot` is everything that a request had cached at one position, all or nothing: its blocks
and a copy of its KDA state. It is found by what it holds: by the keys of its pages (`reuse.py`),
and then by its ids. Knows nothing of the model, of text or of scheduling.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.reuse import page_keys

TRASH = 0


@dataclass(frozen=True)
class Cache:
    """The tensors; a layer's row is its place in `config.kda_layer_ids` or `mla_layer_ids`."""

    conv_state: Tensor  # [KDA layers, slots, taps - 1, q|k|v channels], inputs of the convolution
    state: Tensor  # [KDA layers, slots, H, Dk, Dv] f32
    latent: Tensor  # [MLA layers, blocks * block_size, L + Dr]


def allocate_cache(
    config: ModelConfig,
    num_slots: int,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    shard: Shard = WHOLE,
) -> Cache:
    """Uninitialised: a slot is cleared when it is given out, a latent row is written before it is
    read. A rank has the states of its heads; all ranks have the same latents."""
    kda = config.linear_attn_config
    layers, heads, dim = len(config.kda_layer_ids), shard.local(kda.num_heads), kda.head_dim
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    conv = (layers, num_slots, kda.short_conv_kernel_size - 1, 3 * heads * dim)
    latent = (len(config.mla_layer_ids), num_blocks * block_size, config.latent_width)
    return Cache(
        conv_state=torch.empty(conv, dtype=dtype, device=device),
        state=torch.empty(layers, num_slots, heads, dim, dim, dtype=wide, device=device),
        latent=torch.empty(latent, dtype=dtype, device=device),
    )


class Pool:
    """Hands out the numbers 1..size-1 with a count of holders each; 0 is trash and stays here."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, TRASH, -1))
        self._holders = [0] * size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free(self) -> list[int]:
        """A copy."""
        return list(self._free)

    @property
    def size(self) -> int:
        """How many numbers there are to give."""
        return len(self._holders) - 1

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, "the caller checks num_free"
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            assert self._holders[number] == 0
            self._holders[number] = 1
        return taken

    def hold(self, numbers: list[int]) -> None:
        """One more holder of numbers that have one already."""
        for number in numbers:
            assert self._holders[number] > 0
            self._holders[number] += 1

    def release(self, numbers: list[int]) -> list[int]:
        """One holder less; returns the numbers that nobody holds any more."""
        freed = []
        for number in numbers:
            assert self._holders[number] > 0, f"{number} is released twice"
            self._holders[number] -= 1
            if self._holders[number] == 0:
                freed.append(number)
        self._free.extend(freed)
        return freed

    def num_held_only_by(self, holders: Counter[int]) -> int:
        """How many numbers have these holders (number -> how many) and no others."""
        return sum(self._holders[number] == count for number, count in holders.items())

    def audit(self, holders: Counter[int]) -> None:
        """Debug: these are all the holders there are, and what has none is free."""
        for number, count in enumerate(self._holders):
            assert count == holders[number], f"{number}: {count} holders, not {holders[number]}"
        unheld = [n for n, count in enumerate(self._holders) if n != TRASH and not count]
        assert sorted(self._free) == unheld, "what is free and what is unheld differ"


@dataclass(eq=False)
class Snapshot:
    """A request's caches after `token_ids`, to go on from."""

    token_ids: tuple[int, ...]
    keys: list[int]  # of its full pages
    blocks: list[int]  # held; the last one may be part full
    conv_state: Tensor  # [KDA layers, taps - 1, channels]
    state: Tensor  # [KDA layers, H, Dk, Dv]
    maker: int | None  # slot of who made it, while no row of logits has vouched for it


class CacheManager:
    """The cache's tensors, its pools and its snapshots: the only place that gives and takes."""

    def __init__(
        self,
        cache: Cache,
        block_size: int,
        max_snapshots: int,
        poison: bool = False,
        draft_cache: Tensor | None = None,
    ) -> None:
        """draft_cache: [layers, blocks * block_size, W], rows of a draft in the same blocks."""
        self.cache = cache
        # What lies in blocks, [layers, slots, width] each.
        self._paged = [cache.latent] if draft_cache is None else [cache.latent, draft_cache]
        self.block_size = block_size
        self.slots = Pool(cache.state.shape[1])
        self.blocks = Pool(cache.latent.shape[1] // block_size)
        self.max_snapshots = max_snapshots
        self.poison = poison  # debug: what was freed becomes NaN
        self.snapshots: list[Snapshot] = []  # oldest use first
        if poison:
            for tensor in (cache.conv_state, cache.state, *self._paged):
                tensor.fill_(float("nan"))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(
        self, token_ids: list[int], max_tokens: int, keys: list[int] | None = None
    ) -> tuple[int, list[int], int] | None:
        """Room for a request of at most `max_tokens` tokens that begins with `token_ids`, whose
        pages have these keys.

        Returns (slot, blocks, how many of the tokens are cached already), or None while there is
        no room. Reuses the longest snapshot that is a proper prefix; drops old snapshots for room,
        none while that would not make enough.
        """
        if not self.slots.num_free:
            return None
        found, shared = self._longest_prefix(token_ids, keys), 0
        needed = self.blocks_for(max_tokens)
        if found is not None:
            shared = len(found.token_ids) // self.block_size
            if not self._has_room(needed - shared, keep=found):
                found, shared = None, 0  # rather computed again than never
        needed -= shared
        if not self._has_room(needed, keep=found):
            return None
        while self.blocks.num_free < needed:
            self.drop(next(s for s in self.snapshots if s is not found))
        fresh, (slot,) = self.blocks.take(needed), self.slots.take(1)
        if found is None:
            self._clear(slot)
            return slot, fresh, 0
        blocks = found.blocks[:shared]
        self.blocks.hold(blocks)
        blocks += fresh
        self._restore(found, slot, blocks)
        return slot, blocks, len(found.token_ids)

    def advance(
        self, token_ids: list[int], keys: list[int], slot: int, blocks: list[int], cached: int
    ) -> int:
        """Takes a request that still computes its prompt on to the longest snapshot there is by
        now, if that is further: exchanges its first `blocks`. Returns how many ids are cached."""
        found = self._longest_prefix(token_ids, keys, cached)
        if found is None:
            return cached
        shared = len(found.token_ids) // self.block_size
        own = blocks[:shared]
        self.blocks.hold(found.blocks[:shared])  # first: an interruption may leak, not more
        blocks[:shared] = found.blocks[:shared]
        freed = self.blocks.release(own)
        if self.poison:
            self._poison(freed)
        self._restore(found, slot, blocks)
        return len(found.token_ids)

    def _restore(self, found: Snapshot, slot: int, blocks: list[int]) -> None:
        """`blocks` begin with the full ones of the snapshot, and go on with the request's own."""
        self._touch(found)
        shared, part = divmod(len(found.token_ids), self.block_size)
        if part:  # rows of a part-full block are copied: two requests may go on from here
            self._copy_rows(found.blocks[shared], blocks[shared], part)
        self.cache.conv_state[:, slot] = found.conv_state
        self.cache.state[:, slot] = found.state

    def release(self, slot: int, blocks: list[int]) -> None:
        """Takes back what a request has; what it kept and nobody vouched for goes too."""
        for snapshot in [s for s in self.snapshots if s.maker == slot]:
            self.drop(snapshot)
        self.slots.release([slot])
        freed = self.blocks.release(blocks)
        if self.poison:
            self.cache.conv_state[:, slot] = float("nan")
            self.cache.state[:, slot] = float("nan")
            self._poison(freed)

    def snapshot(
        self, token_ids: list[int], slot: int, blocks: list[int], vouched: bool = True
    ) -> None:
        """Keep what a request has cached, exactly `token_ids`; the oldest snapshot makes room.
        Where it is not vouched for, nobody goes on from it before `vouch`."""
        ids = tuple(token_ids)
        if not ids or self.max_snapshots == 0 or any(s.token_ids == ids for s in self.snapshots):
            return
        while len(self.snapshots) >= self.max_snapshots:
            self.drop(self.snapshots[0])
        used = blocks[: self.blocks_for(len(ids))]
        self.blocks.hold(used)
        conv_state, state = (
            self.cache.conv_state[:, slot].clone(),
            self.cache.state[:, slot].clone(),
        )
        maker, keys = None if vouched else slot, page_keys(ids, self.block_size)
        self.snapshots.append(Snapshot(ids, keys, used, conv_state, state, maker))

    def vouch(self, slot: int) -> None:
        """What the request in this slot kept so far has led to a finite row of logits."""
        for snapshot in self.snapshots:
            if snapshot.maker == slot:
                snapshot.maker = None

    def drop(self, snapshot: Snapshot) -> None:
        self.snapshots = [s for s in self.snapshots if s is not snapshot]
        freed = self.blocks.release(snapshot.blocks)
        if self.poison:
            self._poison(freed)

    def forget(self, token_ids: list[int]) -> None:
        """Drops every snapshot that these ids begin with: what they made of it is not to be
        trusted."""
        for snapshot in [s for s in self.snapshots if _begins(token_ids, s)]:
            self.drop(snapshot)

    def audit(self, requests: list[tuple[int, list[int]]]) -> None:
        """Debug: every slot and block belongs to these requests (slot, blocks) or to a snapshot as
        the pools say, trash to nobody, and nobody wrote to what is free."""
        self.slots.audit(Counter(slot for slot, _ in requests))
        owners = [blocks for _, blocks in requests] + [s.blocks for s in self.snapshots]
        self.blocks.audit(Counter(block for blocks in owners for block in blocks))
        if not self.poison:
            return
        free = self.slots.free
        for tensor in (self.cache.conv_state, self.cache.state):
            assert tensor[:, free].isnan().all(), "a slot was written that nobody owns"
        for tensor in self._paged:
            pages = tensor.unflatten(1, (-1, self.block_size))
            assert pages[:, self.blocks.free].isnan().all(), "a block was written that is nobody's"

    def _longest_prefix(
        self, token_ids: list[int], keys: list[int] | None, beyond: int = 0
    ) -> Snapshot | None:
        """Of the snapshots that leave at least one token to compute, the longest that agrees, if
        it is longer than `beyond`."""
        keys = page_keys(token_ids, self.block_size) if keys is None else keys
        agreeing = [
            s
            for s in self.snapshots
            if s.maker is None
            and beyond < len(s.token_ids) < len(token_ids)
            and s.keys[-1:] == keys[len(s.keys) - 1 : len(s.keys)]
            and _begins(token_ids, s)  # equal keys prove nothing
        ]
        return max(agreeing, key=lambda s: len(s.token_ids), default=None)

    def _has_room(self, needed: int, keep: Snapshot | None) -> bool:
        """Whether `needed` blocks are free, or would be without the snapshots other than `keep`."""
        if self.blocks.num_free >= needed:
            return True
        droppable = Counter(b for s in self.snapshots if s is not keep for b in s.blocks)
        return self.blocks.num_free + self.blocks.num_held_only_by(droppable) >= needed

    def _touch(self, snapshot: Snapshot) -> None:
        self.snapshots = [s for s in self.snapshots if s is not snapshot] + [snapshot]

    def _clear(self, slot: int) -> None:
        self.cache.conv_state[:, slot] = 0
        self.cache.state[:, slot] = 0

    def _poison(self, blocks: list[int]) -> None:
        for tensor in self._paged:
            for block in blocks:
                tensor[:, self.rows_of(block)] = float("nan")

    def rows_of(self, block: int) -> slice:
        """The latent slots of a block."""
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def latent_of(self, blocks: list[int]) -> Tensor:
        """[MLA layers, len(blocks) * block_size, L + Dr], a copy."""
        return torch.cat([self.cache.latent[:, self.rows_of(block)] for block in blocks], 1)

    def _copy_rows(self, source: int, target: int, count: int) -> None:
        for tensor in self._paged:
            tensor[:, self.rows_of(target)][:, :count] = tensor[:, self.rows_of(source)][:, :count]


def _begins(token_ids: list[int], snapshot: Snapshot) -> bool:
    return tuple(token_ids[: len(snapshot.token_ids)]) == snapshot.token_ids
