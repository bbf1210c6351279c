"""`mega.kda` against the reference: a cooperative grid with the role's own counters, no loader.

Each layer the CTAs copy their share of kda_in, then do what `ops` does around KDA. CTAs are few, so
that one has several units, or many, so that units are spread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import check_bf16, check_close, check_equal
from torch import Tensor

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from ptx.launch import ARCH, Compiled, Emulator
from ptx.memory import Fault, buffer_of

from kernels.test_kda_decode import (
    D,
    caches,
    doubled,
    exact_weights,
    inputs,
    reference,
    settled,
    walk,
    weights,
)
from nanok3.dsl import (
    ARCHS,
    address,
    arch_of,
    compile_kernel,
    float_of,
    launch,
    ld_global_u32,
    ld_shared_u32,
    st_global_u32,
    st_shared_u32,
)
from nanok3.kernels.mega.fields import ENTRIES, entry
from nanok3.kernels.mega.kda import KDA
from nanok3.kernels.mega.linear import THREADS, partial_bytes, x_stride
from nanok3.kernels.mega.role import PENDING, SYNC_BYTES, Compute, Signaller, tagged
from nanok3.kernels.mega.sizes import WARPS, Sizes
from nanok3.reference.kda import KDAWeights
from nanok3.reference.kda_records import KDARecords, allocate_records, commit_ref

RECORDS = ("record_qkv", "record_log_decay", "record_key", "record_value")
ADDRESSES = ("table", "work", "sync", "state_slots", "given", "out", *RECORDS)


class Layers:
    """given [layers, bytes of kda_in] -> out [layers, SMs, T, H * D] bf16: x as each CTA has it."""

    def __init__(self, sizes: Sizes, recorded: bool) -> None:
        self.sizes, self.recorded, self.kda = sizes, recorded, KDA(sizes, recorded)

    @cute.jit
    def __call__(
        self,
        table: Int64,
        work: Int64,
        sync: Int64,
        state_slots: Int64,
        given: Int64,
        out: Int64,
        record_qkv: Int64,
        record_log_decay: Int64,
        record_key: Int64,
        record_value: Int64,
        num_reqs: Int32,
        num_tokens: Int32,
        num_layers: Int32,
        record_slots: Int32,
        record_rows: Int32,
        stream,
    ):
        self.kernel(
            *(table, work, sync, state_slots, given, out),
            *(record_qkv, record_log_decay, record_key, record_value),
            *(num_reqs, num_tokens, num_layers, record_slots, record_rows),
        ).launch(
            grid=(self.sizes.sms, 1, 1),
            block=(THREADS + 32, 1, 1),
            stream=stream,
            cooperative=True,
        )

    @cute.kernel
    def kernel(
        self,
        table: Int64,
        work: Int64,
        sync: Int64,
        state_slots: Int64,
        given: Int64,
        out: Int64,
        record_qkv: Int64,
        record_log_decay: Int64,
        record_key: Int64,
        record_value: Int64,
        num_reqs: Int32,
        num_tokens: Int32,
        num_layers: Int32,
        record_slots: Int32,
        record_rows: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        parts = 2 * partial_bytes(self.sizes.pass_rows)
        stop = parts + self.kda.scratch_bytes
        smem = SmemAllocator()
        pending = smem.allocate_array(Int64, num_elems=PENDING)
        areas = smem.allocate(stop + 16, byte_alignment=128)
        program = SimpleNamespace(
            sizes=self.sizes,
            areas={"partial": 0, "scratch": parts, "stop": stop},
            op_number=lambda _: 0,
            stamps=False,
            limit=1 << 22,
        )
        env = dict(table=table, work=work, sync=sync, state_slots=state_slots)
        env.update(num_reqs=num_reqs, num_tokens=num_tokens, areas=Int32(areas.toint()))
        env.update(pending=pending, first_signal=Uint32(0))
        env.update(record_qkv=record_qkv, record_log_decay=record_log_decay)
        env.update(record_key=record_key, record_value=record_value)
        env.update(record_slots=record_slots, record_rows=record_rows)
        if tid == 0:
            for i in cutlass.range_constexpr(PENDING):
                cute.arch.mbarrier_init(pending + i, WARPS)
            st_shared_u32(Int32(areas.toint()) + stop, Uint32(0))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == WARPS:
            Signaller(program, env).run()
        else:
            role = Compute(program, env)
            self.run(role, given, out, num_layers)
            role.fresh()  # not those of the loop
            role.finish()

    @cute.jit
    def run(self, r, given: Int64, out: Int64, num_layers: Int32):
        words, width = self.sizes.buffers["kda_in"] // 4, self.kda.width
        one_row = self.sizes.pass_rows == 1
        r.block_signal[0], r.block_tag[0] = Uint32(0), Uint32(0)
        for layer in cutlass.range(num_layers, unroll=1):
            r.prefetch_row(layer)
            r.next_row()
            r.begin_block()
            tag = r.new_tag("kda_in")
            for i in cutlass.range(
                r.cta * THREADS + r.tid, words, THREADS * self.sizes.sms, unroll=1
            ):
                word = ld_global_u32(given + (Int64(layer) * words + Int64(i)) * 4)
                if const_expr(one_row):
                    word = tagged(float_of(word), tag)
                st_global_u32(r.buffer("kda_in") + Int64(i) * 4, word)
            if const_expr(not one_row):
                r.signal("kda_in")
            r.begin("kda")
            r.new_tag("kda_heads")
            state = self.kda.compute_heads(r)
            if const_expr(not one_row):
                r.signal("kda_heads")
            if const_expr(not self.recorded):
                self.kda.store(r, state)
            if const_expr(one_row):
                r.bar()  # scratch is free
            else:
                r.wait("kda_heads")
            self.kda.stage(r, r.shared("scratch"))
            r.bar()
            to = out + Int64((layer * self.sizes.sms + r.cta) * r.num_tokens) * (2 * width)
            for i in cutlass.range(r.tid, r.num_tokens * (width // 2), THREADS, unroll=1):
                row, pair = i // (width // 2), i % (width // 2)
                at = r.shared("scratch") + row * x_stride(width) + pair * 4
                st_global_u32(to + Int64(i) * 4, ld_shared_u32(at))
            r.signal("out")
            r.wait("out")  # before words are written again, and scratch
            r.end_block()


@functools.cache
def compile_layers(sizes: Sizes, recorded: bool, arch: str) -> Any:
    args = (*(Int64(0) for _ in ADDRESSES), *(Int32(1) for _ in range(5)), make_fake_stream())
    return compile_kernel(Layers(sizes, recorded), args, arch)


@functools.cache
def sizes_of(heads: int, sms: int, pass_rows: int, hidden: int = 128) -> Sizes:
    """Of what KDA does not read, anything that is allowed."""
    return Sizes(
        **dict(sms=sms, pass_rows=pass_rows, hidden=hidden, kda_heads=heads, mla_heads=1),
        **dict(q_rank=64, kv_rank=128, nope_dim=128, rope_dim=64, value_dim=128, num_experts=64),
        **dict(top_k=8, latent=64, expert_width=128, shared_width=128, dense_width=0, vocab=64),
        **dict(router_rows=64, latent_rows=64, up_rows=hidden, router_first=0, latent_first=0),
        **dict(up_first=0, embed_rows=64, embed_first=0, block_size=64, eps=1e-5),
        **dict(beta=1.0, linear_beta=1.0, lower_bound=-5.0, routed_norm=True, renormalize=True),
        **dict(scaling=1.0, softmax_scale=1.0),
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_rows, recorded", [(1, False), (8, False), (8, True)])
def test_kda_compiles(pass_rows: int, recorded: bool, arch: str) -> None:
    compile_layers(sizes_of(6, 132, pass_rows, hidden=7168), recorded, arch)


def test_scratch_leaves_the_ring_its_slots() -> None:
    for heads in (6, 12):
        assert KDA(sizes_of(heads, 132, 1, hidden=7168)).scratch_bytes <= 58 << 10
        assert KDA(sizes_of(heads, 132, 8, hidden=7168)).scratch_bytes <= 72 << 10


def parts_of(x: Tensor, sizes: Sizes) -> Tensor:
    """kda_in [slices, pass_rows, rows] f32 whose sums over the slices are x, in any order; what x
    does not give is NaN."""
    product = sizes.products["kda.in_proj"]
    factors = [(-1) ** s * (s + 1) / 2 for s in range(product.slices - 1)]
    parts = torch.full((product.slices, sizes.pass_rows, product.rows), float("nan"))
    for s, factor in enumerate([*factors, 1 - sum(factors)]):
        parts[s, : x.shape[0], : x.shape[1]] = x.float() * factor
    return parts


Tensors = dict[str, Tensor]
Launch = Callable[[Sizes, Tensors, list[Tensors], tuple[int, ...]], None]


def fill(table: Tensor, layers: list[Tensors]) -> None:
    for i, (row, fields) in enumerate(zip(table, layers, strict=True)):
        row[entry("kda.index")] = i
        for name, tensor in fields.items():
            row[entry(f"kda.{name}")] = tensor.data_ptr()


@pytest.fixture(scope="module")
def on_emulator(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    emulator = Emulator(str(tmp_path_factory.mktemp("ptx")))
    arguments = (*(Int64(0) for _ in ADDRESSES), *(Int32(1) for _ in range(5)), make_fake_stream())

    @functools.cache
    def compiled(sizes: Sizes, recorded: bool) -> Compiled:
        return emulator.compile(Layers(sizes, recorded), arguments, ARCH)

    def launch_layers(
        sizes: Sizes, tensors: Tensors, layers: list[Tensors], numbers: tuple[int, ...]
    ) -> None:
        fill(tensors["table"], layers)
        recorded = bool(numbers[-1])
        work, written = tensors["work"], (*RECORDS, "out")
        written += () if recorded else ("conv_state", "state")
        one_row = sizes.pass_rows == 1  # words, which hand themselves over, and windows with them
        buffers = [
            buffer_of(
                work[at : at + sizes.buffers[name]], False, name, unordered=sizes.is_words(name)
            )
            for name, at in sizes.offsets.items()
            if name.startswith("kda")
        ]
        named = [(n, t) for n, t in tensors.items() if n not in ("work", "sync")]
        named += [(f"{n} {i}", t) for i, fields in enumerate(layers) for n, t in fields.items()]
        shared = len(tensors["state_slots"].unique()) < len(tensors["state_slots"])
        for name, tensor in named:
            constant = name.split()[0] not in written
            free = shared or (one_row and name.startswith("conv_state"))
            buffers.append(buffer_of(tensor, constant, name, unordered=free and not constant))
        buffers.append(buffer_of(tensors["sync"].view(torch.int32), False, "sync"))
        places = [tensors[name].data_ptr() if name in tensors else 0 for name in ADDRESSES]
        emulator.run(compiled(sizes, recorded), [*places, *numbers], buffers)

    return launch_layers


def on_gpu(sizes: Sizes, tensors: Tensors, layers: list[Tensors], numbers: tuple[int, ...]) -> None:
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    layers_there = [{name: t.cuda() for name, t in fields.items()} for fields in layers]
    table = tensors["table"]
    fill(table, layers_there)
    there["table"] = table.cuda()
    places = [address(there[name]) if name in there else 0 for name in ADDRESSES]
    launch(compile_layers(sizes, bool(numbers[-1]), arch_of(0)), *places, *numbers)
    for name in ("out", *RECORDS):
        if name in tensors:
            tensors[name].copy_(there[name])
    for fields, fields_there in zip(layers, layers_there, strict=True):
        for name in ("conv_state", "state"):
            fields[name].copy_(fields_there[name])


Layer = tuple[Tensor, KDAWeights, Tensor, Tensor]  # x, weights, conv_state, state


def run(
    launch_layers: Launch,
    sizes: Sizes,
    layers: list[Layer],
    slots: list[int],
    records: KDARecords | None = None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """On copies of the caches -> out, conv_state, state of each layer."""
    fields = [
        {
            **{name: t for name, t in vars(w).items() if isinstance(t, Tensor)},
            **{"conv_state": conv_state.clone(), "state": state.clone()},
        }
        for _, w, conv_state, state in layers
    ]
    tokens = layers[0][0].shape[0]
    out = torch.full((len(layers), sizes.sms, tokens, sizes.kda_width), float("nan")).bfloat16()
    tensors = {
        "table": torch.full((len(layers), ENTRIES), 16),
        "work": torch.full((sizes.work_bytes,), 0xFF, dtype=torch.uint8),
        "sync": torch.zeros(SYNC_BYTES, dtype=torch.uint8),
        "state_slots": torch.tensor(slots),
        "given": torch.stack([parts_of(x, sizes) for x, *_ in layers]),
        "out": out,
    }
    extent = (0, 0)
    if records is not None:
        extent = records.key.shape[1], records.key.shape[2]
        tensors |= {name: getattr(records, name.removeprefix("record_")) for name in RECORDS}
    launch_layers(sizes, tensors, fields, (len(slots), tokens, len(layers), *extent))
    for cta in range(1, sizes.sms):
        check_equal(out[:, cta], out[:, 0], f"x of CTA {cta}")
    return [(out[i, 0], f["conv_state"], f["state"]) for i, f in enumerate(fields)]


# heads, SMs, rows of a request, slots: one row; units spread; a request of 8 rows, of 2 and of 3
# (fewer rows than the window, as many, more); 8 requests with several units a CTA
CASES = [
    (1, 3, 1, [3]),
    (1, 9, 1, [3]),
    (2, 3, 8, [2]),
    (1, 5, 3, [5, 1]),
    (1, 12, 2, [2, 7]),
    (1, 7, 1, [6, 1, 3, 4, 5, 2, 7, 8]),
]
GPU_CASES = [*CASES[2:4], CASES[5], (6, 132, 1, [3]), (12, 132, 8, [1])]


def check_layers(
    launch_layers: Launch, heads: int, sms: int, num_rows: int, slots: list[int], count: int
) -> None:
    tokens = len(slots) * num_rows
    layers = [
        (inputs(5 + i, tokens, heads), weights(heads), *caches(20 + i, heads, slots, 9))
        for i in range(count)
    ]
    sizes = sizes_of(heads, sms, 1 if tokens == 1 else 8)
    for layer, got in zip(layers, run(launch_layers, sizes, layers, slots), strict=True):
        x, w, conv_state, state = layer
        bf16 = reference(*layer, slots)
        right = reference(x.double(), doubled(w), conv_state.double(), state.double(), slots)
        check_bf16(got[0], bf16[0], right[0])
        check_equal(got[1], bf16[1], "windows")
        foreign = [slot for slot in range(len(state)) if slot not in slots]
        check_equal(got[2][foreign], state[foreign], "states of others")
        check_close(got[2][slots], bf16[2][slots], 2e-3, "state")  # q, k, v, f may round apart


@pytest.mark.parametrize("heads, sms, num_rows, slots", CASES)
def test_kda_on_emulator(
    on_emulator: Launch, heads: int, sms: int, num_rows: int, slots: list[int]
) -> None:
    check_layers(on_emulator, heads, sms, num_rows, slots, 1)


def check_padding(launch_layers: Launch) -> None:
    """Padding requests share slot 0, whatever it holds; the real one does not notice."""
    heads, slots, sizes = 1, [0, 3, 0], sizes_of(1, 5, 8)
    w, x, (conv_state, state) = weights(heads), inputs(6, 6, heads), caches(30, heads, [3])
    conv_state[0], state[0] = float("nan"), float("nan")
    x[:2], x[4:] = float("nan"), float("nan")
    [got] = run(launch_layers, sizes, [(x, w, conv_state, state)], slots)
    [alone] = run(launch_layers, sizes, [(x[2:4], w, conv_state, state)], [3])
    check_equal(got[0][2:4], alone[0], "outputs")
    for name, mine, right in zip(("windows", "states"), got[1:], alone[1:], strict=True):
        check_equal(mine[1:], right[1:], name)


def test_padding_on_emulator(on_emulator: Launch) -> None:
    check_padding(on_emulator)


@pytest.mark.gpu
def test_padding_leaves_others_alone() -> None:
    check_padding(on_gpu)


def test_state_is_close_on_emulator(on_emulator: Launch) -> None:
    """Rows without results that may be rounded either way, so that the state can be judged."""
    heads, num_rows, slots = 1, 3, [5, 1]
    w, (conv_state, state) = exact_weights(heads), caches(40, heads, slots)
    x = [settled(inputs(9 + s, num_rows, heads), w, conv_state[s]) for s in slots]
    layer = (torch.cat(x), w, conv_state, state)
    _, windows, got = run(on_emulator, sizes_of(heads, 5, 8), [layer], slots)[0]
    for slot, own in zip(slots, x, strict=True):
        right = walk(own, w, conv_state[slot], state[slot])
        check_close(got[slot], right, 1e-5, "state, in float64")
        check_equal(windows[slot], own[:, : 3 * heads * D], "window")


def test_a_window_written_too_early_is_noticed(
    on_emulator: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KDA, "store", lambda self, r, state: self.store_windows(r))
    with pytest.raises(Fault, match="conv_state 0"):
        check_layers(on_emulator, 1, 4, 2, [3], 1)  # sizes that no other test compiles


def test_two_layers_on_emulator(on_emulator: Launch) -> None:
    check_layers(on_emulator, 1, 3, 1, [4, 1], 2)


# ---- rows that are recorded ----

# part of a CTA's SMs idle, units spread; several units a CTA; 8 requests of one row
RECORDED = [(1, 12, 3, [5, 1]), (1, 3, 8, [2]), (1, 7, 1, [6, 1, 3, 4, 5, 2, 7, 8])]


def check_recorded(
    launch_layers: Launch, heads: int, sms: int, num_rows: int, slots: list[int], count: int
) -> None:
    """Records of `count` layers, for more rows than the step has; then each number of rows that may
    stand, by the reference. Where there are several, the last one is NaN and never stands."""
    w, layers = exact_weights(heads), list[Layer]()
    stand = max(1, num_rows - 1)  # at most
    for i in range(count):
        conv_state, state = caches(40 + i, heads, slots, 9)
        x = [settled(inputs(9 + s + i, num_rows, heads), w, conv_state[s]) for s in slots]
        for own in x:
            own[stand:] = float("nan")
        layers.append((torch.cat(x), w, conv_state, state))
    conv_states, states = (torch.stack([layer[i] for layer in layers]) for i in (2, 3))
    records = allocate_records(count, 9, num_rows + 1, conv_states, states)
    for tensor in (records.qkv, records.log_decay, records.key, records.value):
        tensor.fill_(float("nan"))
    sizes = sizes_of(heads, sms, 8)
    found = run(launch_layers, sizes, layers, slots, records)
    for i, (layer, (out, conv_state, state)) in enumerate(zip(layers, found, strict=True)):
        x, _, old_conv_state, old_state = layer
        check_equal(conv_state, old_conv_state, "windows are only read")
        check_equal(state, old_state, "states are only read")
        right = reference(x.double(), doubled(w), *(t.double() for t in layer[2:]), slots)
        outs = (out, reference(*layer, slots)[0], right[0])
        check_bf16(*(o.unflatten(0, (-1, num_rows))[:, :stand] for o in outs))
        others = [s for s in range(9) if s not in slots]
        for tensor in (records.qkv[i], records.log_decay[i], records.key[i], records.value[i]):
            assert tensor[others].isnan().all() and tensor[:, num_rows:].isnan().all()
    for standing in range(stand + 1):
        counts = [(standing + r) % (stand + 1) for r in range(len(slots))]
        got_conv, got = conv_states.clone(), states.clone()
        commit_ref(got_conv, got, records, slots, counts, fold=False)
        for i, (x, _, conv_state, state) in enumerate(layers):
            for r, (slot, n) in enumerate(zip(slots, counts, strict=True)):
                rows = x[r * num_rows : r * num_rows + n]
                right_state = walk(rows, w, conv_state[slot], state[slot])
                check_close(got[i, slot], right_state, 1e-5, f"state after {n} rows")
                window = torch.cat([conv_state[slot], rows[:, : 3 * heads * D]])[n:]
                check_equal(got_conv[i, slot], window, "window")


@pytest.mark.parametrize("heads, sms, num_rows, slots", RECORDED)
def test_recorded_on_emulator(
    on_emulator: Launch, heads: int, sms: int, num_rows: int, slots: list[int]
) -> None:
    check_recorded(on_emulator, heads, sms, num_rows, slots, len(slots) % 2 + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, sms, num_rows, slots", [*RECORDED, (6, 132, 8, [3])])
def test_recorded_matches_ref(heads: int, sms: int, num_rows: int, slots: list[int]) -> None:
    check_recorded(on_gpu, heads, sms, num_rows, slots, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, sms, num_rows, slots", GPU_CASES)
def test_kda_matches_ref(heads: int, sms: int, num_rows: int, slots: list[int]) -> None:
    check_layers(on_gpu, heads, sms, num_rows, slots, 2)
