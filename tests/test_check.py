"""What is in order passes, each damage fails its own check, and a hash is of the content."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, tiny_config
from torch import Tensor

from nanok3 import check, check_values, cli, content_hash
from nanok3.check import HASH
from nanok3.check_files import FILE_CHECKS, TEXT_CHECKS
from nanok3.check_values import VALUE_CHECKS
from nanok3.checkpoint import Checkpoint, TensorSpec, read_tensor
from nanok3.commands_plan import CHECK_STATE
from nanok3.exits import MODEL, OUTPUT, USAGE
from nanok3.tokenizer import NAMED_SPECIALS
from nanok3.weight_table import expected_tensors

ROOT = Path(__file__).parents[1]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
INDEX = "model.safetensors.index.json"
CONFIG = tiny_config(num_hidden_layers=3, kda_layers=(1, 2), full_attn_layers=(3,))
LAYER = "language_model.model.layers."
MOE = f"{LAYER}1.block_sparse_moe."
FIRST, SECOND = (f"model-0000{k}-of-000004.safetensors" for k in (2, 3))  # layers 0 and 1
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), CONFIG, seed=3)
    named = {256 + k: {"content": name} for k, name in NAMED_SPECIALS.items()}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257]}))
    return path


@pytest.fixture
def spoilt(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "spoilt"))


def run(capsys: Capture, *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run(["check", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def report_of(capsys: Capture, *arguments: Any) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert out.count("\n") == 1
    report = json.loads(out)
    assert report["ok"] == (code == 0) == all(c["status"] != "failed" for c in report["checks"])
    return code, report


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in report["checks"]}


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def set_value(file: str, name: str, place: tuple[int, ...], value: float) -> Callable[[Path], None]:
    return lambda path: edit_tensors(path / file, lambda t: t[name].__setitem__(place, value))


def set_scales(byte: int, code: int = 0x77) -> Callable[[Path], None]:
    """Of every expert of layer 1, whichever are looked at: row 5, group 0."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name][5, 0] = byte
                tensors[name.replace("_scale", "_packed")][5, 3] = code

    return lambda path: edit_tensors(path / SECOND, edit)


# ---- what is in order ----


def test_tiny_passes(tiny: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "--model", tiny)
    *lines, verdict = out.splitlines()
    assert code == 0 and verdict == "this checkpoint can be loaded"
    names = ["config", *FILE_CHECKS, *TEXT_CHECKS, *VALUE_CHECKS]
    assert [line.partition(":")[0] for line in lines] == [f"{'ok':8}{name}" for name in names]


def test_golden_passes(tmp_path: Path, capsys: Capture) -> None:
    script = ROOT / "tests" / "data" / "make_golden_k3.py"
    subprocess.run([sys.executable, script, "golden", tmp_path], check=True, capture_output=True)
    code, report = report_of(capsys, "--model", tmp_path)
    checks = by_name(report)
    assert code == 0 and not any(entry["warnings"] for entry in checks.values())
    assert [n for n, c in checks.items() if c["status"] == "skipped"] == list(TEXT_CHECKS[:2])
    assert "3 skipped (projector), 15 skipped (vision)" in checks["index"]["summary"]
    assert "100.0% of 38,400 groups reach 4 or 6" in checks["experts"]["summary"]
    # Skipped tensors need not be there; where they are, their file must be whole.
    vision = tmp_path / "model-00006-of-000006.safetensors"
    os.truncate(vision, vision.stat().st_size - 1)
    code, report = report_of(capsys, "--model", tmp_path)
    assert code == MODEL and vision.name in by_name(report)["files"]["problems"][0]
    vision.unlink()
    code, report = report_of(capsys, "--model", tmp_path)
    assert code == 0 and by_name(report)["total size"]["summary"] == "1 of 6 files are not here"


def test_the_packaged_model_passes(capsys: Capture) -> None:
    code, report = report_of(capsys)
    assert code == 0 and not any(c["warnings"] for c in report["checks"])
    assert {c["status"] for c in report["checks"]} == {"ok"}


# ---- each damage fails its own check ----


def truncate(path: Path) -> None:
    os.truncate(path / SECOND, (path / SECOND).stat().st_size - 1)


def lengthen(path: Path) -> None:
    with (path / SECOND).open("ab") as file:
        file.write(b"\0")


def narrow(path: Path) -> None:
    name = f"{LAYER}0.self_attn.dt_bias"
    edit_tensors(path / FIRST, lambda t: t.update({name: t[name].bfloat16()}))
    edit_json(path / INDEX, lambda index: index.pop("metadata"))


