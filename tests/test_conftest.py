"""What a test starts from does not depend on those that the same process ran before it."""

from __future__ import annotations

import ast
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import mixprec.noise

LARGEST = 2**32 - 1


def test_examples_are_not_of_what_happens_to_be_imported() -> None:
    tree = ast.parse(Path(mixprec.noise.__file__).read_text())
    numbers = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    of_source = {n for n in numbers if isinstance(n, int) and n > 2**20 and n.bit_count() > 2}
    of_source -= {LARGEST}
    assert of_source
    drawn: set[int] = set()

    @settings(max_examples=2000)
    @given(st.integers(2**20, LARGEST))
    def draw(number: int) -> None:
        drawn.add(number)

    draw()
    assert len(drawn) > 500
    assert drawn.isdisjoint(of_source)
