"""What the persistent kernel computes with: a rank's sizes, its products, how the work is cut.

Plain numbers, known when the kernel is compiled; no CuTe DSL here, so that a CPU can check them.

Cutting: a product's rows lie in tiles of 16, K is cut in `slices`. CTA b works on slice b % slices
of tiles b // slices, + groups, ... (groups = SMs // slices). Products with one slice whose rows are
the C columns of a stream follow the owner map: CTA b owns columns 16 b .. 16 b + 15, then those
16 * SMs further on, so what such a product gives stays in the CTA that needs it next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

TILE = 16  # weight rows of a tile: the M of an mma
BLOCK = 32  # columns of a block: two mma
BLOCK_BYTES = TILE * BLOCK * 2
EXPERT_BLOCK_BYTES = 272  # of MXFP4, with 16 scales
SLOT_BYTES = 30720  # of a ring slot: 30 blocks, or an expert's tile of gate and up at Z = 3584
SLOT_BLOCKS = SLOT_BYTES // BLOCK_BYTES
WARPS = 8  # compute warps; one more loads
MOST_SLICE = 1792  # columns of x that a CTA stages, where K is cut
PASS = 8  # rows of a step, at most: the N of an mma
KDA_DIM = 128  # keys and values of a head
MOST_STREAMS = 16
SHARED_BYTES = 227 << 10
# Buffers of words that say themselves whether they are new; further ones in a step of one row.
WORDS = ("mixed", "stats", "scores", "latent_up")
ONE_ROW_WORDS = (
    *("kda_in", "kda_heads", "kda_squares", "mla_in", "mla_gate", "q", "q_absorbed"),
    *("mla_partial", "mla_stats", "mla_heads", "expert_act", "routed"),
)
RESERVED_BYTES = 2048  # barriers, small tables, alignment


@dataclass(frozen=True)
class Product:
    """A matrix [rows, k] in tiles, and how its tiles are cut over the CTAs."""

    name: str  # of the field that holds it
    rows: int
    k: int
    slices: int

    def __post_init__(self) -> None:
        assert self.rows % TILE == 0 and self.k % BLOCK == 0, self
        assert self.blocks % self.slices == 0, self

    @property
    def tiles(self) -> int:
        return self.rows // TILE

    @property
    def blocks(self) -> int:
        return self.k // BLOCK

    @property
    def part_blocks(self) -> int:
        """Blocks of a tile in a K slice."""
        return self.blocks // self.slices

    @property
    def part_width(self) -> int:
        return self.part_blocks * BLOCK

    @property
    def chunks(self) -> int:
        """Ring slots that a tile's slice takes, where it does not share one."""
        return -(-self.part_blocks // SLOT_BLOCKS)

    @property
    def chunk_blocks(self) -> int:
        return -(-self.part_blocks // self.chunks)

    @property
    def tiles_per_slot(self) -> int:
        return max(1, SLOT_BLOCKS // self.part_blocks)

    def groups(self, sms: int) -> int:
        return sms // self.slices

    def most_tiles(self, sms: int) -> int:
        """Of a CTA."""
        return -(-self.tiles // self.groups(sms))


def cut(name: str, rows: int, k: int, sms: int, pass_rows: int) -> Product:
    """With the number of slices that gives the busiest CTA the fewest bytes, of weights and of what
    x is made of (8 for a column and row); few slices, if equal."""
    rows, blocks = -(-rows // TILE) * TILE, k // BLOCK
    able = [
        s
        for s in range(1, min(PASS, sms) + 1)
        if blocks % s == 0 and (k // s <= MOST_SLICE or s == PASS)
    ]

    def busiest(p: Product) -> int:
        return p.most_tiles(sms) * p.part_blocks * BLOCK_BYTES + 8 * pass_rows * p.part_width

    made = [Product(name, rows, k, s) for s in able]
    return min(made, key=lambda p: (busiest(p), p.slices))


@dataclass(frozen=True)
class Sizes:
    """One rank's share of the model; widths in columns."""

    sms: int
    pass_rows: int  # 1, or PASS for 2 to 8 rows
    hidden: int  # C
    kda_heads: int
    mla_heads: int
    q_rank: int
    kv_rank: int  # L
    nope_dim: int
    rope_dim: int
    value_dim: int
    num_experts: int  # of all ranks
    top_k: int
    latent: int  # Z
    expert_width: int  # F of an expert, this rank's
    shared_width: int
    dense_width: int  # 0: no layer is dense
    vocab: int  # rows of lm_head, this rank's
    router_rows: int  # this rank's part of the router's rows, of Z, of C, and where they begin
    latent_rows: int
    up_rows: int
    router_first: int
    latent_first: int
    up_first: int
    embed_rows: int
    embed_first: int
    block_size: int
    eps: float
    beta: float  # SiTU
    linear_beta: float
    lower_bound: float  # of a log-decay
    routed_norm: bool
    renormalize: bool
    scaling: float
    softmax_scale: float
    ranks: int = 1  # that run together and exchange; of one that runs alone 1
    apart: bool = False  # whether they have GPUs of their own

    def __post_init__(self) -> None:
        assert self.pass_rows in (1, PASS), self.pass_rows
        for name in ("hidden", "latent", "expert_width", "shared_width", "dense_width"):
            assert getattr(self, name) % BLOCK == 0, f"{name} {getattr(self, name)}"
        assert self.hidden % TILE == 0
        assert self.num_experts <= 1024 and self.top_k <= 32, "what `route` takes"
        if self.ranks > 1:  # parts are whole stores of 16 bytes
            assert self.router_rows % 2 == 0 and self.router_rows * self.ranks == self.num_experts
            assert self.latent_rows % 4 == 0 and self.latent_rows * self.ranks == self.latent
            assert self.up_rows * self.ranks == self.hidden
        else:  # own columns are this rank's or not
            assert self.up_first % TILE == 0 and self.up_rows % TILE == 0

    # ---- products ----

    @property
    def kda_width(self) -> int:
        return self.kda_heads * KDA_DIM

    @property
    def kda_in_width(self) -> int:
        return 4 * self.kda_width + KDA_DIM + self.kda_heads

    @property
    def mla_in_width(self) -> int:
        return self.q_rank + self.kv_rank + self.rope_dim + self.mla_heads * self.value_dim

    @property
    def mla_width(self) -> int:
        return self.mla_heads * self.value_dim

    @property
    def mla_units(self) -> int:
        """Units (request, 16 rows of it, split of its context) of a step, at most."""
        return max(self.sms, self.pass_rows * -(-self.mla_heads // 16))

    @property
    def router_tiles(self) -> int:
        return -(-self.router_rows // TILE)

    @property
    def latent_tiles(self) -> int:
        return -(-self.latent_rows // TILE)

    @cached_property
    def products(self) -> dict[str, Product]:
        c, sms = self.hidden, self.sms
        moe_rows = TILE * (self.router_tiles + self.latent_tiles) + 2 * self.shared_width
        made = [
            cut("kda.in_proj", self.kda_in_width, c, sms, self.pass_rows),
            Product("kda.o_proj", c, self.kda_width, 1),
            cut("mla.in_proj", self.mla_in_width, c, sms, self.pass_rows),
            Product("mla.q_b", self.mla_heads * (self.nope_dim + self.rope_dim), self.q_rank, 1),
            Product("mla.o_proj", c, self.mla_heads * self.value_dim, 1),
            cut("moe_in", moe_rows, c, sms, self.pass_rows),
            Product("shared_down", c, self.shared_width, 1),
            cut("latent_up", self.up_rows, self.latent, sms, self.pass_rows),
            cut("lm_head", self.vocab, c, sms, self.pass_rows),
        ]
        if self.dense_width:
            made.append(cut("dense.gate_up", 2 * self.dense_width, c, sms, self.pass_rows))
            made.append(Product("dense.down", c, self.dense_width, 1))
        return {p.name: p for p in made}

    @property
    def own_tiles(self) -> int:
        """Column tiles of a stream that a CTA owns, at most."""
        return -(-self.hidden // TILE // self.sms)

    @property
    def act_rows(self) -> int:
        """(row, expert) pairs of a step."""
        return self.pass_rows * self.top_k

    # ---- what CTAs exchange ----

    def is_words(self, buffer: str) -> bool:
        return buffer in WORDS or (self.pass_rows == 1 and buffer in ONE_ROW_WORDS)

    @cached_property
    def buffers(self) -> dict[str, int]:
        """Bytes of each buffer in the workspace."""
        rows, p = self.pass_rows, self.products

        def parts(name: str) -> int:
            return 4 * p[name].slices * rows * p[name].rows

        bf16 = 4 if self.is_words("q") else 2  # bytes, where a word has it in its upper half

        sizes = {
            "mixed": 8 * rows * self.hidden,  # [T, C, 2] words: p, which is a bf16, and prefix
            "stats": 16 * self.sms * rows,  # [CTA, T, 4] words: sums over own columns
            "scores": 4 * MOST_STREAMS * rows,  # [2, T, 8] words: a of finished streams
            "kda_in": parts("kda.in_proj"),  # [slices, T, rows] f32
            "kda_heads": 4 * rows * self.kda_width,  # [T, H * D] f32, before the norm's factor
            "kda_squares": 16 * rows * self.kda_heads,  # [T, H, 4] f32
            "mla_in": parts("mla.in_proj"),
            "q_latent": 2 * rows * self.q_rank,  # [T, q_rank] bf16
            "q": bf16 * rows * self.mla_heads * (self.nope_dim + self.rope_dim),
            "q_absorbed": bf16 * rows * self.mla_heads * self.kv_rank,
            "mla_gate": 4 * rows * self.mla_width,  # [T, H * Dv] f32, after the sigmoid
            "mla_partial": 4 * self.mla_units * 16 * self.kv_rank,  # [unit, 16, L] f32
            "mla_stats": 8 * self.mla_units * 16,  # [unit, 16, 2] f32
            # [L / 64, T, H * Dv] f32, a sum over 64 columns of the latent each
            "mla_heads": self.kv_rank // 16 * rows * self.mla_width,
            "moe_in": parts("moe_in"),
            "shared_act": 2 * rows * self.shared_width,
            "expert_act": bf16 * self.act_rows * self.expert_width,
            "routed": bf16 * rows * self.latent,
            "latent_up": parts("latent_up"),  # words
            "lm_head": parts("lm_head"),
        }
        if self.dense_width:
            sizes["dense_in"] = parts("dense.gate_up")
            sizes["dense_act"] = 2 * rows * self.dense_width
        return sizes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each buffer begins in the workspace."""
        at, made = 0, {}
        for name, size in self.buffers.items():
            made[name] = at
            at += -(-size // 256) * 256
        return made

    @property
    def work_bytes(self) -> int:
        return sum(-(-size // 256) * 256 for size in self.buffers.values())

    # ---- what ranks exchange ----

    @property
    def own_bytes(self) -> int:
        """Of a CTA's own columns as words of two bf16."""
        return 4 * self.own_tiles * self.pass_rows * TILE

    @cached_property
    def boxes(self) -> dict[str, int]:
        """Bytes of each mailbox of a rank, for the words of all ranks: see `exchange`."""
        if self.ranks == 1:
            return {}
        rows, own = self.pass_rows, self.sms * self.own_bytes
        of_a_rank = {
            "attn": own,  # [CTA, own tile, T, 16] bf16 words of two
            "mlp": own,
            "embed": own,
            "logits": 8 * rows * self.router_rows,  # [T, E / P] f32, a word each
            "latent": 4 * rows * self.latent_rows,  # [T, Z / P]
            "routed": 4 * rows * self.latent,  # [T, Z]
            "latent_up": self.buffers["latent_up"],  # [slices, T, C / P] words of 32 bits
        }
        return {name: self.ranks * size for name, size in of_a_rank.items()}

    @cached_property
    def box_offsets(self) -> dict[str, int]:
        """Where each begins in a rank's mailboxes."""
        at, made = 0, {}
        for name, size in self.boxes.items():
            made[name] = at
            at += -(-size // 256) * 256
        return made

    @property
    def mail_bytes(self) -> int:
        return sum(-(-size // 256) * 256 for size in self.boxes.values())
