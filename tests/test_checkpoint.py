"""Checkpoints in order load to the bit; every kind of damage is named before a tensor is read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_official import SUMMARY, official_tensors, write_fake_official
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import nanok3.checkpoint
from nanok3.checkpoint import Checkpoint, CheckpointError, Part, TensorSpec
from nanok3.config import K3, load_config
from nanok3.weight_table import expected_tensors

ROOT = Path(__file__).parents[1]
INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD, TOP, MM, VISION = (
    f"model-{k:05d}-of-000006.safetensors" for k in range(1, 7)
)
NORM = "language_model.model.norm.weight"  # in TOP
Tables = Mapping[str, Mapping[str, TensorSpec]]


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("golden")
    script = ROOT / "tests" / "data" / "make_golden_k3.py"
    subprocess.run([sys.executable, script, "golden", out], check=True)
    return out


@pytest.fixture(scope="session")
def stored(golden: Path) -> dict[str, Tensor]:
    """Every tensor of the golden checkpoint, as the safetensors library reads it."""
    return {
        k: t for file in sorted(golden.glob("*.safetensors")) for k, t in load_file(file).items()
    }


@pytest.fixture(scope="session")
def tables(golden: Path) -> Tables:
    """What the golden checkpoint's own headers say; and the same with bf16 experts."""
    mxfp4 = {}
    for path in sorted(golden.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                view = file.get_slice(name)
                if name.startswith("language_model."):
                    mxfp4[name] = TensorSpec(tuple(view.get_shape()), view.get_dtype())
    bf16 = {}
    for name, spec in mxfp4.items():
        if name.endswith(".weight_packed"):
            rows, half = spec.shape
            bf16[name.removesuffix("_packed")] = TensorSpec((rows, 2 * half), "BF16")
        elif not name.endswith(".weight_scale"):
            bf16[name] = spec
    return {"mxfp4": mxfp4, "bf16": bf16}


@pytest.fixture
def spoilt(golden: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt: links, so a file must be replaced, not written to."""
    for path in golden.iterdir():
        os.link(path, tmp_path / path.name)
    return tmp_path


def replace_file(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def joined(header: object, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    header, rest = split(path.read_bytes())
    edit(header)
    replace_file(path, joined(header, rest))


def edit_index(model_dir: Path, edit: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((model_dir / INDEX).read_text())
    edit(index["weight_map"])
    replace_file(model_dir / INDEX, json.dumps(index).encode())


def problems_of(model_dir: Path, tables: Tables) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(model_dir, tables)
    assert str(caught.value).startswith(f"{model_dir}: ")
    return caught.value.problems


# ---- what is in order ----


def test_golden_is_read_to_the_bit(golden: Path, tables: Tables, stored: dict[str, Tensor]) -> None:
    checkpoint = Checkpoint.open(golden, tables)
    assert checkpoint.expert_format == "mxfp4"
    assert checkpoint.specs is tables["mxfp4"]
    assert len(checkpoint.specs) + checkpoint.num_skipped == len(stored) == 2222
    assert checkpoint.num_skipped == 3 + 3 + 2 * 6  # projector, vision tower, two of its blocks
    assert checkpoint.files == (FIRST, SECOND, THIRD, TOP)
    for name in checkpoint.specs:
        tensor = checkpoint.read(name)
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(tensor, stored[name]), name


def test_a_tensor_has_memory_of_its_own(golden: Path, tables: Tables) -> None:
    checkpoint = Checkpoint.open(golden, tables)
    before = checkpoint.read(NORM)
    checkpoint.read(NORM).zero_()
    assert torch.equal(checkpoint.read(NORM), before)
    assert before.any()


def test_weights_expect_what_the_golden_checkpoint_holds(golden: Path, tables: Tables) -> None:
    config = load_config(golden)
    for expert_format, table in tables.items():
        assert expected_tensors(config, expert_format) == table


def test_golden_has_the_official_names_and_dtypes(tables: Tables) -> None:
    """A-13: a tiny checkpoint proves little if its layout is not the real one."""

    def pattern(name: str) -> str:
        return re.sub(r"layers\.\d+", "layers.{L}", re.sub(r"experts\.\d+", "experts.{e}", name))

    def layout(items: list[tuple[str, TensorSpec]]) -> set[tuple[str, str, int]]:
        return {(pattern(name), spec.dtype, len(spec.shape)) for name, spec in items}

    official = [(name, spec) for name, _, spec in official_tensors() if name.startswith("language")]
    assert layout(official) == layout(list(tables["mxfp4"].items()))


def test_vision_files_need_not_be_there(spoilt: Path, tables: Tables) -> None:
    (spoilt / MM).unlink()
    replace_file(spoilt / VISION, b"")
    assert Checkpoint.open(spoilt, tables).num_skipped == 18


def test_draft_layers_are_skipped_where_told(spoilt: Path, tables: Tables) -> None:
    names = [f"language_model.model.layers.{layer}.enorm.weight" for layer in (11, 12)]
    edit_index(spoilt, lambda index: index.update(dict.fromkeys(names, "model-mtp.safetensors")))
    assert Checkpoint.open(spoilt, tables, skip_layers_from=11).num_skipped == 18 + 2
    with pytest.raises(CheckpointError, match=r"layers\.11\.enorm.*not a tensor of this model"):
        Checkpoint.open(spoilt, tables, skip_layers_from=12)
    assert len(problems_of(spoilt, tables)) == 2


def test_text_only_root_in_one_file(
    tmp_path: Path, tables: Tables, stored: dict[str, Tensor]
) -> None:
    text = {n.removeprefix("language_model."): t for n, t in stored.items() if n in tables["mxfp4"]}
    save_file(text, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, tables)
    assert checkpoint.num_skipped == 0
    for name in (NORM, "language_model.lm_head.weight", next(iter(tables["mxfp4"]))):
        assert torch.equal(checkpoint.read(name), stored[name])


def test_bf16_experts(tmp_path: Path, tables: Tables, stored: dict[str, Tensor]) -> None:
    """Under the text-only root, in two files: how dequantised copies are found."""
    torch.manual_seed(0)
    tensors = {
        name.removeprefix("language_model."): stored[name]
        if name in stored
        else torch.randn(spec.shape).bfloat16()
        for name, spec in tables["bf16"].items()
    }
    names = list(tensors)
    index = {}
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        index |= dict.fromkeys(part, file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    checkpoint = Checkpoint.open(tmp_path, tables)
    assert checkpoint.expert_format == "bf16"
    for name in checkpoint.specs:
        expected = tensors[name.removeprefix("language_model.")]
        assert torch.equal(checkpoint.read(name), expected), name


def test_two_roots_in_one_checkpoint_are_refused(spoilt: Path, tables: Tables) -> None:
    edit_index(spoilt, lambda index: index.update({"model.norm.weight": TOP}))
    problems = problems_of(spoilt, tables)
    assert problems == [f"model.norm.weight: not a tensor of this model; the index names {TOP}"]


# ---- damaged files ----


def test_short_and_long_files_are_named(spoilt: Path, tables: Tables) -> None:
    """A-01: both at once, in opposite directions, with expected and found sizes."""
    first, third = (spoilt / FIRST).read_bytes(), (spoilt / THIRD).read_bytes()
    replace_file(spoilt / FIRST, first[:-1])
    replace_file(spoilt / THIRD, third + b"\0")
    sizes = "; expected {} bytes, found {}; download it again"
    assert problems_of(spoilt, tables) == [
        f"{FIRST}: the file is shorter than its header says"
        + sizes.format(len(first), len(first) - 1),
        f"{THIRD}: the file is longer than its header says"
        + sizes.format(len(third), len(third) + 1),
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "has 0 bytes, too few"),
        (b"\x10\0\0", "has 3 bytes, too few"),
        (b"\xff" * 8 + b"{}", "announce a header of 18446744073709551615 bytes"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "announce a header of 200000000 bytes"),
        ((64).to_bytes(8, "little") + b"{", "announce a header of 64 bytes"),  # cut in the header
        ((2).to_bytes(8, "little") + b"{]", "not JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    ],
)
def test_a_damaged_header_is_one_problem(
    spoilt: Path, tables: Tables, data: bytes, reason: str
) -> None:
    replace_file(spoilt / SECOND, data)
    problems = problems_of(spoilt, tables)
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"{SECOND}: ") and reason in problems[0]


ENTRY_DAMAGE: list[tuple[dict[str, Any] | list[int], str]] = [
    ({"data_offsets": [0, 639]}, "BF16 [320] has 640 bytes, but its offsets span 639"),
    ({"data_offsets": [640, 0]}, "expected a dtype, a shape and data_offsets"),
    ({"data_offsets": [0]}, "expected a dtype, a shape and data_offsets"),
    ({"shape": [-320]}, "expected a dtype, a shape and data_offsets"),
    ({"shape": [True, 320]}, "expected a dtype, a shape and data_offsets"),
    ({"shape": "320"}, "expected a dtype, a shape and data_offsets"),
    ({"dtype": None}, "expected a dtype, a shape and data_offsets"),
    ([0, 640], "expected a dtype, a shape and data_offsets"),
]


@pytest.mark.parametrize(("change", "reason"), ENTRY_DAMAGE, ids=lambda value: str(value)[:30])
def test_a_damaged_entry_is_named(
    spoilt: Path, tables: Tables, change: dict[str, Any] | list[int], reason: str
) -> None:
    def edit(header: dict[str, Any]) -> None:
        header[NORM] = header[NORM] | change if isinstance(change, dict) else change

    edit_header(spoilt / TOP, edit)
    problems = problems_of(spoilt, tables)
    assert problems[0].startswith(f"{TOP}: {NORM}: ") and reason in problems[0], problems


def test_overlaps_and_gaps_are_named(spoilt: Path, tables: Tables) -> None:
    def shift(by: int) -> Callable[[dict[str, Any]], None]:
        def edit(header: dict[str, Any]) -> None:
            header[NORM]["data_offsets"] = [at + by for at in header[NORM]["data_offsets"]]

        return edit

    edit_header(spoilt / TOP, shift(-2))
    problems = problems_of(spoilt, tables)
    assert f"{TOP}: {NORM}: overlaps language_model.model.embed_tokens.weight" in problems[0]
    edit_header(spoilt / TOP, shift(+4))
    problems = problems_of(spoilt, tables)
    assert f"{TOP}: {NORM}: leaves a gap after language_model.model.embed_tokens" in problems[0]
    edit_header(spoilt / TOP, shift(1 << 40))
    assert any("the file is shorter than its header says" in p for p in problems_of(spoilt, tables))


def test_a_tensor_removed_from_a_header_leaves_a_gap_and_is_missing(
    spoilt: Path, tables: Tables
) -> None:
    edit_header(spoilt / TOP, lambda header: header.pop(NORM) and None)
    gap, missing = problems_of(spoilt, tables)
    assert "leaves a gap after" in gap
    assert missing == f"{NORM}: missing; the index names {TOP}, which does not hold it"


# ---- files that are not this model's, or not as the index says ----


def test_wrong_shape_and_dtype_are_found_without_a_tensor_read(
    spoilt: Path, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-05: in the last file, from headers alone, within a second."""
    edit_header(spoilt / TOP, lambda header: header[NORM].update(dtype="F16"))
    proj = "language_model.model.output_attn_res_proj.weight"
    edit_header(spoilt / TOP, lambda header: header[proj].update(shape=[320, 1]))
    monkeypatch.setattr(os, "preadv", None)
    start = time.monotonic()
    assert sorted(problems_of(spoilt, tables)) == [
        f"{NORM}: expected BF16 [320], found F16 [320] in {TOP}",
        f"{proj}: expected BF16 [1, 320], found BF16 [320, 1] in {TOP}",
    ]
    assert time.monotonic() - start < 1


def test_missing_and_extra_tensors(spoilt: Path, tables: Tables) -> None:
    extra = "language_model.model.layers.3.self_attn.q_norm.weight"

    def rename(index: dict[str, Any]) -> None:
        index[extra] = index.pop(NORM)

    edit_index(spoilt, rename)
    edit_header(spoilt / TOP, rename)
    missing, unknown = problems_of(spoilt, tables)
    assert missing == f"{NORM}: missing; expected BF16 [320], and no file holds it"
    assert unknown == f"{extra}: not a tensor of this model; the index names {TOP}"


def test_index_that_disagrees_with_the_files(spoilt: Path, tables: Tables) -> None:
    other = "language_model.lm_head.weight"

    def edit(index: dict[str, str]) -> None:
        index[NORM] = FIRST
        del index[other]

    edit_index(spoilt, edit)
    assert sorted(problems_of(spoilt, tables)) == [
        f"{other}: held by {TOP}, but not in the index",
        f"{NORM}: held by {TOP}, but the index names {FIRST}",
    ]


def test_a_tensor_in_two_files(spoilt: Path, tables: Tables) -> None:
    def add(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key[:2] != "__")
        entry = {"dtype": "BF16", "shape": [320], "data_offsets": [end, end + 640]}
        header[NORM] = entry
        header["vision_tower.stray"] = entry | {"data_offsets": [end + 640, end + 1280]}

    edit_header(spoilt / FIRST, add)
    replace_file(spoilt / FIRST, (spoilt / FIRST).read_bytes() + bytes(1280))
    assert problems_of(spoilt, tables) == [f"{NORM}: held by both {TOP} and {FIRST}"]


def test_absent_files(spoilt: Path, tables: Tables) -> None:
    (spoilt / TOP).unlink()
    lost = f"{TOP}: no such file, though the index names it for 5 tensors; download it"
    assert problems_of(spoilt, tables) == [lost]
    (spoilt / INDEX).unlink()
    assert (
        "expected model.safetensors.index.json or model.safetensors"
        in problems_of(spoilt, tables)[0]
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"metadata": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../a.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
    ],
)
def test_a_damaged_index_is_named(spoilt: Path, tables: Tables, text: str) -> None:
    replace_file(spoilt / INDEX, text.encode())
    problems = problems_of(spoilt, tables)
    assert len(problems) == 1 and problems[0].startswith(f"{INDEX}: expected "), problems


def test_many_problems_are_counted(spoilt: Path, tables: Tables) -> None:
    edit_index(spoilt, lambda index: index.clear())
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(spoilt, {"mxfp4": tables["mxfp4"]})
    lines = str(caught.value).splitlines()
    assert len(caught.value.problems) == len(tables["mxfp4"])
    assert len(lines) == 22
    assert lines[-1] == f"... and {len(tables['mxfp4']) - 20} more problems"


# ---- loading ----


def test_load_gives_each_tensor_in_the_order_asked_for(
    golden: Path, tables: Tables, stored: dict[str, Tensor]
) -> None:
    checkpoint = Checkpoint.open(golden, tables)
    names = sorted(checkpoint.specs, key=lambda name: name[::-1])  # hops between files
    seen: list[str] = []
    steps: list[tuple[int, int]] = []

    def consume(name: str, tensor: Tensor) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name])
        seen.append(name)

    checkpoint.load(names, consume, progress=lambda done, of: steps.append((done, of)))
    assert seen == names
    total = sum(stored[name].nbytes for name in names)
    assert steps[-1] == (total, total)
    assert all(a[0] < b[0] for a, b in pairwise(steps))
    checkpoint.load([], consume)
    assert len(seen) == len(names)


