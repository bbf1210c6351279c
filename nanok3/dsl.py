"""What CuTe DSL leaves to us: PTX, one function an instruction; addresses, launches, compiling.

Knows nothing of the model. Device functions may be called inside `@cute.jit` and `@cute.kernel`;
each name says its instruction and, where there is one, its memory order.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

VERSION = "4.8.1"  # another release may generate other code: kernels are checked with this one
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
U2, U4 = (Uint32,) * 2, (Uint32,) * 4
F4 = (Float32,) * 4

assert cutlass.__version__.split("+")[0] == VERSION, (
    f"nvidia-cutlass-dsl {VERSION} is needed, {cutlass.__version__} is installed"
)


# ---- device: one instruction each ----


@dsl_user_op
def asm(
    code: str,
    constraints: str,
    args: Sequence[Any] = (),
    result: Any = None,
    *,
    effects: bool = True,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """One asm statement; $0.. are results, then args. `result`: a type, a tuple of types, None."""
    kinds = [c for c in constraints.split(",") if c[:1] not in ("=", "~", "")]
    values = []
    for kind, value in zip(kinds, args, strict=True):
        if hasattr(value, "toint"):
            value = value.toint(loc=loc, ip=ip)
            value = Int32(value) if kind == "r" else value
        values.append(value.ir_value(loc=loc, ip=ip))
    many = isinstance(result, tuple)
    mlir_type = None
    if many:
        mlir_type = llvm.StructType.get_literal([t.mlir_type for t in result])
    elif result is not None:
        mlir_type = result.mlir_type
    out = llvm.inline_asm(
        mlir_type,
        values,
        code,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if result is None:
        return None
    if many:
        return tuple(
            t(llvm.extractvalue(t.mlir_type, out, [i], loc=loc, ip=ip))
            for i, t in enumerate(result)
        )
    return result(out)


def ld_global_u32(address):
    return asm("ld.global.u32 $0,[$1];", "=r,l,~{memory}", (address,), Uint32)


def ld_global_u16(address):
    """Zero-extended."""
    code = "{.reg .b16 t; ld.global.u16 t,[$1]; cvt.u32.u16 $0,t;}"
    return asm(code, "=r,l,~{memory}", (address,), Uint32)


def ld_global_u32x4(address):
    """16 bytes as four words, from memory that nobody writes while the kernel runs."""
    return asm("ld.global.v4.u32 {$0,$1,$2,$3},[$4];", "=r,=r,=r,=r,l,~{memory}", (address,), U4)


def ld_global_f32(address):
    return asm("ld.global.f32 $0,[$1];", "=f,l,~{memory}", (address,), Float32)


def ld_global_f32x4(address):
    return asm("ld.global.v4.f32 {$0,$1,$2,$3},[$4];", "=f,=f,=f,=f,l,~{memory}", (address,), F4)


def ld_global_i64(address):
    return asm("ld.global.b64 $0,[$1];", "=l,l,~{memory}", (address,), Int64)


def st_global_u32(address, word):
    asm("st.global.u32 [$0],$1;", "l,r,~{memory}", (address, word))


def st_global_u16(address, word):
    """The low half of a word."""
    asm("{.reg .b16 t; cvt.u16.u32 t,$1; st.global.u16 [$0],t;}", "l,r,~{memory}", (address, word))


def st_global_f32(address, value):
    asm("st.global.f32 [$0],$1;", "l,f,~{memory}", (address, value))


def st_global_f32x4(address, values):
    asm("st.global.v4.f32 [$0],{$1,$2,$3,$4};", "l,f,f,f,f,~{memory}", (address, *values))


def st_global_f32x2(address, values):
    asm("st.global.v2.f32 [$0],{$1,$2};", "l,f,f,~{memory}", (address, *values))


def st_global_u32x2(address, words):
    asm("st.global.v2.u32 [$0],{$1,$2};", "l,r,r,~{memory}", (address, *words))


def st_global_u32x4(address, words):
    asm("st.global.v4.u32 [$0],{$1,$2,$3,$4};", "l,r,r,r,r,~{memory}", (address, *words))


def ld_shared_u32(address):
    return asm("ld.shared.u32 $0,[$1];", "=r,r,~{memory}", (address,), Uint32)


def ld_shared_u32x4(address):
    return asm("ld.shared.v4.u32 {$0,$1,$2,$3},[$4];", "=r,=r,=r,=r,r,~{memory}", (address,), U4)


def ld_shared_f32(address):
    return asm("ld.shared.f32 $0,[$1];", "=f,r,~{memory}", (address,), Float32)


def ld_shared_f32x4(address):
    return asm("ld.shared.v4.f32 {$0,$1,$2,$3},[$4];", "=f,=f,=f,=f,r,~{memory}", (address,), F4)


def st_shared_u32(address, word):
    asm("st.shared.u32 [$0],$1;", "r,r,~{memory}", (address, word))


def st_shared_f32(address, value):
    asm("st.shared.f32 [$0],$1;", "r,f,~{memory}", (address, value))


def st_shared_f32x4(address, values):
    asm("st.shared.v4.f32 [$0],{$1,$2,$3,$4};", "r,f,f,f,f,~{memory}", (address, *values))


def st_shared_u32x4(address, words):
    asm("st.shared.v4.u32 [$0],{$1,$2,$3,$4};", "r,r,r,r,r,~{memory}", (address, *words))


def mapa_shared(address, rank):
    """The address, in the cluster, of what lies at the same shared address of CTA `rank`."""
    return asm(
        "mapa.shared::cluster.u32 $0,$1,$2;", "=r,r,r", (address, rank), Int32, effects=False
    )


def st_cluster_f32(address, value):
    """Weak: seen by the other CTA after cluster_arrive here and cluster_wait there."""
    asm("st.shared::cluster.f32 [$0],$1;", "r,f,~{memory}", (address, value))


def ldmatrix_x4(address):
    """Four 8x8 matrices of bf16; lane l gives the address of row l % 8 of matrix l // 8 (16 bytes).

    Word i of lane 4g + q: row g of matrix i, columns 2q and 2q + 1.
    """
    code = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3},[$4];"
    return asm(code, "=r,=r,=r,=r,r,~{memory}", (address,), U4)


def ldmatrix_x4_trans(address):
    """The same, transposed. Word i of lane 4g + q: column g of matrix i, rows 2q and 2q + 1."""
    code = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3},[$4];"
    return asm(code, "=r,=r,=r,=r,r,~{memory}", (address,), U4)


def mma_bf16(a, b, c):
    """m16n8k16, row x col, float32 accumulators: c [16, 8] += a [16, 16] @ b [16, 8].

    Lane 4g + q holds a: rows g and g + 8 of columns 2q, 2q + 1 (a0, a1), then of columns 2q + 8,
    2q + 9 (a2, a3); b: column g of rows 2q, 2q + 1 (b0) and 2q + 8, 2q + 9 (b1); c: row g of
    columns 2q, 2q + 1 (c0, c1), row g + 8 of the same (c2, c3).
    """
    return asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        (*a, *b, *c),
        F4,
        effects=False,
    )


def mul_bf16x2(a, b):
    return asm("mul.rn.bf16x2 $0,$1,$2;", "=r,r,r", (a, b), Uint32, effects=False)


def bf16_low(word):
    """The low bf16 of a word as float32."""
    return asm("shl.b32 $0,$1,16;", "=f,r", (word,), Float32, effects=False)


def bf16_high(word):
    return asm("and.b32 $0,$1,0xffff0000;", "=f,r", (word,), Float32, effects=False)


def pack_bf16(low, high):
    """Two float32, rounded to nearest even, as one word."""
    return asm("cvt.rn.bf16x2.f32 $0,$2,$1;", "=r,f,f", (low, high), Uint32, effects=False)


def bits_of(value):
    return asm("mov.b32 $0,$1;", "=r,f", (value,), Uint32, effects=False)


def float_of(word):
    return asm("mov.b32 $0,$1;", "=f,r", (word,), Float32, effects=False)


def select_f32(condition, yes, no):
    """`yes` where the word `condition` is not 0."""
    code = "{.reg .pred p; setp.ne.u32 p,$1,0; selp.f32 $0,$2,$3,p;}"
    return asm(code, "=f,r,f,f", (condition, yes, no), Float32, effects=False)


def ex2_approx(value):
    return asm("ex2.approx.ftz.f32 $0,$1;", "=f,f", (value,), Float32, effects=False)


def rcp_approx(value):
    return asm("rcp.approx.ftz.f32 $0,$1;", "=f,f", (value,), Float32, effects=False)


def rsqrt_approx(value):
    return asm("rsqrt.approx.ftz.f32 $0,$1;", "=f,f", (value,), Float32, effects=False)


def ld_global_u32x4_or_zero(address, wanted):
    """16 bytes as four words; without `wanted` zeros, and the address is not read."""
    code = (
        "{.reg .pred p; setp.ne.s32 p,$5,0; "
        "mov.u32 $0,0; mov.u32 $1,0; mov.u32 $2,0; mov.u32 $3,0; "
        "@p ld.global.v4.u32 {$0,$1,$2,$3},[$4];}"
    )
    return asm(code, "=&r,=&r,=&r,=&r,l,r,~{memory}", (address, wanted), U4)


def ld_shared_u16(address):
    """Zero-extended."""
    code = "{.reg .b16 t; ld.shared.u16 t,[$1]; cvt.u32.u16 $0,t;}"
    return asm(code, "=r,r,~{memory}", (address,), Uint32)


def ld_shared_u32x2(address):
    return asm("ld.shared.v2.u32 {$0,$1},[$2];", "=r,=r,r,~{memory}", (address,), U2)


def red_or_shared(address, word):
    """Relaxed, at CTA scope."""
    asm("red.relaxed.cta.shared.or.b32 [$0],$1;", "r,r,~{memory}", (address, word))


def warp_max_u32(word):
    """The largest of the warp's 32 words, in every lane."""
    return asm("redux.sync.max.u32 $0,$1,0xffffffff;", "=r,r", (word,), Uint32)


