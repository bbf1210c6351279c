"""`bench decode` on a tiny checkpoint: its report, its sums, and no figure for wrong values."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import TINY, make_checkpoint, random_fields

from nanok3 import bench
from nanok3.config import EngineConfig
from nanok3.engine import Engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny_k3", TINY, seed=0)


@pytest.fixture(autouse=True)
def small_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SMALLEST_READ", 2**20)
    monkeypatch.setattr(bench, "TIMES_CACHE", 0)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return Engine.load(model_dir)


def test_report(model_dir: Path) -> None:
    settings = EngineConfig(block_size=8, prefill_chunk=5)
    report = bench.bench_decode(
        settings, model_dir, (1, 3), prompt_tokens=12, decode_tokens=6, repeats=3
    )
    assert [b.num_reqs for b in report.batches] == [1, 3]
    assert all(len(b.tokens_per_s) == 3 and min(b.tokens_per_s) > 0 for b in report.batches)
    one, three = report.batches
    assert one.context == 12 + 1 + 3  # the prompt, the first output, half of the steps
    assert three.context > one.context  # the first request decodes while the others' prompts run
    assert one.step_bytes < three.step_bytes
    assert 0 <= report.largest_gap <= bench.LARGEST_GAP["float32"]

    line = report.json()
    assert "\n" not in line
    record = json.loads(line)
    assert record["bench"] == "decode"
    assert record["model"] == "tiny_k3"
    assert record["threads"] == torch.get_num_threads()
    entry = record["batches"][1]
    assert sorted(entry["tokens_per_s"])[1] == entry["median_tokens_per_s"]
    step_s = 3 / entry["median_tokens_per_s"]
    share = entry["step_bytes"] / step_s / record["bandwidth"]["bytes_per_s"]
    assert entry["share_of_bandwidth"] == pytest.approx(share)

    table = report.table().splitlines()
    assert "float32 on cpu" in table[0]
    rows = [row.split() for row in table if row.split()[:1] in (["1"], ["3"])]
    assert [float(row[1]) for row in rows] == pytest.approx(
        [one.median_tokens_per_s, three.median_tokens_per_s], abs=0.06
    )


def test_step_bytes_are_weights_and_caches_of_this_engine() -> None:
    """By hand, from loaded tensors: every weight but embedding and experts, then those in part."""
    sizes = {name: tensor.nbytes for name, tensor in random_fields(TINY, 0).items()}
    experts = sum(size for name, size in sizes.items() if name.endswith(("w13", "w2")))
    share = 1 - (1 - TINY.num_experts_per_token / TINY.num_experts) ** 2  # an expert is needed
    kda, num_kda, num_mla = TINY.linear_attn_config, len(TINY.kda_layer_ids), 3
    padding = 4 * num_kda * (kda.head_dim - kda.num_heads)  # A_log as the checkpoint has it
    fixed = sum(sizes.values()) - experts - sizes["embed"] + padding
    state = kda.num_heads * kda.head_dim**2 + (kda.short_conv_kernel_size - 1) * 3 * kda.width
    caches = 4 * (num_kda * state + num_mla * 10 * TINY.latent_width)
    expected = fixed + share * experts + 2 * 4 * TINY.hidden_size + 2 * caches
    assert bench.step_bytes(TINY, 2, 10, "float32") == pytest.approx(expected)


def test_wrong_values_give_no_figure(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Engine.logits

    def wrong(self: Engine, token_ids: list[int]) -> torch.Tensor:
        return honest(self, token_ids).roll(1, dims=-1)

    monkeypatch.setattr(Engine, "logits", wrong)
    with pytest.raises(bench.CheckFailed, match="no speed is reported"):
        bench.bench_decode(EngineConfig(), model_dir, (1,), 4, 2, 1)


def test_nan_logits_give_no_figure(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(token_ids: list[int]) -> torch.Tensor:
        return torch.full((len(token_ids), TINY.vocab_size), float("nan"))

    monkeypatch.setattr(engine, "logits", nowhere)
    with pytest.raises(bench.CheckFailed):
        bench.check_values(engine, [1, 2, 3])


def test_a_failed_reply_gives_no_figure() -> None:
    failed = SimpleNamespace(finish_reason="error", error="the model's logits are not finite")
    broken: Any = SimpleNamespace(generate=lambda *_: failed)
    with pytest.raises(bench.CheckFailed, match="not finite"):
        bench.check_values(broken, [1])


def test_measuring_leaves_nothing_behind(engine: Engine) -> None:
    bench.measure(engine, 2, prompt_tokens=5, most_output=12, num_steps=4)
    assert engine.num_unfinished == 0


@pytest.mark.parametrize("figure", ["requests", "prompt_tokens", "decode_tokens", "repeats"])
def test_figures_below_one_are_refused(model_dir: Path, figure: str) -> None:
    value: Any = (1, 0) if figure == "requests" else 0
    with pytest.raises(ValueError, match="at least 1"):
        bench.bench_decode(EngineConfig(), model_dir, **{figure: value})


def test_more_tokens_than_the_context_are_refused(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="4096 tokens of this model's context"):
        bench.bench_decode(EngineConfig(), model_dir, decode_tokens=TINY.max_position_embeddings)


def test_bandwidth_reads_a_buffer_that_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TIMES_CACHE", 4)
    monkeypatch.setattr(bench, "last_cache_bytes", lambda: 2**20)
    measured = bench.read_bandwidth("cpu", repeats=2)
    assert (measured.buffer_bytes, measured.cache_bytes) == (4 * 2**20, 2**20)
    assert measured.bytes_per_s > 0
