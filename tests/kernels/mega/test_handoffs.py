"""No wait and no signal of the persistent kernel is there for nothing.

A small model with layers of every kind runs on the emulator with one of them left out at a time.
Without a wait its CTAs read what is not handed over, a race; without a signal they wait for ever.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_config

pytest.importorskip("cutlass")

from packed import packed_tiny_weights
from ptx.memory import Fault

from kernels.mega.harness import OnEmulator, without_signal, without_wait
from kernels.mega.test_step import BLOCK, MAX_BLOCKS, filled_cache, poisoned, step_of
from nanok3.kernels.mega.launch import sync_part
from nanok3.mega_ops import Mega

# KDA and dense, MLA and MoE; products in several K slices
CONFIG = tiny_config(
    hidden_size=96,
    num_hidden_layers=2,
    full_attn_layers=(2,),
    kda_layers=(1,),
    num_attention_heads=1,
    num_heads=1,
    head_dim=128,
    intermediate_size=32,
    q_lora_rank=32,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    attn_res_block_size=1,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=32,
    routed_expert_hidden_size=64,
    num_shared_experts=1,
)


class Small:
    """The model, ready for a step of `rows` rows of one request."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.on_emulator = OnEmulator(folder)
        packed = packed_tiny_weights(CONFIG, 3)
        cache = filled_cache(CONFIG, torch.bfloat16, 2)
        self.mega = Mega(CONFIG, packed, cache, BLOCK, MAX_BLOCKS)
        self.sync = sync_part(self.mega.sync, int(rows > 1))
        self.rows, self.inputs = rows, step_of(CONFIG, [5], rows)

    def step(self) -> None:
        """From counters that stand at zero, whatever a step before left."""
        self.mega.clear()
        self.on_emulator.step(self.mega, self.inputs, poisoned(CONFIG, self.rows, torch.bfloat16))

    def signals(self) -> list[str]:
        """Of a step, in order: block and buffer."""
        self.step()
        program = self.mega.space_of(self.rows).program
        return [
            f"{block}: {name}"
            for block, _ in self.mega.blocks(program)
            for name in program.signals[block]
        ]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Small:
    return Small(Path(tmp_path_factory.mktemp("ptx")), request.param)


def fault_of(small: Small) -> str:
    try:
        small.step()
    except Fault as fault:
        return str(fault)
    return ""


@pytest.mark.parametrize("small", [2, pytest.param(1, marks=pytest.mark.slow)], indirect=True)
def test_a_race_is_found_without_any_one_wait(small: Small) -> None:
    signals, missed = small.signals(), []
    assert len(signals) > 5 and fault_of(small) == ""
    for number, name in enumerate(signals):
        with without_wait(small.sync, number):
            fault = fault_of(small)
        if "no signal" not in fault:
            missed.append(f"{name}: {fault}".removesuffix(": "))
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("small", [2], indirect=True)
def test_a_deadlock_is_found_without_any_one_signal(small: Small) -> None:
    missed = []
    for number, name in enumerate(small.signals()):
        with without_signal(small.sync, number):
            fault = fault_of(small)
        if not fault.startswith("deadlock"):
            missed.append(f"{name}: {fault}")
    assert not missed, "\n".join(missed)