def max_u32(a, b):
    """Of two words. (`cutlass.max` compares as signed numbers when one is a constant.)"""
    return asm("max.u32 $0,$1,$2;", "=r,r,r", (a, b), Uint32, effects=False)


def lowest_bit(word):
    """Number of the lowest set bit; 32 if there is none."""
    code = "{.reg .b32 t; brev.b32 t,$1; clz.b32 $0,t;}"
    return asm(code, "=r,r", (word,), Int32, effects=False)


def evict_first_policy():
    """L2 policy of data that is read once."""
    code = "createpolicy.fractional.L2::evict_first.b64 $0,1.0;"
    return asm(code, "=l", (), Int64, effects=False)


def bulk_copy_g2s(shared, address, num_bytes, mbarrier, policy):
    """num_bytes (a multiple of 16) from global to shared memory; completes on the mbarrier."""
    asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0],[$1],$2,[$3],$4;",
        "r,l,r,r,l,~{memory}",
        (shared, address, num_bytes, mbarrier, policy),
    )


def cp_async_16(shared, address):
    """16 bytes from global to shared memory; waited for with cute.arch.cp_async_wait_group."""
    asm("cp.async.cg.shared.global [$0],[$1],16;", "r,l,~{memory}", (shared, address))


def ld_global_u32x2(address):
    return asm("ld.global.v2.u32 {$0,$1},[$2];", "=r,=r,l,~{memory}", (address,), U2)


