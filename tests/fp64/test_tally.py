"""The arguments of ``emulate``, what it expects to be faster, and its table."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from mixprec import fp64
from mixprec.fp64 import emulate, speed
from mixprec.hardware import ACCELERATORS

DOUBLE = torch.float64
ROW = torch.tensor([[1e200, -1e200]], dtype=DOUBLE)
COLUMN = torch.tensor([[1e200], [1e200]], dtype=DOUBLE)


def is_native(product: Tensor) -> bool:
    return not bool(torch.isfinite(product).any())


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def test_performant_is_native_on_a_cpu() -> None:
    with emulate(strategy="performant") as done:
        assert is_native(ROW @ COLUMN)
    assert str(done) == (
        "operation  emulated  native  why native\n"
        "mm                0       1  native FP64 is faster on cpu"
    )


@pytest.mark.parametrize(
    ("name", "size", "bits", "engine", "reason"),
    [
        ("GB200", 4096, None, "auto", None),
        ("L4", 4096, 79, "int8", None),
        ("H200", 8192, None, "auto", "H200: about 38.9 emulated against 67 "),
        ("GB200", 4096, None, "float64", "GB200: about 0 emulated against 45 "),
        ("GB200", 512, None, "auto", "smaller than 1024"),
        ("unknown", 4096, None, "auto", "the hardware table has no rates"),
    ],
)
def test_performant_goes_by_the_hardware_table(
    name: str, size: int, bits: int | None, engine: str, reason: str | None
) -> None:
    found = speed.why_not_faster_on(ACCELERATORS.get(name), size, bits, engine)
    assert (found is None) if reason is None else (found or "").startswith(reason)


def test_tally_is_a_table_and_plain_values() -> None:
    with emulate(min_size=2) as done:
        assert str(done) == "no product of matrices was called"
        torch.addmm(random(2), random(2, 2), random(2, 2))
        random(2, 2) @ random(2, 2)
        random(1, 2) @ random(2, 2)
        random(2, 2).float() @ random(2, 2).float()
    assert str(done) == (
        "operation  emulated  native  why native\n"
        "addmm             1       0\n"
        "mm                1       2  smaller than 2 (1); float32 (1)"
    )
    data = json.loads(json.dumps(done.to_dict()))
    assert (data["emulated"], data["native"], data["bits"]) == (2, 2, "auto")
    assert data["operations"]["mm"]["reasons"] == {"smaller than 2": 1, "float32": 1}
    assert data["operations"]["mm"]["products"] > 0


def test_fixed_bits_and_scheme_reach_the_products() -> None:
    with emulate(bits=55, engine="float32") as done:
        random(4, 4) @ random(4, 4)
    assert done.operations["mm"].products == 28
    assert done.bits == 55


def test_rows_that_need_more_bits_are_told() -> None:
    wide = torch.tensor([[1.0, 1.0], [1e200, 1e-200]], dtype=DOUBLE)
    with emulate() as done:
        wide @ torch.tensor([[1e-200], [1e200]], dtype=DOUBLE)
    assert done.operations["mm"].native_rows == 1
    assert str(done).endswith("1 rows or columns of the emulated need more bits")


def test_settings_in_place_of_arguments() -> None:
    with emulate(settings=fp64.Settings(enabled=True, bits=55, strategy="eager")) as done:
        ROW @ COLUMN
    assert (done.bits, done.emulated) == (55, 1)
    with emulate(settings=fp64.Settings()) as done:
        assert is_native(ROW @ COLUMN)
    assert str(done) == "nothing is emulated: CUBLAS_EMULATE_DOUBLE_PRECISION is not 1"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ops": ["mmm"]}, ValueError, r"ops: got 'mmm'; .* did you mean mm\?"),
        ({"ops": ["softmax"]}, ValueError, r"ops: got 'softmax'; .* choose from mm, addmm"),
        ({"ops": ["linear"]}, ValueError, r"ops: got 'linear'; .* mm, addmm"),
        ({"ops": "mm"}, TypeError, r"ops: got 'mm'; .* \('mm',\)"),
        ({"min_size": 0}, ValueError, "min_size: got 0; must be"),
        ({"min_size": 2.5}, ValueError, r"min_size: got 2\.5; must be"),
        ({"strategy": "fast"}, ValueError, "strategy: got 'fast'; must be eager or performant"),
        ({"bits": 0}, ValueError, "bits: got 0; must be"),
        ({"bits": 5.5}, TypeError, r"bits: got 5\.5; must be"),
        ({"scheme": "ozaki"}, ValueError, "scheme: got 'ozaki'; must be"),
        ({"engine": "int4"}, ValueError, "engine: got 'int4'; must be one of auto, float64"),
        ({"settings": fp64.Settings(), "bits": 55}, ValueError, "settings: got them beside bits"),
        ({"settings": {}}, TypeError, "settings: got dict; must be a Settings"),
    ],
)
def test_arguments_are_checked_when_called(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        emulate(**arguments)
