"""The ring through which weights reach a CTA: a loader warp fills it, compute warps empty it.

Slots lie in shared memory, each with a full and an empty mbarrier. The loader asks for chunks by
bulk copy, evict-first in L2 (a weight is read once, and what CTAs exchange should stay there), as
far ahead as there are slots. Every role keeps its own position, a slot and a phase, in registers.

    barrier        arrivals                                  waited for by
    full  [slot]   1 by the loader's lane 0 with the         every compute warp, at its phase
                   chunk's bytes, and those bytes
    empty [slot]   1 by lane 0 of each compute warp          the loader, at the other phase; the
                                                             first round passes at once
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from nanok3.dsl import bulk_copy_g2s


class Ring:
    """Static sizes; `state()` makes a role's position."""

    def __init__(self, slots: int, slot_bytes: int, consumers: int):
        assert slot_bytes % 128 == 0
        self.slots, self.slot_bytes, self.consumers = slots, slot_bytes, consumers

    @property
    def shared_bytes(self) -> int:
        return self.slots * self.slot_bytes + 16 * self.slots

    def allocate(self, smem):
        """-> (mbarriers, address of slot 0)."""
        barriers = smem.allocate_array(Int64, num_elems=2 * self.slots)
        base = Int32(smem.allocate(self.slots * self.slot_bytes, byte_alignment=128).toint())
        return barriers, base

    @cute.jit
    def init(self, barriers, tid: Int32):
        """By all threads; a CTA barrier must follow."""
        if tid == 0:
            for slot in cutlass.range_constexpr(self.slots):
                cute.arch.mbarrier_init(barriers + slot, 1)
                cute.arch.mbarrier_init(barriers + self.slots + slot, self.consumers)
        cute.arch.mbarrier_init_fence()

    def state(self):
        """A role's position: slot, phase."""
        position = cute.make_rmem_tensor((2,), Int32)
        position[0] = Int32(0)
        position[1] = Int32(0)
        return position

    def advance(self, position):
        slot = position[0] + 1
        wraps = Int32(slot == self.slots)
        position[0] = slot - wraps * self.slots
        position[1] = position[1] ^ wraps

    # ---- loader warp ----

    @cute.jit
    def fill(
        self,
        barriers,
        base: Int32,
        position,
        source: Int64,
        num_bytes: Int32,
        policy: Int64,
        lane: Int32,
    ):
        """Asks for one chunk, when its slot is empty. By the whole loader warp."""
        slot = position[0]
        cute.arch.mbarrier_wait(barriers + self.slots + slot, position[1] ^ 1)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + slot, num_bytes)
            shared = base + slot * self.slot_bytes
            bulk_copy_g2s(shared, source, num_bytes, barriers + slot, policy)
        cute.arch.sync_warp()
        self.advance(position)

    # ---- compute warps ----

    @cute.jit
    def wait(self, barriers, base: Int32, position):
        """Address of the next chunk, when it has arrived."""
        slot = position[0]
        cute.arch.mbarrier_wait(barriers + slot, position[1])
        return base + slot * self.slot_bytes

    @cute.jit
    def release(self, barriers, position, lane: Int32):
        """This warp has read the chunk. By whole warps, converged."""
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barriers + self.slots + position[0])
        self.advance(position)