def st_shared_u32x2(address, words):
    asm("st.shared.v2.u32 [$0],{$1,$2};", "r,r,r,~{memory}", (address, *words))


def st_shared_u16(address, word):
    """The low half of a word."""
    asm("{.reg .b16 t; cvt.u16.u32 t,$1; st.shared.u16 [$0],t;}", "r,r,~{memory}", (address, word))


def ld_acquire_u32(address):
    """Acquire, at GPU scope."""
    return asm("ld.acquire.gpu.global.u32 $0,[$1];", "=r,l,~{memory}", (address,), Uint32)


def ld_relaxed_u32(address, scope="gpu"):
    """Relaxed, at GPU scope, or "sys" for what another device writes."""
    return asm(f"ld.relaxed.{scope}.global.u32 $0,[$1];", "=r,l,~{memory}", (address,), Uint32)


def ld_relaxed_u32x2(address):
    code = "ld.relaxed.gpu.global.v2.u32 {$0,$1},[$2];"
    return asm(code, "=r,=r,l,~{memory}", (address,), U2)


def ld_relaxed_u32x4(address):
    """Relaxed, at GPU scope, each word for itself: for words that say whether they are new."""
    code = "ld.relaxed.gpu.global.v4.u32 {$0,$1,$2,$3},[$4];"
    return asm(code, "=r,=r,=r,=r,l,~{memory}", (address,), U4)


