"""Every kernel on the emulator of `tests/ptx`: no GPU is needed.

Sizes are small and the judges are those of the tests on a GPU. The last tests take a barrier or a
wait out of a kernel, which the emulator must notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("cutlass")
from ptx.launch import Emulator
from ptx.memory import Fault

from kernels import (
    test_attn_res,
    test_embed,
    test_expert_down,
    test_expert_prefill,
    test_expert_up,
    test_gemv,
    test_kda_commit,
    test_kda_decode,
    test_mla_decode,
    test_mla_latent,
    test_mla_merge,
    test_rms_norm,
    test_route,
    test_tap,
)

# every `finish`, groups, and a K split over a cluster; in one row, part of a pass and three passes
GEMV_CASES = ["golden q_b", "one tile", "situ odd", "situ split", "value", "latent_up mini"]


@pytest.mark.parametrize("tokens", [1, 3, 19])
@pytest.mark.parametrize("case", GEMV_CASES)
def test_gemv_on_emulator(emulated: Emulator, case: str, tokens: int) -> None:
    test_gemv.test_gemv_matches_ref(case, tokens)


@pytest.mark.parametrize("tokens", [1, 3, 19])
@pytest.mark.parametrize("case", ["odd", "odd split", "one"])
def test_moe_in_on_emulator(emulated: Emulator, case: str, tokens: int) -> None:
    test_gemv.test_moe_in_matches_ref(case, tokens)


def test_gemv_in_f32_on_emulator(emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"rows": 40, "k": 320, "x_width": 320, "finish": "f32"}
    monkeypatch.setitem(test_gemv.CASES, "router", small)
    test_gemv.test_gemv_matches_ref("router", 3)


# the last: a cluster of two
@pytest.mark.parametrize("width, n, fresh", [(160, 1, True), (160, 3, False), (1032, 10, False)])
def test_attn_res_on_emulator(emulated: Emulator, width: int, n: int, fresh: bool) -> None:
    test_attn_res.test_attn_res_matches_ref(width, n, fresh)


def test_embed_on_emulator(emulated: Emulator) -> None:
    test_embed.test_embed_matches_ref(160)
    test_embed.test_ids_that_are_no_row_give_zeros()
    test_embed.test_rows_of_other_ranks_are_zero()


def test_tap_on_emulator(emulated: Emulator) -> None:
    test_tap.test_tap_matches_ref(160, 1)
    test_tap.test_tap_matches_ref(1032, 3)


# one warp, of which half has a second piece; a part-full last warp; one piece
@pytest.mark.parametrize("width", [320, 1032, 8])
def test_rms_norm_on_emulator(emulated: Emulator, width: int) -> None:
    test_rms_norm.test_rms_norm_matches_ref(width)


@pytest.mark.parametrize("sizes", [(64, 128, 64), (160, 512, 64)])
def test_mla_latent_on_emulator(emulated: Emulator, sizes: tuple[int, int, int]) -> None:
    test_mla_latent.test_mla_latent_matches_ref(sizes)
    test_mla_latent.test_padding_writes_no_cache_row()


@pytest.mark.parametrize("splits", [1, 5, 16])
def test_mla_merge_on_emulator(emulated: Emulator, splits: int) -> None:
    test_mla_merge.test_mla_merge_matches_ref(splits=splits, rank=128)
    test_mla_merge.test_a_nan_is_shown()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", ["mini", "mini window", "mini many rows", "odd"])
def test_mla_decode_on_emulator(emulated: Emulator, case: str, splits: int) -> None:
    test_mla_decode.test_mla_decode_matches_ref(case, splits)


# one row; part of a pass; two passes
@pytest.mark.parametrize("heads, num_rows, slots", [(1, 1, [3]), (2, 2, [5, 1]), (1, 11, [4])])
def test_kda_decode_on_emulator(
    emulated: Emulator, heads: int, num_rows: int, slots: list[int]
) -> None:
    test_kda_decode.test_kda_decode_matches_ref(heads, num_rows, slots)


@pytest.mark.parametrize("heads, num_rows, slots", [(2, 3, [5, 1]), (1, 11, [4])])
def test_kda_recorded_on_emulator(
    emulated: Emulator, heads: int, num_rows: int, slots: list[int]
) -> None:
    test_kda_commit.test_kda_recorded_matches_ref(heads, num_rows, slots)


# the second: rows over the pass
@pytest.mark.parametrize(
    "num_rows, forced", [(5, [[0, 5], [4, 1], [1, 3]]), (11, [[9, 0], [2, 3]])]
)
def test_kda_commit_on_emulator(emulated: Emulator, num_rows: int, forced: list[list[int]]) -> None:
    test_kda_commit.test_steps_leave_what_their_standing_rows_leave(1, num_rows, forced)


def test_kda_commit_of_any_counts_on_emulator(emulated: Emulator) -> None:
    test_kda_commit.test_kda_commit_matches_ref(4, 5, [4, 2, 1, 3, 6], [5, 2, 0, -1, 9])


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("name", ["mini", "golden", "few"])
def test_route_on_emulator(emulated: Emulator, name: str, tokens: int) -> None:
    test_route.test_route_matches_ref(name, tokens)


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("name", ["one", "odd", "golden"])
def test_expert_up_on_emulator(emulated: Emulator, name: str, tokens: int) -> None:
    test_expert_up.test_expert_up_matches_ref(name, tokens)


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("name", ["one", "odd", "golden"])
def test_expert_down_on_emulator(emulated: Emulator, name: str, tokens: int) -> None:
    test_expert_down.test_expert_down_matches_ref(name, tokens)


@pytest.mark.parametrize("name, tokens", [("one", 1), ("odd", 3), ("golden", 20), ("mini", 9)])
def test_expert_prefill_on_emulator(emulated: Emulator, name: str, tokens: int) -> None:
    test_expert_prefill.experts.cache_clear()
    test_expert_prefill.test_expert_prefill_matches_ref(name, tokens)


def test_expert_prefill_reads_nothing_else_on_emulator(emulated: Emulator) -> None:
    test_expert_prefill.experts.cache_clear()
    test_expert_prefill.test_other_experts_and_other_rows_are_not_read()


# ---- a kernel with a fault ----


def replaced(pattern: str, by: str, which: int) -> Callable[[str], str]:
    """An edit of PTX: the match number `which` becomes `by`."""

    def edit(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))[which]
        return ptx[: found.start()] + by + ptx[found.end() :]

    return edit


BARRIER, TRY_WAIT, NEVER_WAITS = (
    r"bar\.sync[^;]*;",
    r"mbarrier\.try_wait[^;]*;",
    "setp.eq.b32 P1, 0, 0;",
)


@pytest.mark.parametrize(
    "edit, sentence",
    [
        (replaced(BARRIER, "", 0), "before this warp can know of its init"),
        (replaced(BARRIER, "", 1), "is read, which another warp has written"),  # x is staged
        (replaced(BARRIER, "", 2), "race"),  # the warps' parts of a tile
        (replaced(TRY_WAIT, NEVER_WAITS, 0), "more arrivals"),  # the loader's
        (replaced(TRY_WAIT, NEVER_WAITS, 1), "race|before a copy"),  # for a chunk of weights
        (replaced(r"mbarrier\.arrive\.shared[^;]*;", "", 0), "deadlock"),
        (replaced(r"griddepcontrol\.wait;", "", 0), "before griddepcontrol.wait"),
    ],
)
def test_faults_of_gemv_are_noticed(
    emulated: Emulator, edit: Callable[[str], str], sentence: str
) -> None:
    emulated.edit = edit
    with pytest.raises(Fault, match=sentence):
        test_gemv.test_gemv_matches_ref("golden q_b", 19)


@pytest.mark.parametrize(
    "edit, sentence",
    [
        (replaced(r"cp\.async\.wait_group", "// ", 0), "before a copy to it is waited for"),
        (replaced(r"barrier\.cluster\.wait", "// ", 0), "without a wait"),
    ],
)
def test_faults_of_kda_decode_are_noticed(
    emulated: Emulator, edit: Callable[[str], str], sentence: str
) -> None:
    emulated.edit = edit
    with pytest.raises(Fault, match=sentence):
        test_kda_decode.test_kda_decode_matches_ref(1, 11, [4])


@pytest.mark.parametrize(
    "edit, sentence",
    [
        (replaced(BARRIER, "", 0), "race|read, which another warp"),  # rows are there
        (replaced(BARRIER, "", 1), "race|read, which another warp"),  # the next ones may come
        (replaced(r"griddepcontrol\.wait;", "", 0), "before griddepcontrol.wait"),
    ],
)
def test_faults_of_kda_commit_are_noticed(
    emulated: Emulator, edit: Callable[[str], str], sentence: str
) -> None:
    emulated.edit = edit
    with pytest.raises(Fault, match=sentence):
        test_kda_commit.test_kda_commit_matches_ref(1, 11, [2, 5], [11, 9])


@pytest.mark.parametrize(
    "edit, sentence",
    [
        (replaced(r"cp\.async\.wait_group", "// ", 0), "before a copy to it is waited for"),
        (replaced(BARRIER, "", 0), "race|read, which another warp|before a copy"),
        (replaced(r"griddepcontrol\.wait;", "", 0), "before griddepcontrol.wait"),
    ],
)
def test_faults_of_expert_prefill_are_noticed(
    emulated: Emulator, edit: Callable[[str], str], sentence: str
) -> None:
    emulated.edit = edit
    test_expert_prefill.experts.cache_clear()
    with pytest.raises(Fault, match=sentence):
        test_expert_prefill.test_expert_prefill_matches_ref("golden", 3)
