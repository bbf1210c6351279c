"""What fits is the most that fits; what a step reads is what benches say; the command says both."""

from __future__ import annotations

import functools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drafts import INFERACT
from packed import CONFIG
from tiny import make_checkpoint

from nanok3 import cli
from nanok3.capacity import Capacity, capacity, largest, settings_for, step_bytes, verdict
from nanok3.cards import CARDS
from nanok3.config import K3, WHOLE, Shard
from nanok3.plan import LATENTS, Plan, make_plan
from nanok3.spec.config import draft_config

ROOT = Path(__file__).parents[1]
MEMORY = CARDS["h200"].memory


def k3_plan(size: int, context: int, requests: int = 8) -> Plan:
    return make_plan(K3, Shard(0, size), settings_for(context, requests))


@functools.cache
def k3(size: int, context: int = 32768, requests: int = 8, memory: int = MEMORY) -> Capacity:
    return capacity(K3, size, context, requests, None, memory, 4.64e12)


@pytest.mark.parametrize("right", [0, 1, 6, 10])
def test_largest(right: int) -> None:
    assert largest(lambda n: n <= right, 10) == right
    assert largest(lambda n: n <= right, 5) == min(right, 5)


def test_what_fits_is_the_most_that_fits() -> None:
    """Of context and of requests, whether the plan itself fits or not."""
    for asked in (k3(16), k3(16, context=1_048_576)):
        longest, most = asked.longest_context, asked.most_requests
        assert k3_plan(16, longest).needed_bytes <= MEMORY
        assert k3_plan(16, longest + 64).needed_bytes > MEMORY
        assert k3_plan(16, asked.context, most).needed_bytes <= MEMORY
        assert k3_plan(16, asked.context, most + 1).needed_bytes > MEMORY
        assert f"--context {longest} or --requests {most}" in asked.verdict
        assert asked.fits == asked.verdict.startswith("fits with ")


def test_no_context_is_longer_than_the_model_reads() -> None:
    found = k3(16, memory=CARDS["gb300"].memory, requests=1)
    assert found.longest_context == K3.max_position_embeddings == 1_048_576


def test_verdicts() -> None:
    on_8 = k3(8)
    assert on_8.verdict.startswith("does not fit by ") and "use 16 GPUs" in on_8.verdict
    assert on_8.verdict.endswith("or --gpu b300"), "the smallest that would do"
    assert f"{(on_8.chosen.needed_bytes - MEMORY) / 1e9:.1f} GB" in on_8.verdict
    assert (on_8.longest_context, on_8.most_requests) == (0, 0)
    chosen, needed = k3(16).chosen, k3(16).chosen.needed_bytes
    said = verdict(K3, chosen, needed, 64, 1)
    assert said.startswith("fits with 0.0 GB to spare on each GPU")
    assert "does not fit" in verdict(K3, chosen, needed - 1, 0, 0)
    large = make_plan(K3, WHOLE, settings_for(64, 1))
    said = verdict(K3, large, 24_000_000_000, 0, 0)
    assert said.endswith(f"use GPUs with {large.needed_bytes / 1e9:.1f} GB")


def test_a_model_without_latents_is_not_helped_by_a_shorter_context() -> None:
    linear = CONFIG.linear_attn_config
    linear = replace(linear, kda_layers=tuple(range(1, 8)), full_attn_layers=())
    config = replace(CONFIG, linear_attn_config=linear)
    found = capacity(config, 1, 64, 8, None, 1000, 1e12)
    assert found.chosen.nbytes[LATENTS] == found.longest_context == found.most_requests == 0


# ---- steps ----


def test_a_step_reads_what_the_bench_says() -> None:
    """docs/perf/layers.md: 93 layers and the head of one rank of 16, one row, 4 K of context."""
    one = step_bytes(K3, Shard(0, 16), 1, 4096, 1, 4.64e12)
    assert one.weight_bytes + one.cache_bytes + one.written_bytes == pytest.approx(9.54e9, rel=2e-3)
    assert one.floor_ms == pytest.approx(2.056, abs=5e-4)


def test_rows_are_spread_over_the_requests() -> None:
    found = [step_bytes(K3, Shard(0, 16), r, 4096, 8, 8e12) for r in (1, 8, 64)]
    assert [(s.rows, s.num_reqs) for s in found] == [(1, 1), (8, 8), (64, 8)]
    assert [step_bytes(CONFIG, WHOLE, 8, 64, n, 1e12).num_reqs for n in (1, 3, 5)] == [1, 2, 4]
    latents, state = 4096 * 27_648, 69 * 6 * (128 * 128 * 4 + 3 * 3 * 128 * 2)
    assert [s.cache_bytes for s in found] == [n * (latents + state) for n in (1, 8, 8)]
    assert found[0].weight_bytes < found[1].weight_bytes < found[2].weight_bytes