def st_relaxed_u32x2(address, words):
    code = "st.relaxed.gpu.global.v2.u32 [$0],{$1,$2};"
    asm(code, "l,r,r,~{memory}", (address, *words))


def st_relaxed_u32x4(address, words):
    code = "st.relaxed.gpu.global.v4.u32 [$0],{$1,$2,$3,$4};"
    asm(code, "l,r,r,r,r,~{memory}", (address, *words))


def st_relaxed_u32(address, word, scope="gpu"):
    """Relaxed, at GPU scope, or "sys" for what another device reads."""
    asm(f"st.relaxed.{scope}.global.u32 [$0],$1;", "l,r,~{memory}", (address, word))


def red_add_release(address, word):
    """Release, at GPU scope: also of what came before a barrier that this thread has passed."""
    asm("red.release.gpu.global.add.u32 [$0],$1;", "l,r,~{memory}", (address, word))


def fence_async():
    """What this thread wrote or saw written is ordered before bulk copies that come after."""
    asm("fence.proxy.async.global;", "~{memory}", ())


def mul_wide_u32(a, b):
    """The low and the high word of a product."""
    code = "{.reg .b64 t; mul.wide.u32 t,$2,$3; mov.b64 {$0,$1},t;}"
    return asm(code, "=r,=r,r,r", (a, b), U2, effects=False)


def ld_shared_u8(address):
    """Zero-extended."""
    return asm("ld.shared.u8 $0,[$1];", "=r,r,~{memory}", (address,), Uint32)


def global_clock():
    """Nanoseconds, the same clock on all SMs."""
    return asm("mov.u64 $0,%globaltimer;", "=l,~{memory}", (), Int64)


def ld_relaxed_word(address, scope):
    """The low and the high half of a word of 64 bits, which is read whole."""
    code = f"{{.reg .b64 a; ld.relaxed.{scope}.global.b64 a,[$2]; mov.b64 {{$0,$1}},a;}}"
    return asm(code, "=r,=r,l,~{memory}", (address,), U2)


def ld_relaxed_words(address, scope):
    """Two words of 64 bits, each read whole: low and high half of each."""
    code = (
        f"{{.reg .b64 a,b; ld.relaxed.{scope}.global.v2.b64 {{a,b}},[$4]; "
        "mov.b64 {$0,$1},a; mov.b64 {$2,$3},b;}"
    )
    return asm(code, "=r,=r,=r,=r,l,~{memory}", (address,), U4)


def st_relaxed_words(address, first, second, tag, scope):
    """Two words of 64 bits with the same high half, each written whole."""
    code = (
        f"{{.reg .b64 a,b; mov.b64 a,{{$1,$3}}; mov.b64 b,{{$2,$3}}; "
        f"st.relaxed.{scope}.global.v2.b64 [$0],{{a,b}};}}"
    )
    asm(code, "l,r,r,r,~{memory}", (address, first, second, tag))


