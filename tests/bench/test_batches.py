"""The largest batch that fits, for every answer there can be."""

from __future__ import annotations

import pytest

from mixprec.bench.batches import largest


@pytest.mark.parametrize("answer", range(70))
def test_the_answer_is_found_and_no_batch_is_tried_twice(answer: int) -> None:
    tried: list[int] = []

    def fits(rows: int) -> bool:
        tried.append(rows)
        return rows <= answer

    assert largest(fits) == answer
    assert len(set(tried)) == len(tried)
    assert len(tried) <= 2 * answer.bit_length() + 1
    assert max(tried) <= max(1, 2 * answer), "nothing is tried that is far too large"


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9])
def test_nothing_beyond_the_most_is_tried(most: int) -> None:
    tried: list[int] = []
    assert largest(lambda rows: not tried.append(rows), most=most) == most
    assert max(tried) == most