def low_codes(path: Path) -> None:
    """No value of layer 1's experts is above 1.5 times its scale."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_packed"):
                tensors[name] &= 0xBB

    edit_tensors(path / SECOND, edit)


def drop_special(path: Path) -> None:
    config = path / "tokenizer_config.json"
    edit_json(config, lambda raw: raw["added_tokens_decoder"].pop("259"))


def other_ranks(path: Path) -> None:
    (path / "tokenizer_config.json").unlink()
    with (path / "tiktoken.model").open("a") as file:
        file.write(f"{base64.b64encode(b'ab').decode()} 256\n")


def other_eos(path: Path) -> None:
    def edit(raw: dict[str, Any]) -> None:
        raw["eos_token_id"] = raw["text_config"]["eos_token_id"] = 257

    edit_json(path / "config.json", edit)


def two_places(path: Path) -> None:
    """A tensor in two files, and the index without an opinion of its size."""
    name = f"{LAYER}0.input_layernorm.weight"
    held = load_file(path / FIRST)[name]
    edit_tensors(path / SECOND, lambda t: t.update({name: held}))
    edit_json(path / INDEX, lambda index: index.pop("metadata"))


def drop_entry(path: Path) -> None:
    edit_json(path / INDEX, lambda index: index["weight_map"].pop(f"{MOE}gate.weight"))


def lie(path: Path) -> None:
    edit_json(path / INDEX, lambda index: index["metadata"].update(total_size=12345))


def beyond_vocab(path: Path) -> None:
    (path / "generation_config.json").write_text('{"eos_token_id": 512}')


def spoil_head(path: Path) -> None:
    files = json.loads((path / INDEX).read_text())["weight_map"]
    name = "language_model.lm_head.weight"
    edit_tensors(path / files[name], lambda t: t[name].__setitem__((300, 1), float("nan")))


A_LOG = f"{LAYER}1.self_attn.A_log"
DAMAGE: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "index": (lambda p: (p / INDEX).unlink(), "index", [INDEX, "found neither"]),
    "short": (truncate, "files", [SECOND, "shorter than its header says", "download it again"]),
    "long": (lengthen, "files", [SECOND, "longer than its header says"]),
    "absent": (lambda p: (p / SECOND).unlink(), "files", [SECOND, "no such file"]),
    "BF16": (narrow, "F32 tensors", ["dt_bias: expected F32 [48], found BF16 [48] in", FIRST]),
    "twice": (two_places, "tensors", ["input_layernorm.weight: held by both", FIRST, SECOND]),
    "no entry": (drop_entry, "tensors", [f"{MOE}gate.weight: held by {SECOND}, but not in"]),
    "total": (lie, "total size", ["total_size says 12345 bytes, expected"]),
    "special": (drop_special, "special tokens", ["name id 259", "'<|open|>', and has nothing"]),
    "eos": (other_eos, "special tokens", ["eos_token_id: expected 258, <|end_of_msg|>, found 257"]),
    "ranks": (lambda p: (p / "tiktoken.model").write_text("?\n"), "tokenizer", ["line 1"]),
    "vocab": (other_ranks, "tokenizer", ["has 513 ids", "expected 512"]),
    "generation": (beyond_vocab, "generation config", ["expected an id below 512, found 512"]),
    "A_log": (
        set_value(SECOND, A_LOG, (9,), 0.5),
        "A_log",
        [f"{A_LOG} in {SECOND}", "zeros past the 3 heads, found 0.5 at entry 9"],
    ),
    "dt_bias": (
        set_value(SECOND, f"{LAYER}1.self_attn.dt_bias", (7,), float("nan")),
        "dt_bias and conv",
        ["dt_bias in", "found nan in row 7"],
    ),
    "bias": (
        set_value(SECOND, f"{MOE}gate.e_score_correction_bias", (2,), float("inf")),
        "correction bias",
        ["e_score_correction_bias in", "found inf in row 2"],
    ),
    "norm": (
        set_value(SECOND, f"{MOE}routed_expert_norm.weight", (), 0.0),
        "norms",
        ["routed_expert_norm.weight in", "found zeros throughout"],
    ),
    "head": (
        spoil_head,
        "embedding and head",
        ["lm_head.weight in", "found nan in row 300"],
    ),
    "matrix": (
        set_value(SECOND, f"{LAYER}1.self_attn.o_proj.weight", (63, 5), float("nan")),
        "matrices",
        ["o_proj.weight in", "found nan in row 63"],
    ),
    "scale 255": (set_scales(255), "experts", ["weight_scale in", "found 255 (NaN) in row 5"]),
    "low": (low_codes, "experts", ["weight_scale in", "at 2 or less in 64 of 64 groups"]),
    "too large": (set_scales(254), "experts", ["bfloat16 can hold", "found 1.02e+39 in row 5"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_fails_its_own_check(damage: str, spoilt: Path, capsys: Capture) -> None:
    spoil, name, sentence = DAMAGE[damage]
    spoil(spoilt)
    code, report = report_of(capsys, "--model", spoilt)
    failed = {c["name"]: c["problems"] for c in report["checks"] if c["status"] == "failed"}
    assert code == MODEL and list(failed) == [name], failed
    assert all(part in failed[name][0] for part in sentence), failed[name]
    assert report["verdict"] == f"refused: {name} failed"
    if name in ("index", "files", "tensors", "F32 tensors"):  # nothing to read values from
        skipped = [c["name"] for c in report["checks"] if c["status"] == "skipped"]
        assert set(VALUE_CHECKS) <= set(skipped) and report["sampled_bytes"] == 0


def test_a_config_that_cannot_be_run_ends_it(spoilt: Path, capsys: Capture) -> None:
    edit_json(spoilt / "config.json", lambda raw: raw["text_config"].update(hidden_act="silu"))
    code, out, _ = run(capsys, "--model", spoilt)
    assert code == MODEL and "hidden_act" in out
    assert out.count("\nskipped ") == len((*FILE_CHECKS, *TEXT_CHECKS, *VALUE_CHECKS))


def test_several_problems_are_all_shown_up_to_a_count(spoilt: Path, capsys: Capture) -> None:
    edit_json(spoilt / INDEX, lambda index: index.update(metadata=None))
    edit_tensors(spoilt / SECOND, lambda t: [t.pop(n) for n in list(t) if ".experts.1" in n])
    narrow_name = f"{LAYER}0.self_attn.o_norm.weight"
    edit_tensors(spoilt / FIRST, lambda t: t.update({narrow_name: t[narrow_name].bfloat16()}))
    code, report = report_of(capsys, "--model", spoilt)
    checks = by_name(report)
    assert code == MODEL and report["verdict"] == "refused: tensors, F32 tensors failed"
    assert checks["tensors"]["num_problems"] == 3 * 6  # experts 1, 10, 11
    set_scales(255)(spoilt)
    code, out, _ = run(capsys, "--model", spoilt)
    assert out.count("missing; the index names") == 18


def test_more_problems_than_are_shown_are_counted(
    spoilt: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "MAX_PROBLEMS", 5)
    set_scales(255)(spoilt)
    _, report = report_of(capsys, "--model", spoilt)
    experts = by_name(report)["experts"]
    assert experts["num_problems"] == 4 * 3 and experts["problems"][5:] == ["... and 7 more"]


def test_what_does_not_hinder_is_a_warning(spoilt: Path, capsys: Capture) -> None:
    set_scales(129, code=0x11)(spoilt)
    (spoilt / "left-over.safetensors").write_bytes(b"")
    set_value(FIRST, f"{LAYER}0.mlp.down_proj.weight", (), 0.0)(spoilt)
    code, out, _ = run(capsys, "--model", spoilt)
    warnings = [line for line in out.splitlines() if line.startswith("    warning: ")]
    assert code == 0 and len(warnings) == 1 + 4 * 3 + 1
    assert "left-over.safetensors: not in the index" in warnings[0]
    assert "above 128 are not for the GPU kernels, found 129 in row 5" in warnings[1]
    assert "rows 0 to 63 are zero throughout" in warnings[-1]


def test_proposals_that_are_not_taken_are_warnings(spoilt: Path, capsys: Capture) -> None:
    """Of generation_config.json; those that change nothing are no matter."""
    taken = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "eos_token_id": 258}
    neutral = {"do_sample": True, "min_p": None, "num_beams": 1, "transformers_version": "5"}
    taken |= {"repetition_penalty": 1.1}
    path = spoilt / "generation_config.json"
    path.write_text(json.dumps(taken | neutral | {"presence_penalty": 0}))
    _, report = report_of(capsys, "--model", spoilt)
    assert by_name(report)["generation config"]["warnings"] == []
    path.write_text(json.dumps(taken | {"presence_penalty": 1.1, "num_beams": 4}))
    code, report = report_of(capsys, "--model", spoilt)
    assert code == 0 and by_name(report)["generation config"]["warnings"] == [
        "generation_config.json: presence_penalty 1.1 is not taken",
        "generation_config.json: num_beams 4 is not taken",
    ]


# ---- the sample ----


def test_a_sample_is_a_part_and_says_how_much(
    tiny: Path, spoilt: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_values, "SAMPLE_BYTES", 512)
    sizes = []

    def noted(descriptor: int, path: Path, begin: int, spec: TensorSpec) -> Tensor:
        sizes.append(spec.nbytes)
        return read_tensor(descriptor, path, begin, spec)

    monkeypatch.setattr(check_values, "read_tensor", noted)
    code, report = report_of(capsys, "--model", tiny)
    total = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    assert code == 0 and report["sampled_bytes"] == sum(sizes) < total / 3
    _, again = report_of(capsys, "--model", tiny)
    assert again == report  # seeded
    # A row's number is its number in the whole tensor.
    name = f"{LAYER}1.self_attn.o_proj.weight"
    tables = {"mxfp4": expected_tensors(CONFIG)}
    checkpoint = Checkpoint.open(tiny, tables)
    sample = next(s for s in check_values.samples(checkpoint, CONFIG) if s.names == (name,))
    assert sample.first > 0 and 1 < sample.rows < 64
    for row in (sample.first - 1, sample.first, sample.first + sample.rows - 1):
        shutil.copy(tiny / SECOND, spoilt / SECOND)
        set_value(SECOND, name, (row, 0), float("inf"))(spoilt)
        code, report = report_of(capsys, "--model", spoilt)
        problems = by_name(report)["matrices"]["problems"]
        assert len(problems) == (row >= sample.first)
        assert all(f"found inf in row {row}" in problem for problem in problems)


def test_largest_codes() -> None:
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    packed[0, 3], packed[0, 20], packed[1, 15], packed[1, 16] = 0x0F, 0x60, 0x81, 0xD8
    assert check_values.largest_code(packed).tolist() == [[7, 6], [1, 5]]


# ---- the hash ----


def hashed(capsys: Capture, model: Path, state: Path) -> dict[str, Any]:
    code, report = report_of(capsys, "--model", model, "--hash", "--state", state)
    assert code == 0, report
    return report


def by_hand(model: Path) -> str:
    """The content hash from the safetensors library and the official names."""
    dtypes = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
    lines = []
    for path in model.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(raw).hexdigest()
            shape = ",".join(str(n) for n in tensor.shape)
            lines.append((name, f"{name}\t{dtypes[tensor.dtype]}\t{shape}\t{digest}\n"))
    return hashlib.sha256("".join(line for _, line in sorted(lines)).encode()).hexdigest()


def reshard(model: Path, target: Path, prefix: str) -> Path:
    """The same tensors in one file, in another order, under another root."""
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    tensors = {k: t for path in model.glob("*.safetensors") for k, t in load_file(path).items()}
    renamed = {prefix + k.removeprefix("language_model."): tensors[k] for k in reversed(tensors)}
    save_file(renamed, target / "model.safetensors")
    return target


def test_a_hash_is_of_the_content(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    report = hashed(capsys, tiny, tmp_path / "s")
    assert report["content_sha256"] == by_hand(tiny)
    shards = sorted(tiny.glob("*.safetensors"))
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}
    assert report["file_sha256"] == files
    for prefix in ("language_model.", ""):
        other = reshard(tiny, tmp_path / f"other {prefix}", prefix)
        again = hashed(capsys, other, tmp_path / "s")
        assert again["content_sha256"] == report["content_sha256"]
        assert again["file_sha256"].keys() == {"model.safetensors"}
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (other / "model.safetensors").write_bytes(raw)
    assert hashed(capsys, other, tmp_path / "s")["content_sha256"] != report["content_sha256"]


def test_chunks_do_not_matter(
    tiny: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk may hold many tensors or a part of one."""
    monkeypatch.setattr(content_hash, "CHUNK_BYTES", 1000)
    report = hashed(capsys, tiny, tmp_path / "state")
    assert report["content_sha256"] == by_hand(tiny)
    first = sorted(tiny.glob("*.safetensors"))[0]
    whole = hashlib.sha256(first.read_bytes()).hexdigest()
    assert report["file_sha256"][first.name] == whole


