"""Where prompts are seen to part, and where a prompt should leave snapshots."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from nanok3.reuse import common_pages, marks, page_keys

PAGE = 4


def places(
    prompt: list[int], others: list[list[int]], *, cached: int = 0, chunk: int = 8, most: int = 8
) -> list[int]:
    found = marks(
        page_keys(prompt, PAGE),
        len(prompt),
        cached,
        [page_keys(other, PAGE) for other in others],
        block_size=PAGE,
        chunk=chunk,
        most=most,
    )
    return sorted(found)


def test_keys_stand_for_all_ids_up_to_theirs() -> None:
    ids = list(range(23))
    keys = page_keys(ids, PAGE)
    assert len(keys) == len(set(keys)) == 5  # the last three ids fill no page
    assert page_keys(ids[:3], PAGE) == [] and page_keys(ids[:4], PAGE) == keys[:1]
    for place in range(20):
        edited = page_keys([*ids[:place], 99, *ids[place + 1 :]], PAGE)
        same = [a == b for a, b in zip(keys, edited, strict=True)]
        assert same == [page < place // PAGE for page in range(5)], "a page behind an edit agrees"
    assert page_keys([0] * 8, PAGE)[0] != page_keys([0] * 8, PAGE)[1]


def test_common_pages_are_those_of_the_common_beginning() -> None:
    chooser = random.Random(3)
    for _ in range(300):
        begin = [chooser.randrange(3) for _ in range(chooser.randrange(30))]
        a, b = (begin + [chooser.randrange(3) for _ in range(chooser.randrange(9))] for _ in "ab")
        alike = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        alike = min(len(a), len(b)) if alike is None else alike
        assert common_pages(page_keys(a, PAGE), page_keys(b, PAGE)) == alike // PAGE


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, []), (4, []), (5, [4]), (8, [4]), (9, [8]), (17, [8, 16]), (26, [8, 16, 24])],
)
def test_a_prompt_like_no_other_leaves_its_last_page_and_borders_of_chunks(
    length: int, expected: list[int]
) -> None:
    assert places(list(range(length)), []) == expected


def test_where_prompts_part_is_marked_before_all_else() -> None:
    prompt = list(range(40))
    near, far = [*prompt[:9], 99, *prompt[10:]], [*prompt[:30], 98, 97]
    others = [near, [*prompt[:10], 96], far, [90, *prompt[1:]]]
    assert places(prompt, others, most=1) == [8]  # two part there
    assert places(prompt, others, most=2) == [8, 28]
    assert places(prompt, others, most=3) == [8, 28, 36]
    assert places(prompt, others, most=0) == []
    assert places(prompt, others, most=3, cached=8) == [28, 36]  # what is cached needs no mark
    assert places(prompt, others, cached=38) == []


def test_marks_are_few_and_spread_over_a_long_prompt() -> None:
    found = places(list(range(1000)), [], most=6)
    assert len(found) <= 6 and found[-1] == 996
    steps = [b - a for a, b in pairwise([0, *found[:-1]])]
    assert len(set(steps)) == 2 and all(step % 8 == 0 for step in steps)
    for length in range(1, 200):  # whatever the length (pitfall E-04)
        for most in range(5):
            marked = places(list(range(length)), [], most=most)
            assert len(marked) <= most
            assert all(place % PAGE == 0 and 0 < place < length for place in marked)
            assert not most or length <= PAGE or max(marked) >= length - PAGE
