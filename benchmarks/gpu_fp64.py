"""FP64 products from small integers on one device, beside native ones: time and error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from fp64 import Reference
from gpu_products import timed
from torch import Tensor

from mixprec import fp64

NATIVE = "native"
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "slices": {"scheme": "slices"},
    "residues": {"scheme": "residues"},
    "55 bits": {"bits": 55},
}


def measure(n: int, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for torch.mm and for each way of ``mixprec.fp64.matmul``, [n, n] x [n, n].

    ``grade``: the largest |C - A B| / (2^-53 |A||B|) of sampled elements, against exact integers;
    below 1 is better than one rounding of |A||B|.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(n, n, generator=generator, dtype=torch.float64).to(device) for _ in range(2)
    )
    contenders: dict[str, Callable[[], Tensor]] = {NATIVE: functools.partial(torch.mm, a, b)}
    contenders |= {
        name: functools.partial(fp64.matmul, a, b, **options) for name, options in OPTIONS.items()
    }
    seconds = timed(contenders, rounds)
    reference = Reference(a, b)
    for name, call in contenders.items():
        grade = reference.grade(functools.partial(_element, call().cpu()))
        row = {
            "n": n,
            "way": name,
            "ms": 1e3 * seconds[name],
            "tflops": 2 * n**3 / seconds[name] / 1e12,
            "speedup": seconds[NATIVE] / seconds[name],
            "grade": grade,
        }
        if name != NATIVE:
            _, report = fp64.matmul(a, b, report=True, **OPTIONS[name])
            row |= {"scheme": report.scheme, "engine": report.engine, "products": report.products}
        yield row


def _element(result: Tensor, i: int, j: int) -> Fraction:
    return Fraction(float(result[i, j]))
