"""Routed experts in the persistent kernel: gate and up (`expert_up`), then down (`expert_down`).

    act[t, a] = situ(w1[e] @ z[t], w3[e] @ z[t]),  e = the row's expert a
    routed[t] = sum_a weight[t, a] * w2[e] @ act[t, a],  e ascending

Bytes    1.59 F Z for every expert of the step. TP16: 17.5 MB at T = 1, 120 MB with 110 experts.
Waits    the loader for the mbarrier `routed`, once; down for "expert_act".
Signals  "expert_act" [T, A, F] bf16, "routed" [T, Z] bf16. Of one row both are words. Where ranks
         exchange, this rank's part of routed goes to all of them instead (`exchange`).
"""

from __future__ import annotations

import cutlass.cute as cute

from nanok3.kernels.mega.expert_down import Down
from nanok3.kernels.mega.expert_up import Up
from nanok3.kernels.mega.role import Frozen
from nanok3.kernels.mega.route import Route
from nanok3.kernels.mega.sizes import Sizes


class Experts(Frozen):
    def __init__(self, sizes: Sizes) -> None:
        self.up, self.down = Up(sizes), Down(sizes)
        self.rows, self.ranks = sizes.pass_rows, sizes.ranks
        # one row: z lies behind what `route` uses, and is staged while that waits for logits
        self.z = -(-Route(sizes).scratch_bytes // 128) * 128 if self.rows == 1 else 0
        self.scratch_bytes = max(self.z + self.up.scratch_bytes, self.down.scratch_bytes)

    def load(self, r):
        """The loader warp."""
        self.up.load(r)
        self.signal(r, "expert_act")
        self.down.load(r)
        if self.ranks == 1:
            self.signal(r, "routed")

    def signal(self, r, buffer):
        if not r.sizes.is_words(buffer):
            r.signal(buffer)

    def ahead(self, r):
        """One row: stages z. After "moe_in" was waited for, before `route` waits for all cp.async
        and has a barrier."""
        if self.rows == 1:
            self.up.stage(r, r.shared("scratch") + self.z)

    def compute(self, r):
        """The compute warps, after `ahead`."""
        z = r.shared("scratch") + self.z
        r.begin("expert_up")
        if self.rows > 1:
            self.up.stage(r, z)
            cute.arch.cp_async_wait_group(0)
            r.bar()
        if r.sizes.is_words("expert_act"):
            r.new_tag("expert_act")  # also of routed
        self.up.compute(r, z)
        self.signal(r, "expert_act")
        r.begin("expert_down")
        if r.sizes.is_words("expert_act"):
            r.bar()  # scratch and partial are free
        else:
            r.wait("expert_act")
        if self.ranks == 1:
            self.down.compute(r)
            self.signal(r, "routed")
        else:
            r.new_tag("routed")
            self.down.compute(r)
