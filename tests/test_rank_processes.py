"""Ranks as real processes on a CPU: the same replies as one process, and no end without a word.

A start takes some seconds, so each test does all it can with one. `scripts/check_ranks.py` and
`scripts/kill_ranks.py` do more of the same.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare import check_close
from drafts import make_draft, random_draft_fields, tiny_inferact
from tiny import make_checkpoint, tiny_config

from nanok3 import cli
from nanok3.comm.exchange import PeerLost
from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.exits import INTERRUPTED, LOST
from nanok3.sampling import SamplingParams
from nanok3.spec.config import draft_config
from nanok3.spec_loop import SpecLoop

ROOT = Path(__file__).parent.parent
MINI = ROOT / "nanok3" / "models" / "k3_mini"
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
CONFIG = tiny_config(
    num_heads=4,
    num_attention_heads=4,
    moe_intermediate_size=128,
    num_hidden_layers=3,
    kda_layers=(1, 2),
    full_attn_layers=(3,),
)
GREEDY = ["--temperature", "0", "--thinking", "off", "--strict"]
MOST_S = 10.0  # from a death to the end of all


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), CONFIG, seed=3)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert wait_for(lambda: not followers(os.getpid()), 5)


def followers(pid: int) -> list[int]:
    """Processes of rank 0, in the order of ranks."""
    found = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                if "nanok3.follower" in Path(f"/proc/{child}/cmdline").read_text():
                    found.append(int(child))
    except OSError:
        return []
    return sorted(found)


def wait_for(condition: object, seconds: float) -> bool:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def spawn(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "nanok3.cli", *arguments]
    return subprocess.Popen(command, env=ENV, **(pipes | options))  # type: ignore[call-overload]


def test_the_python_interface_then_a_kill(model: Path) -> None:
    """In float64, where sums over ranks cannot turn a greedy choice of random weights."""
    settings = EngineConfig(strict=True, debug=True, block_size=8, num_blocks=60)
    alone = Engine.load(model, dtype="float64", settings=settings)
    engine = Engine.load(model, dtype="float64", settings=settings, gpus=2)
    pids = followers(os.getpid())
    assert len(pids) == 1
    params = engine.sampling(temperature=0.0, max_tokens=6)
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7], list(range(40))]
    right = [alone.generate(prompt, params) for prompt in prompts]
    requests = [engine.submit(prompt, params) for prompt in prompts]
    engine.run(requests)
    assert [r.result().token_ids for r in requests] == [r.token_ids for r in right]
    check_close(engine.logits(list(range(20))), alone.logits(list(range(20))), 1e-11)
    for event in engine.stream([5, 6, 7], params):
        assert event is not None
        break  # cancels

    request, other = engine.submit([1, 2], engine.sampling()), engine.submit([3], params)
    engine.step()
    os.kill(pids[0], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 was ended by SIGKILL; its log is empty"):
        engine.run([request])
    assert time.monotonic() - start < MOST_S
    for ended in (request, other):
        assert ended.result().finish_reason == "error"
        assert "rank 1" in (ended.result().error or "")
    engine.close()


def test_four_ranks_of_k3_mini() -> None:
    """In a thread, and with an end without `close`."""
    settings = EngineConfig(strict=True)
    prompt = [[3, 4, 5], [339, 475, 679, 267]]
    alone = Engine.load(MINI, settings=settings)
    params = alone.sampling(temperature=0.0, max_tokens=6)
    right = [alone.generate(ids, params).token_ids for ids in prompt]
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(Engine.load, MINI, settings=settings, gpus=4).result()
    assert len(followers(os.getpid())) == 3
    assert [engine.generate(ids, params).token_ids for ids in prompt] == right
    del engine


def test_batch_and_chat(
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [{"prompt": f"{i}", "max_tokens": 3, "temperature": 0} for i in range(4)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ["--model", str(model), "--dtype", "float64", *GREEDY]
    found = []
    for gpus in ("1", "2"):
        out = tmp_path / f"out{gpus}.jsonl"
        assert cli.run(["batch", str(source), str(out), *common, "--gpus", gpus]) == 0
        capfd.readouterr()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\nyou\n")))
        assert cli.run(["chat", *common, "--max-tokens", "5", "--gpus", gpus]) == 0
        replies = [json.loads(line) for line in out.read_text().splitlines()]
        found.append((capfd.readouterr().out, [strip(reply) for reply in replies]))
    assert found[0] == found[1] and len(found[0][1]) == 4 and found[0][0]


def strip(record: object) -> object:
    """Without what no two runs share."""
    if isinstance(record, dict):
        return {k: strip(v) for k, v in record.items() if k not in ("id", "created", "request_id")}
    return [strip(r) for r in record] if isinstance(record, list) else record


def test_rank_0_is_killed() -> None:
    """The others notice; `kill_ranks.py` kills them too, and in other moments."""
    leader = spawn("generate", "What is 27 + 58?", "--temperature", "0", "--gpus", "2")
    assert leader.stdout is not None
    assert leader.stdout.read(1)  # it replies
    pids = [leader.pid, *followers(leader.pid)]
    assert len(pids) == 2
    leader.kill()
    assert wait_for(lambda: leader.poll() is not None and all(map(is_gone, pids)), MOST_S)
    leader.communicate()


def test_ctrl_c_ends_all_ranks() -> None:
    """As a terminal sends it, to rank 0 alone: the others are in sessions of their own."""
    leader = spawn("generate", "What is 27 + 58?", "--temperature", "0", "--gpus", "2")
    assert leader.stdout is not None
    assert leader.stdout.read(1)
    pids = [leader.pid, *followers(leader.pid)]
    assert len(pids) == 2 and os.getsid(pids[1]) != os.getsid(pids[0])
    leader.send_signal(signal.SIGINT)
    assert wait_for(lambda: leader.poll() is not None and all(map(is_gone, pids)), MOST_S)
    assert leader.returncode == INTERRUPTED, leader.communicate()


@pytest.mark.slow
def test_a_rank_that_stands_still_is_given_up() -> None:
    """Stopped, not dead: only the deadline can tell."""
    leader = spawn("generate", "What is 27 + 58?", "--temperature", "0", "--gpus", "2")
    assert leader.stdout is not None
    assert leader.stdout.read(1)
    pids = [leader.pid, *followers(leader.pid)]
    os.kill(pids[1], signal.SIGSTOP)
    assert wait_for(lambda: leader.poll() is not None and all(map(is_gone, pids)), MOST_S + 2)
    assert leader.returncode == LOST
    told = r"nanok3: rank 1 (did not answer rank 0 within 6 s|does not answer rank 0)"
    assert re.search(told, leader.communicate()[1].decode())


def test_drafts_over_ranks(model: Path, tmp_path: Path) -> None:
    """Each rank has the draft, but its part of the embedding and of the head."""
    taps = {"target_num_hidden_layers": 3, "target_layer_ids": [0, 1], "num_target_layers": 2}
    raw = tiny_inferact(**taps)
    c = draft_config(raw)
    draft = make_draft(tmp_path / "draft", raw, c, random_draft_fields(c, 1))
    settings = EngineConfig(debug=True, block_size=8, num_blocks=60, break_even=0.0)
    alone = Engine.load(model, dtype="float64", settings=settings, draft=draft)
    engine = Engine.load(model, dtype="float64", settings=settings, gpus=2, draft=draft)
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7], list(range(40))]
    params = [SamplingParams(temperature=0.8 * i, seed=i, max_tokens=9 + i) for i in range(3)]
    results = []
    for each in (alone, engine):
        requests = [each.submit(p, o) for p, o in zip(prompts, params, strict=True)]
        each.run(requests)
        results.append([r.result().token_ids for r in requests])
        loop = each._runner.loop
        assert isinstance(loop, SpecLoop) and loop.acceptance.num_steps > 5
    assert results[0] == results[1]
    with pytest.raises(ValueError, match="adaptive_drafts"):
        adaptive = replace(settings, adaptive_drafts=True)
        Engine.load(model, settings=adaptive, gpus=2, draft=draft)
