"""Which beginnings of prompts are worth a snapshot, and how prompts are seen to begin alike.

A prompt is a chain of pages of `block_size` ids. The key of a page is a hash of its ids and of the
key before it, so one key stands for a whole beginning, and two prompts part where their keys do.
Keys say where to look and nothing more: whoever reuses a beginning compares its ids.

A KDA state cannot be taken apart afterwards, so what later prompts may share has to be noticed
while a prompt is computed. Its marks, in the order of their worth:

- where it parts from what is cached, waits or runs: at the page that most share, and the last one;
- its last page border, for prompts that differ in their last words only;
- borders of chunks, evenly spaced, for prompts that nobody has seen yet.

Knows ids only; snapshots are `cache.py`'s, and when a mark is reached is for `scheduler.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence


def page_keys(ids: Sequence[int], block_size: int) -> list[int]:
    """A key for every full page of `ids`."""
    keys, key = [], 0
    for begin in range(0, len(ids) - block_size + 1, block_size):
        key = hash((key, *ids[begin : begin + block_size]))
        keys.append(key)
    return keys


def common_pages(a: Sequence[int], b: Sequence[int]) -> int:
    """How many pages two chains of keys begin with alike."""
    shorter = range(min(len(a), len(b)))
    return bisect_left(shorter, True, key=lambda i: a[i] != b[i])


def marks(
    keys: Sequence[int],
    num_ids: int,
    num_cached: int,
    others: Iterable[Sequence[int]],
    *,
    block_size: int,
    chunk: int,
    most: int,
) -> set[int]:
    """Numbers of ids after which this prompt should leave a snapshot, at most `most`.

    keys: of the prompt, which has num_ids ids, num_cached of them cached. others: keys of what it
    may have its beginning in common with. chunk: ids that a pass of the model takes.
    """
    last = (num_ids - 1) // block_size  # a snapshot leaves at least one id to compute
    shared = [min(common_pages(keys, other), last) for other in others]
    counts = Counter(n for n in shared if n * block_size > num_cached)
    pages = [max(counts, key=lambda n: (counts[n], n)), max(counts)] if counts else []
    pages.append(last)
    per_chunk = max(1, chunk // block_size)
    borders = range(per_chunk, last, per_chunk)
    if borders and (left := most - len(set(pages))) > 0:
        pages += borders[:: -(-len(borders) // left)]
    places = [n * block_size for n in dict.fromkeys(pages)]
    return {place for place in places[:most] if place > num_cached}