# ---- device: small functions of several instructions ----


def sigmoid(value):
    """1 / (1 + e^-v): two approximations, relative error about 1e-6."""
    return rcp_approx(Float32(1.0) + ex2_approx(value * Float32(-1.4426950408889634)))


def tanh(value):
    """2 sigmoid(2 v) - 1; absolute error about 1e-6, which is what a capped product needs."""
    return Float32(2.0) * sigmoid(value + value) - Float32(1.0)


def situ(gate, up, beta, linear_beta):
    """[beta tanh(g / beta) sigmoid(g)] [linear_beta tanh(u / linear_beta)]; betas are static."""
    capped = Float32(beta) * tanh(gate * Float32(1.0 / beta)) * sigmoid(gate)
    return capped * (Float32(linear_beta) * tanh(up * Float32(1.0 / linear_beta)))


def tree(values: list[Any], combine: Callable[[Any, Any], Any] = lambda x, y: x + y) -> Any:
    """Reduces by pairs: a chain of n dependent instructions costs 4 n cycles."""
    while len(values) > 1:
        values = [
            combine(*values[i : i + 2]) if i + 1 < len(values) else values[i]
            for i in range(0, len(values), 2)
        ]
    return values[0]


def warp_sum(values: list[Any]) -> list[Any]:
    """Sums of several values over the warp, in every lane; their shuffles overlap."""
    for distance in (16, 8, 4, 2, 1):
        values = [v + cute.arch.shuffle_sync_bfly(v, distance) for v in values]
    return values


def warp_sums(values: list[Any], lane: Any) -> Any:
    """Lane l gets the sum over the warp of values[l % n], n = len(values), a power of two.

    Each step halves the values: of a pair of lanes one keeps the low half and is given its
    partner's, the other the high half. So n sums cost n - 1 shuffles, and log2(32 / n) more.
    """
    n = len(values)
    assert n in (1, 2, 4, 8, 16, 32)
    for distance in (d for d in (16, 8, 4, 2, 1) if d < n):
        upper = lane & distance
        values = [
            select_f32(upper, high, low)
            + cute.arch.shuffle_sync_bfly(select_f32(upper, low, high), distance)
            for low, high in zip(values[:distance], values[distance:], strict=True)
        ]
    total = values[0]
    for distance in (d for d in (16, 8, 4, 2, 1) if d >= n):
        total = total + cute.arch.shuffle_sync_bfly(total, distance)
    return total


# ---- host ----


@functools.cache
def arch_of(device_index: int) -> str:
    """The target to compile for; RuntimeError for a GPU that these kernels do not run on."""
    major, minor = torch.cuda.get_device_capability(device_index)
    names = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
    if (major, minor) not in names:
        raise RuntimeError(
            f"compute capability {major}.{minor} found; the kernels need 9.0 (Hopper), 10.0 or 10.3"
        )
    return names[(major, minor)]


def current_stream() -> Any:
    """torch's current stream, as CuTe DSL takes it."""
    import cuda.bindings.driver as cuda

    return cuda.CUstream(torch.cuda.current_stream().cuda_stream)


def address(tensor: torch.Tensor) -> int:
    """Kernels take addresses and sizes; the launcher has checked shape, dtype and stride."""
    return tensor.data_ptr()


def launch(kernel: Any, *numbers: int | float) -> None:
    """On torch's current stream."""
    kernel(*numbers, current_stream())


def compile_kernel(function: Any, args: Sequence[Any], arch: str) -> Any:
    """Compiles for `arch`; CUTE_DSL_ARCH, where it is set, must agree."""
    wanted = os.environ.get("CUTE_DSL_ARCH", arch)
    assert wanted == arch, f"CUTE_DSL_ARCH is {wanted}, the device needs {arch}"
    return cute.compile(function, *args, options=f"--enable-tvm-ffi --gpu-arch={arch}")
