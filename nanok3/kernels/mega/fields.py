"""The table of weights and caches: a row a layer, an entry a lane of a warp.

Names of layers' kinds share places: a row is of one kind of attention and one kind of MLP.
"""

from __future__ import annotations

ENTRIES = 32  # of a row, one a lane
KDA, MOE = 1, 2  # bits of the entry "kind"
COMMON = (
    *("kind", "attn.score", "attn.norm", "attn.streams", "attn.fresh"),
    *("mlp.score", "mlp.norm", "mlp.streams", "mlp.fresh", "next.score", "next.streams", "o_proj"),
    "tap",  # first column that the layer is tapped to, -1 if it is not
)
ATTENTION = {
    "kda": ("in_proj", "conv", "f_b", "A_log", "dt_bias", "o_norm", "conv_state", "state", "index"),
    "mla": ("in_proj", "q_norm", "kv_norm", "q_b", "absorb", "value", "cache"),
}
MLP = {
    "moe": ("in_proj", "bias", "w13", "w2", "shared_down", "routed_norm", "latent_up"),
    "dense": ("gate_up", "down"),
}
HEAD = {"output.norm": "attn.norm", "output.streams": "attn.streams", "lm_head": "o_proj"}


def entry(name: str) -> int:
    """Where the table holds a field: `kda.conv` or `moe.w2`, or a common one."""
    name = HEAD.get(name, name)
    if name in COMMON:
        return COMMON.index(name)
    kind, _, own = name.partition(".")
    if own == "o_proj":
        return COMMON.index(own)
    if kind in ATTENTION:
        return len(COMMON) + ATTENTION[kind].index(own)
    return len(COMMON) + max(map(len, ATTENTION.values())) + MLP[kind].index(own)


assert all(entry(f"{kind}.{own}") < ENTRIES for kind, names in MLP.items() for own in names)
