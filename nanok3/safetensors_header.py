"""Reads the header of one safetensors file and checks it against the size of the file.

Layout of such a file, all numbers little-endian:

    8 bytes        H, the length of the header
    H bytes        JSON: {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [BEGIN, END]}}
    rest           tensors, row-major, end to end; offsets count from here, with no gap or overlap

No tensor's bytes are read here, and which tensors should be there is not known here.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_NUMBER = 2**63 - 1  # of a shape or an offset; no file is longer
MAX_DIMENSIONS = 32  # so that no product of a damaged shape takes long

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class StoredTensor(NamedTuple):
    """A tensor as a header describes it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


def read_header(path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of a file by name, and what is wrong with it, a sentence each."""
    try:
        with path.open("rb", buffering=0) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            too_long = header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8)
            raw = b"" if too_long or len(prefix) < 8 else file.read(header_bytes)
    except OSError as error:
        return {}, [f"{path.name}: the file cannot be read: {error.strerror}"]
    again = "download it again"
    if len(prefix) < 8:
        found = f"the file has {file_bytes} bytes, too few for a safetensors header"
        return {}, [f"{path.name}: {found}; {again}"]
    if too_long:
        expected = f"at most {MAX_HEADER_BYTES} bytes and no more than the file's {file_bytes}"
        found = f"its first 8 bytes announce a header of {header_bytes} bytes"
        return {}, [f"{path.name}: {found}, expected {expected}; {again}"]
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return {}, [f"{path.name}: the header is not JSON ({error}); {again}"]
    if not isinstance(entries, dict):
        return {}, [f"{path.name}: the header is not a JSON object; {again}"]

    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    start = 8 + header_bytes
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        tensor = parse_entry(entry, start)
        if tensor is None:
            expected = "a dtype, a shape and data_offsets [begin, end]"
            problems.append(
                f"{path.name}: {name}: expected {expected}, found {reprlib.repr(entry)}"
            )
            continue
        tensors[name] = tensor
        width = DTYPE_BYTES.get(tensor.dtype)
        if width is not None and tensor.end - tensor.begin != width * math.prod(tensor.shape):
            described = f"{tensor.dtype} {list(tensor.shape)} has {width * math.prod(tensor.shape)}"
            span = f"its offsets span {tensor.end - tensor.begin}"
            problems.append(f"{path.name}: {name}: {described} bytes, but {span}")
    if not problems:
        problems = layout_problems(path.name, tensors, start, file_bytes)
    return tensors, problems


def parse_entry(entry: Any, start: int) -> StoredTensor | None:
    """One header entry, its offsets counted from the start of the file; None if malformed."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        return None
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return None
    for number in (begin, end, *shape):
        if type(number) is not int or not 0 <= number <= MAX_NUMBER:
            return None
    return StoredTensor(dtype, tuple(shape), start + begin, start + end) if begin <= end else None


def layout_problems(
    file_name: str, tensors: dict[str, StoredTensor], start: int, file_bytes: int
) -> list[str]:
    """Where tensors do not lie end to end, or do not end where the file does."""
    problems = []
    covered, before = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.begin != covered:
            what = "overlaps" if tensor.begin < covered else "leaves a gap after"
            where = f"begins at byte {tensor.begin}, expected {covered}"
            problems.append(f"{file_name}: {name}: {what} {before}; {where}")
        if tensor.end >= covered:
            covered, before = tensor.end, name
    if covered != file_bytes:
        what = "shorter" if file_bytes < covered else "longer"
        sizes = f"expected {covered} bytes, found {file_bytes}"
        problems.append(
            f"{file_name}: the file is {what} than its header says; {sizes}; download it again"
        )
    return problems
