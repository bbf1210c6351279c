"""Input gone wrong at random: JSON values with a node exchanged, bytes with a few changed."""

from __future__ import annotations

import copy
import json
import random
import re
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BIG = 10**3000  # within what json reads, and no size, count or id
STRINGS = (
    *("", " ", "\0", "\n", "é", "😀", "\ud800", "x" * 3000, "<|open|>", "<|end_of_msg|>", "%s{0}"),
    *("text", "user", "assistant", "tool", "system", "function", "object", "string", "POST", "../"),
)
NUMBERS = (0, -1, 1, 3, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, BIG, 0.5, -0.0, 1e308, 5e-324, 1e19)


def to_json(value: Any, *, ensure_ascii: bool = True) -> bytes:
    """With what stands for depth as deep as it says."""

    def deep(found: re.Match[str]) -> str:
        depth = int(found[1])
        return "[" * depth + "]" * depth

    text = json.dumps(value, ensure_ascii=ensure_ascii)
    return re.sub(r'"@deep (\d+)@"', deep, text).encode("utf-8", "surrogatepass")


def some_json(chooser: random.Random, depth: int = 2) -> Any:
    kind = chooser.randrange(9)
    if kind < 2:
        return chooser.choice(NUMBERS)
    if kind < 4:
        return chooser.choice(STRINGS)
    if kind == 4:
        return chooser.choice([None, True, False])
    if kind == 5 and chooser.random() < 0.3:
        return f"@deep {chooser.choice([100, 400, 900, 2000])}@"  # see to_json
    if depth == 0:
        return chooser.choice([[], {}])
    if kind < 7:
        return [some_json(chooser, depth - 1) for _ in range(chooser.randrange(4))]
    return {
        chooser.choice(STRINGS): some_json(chooser, depth - 1) for _ in range(chooser.randrange(4))
    }


def nodes(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a value."""
    found = [] if found is None else found
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        found.append((value, key))
        if isinstance(item, dict | list):
            nodes(item, found)
    return found


def mutated(value: Any, chooser: random.Random) -> Any:
    """A copy with one node or a few exchanged, left out, doubled, renamed or moved."""
    value = copy.deepcopy(value)
    for _ in range(chooser.choice([1, 1, 1, 2, 4])):
        places = nodes(value)
        if not places:
            return some_json(chooser)
        holder, key = chooser.choice(places)
        what = chooser.randrange(6)
        if what < 3:
            holder[key] = some_json(chooser)
        elif what == 3:
            del holder[key]
        elif what == 4:
            other, place = chooser.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder, dict):
            holder[chooser.choice(STRINGS)] = holder.pop(key)
        else:
            holder.append(copy.deepcopy(holder[key]))
    return value


def torn(raw: bytes, chooser: random.Random) -> bytes:
    """Bytes changed, left out, put in, or cut off."""
    data = bytearray(raw)
    for _ in range(chooser.choice([1, 1, 2, 8])):
        place = chooser.randrange(len(data) + 1)
        what = chooser.randrange(5)
        if what == 0 and place < len(data):
            data[place] ^= 1 << chooser.randrange(8)
        elif what == 1:
            del data[place : place + chooser.choice([1, 2, 20])]
        elif what == 2:
            data[place:place] = chooser.choice([b"\xff", b"\0", b'"', b"}", b"[" * 40, b"\xed\xa0"])
        elif what == 3:
            data[place:place] = data[place : place + 30]
        elif chooser.random() < 0.3:
            del data[place:]
    return bytes(data)


@contextmanager
def bounded(peak_bytes: int) -> Iterator[Callable[[], None]]:
    """No more than this at once, by Python's own count at the calls of what it gives, and by the
    process's over all."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()

    def check() -> None:
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < peak_bytes, f"{peak} bytes at once"
        tracemalloc.reset_peak()

    try:
        yield check
        check()
    finally:
        tracemalloc.stop()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 2 * peak_bytes + 2**26, f"the process has grown by {grown} bytes"
