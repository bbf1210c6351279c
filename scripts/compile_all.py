"""Compiles every kernel that k3-mini and K3 at TP8 and TP16 need, for all archs, without a GPU.

    python scripts/compile_all.py [--arch sm_90a] [--only mega] [--table FILE]

One line a kernel and arch: seconds, registers, stack, static shared memory, local memory, if
`cuobjdump` (package nvidia-cuda-cuobjdump) is on hand, else seconds only. The last line is a
summary. Exits with 1 if a kernel does not compile, or uses stack or local memory and is not in
KNOWN_STACK.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

DUMPS = tempfile.mkdtemp(prefix="cubins-")
os.environ["CUTE_DSL_KEEP"] = "cubin"  # before CuTe DSL is imported: it reads them once
os.environ["CUTE_DSL_DUMP_DIR"] = DUMPS

from nanok3.config import K3, ModelConfig, Shard, load_config  # noqa: E402
from nanok3.dsl import ARCHS  # noqa: E402
from nanok3.kernels import (  # noqa: E402
    attn_res,
    embed,
    exchange,
    expert_down,
    expert_prefill,
    expert_up,
    gemv,
    kda_commit,
    kda_decode,
    mla_decode,
    mla_latent,
    mla_merge,
    rms_norm,
    route,
    tap,
)
from nanok3.kernels.exchange import Segment  # noqa: E402
from nanok3.kernels.mega.kernel import Program, compile_mega  # noqa: E402
from nanok3.mega_ops import texts  # noqa: E402
from nanok3.mega_sizes import sizes_of  # noqa: E402
from nanok3.packing import Packed, empty_weights  # noqa: E402

MINI = Path(__file__).parent.parent / "nanok3" / "models" / "k3_mini"
KNOWN_STACK = {
    "mla_decode 3 row tiles": "scalars outside the mma loops, 56 bytes",
    "mega ranks 1 rows": "24 bytes; not looked into",
    "mega ranks 8 rows": "on sm_103a, 8 bytes; the same",
    "mega virtual ranks": "16 bytes; the same",
    "mini mega 8 rows": "on Blackwell, 32 bytes; not looked into, none at the sizes of K3",
    "TP16 mega recorded": "an address, put away while KDA's rows are read, 8 bytes",
}
PASSES = (1, 8)  # rows of a pass that launchers ask for
BLOCK_SIZE = 64
SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 152}  # what the persistent kernel is cut for


@dataclass(frozen=True)
class Variant:
    name: str
    compile: Callable[[str], Any]  # arch -> the compiled kernel


def gemv_shapes(config: ModelConfig, shard: Shard) -> set[Any]:
    """Of all layers and the head; tensors without memory."""
    fields = empty_weights(config, shard, "meta").packed.values()
    matrices = [m for field in fields for m in (field if isinstance(field, tuple) else [field])]
    return {m.shape for m in matrices if isinstance(m, Packed)}


def variants(label: str, config: ModelConfig, shard: Shard) -> Iterator[Variant]:
    c, eps = config, config.rms_norm_eps

    def named(name: str, function: Callable[..., Any], *args: Any) -> Variant:
        return Variant(f"{label} {name}", lambda arch: function(*args, arch))

    for shape in sorted(gemv_shapes(c, shard), key=str):
        size = f"{shape.rows} x {shape.k} {shape.finish}"
        for rows in PASSES:
            try:
                gemv.Gemv(shape, rows)
            except AssertionError as refusal:  # the launcher refuses it too
                print(f"{label} gemv {size}, {rows} rows: refused, {refusal}")
                continue
            yield named(f"gemv {size}, {rows} rows", gemv.compile_gemv, shape, rows)
    for streams in range(1, c.num_res_blocks + 1):
        for fresh in (True, False):
            attn = attn_res.Shape(c.hidden_size, streams, fresh, eps)
            yield named(f"attn_res {streams} fresh {fresh}", attn_res.compile_attn_res, attn)
    yield named("embed", embed.compile_embed, c.hidden_size)
    if c.latent_moe_use_norm:
        latent = c.routed_expert_hidden_size
        yield named("rms_norm", rms_norm.compile_rms_norm, latent, eps)
    latent_shape = mla_latent.Shape(c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim, eps)
    yield named("mla_latent", mla_latent.compile_mla_latent, latent_shape)
    kda = c.linear_attn_config
    kda_shape = kda_decode.Shape(shard.local(kda.num_heads), kda.gate_lower_bound, eps)
    for rows in PASSES:
        name = f"kda_decode {rows} rows"
        yield named(name, kda_decode.compile_kda_decode, kda_shape, rows, False)
    yield named("kda_recorded", kda_decode.compile_kda_decode, kda_shape, PASSES[-1], True)
    yield named("kda_commit", kda_commit.compile_kda_commit, kda_shape.heads)
    yield named("tap", tap.compile_tap, c.hidden_size)
    mla = mla_decode.Shape(
        shard.local(c.num_attention_heads),
        c.kv_lora_rank,
        c.qk_nope_head_dim,
        c.qk_rope_head_dim,
        BLOCK_SIZE,
        c.qk_head_dim**-0.5,
    )
    for row_tiles in sorted({mla_decode.row_groups(mla, rows)[1] for rows in PASSES}):
        name = f"mla_decode {row_tiles} row tiles"
        yield named(name, mla_decode.compile_mla_decode, mla, row_tiles)
    for few in (True, False):
        yield named(f"mla_merge few {few}", mla_merge.compile_mla_merge, c.kv_lora_rank, few)
    top = route.Shape(
        c.num_experts, c.num_experts_per_token, c.moe_renormalize, c.routed_scaling_factor
    )
    yield named("route", route.compile_route, top)
    sizes = (c.num_experts, c.num_experts_per_token, c.routed_expert_hidden_size)
    width = shard.local(c.moe_intermediate_size)
    betas = c.activation_situ_beta, c.activation_situ_linear_beta
    up = expert_up.Shape(*sizes, width, *betas)
    for rows in PASSES:
        yield named(f"expert_up {rows} rows", expert_up.compile_expert_up, up, rows)
    down = expert_down.Shape(*sizes, width)
    yield named("expert_down", expert_down.compile_expert_down, down)
    for columns in (expert_prefill.FEW, expert_prefill.MANY):
        many = expert_prefill.Shape(up.tiles, up.blocks, columns, betas)
        yield named(f"prefill up {columns}", expert_prefill.compile_expert_prefill, many)
        many = expert_prefill.Shape(down.tiles, down.blocks, columns, None)
        yield named(f"prefill down {columns}", expert_prefill.compile_expert_prefill, many)


def mega_variants(label: str, config: ModelConfig, shard: Shard) -> Iterator[Variant]:
    """The persistent kernel for a whole step, and for one whose rows may be rolled back."""

    def compile_for(pass_rows: int, drafted: bool, arch: str) -> Any:
        sizes = sizes_of(config, shard, pass_rows, SMS[arch], BLOCK_SIZE)
        text = texts(config, recorded=drafted, tapped=drafted)
        program = Program(sizes, text, whole=True, recorded=drafted, tapped=drafted)
        return compile_mega(program, arch)

    for rows in PASSES:
        yield Variant(f"{label} mega {rows} rows", partial(compile_for, rows, False))
    yield Variant(f"{label} mega recorded", partial(compile_for, PASSES[-1], True))


def rank_variants(label: str, config: ModelConfig, shard: Shard) -> Iterator[Variant]:
    """The same with exchanges: ranks with GPUs of their own, and all on one."""

    def compile_for(pass_rows: int, apart: bool, arch: str) -> Any:
        sms = SMS[arch] if apart else SMS[arch] // shard.size
        sizes = sizes_of(config, shard, pass_rows, sms, BLOCK_SIZE, together=True)
        program = Program(replace(sizes, apart=apart), texts(config), whole=True)
        return compile_mega(program, arch)

    for rows in PASSES:
        yield Variant(f"{label} mega ranks {rows} rows", partial(compile_for, rows, True))
    yield Variant(f"{label} mega virtual ranks", partial(compile_for, 1, False))
    c, size = config, shard.size
    delta, latent = c.hidden_size // 4, c.routed_expert_hidden_size // 4
    exchanges = {
        "all_reduce": (Segment("sum", delta),),
        "all_gather": (
            Segment("gather", c.num_experts // size // 2),
            Segment("gather", latent // size),
        ),
        "reduce_moe": (Segment("sum", latent), Segment("scatter", delta // size)),
    }
    for name, segments in exchanges.items():
        for launched in (1, size):
            made = partial(exchange.compile_exchange, segments, size, launched)
            yield Variant(f"{label} {name}, {launched} ranks a launch", made)


def resources(cubin: bytes, tool: str | None) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL of the kernel in a cubin."""
    if tool is None:
        return {}
    path = Path(DUMPS) / "one.cubin"
    path.write_bytes(cubin)
    shown = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    found = re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", shown.stdout + shown.stderr)
    return {name: int(value) for name, value in found}