def test_in_file_order(golden: Path, tables: Tables) -> None:
    checkpoint = Checkpoint.open(golden, tables)
    names = checkpoint.in_file_order(reversed(list(checkpoint.specs)))
    assert sorted(names) == sorted(checkpoint.specs)
    places = [checkpoint.places[name] for name in names]
    assert places == sorted(places)


def test_slow_reads_overlap(golden: Path, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-10: with one read at a time this takes 24 * 0.05 s before 24 * 0.02 s to consume."""
    read = nanok3.checkpoint.read_tensor

    def slow(*args: Any) -> Tensor:
        time.sleep(0.05)
        return read(*args)

    monkeypatch.setattr(nanok3.checkpoint, "read_tensor", slow)
    checkpoint = Checkpoint.open(golden, tables)
    names = list(checkpoint.specs)[:24]
    start = time.monotonic()
    checkpoint.load(names, lambda name, tensor: time.sleep(0.02), workers=6)
    assert time.monotonic() - start < 1.2


def test_reads_ahead_no_more_than_told(
    golden: Path, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-08: what is read and not yet consumed is bounded in bytes, whatever the sizes."""
    read, lock = nanok3.checkpoint.read_tensor, threading.Lock()
    held = most = 0

    def counted(*args: Any) -> Tensor:
        nonlocal held, most
        with lock:
            held += args[3].nbytes
            most = max(most, held)
        return read(*args)

    def consume(name: str, tensor: Tensor) -> None:
        nonlocal held
        time.sleep(0.0005)  # slower than the reads, so that they fill the window
        with lock:
            held -= tensor.nbytes

    monkeypatch.setattr(nanok3.checkpoint, "read_tensor", counted)
    checkpoint = Checkpoint.open(golden, tables)
    largest = max(spec.nbytes for spec in checkpoint.specs.values())
    checkpoint.load(list(checkpoint.specs), consume, workers=3, read_ahead_bytes=1000)
    assert held == 0 and most <= 2 * largest
    most, window = 0, 1 << 20
    checkpoint.load(list(checkpoint.specs), consume, workers=3, read_ahead_bytes=window)
    assert held == 0 and window / 2 < most <= window + largest


@pytest.mark.parametrize("page", [1, 1 << 30])
def test_parts_of_tensors_and_no_other_bytes(
    golden: Path,
    tables: Tables,
    stored: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    page: int,
) -> None:
    """Rows and columns; columns of rows shorter than a page come by way of the whole tensor."""
    read, lock, total = nanok3.checkpoint.read_bytes, threading.Lock(), 0

    def counted(descriptor: int, path: Path, begin: int, raw: Tensor) -> None:
        nonlocal total
        with lock:
            total += raw.nbytes
        read(descriptor, path, begin, raw)

    monkeypatch.setattr(nanok3.checkpoint, "read_bytes", counted)
    monkeypatch.setattr(nanok3.checkpoint, "PAGE_BYTES", page)

    def part_of(name: str, spec: TensorSpec) -> Part | None:
        axis = len(name) % 3
        if axis >= len(spec.shape) or spec.shape[axis] % 4:
            return None
        return Part(axis, spec.shape[axis] // 4, spec.shape[axis] // 2)

    checkpoint = Checkpoint.open(golden, tables)
    kinds, steps, expected = set(), [], 0

    def consume(name: str, tensor: Tensor) -> None:
        nonlocal expected
        part, right = part_of(name, checkpoint.specs[name]), stored[name]
        own = right if part is None else part.of(right)
        assert torch.equal(tensor, own) and tensor.is_contiguous()
        is_all = part is None or (part.axis == 1 and page > 1)
        expected += right.nbytes if is_all else own.nbytes
        kinds.add(part and part.axis)

    names = list(checkpoint.specs)
    checkpoint.load(
        names, consume, part_of=part_of, progress=lambda done, of: steps.append((done, of))
    )
    assert kinds == {None, 0, 1} and total == expected
    assert steps[-1][0] == steps[-1][1]


def open_shards() -> list[str]:
    links = [Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd")]
    found = [os.readlink(link) for link in links if link.is_symlink()]
    return sorted(Path(path).name for path in found if path.endswith(".safetensors"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_files_are_closed_in_order_and_never_mapped(spoilt: Path, tables: Tables) -> None:
    checkpoint = Checkpoint.open(spoilt, tables)
    assert open_shards() == []
    seen: list[tuple[str, ...]] = []

    def consume(name: str, tensor: Tensor) -> None:
        shards = tuple(open_shards())
        if not seen or seen[-1] != shards:
            seen.append(shards)
            assert str(spoilt) not in Path("/proc/self/maps").read_text()

    names = checkpoint.in_file_order(checkpoint.specs)
    checkpoint.load(names, consume, read_ahead_bytes=1 << 16)
    assert open_shards() == []
    assert seen[0] == (FIRST,)
    firsts = [shards[0] for shards in seen if shards]
    assert firsts == sorted(firsts) and firsts[-1] == TOP  # a closed file stays closed
    assert max(len(shards) for shards in seen) <= 2  # two while the window spans them


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_failure_midway_is_told_and_leaves_no_file_open(spoilt: Path, tables: Tables) -> None:
    checkpoint = Checkpoint.open(spoilt, tables)
    replace_file(spoilt / TOP, (spoilt / TOP).read_bytes()[:-10])
    last = checkpoint.in_file_order(checkpoint.specs)[-1]
    with pytest.raises(CheckpointError, match=rf"{TOP}: expected bytes up to .*has changed since"):
        checkpoint.read(last)
    with pytest.raises(CheckpointError, match=rf"{TOP}: expected bytes up to .*has changed since"):
        checkpoint.load(list(checkpoint.specs), lambda name, tensor: None)
    (spoilt / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND}: the file cannot be read: No such file"):
        checkpoint.load(list(checkpoint.specs), lambda name, tensor: None)

    def fail(name: str, tensor: Tensor) -> None:
        raise RuntimeError(name)

    with pytest.raises(RuntimeError):
        checkpoint.load(checkpoint.in_file_order(checkpoint.specs)[:9], fail)
    assert open_shards() == []


PEAK = """
import resource, sys
from pathlib import Path
from nanok3.checkpoint import Checkpoint, TensorSpec
specs = {f"language_model.model.{k}": TensorSpec((2**21,), "BF16") for k in range(96)}
checkpoint = Checkpoint.open(Path(sys.argv[1]), {"mxfp4": specs})
seen = []
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint.load(list(specs), lambda n, t: seen.append(n), read_ahead_bytes=16 << 20)
assert len(seen) == 96
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_peak_memory_is_a_few_tensors(tmp_path: Path) -> None:
    """A-08: 384 MiB in three files, tensors of 4 MiB, 16 MiB ahead: 20 MiB and little else."""
    weight_map = {}
    for file in range(3):
        names = [f"language_model.model.{k}" for k in range(32 * file, 32 * file + 32)]
        path = tmp_path / f"{file}.safetensors"
        entries = {
            name: {"dtype": "BF16", "shape": [2**21], "data_offsets": [k << 22, (k + 1) << 22]}
            for k, name in enumerate(names)
        }
        path.write_bytes(joined(entries, b""))
        os.truncate(path, path.stat().st_size + (32 << 22))
        weight_map |= dict.fromkeys(names, path.name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    grown_kib = int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    assert grown_kib < 40 * 1024


# ---- the size of the official checkpoint ----


class Counted(dict[str, TensorSpec]):
    """A table that counts how often it is asked."""

    asked = 0

    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return super().__contains__(name)

    def __getitem__(self, name: str) -> TensorSpec:
        self.asked += 1
        return super().__getitem__(name)


def test_names_are_matched_in_linear_time(tmp_path: Path) -> None:
    """A-09: 5 layers of 896 experts; a handful of look-ups a name, no scan of the table."""
    specs = Counted()
    header = {}
    for layer in range(5):
        for expert in range(896):
            for part in ("w1", "w2", "w3"):
                at = 2 * len(header)
                experts = f"model.layers.{layer}.block_sparse_moe.experts"
                name = f"language_model.{experts}.{expert}.{part}.weight_packed"
                specs[name] = TensorSpec((2,), "U8")
                header[name] = {"dtype": "U8", "shape": [2], "data_offsets": [at, at + 2]}
    (tmp_path / "model.safetensors").write_bytes(joined(header, bytes(2 * len(header))))
    Checkpoint.open(tmp_path, {"mxfp4": specs})
    assert specs.asked <= 8 * len(specs)


OPEN_OFFICIAL = """
import re, sys, time
from pathlib import Path
from nanok3.checkpoint import Checkpoint
from nanok3.config import K3
from nanok3.weight_table import expected_tensors
start = time.monotonic()
tables = {form: expected_tensors(K3, form) for form in ("mxfp4", "bf16")}
checkpoint = Checkpoint.open(Path(sys.argv[1]), tables)
assert (checkpoint.expert_format, len(checkpoint.specs)) == ("mxfp4", 497_052)
assert checkpoint.num_skipped == 168
status = Path("/proc/self/status").read_text()  # getrusage would count the parent's memory
print(time.monotonic() - start, re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])
"""


def test_official_size_is_checked_in_seconds(tmp_path: Path) -> None:
    """497,220 names in 96 files of 1.56 TB: under 30 s and 1 GB, the imports included."""
    write_fake_official(tmp_path)
    for shard in (95, 96):  # vision and projector
        (tmp_path / f"model-{shard:05d}-of-000096.safetensors").unlink()
    command = [sys.executable, "-c", OPEN_OFFICIAL, str(tmp_path)]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.split()
    assert float(out[0]) < 30
    assert int(out[1]) * 1024 < 1e9


def test_weights_expect_the_official_tensors() -> None:
    summary = json.loads(SUMMARY.read_text())
    official = {name: spec for name, _, spec in official_tensors()}
    assert len(official) == summary["tensors"]
    assert sum(spec.nbytes for spec in official.values()) == summary["total_size"]
    text = {name: spec for name, spec in official.items() if name.startswith("language_model.")}
    assert expected_tensors(K3) == text
