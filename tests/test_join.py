"""What ranks agree on, and what a person is told who wants more GPUs than there are."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import make_checkpoint, tiny_config

from nanok3 import join
from nanok3.cli import cli
from nanok3.comm.host import Host, Place, host_store
from nanok3.config import EngineConfig, Shard
from nanok3.join import Group, agree, blocks_that_fit, too_many
from nanok3.launch import spanning_lines
from nanok3.plan import LATENTS, make_plan

CONFIG = tiny_config(num_heads=4, num_attention_heads=4, moe_intermediate_size=128)
SETTINGS = EngineConfig(block_size=8, num_blocks=50, gpus=2)


def agreed(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[EngineConfig],
    free: list[int | None],
) -> list[EngineConfig | str]:
    """What each rank serves with, or why it does not."""
    store, size = host_store(), len(settings)
    monkeypatch.setattr(join, "free_bytes", lambda place: free[place.rank])

    def work(rank: int) -> EngineConfig | str:
        place = Place(rank, size, rank, size, "127.0.0.1", store.port, rank == 0)
        host = Host(place, store=store if rank == 0 else None)
        try:
            return agree(Group(host, Shard(rank, size), None), path, CONFIG, settings[rank])
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def test_the_smallest_plan_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(CONFIG, Shard(0, 2), SETTINGS)
    page = plan.nbytes[LATENTS] // 51
    free = [None, plan.total_bytes - 7 * page]
    found = agreed(tmp_path, monkeypatch, [SETTINGS] * 2, free)
    assert found == [replace(SETTINGS, num_blocks=43)] * 2
    free = [None, plan.total_bytes]
    assert agreed(tmp_path, monkeypatch, [SETTINGS] * 2, free) == [SETTINGS] * 2
    told = agreed(tmp_path, monkeypatch, [SETTINGS] * 2, [None, plan.weight_bytes])
    assert told == ["rank 1 has no memory for this model; lower --requests or --context"] * 2


def test_blocks_that_fit_are_what_a_plan_of_them_takes() -> None:
    plan = make_plan(CONFIG, Shard(0, 2), SETTINGS)
    for free in range(plan.total_bytes - 60_000, plan.total_bytes + 2000, 777):
        blocks = blocks_that_fit(plan, free)
        smaller = make_plan(CONFIG, Shard(0, 2), replace(SETTINGS, num_blocks=max(blocks, 1)))
        assert blocks == 0 or smaller.total_bytes <= free
        if blocks < 50:
            larger = make_plan(CONFIG, Shard(0, 2), replace(SETTINGS, num_blocks=blocks + 1))
            assert larger.total_bytes > free


def test_other_settings_or_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [SETTINGS, replace(SETTINGS, strict=True)]
    told = agreed(tmp_path, monkeypatch, others, [None, None])
    advice = "start all ranks from the same files and options"
    assert told == [f"rank 1 has another settings than rank 0; {advice}"] * 2
    codes = iter(["a", "b"])
    monkeypatch.setattr(join, "code_hash", lambda: next(codes))
    told = agreed(tmp_path, monkeypatch, [SETTINGS] * 2, [None, None])
    assert "rank 1 has another code than rank 0" in told[0]


def test_hashes_see_code_and_files(tmp_path: Path) -> None:
    assert join.code_hash() == join.code_hash()
    path = make_checkpoint(tmp_path, CONFIG, 1)
    before = join._small_files(path)
    assert len(before) == 2  # the index and the ids of the tokenizer
    (path / "model.safetensors.index.json").write_text("{}")
    assert join._small_files(path) != before


def test_more_gpus_than_the_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines can be typed: torchrun's options and those of the command are known."""
    command = ["chat", "--gpus", "16", "--model", "/models/k 3", "--device", "cuda"]
    lines = spanning_lines(16, 8, command).splitlines()
    assert lines[0] == (
        "this node has 8 GPUs, not 16; with torchrun, on each of 2 nodes, HOST being the first of "
        "them:"
    )
    from torch.distributed.run import get_args_parser

    torchrun = shlex.split(lines[1])
    given = get_args_parser().parse_args(torchrun[1:])
    assert (torchrun[0], given.nnodes, given.nproc_per_node) == ("torchrun", "2", "8")
    assert given.module and given.training_script == "nanok3.cli"
    assert given.training_script_args == command
    cli.make_context("nanok3", list(command))
    assert lines[3] == (
        "  srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --input 0 "
        "nanok3 chat --gpus 16 --model '/models/k 3' --device cuda"
    )
    assert "on each of 4 nodes" in spanning_lines(16, 6, command)  # in fours

    for variable in ("RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert too_many("cuda", 16, command) == spanning_lines(16, 8, command)
    assert too_many("cuda", 8, command) is None and too_many("cpu", 16, command) is None