def find_tool() -> str | None:
    """cuobjdump of the package nvidia-cuda-cuobjdump, or of the PATH."""
    for folder in map(Path, sys.path):
        for path in folder.glob("nvidia/*/bin/cuobjdump"):
            return str(path)
    from shutil import which

    return which("cuobjdump")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", action="append", choices=ARCHS, help="else all")
    parser.add_argument("--only", default="", help="part of the names of kernels to compile")
    parser.add_argument("--table", type=Path, help="write the table there too")
    args = parser.parse_args()
    tool = find_tool()
    mini = load_config(MINI)
    wanted = [
        *variants("mini", mini, Shard(0, 1)),
        *variants("K3 TP8", K3, Shard(0, 8)),
        *variants("K3 TP16", K3, Shard(0, 16)),
        *mega_variants("mini", mini, Shard(0, 1)),
        *mega_variants("K3 TP16", K3, Shard(0, 16)),
        *rank_variants("K3 TP8", K3, Shard(0, 8)),
    ]
    wanted = [variant for variant in wanted if args.only in variant.name]
    lines, failed, start = [], 0, time.monotonic()
    for variant in wanted:
        for arch in args.arch or ARCHS:
            begin = time.monotonic()
            try:
                compiled = variant.compile(arch)
                used = resources(compiled.__cubin__, tool)
            except Exception as error:
                failed += 1
                lines.append(f"{variant.name:48} {arch:7} FAILED {type(error).__name__}: {error}")
                print(lines[-1], flush=True)
                continue
            known = any(variant.name.endswith(name) for name in KNOWN_STACK)
            spills = used.get("STACK", 0) + used.get("LOCAL", 0)
            failed += bool(spills) and not known
            mark = "" if not spills else "  known" if known else "  SPILLS"
            shown = " ".join(f"{name} {used[name]:6}" for name in used)
            seconds = time.monotonic() - begin
            lines.append(f"{variant.name:48} {arch:7} {seconds:5.2f} s  {shown}{mark}")
            if mark:
                print(lines[-1], flush=True)
    count = len(wanted) * len(args.arch or ARCHS)
    lines.append(
        f"{count} compiled in {time.monotonic() - start:.0f} s, {failed} failed or spilled; "
        f"registers by {'cuobjdump' if tool else 'nobody: cuobjdump is not here'}"
    )
    if args.table:
        args.table.write_text("\n".join(lines) + "\n")
    print(lines[-1])
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
