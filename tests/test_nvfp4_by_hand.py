"""docs/nvfp4_by_hand.md: its snippets run, and every figure is the one that they give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mixprec.codes import decode, unpack_nibbles

PAGE = (Path(__file__).parents[1] / "docs" / "nvfp4_by_hand.md").read_text()
PLACES = [0, 1, 2, 3, 16, 17, 18, 19]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(snippet, found)
    return found


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading row."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def shown(values: torch.Tensor) -> list[str]:
    """Five digits, as the page prints them; zero without a sign."""
    return [f"{value + 0.0:.5g}" for value in values.flatten().tolist()]


def test_tensor_factor_and_block_scales(names: dict[str, Any]) -> None:
    x, q = names["x"], names["q"]
    factor = 2688 / q.tensor_amax.item()
    assert f"S = 2688 / {q.tensor_amax.item():g} = {factor:g}\n" in PAGE
    amax = x.abs().unflatten(1, (-1, 16)).amax(-1)
    assert rows("| block | amax |") == [
        [f"{i}", f"{a:g}", f"{a * factor / 6:.5g}", f"{b:g}", f"0x{code:02x}"]
        for i, (a, b, code) in enumerate(
            zip(
                amax[0].tolist(),
                decode(q.scale, "e4m3")[0].tolist(),
                q.scale[0].tolist(),
                strict=True,
            )
        )
    ]
    first, second = shown(q.encode)
    assert f"encode = S / b, which is {first} in block 0 and {second} in\nblock 1" in PAGE


def test_elements_codes_and_bytes(names: dict[str, Any]) -> None:
    x, q = names["x"], names["q"]
    scaled = x * q.encode.repeat_interleave(16, 1)
    codes = unpack_nibbles(q.codes, q.spec.format)[0]
    columns = [shown(v.flatten()[PLACES]) for v in (x, scaled, q.values)]
    assert rows("| x | x * encode |") == [
        [*cells, str(code)] for *cells, code in zip(*columns, codes[PLACES].tolist(), strict=True)
    ]
    low, high = codes[0::2].tolist(), codes[1::2].tolist()
    for place in (0, 1, 8, 9):
        text = rf"{low[place]} and {high[place]}\s+give 0x{q.codes[0, place].item():02x}"
        assert re.search(text, PAGE)
    assert f"16 + 2 + 4 = {q.nbytes}\nbytes in place of {x.nbytes}" in PAGE
    values = decode(torch.arange(8, dtype=torch.uint8), "e2m1")
    assert ", ".join(shown(values)[:-1]) + f" and {values[-1]:g}" in " ".join(PAGE.split())


def test_decoded_values_and_error(names: dict[str, Any]) -> None:
    x, q, error = names["x"], names["q"], names["error"]
    columns = [shown(v.flatten()[PLACES]) for v in (x, q.values, q.dequantize())]
    assert rows("| x | value | decoded |") == [list(cells) for cells in zip(*columns, strict=True)]
    first, second = shown(q.block_scale * q.tensor_scale)
    assert f"/ 2688 = {first}, in\nblock 1 it is {second}:" in PAGE
    assert error.underflow == 1 / 32
    assert f"the error is {error.sqnr_db:.1f} dB below" in PAGE