# ---- the command ----


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run(["plan", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_eight_gpus_cannot_hold_k3_and_sixteen_can(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model", "k3", "--gpus", "8", "--gpu", "h200")
    assert code == 0 and not err and out.splitlines()[-1].startswith("does not fit by 6")
    code, out, err = run(capsys, "--model", "k3", "--gpus", "16", "--gpu-memory", "141GB")
    last = out.splitlines()[-1]
    assert code == 0 and not err and last.startswith("fits with 3") and "to spare" in last
    assert "90,403,504,128 B" in out and "4.64 TB/s (measured" in out
    for kind in ("persistent kernel", "graphs", "prefill workspace", "KDA states", "reserve"):
        assert any(line.startswith(kind) for line in out.splitlines()), kind
    assert out.count(" ms at least") == 3


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(INFERACT))
    arguments = ("--model", "k3", "--gpus", "16", "--context", "4096", "--requests", "2")
    arguments = (*arguments, "--draft", str(tmp_path), "--gpu", "gb300")
    code, out, _ = run(capsys, *arguments, "--gpu-memory", "139.5GiB", "--json")
    report = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    chosen = make_plan(K3, Shard(0, 16), settings_for(4096, 2), draft_config(INFERACT))
    assert report["bytes_a_gpu"] == chosen.nbytes and report["fits"] is True
    assert report["total_bytes_a_gpu"] == chosen.total_bytes
    assert report["gpu_memory_bytes"] == 149_786_984_448
    assert report["spare_bytes_a_gpu"] == 149_786_984_448 - chosen.needed_bytes
    assert (report["gpus"], report["context"], report["requests"]) == (16, 4096, 2)
    assert (report["gpu"], report["bandwidth"]) == ("gb300", 8e12)
    assert "nominal" in report["bandwidth_source"] and report["stored"] is None
    assert [step["rows"] for step in report["steps"]] == [1, 8, 64]
    assert report["longest_context"] > 4096 and report["most_requests"] > 2


def test_the_packaged_model_and_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys)
    assert code == 0 and "k3_mini, GPUs: 1, requests: 8 of 8192 tokens" in out
    code, out, err = run(capsys, "--gpus", "8")
    assert code == 2 and not out and "moe_intermediate_size: expected a multiple of 256" in err
    assert run(capsys, "--gpus", "3")[0] == 2
    code, _, err = run(capsys, "--gpu-memory", "lots")
    assert code == 2 and "a size such as 141GB" in err
    code, _, err = run(capsys, "--gpu", "tpu")
    assert code == 2 and "gb300" in err
    code, _, err = run(capsys, "--context", "8193")
    assert code == 2 and "max_context" in err
    code, _, err = run(capsys, "--model", str(tmp_path))
    assert code == 3 and "config.json" in err
    (tmp_path / "config.json").write_text(json.dumps(INFERACT))
    code, _, err = run(capsys, "--draft", tmp_path)
    assert code == 3 and "hidden_size: the draft has 7168, the model 160" in err


def test_headers_are_read_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config alone has a plan; with its shards, these must be the config's."""
    model = make_checkpoint(tmp_path, CONFIG, seed=3)
    code, out, _ = run(capsys, "--model", model)
    assert code == 0 and out.startswith("headers: ") and "experts as mxfp4" in out
    plan = out.splitlines()[1:]
    shard = sorted(model.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1)
    code, out, err = run(capsys, "--model", model)
    assert code == 3 and not out and shard.name in err and "shorter than its header" in err
    shard.unlink()
    assert run(capsys, "--model", model)[1].splitlines() == plan
    alone = tmp_path / "alone" / model.name
    alone.mkdir(parents=True)
    shutil.copy(model / "config.json", alone)
    assert run(capsys, "--model", alone)[1].splitlines() == plan


def test_the_documented_plans_are_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/memory.md, to 5 % of each figure, so that a few buffers more do not matter;
    `scripts/write_plans.py` renews it."""
    blocks = (ROOT / "docs" / "memory.md").read_text().split("```\n")[1::2]
    assert len(blocks) >= 3
    for block in blocks:
        command, *documented = block.splitlines()
        assert command.startswith("$ nanok3 plan ")
        code, out, _ = run(capsys, *command.split()[3:])
        shown = out.splitlines()
        assert code == 0 and len(shown) == len(documented), command
        for was, now in zip(documented, shown, strict=True):
            for a, b in zip(was.split(), now.split(), strict=True):
                numbers = [part.strip("():,;").replace(",", "") for part in (a, b)]
                if a != b:
                    first, second = map(float, numbers)
                    assert second == pytest.approx(first, rel=0.05), f"{command}: {was}"