KILLED = """
import sys, time
from nanok3 import cli, content_hash

hash_file, count = content_hash.hash_file, 0

def slow(*args):
    global count
    count += 1
    if count == 3:
        args = *args[:3], lambda nbytes: time.sleep(60)  # in the middle of the third file
    return hash_file(*args)

content_hash.hash_file = slow
sys.exit(cli.run(sys.argv[1:]))
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_hash_goes_on_after_an_interruption(
    end: signal.Signals, tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
    state = tmp_path / "state"
    arguments = ["check", "--model", str(tiny), "--hash", "--state", str(state)]
    command = [sys.executable, "-c", KILLED, *arguments]
    with subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not state.exists() or state.read_bytes().count(b"\n") < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        time.sleep(0.1)
        process.send_signal(end)
        _, err = process.communicate()
    assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL)
    assert end == signal.SIGKILL or f"finished files are in {state}" in err.decode()
    with state.open("ab") as log:
        log.write(b'{"file": "/half a li')  # as if the kill had come there
    report = hashed(capsys, tiny, state)
    assert f"4 files, 2 as {state} has them" in by_name(report)[HASH]["summary"]
    assert report["content_sha256"] == by_hand(tiny)
    assert all(json.loads(line)["sha256"] for line in state.read_text().splitlines())


def test_only_changed_files_are_read_again(spoilt: Path, tmp_path: Path, capsys: Capture) -> None:
    state = tmp_path / "state"
    hashed(capsys, spoilt, state)
    set_value(SECOND, A_LOG, (0,), 0.25)(spoilt)
    os.utime(spoilt / SECOND, ns=(1, 1))  # the same size
    report = hashed(capsys, spoilt, state)
    assert f"3 as {state} has them" in by_name(report)[HASH]["summary"]
    assert report["content_sha256"] == by_hand(spoilt)
    assert "4 as " in by_name(hashed(capsys, spoilt, state))[HASH]["summary"]


def test_a_file_that_changes_while_it_is_read_fails(
    spoilt: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changing:
        def __init__(self, label: str) -> None:
            self.label = label

        def __call__(self, done: int, total: int) -> None:
            if self.label == "hashing":
                os.utime(spoilt / FIRST, ns=(done, done))

    monkeypatch.setattr(check, "ProgressLine", Changing)
    options = ("--model", spoilt, "--hash", "--state", tmp_path / "state")
    code, report = report_of(capsys, *options)
    found = by_name(report)[HASH]
    assert code == MODEL and found["status"] == "failed" and FIRST in found["problems"][0]
    assert "it has changed while it was read" in found["problems"][0]


def test_where_the_state_is_kept(
    tiny: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "--model", tiny, "--hash")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == [CHECK_STATE]
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    monkeypatch.chdir(copy)
    code, out, err = run(capsys, "--model", ".", "--hash")
    assert code == USAGE and not out and "--state" in err and not Path(CHECK_STATE).exists()
    assert run(capsys, "--model", ".", "--hash", "--state", CHECK_STATE)[0] == 0
    assert Path(CHECK_STATE).exists()


@pytest.mark.parametrize("text", ["notes", "notes\n", '{"file": "x"}\n', "[]\n", "\n"])
def test_another_file_is_not_taken_for_a_state(
    text: str, tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    code, out, err = run(capsys, "--model", tiny, "--hash", "--state", path)
    assert code == USAGE and not out and "line 1 is not a line of" in err
    assert path.read_text() == text


def test_wrong_options(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    code, _, err = run(capsys, "--model", tmp_path / "none")
    assert code == MODEL and "no such directory" in err
    code, _, err = run(capsys, "--model", tiny, "--state", tmp_path / "state")
    assert code == USAGE and "--state is for --hash" in err
    state = tmp_path / "none" / "state"
    code, out, err = run(capsys, "--model", tiny, "--hash", "--state", state)
    assert code == OUTPUT and not out and f"{state} cannot be written" in err
    code, _, err = run(capsys, "--model", tiny, "--hash", "--state", tmp_path)
    assert code == USAGE and f"{tmp_path} cannot be read" in err


def test_progress_has_a_rate_and_the_time_left(
    tiny: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanok3.progress.StatusLine.is_due", True)
    code, out, err = run(capsys, "--model", tiny, "--hash", "--state", tmp_path / "state")
    assert code == 0 and "GB/s" not in out
    for label in ("checking values", "hashing"):
        assert any(line.startswith(label) and "s left" in line for line in err.splitlines())
