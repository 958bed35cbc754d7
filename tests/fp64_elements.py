"""Strategies of hypothesis for small float64 matrices that break inexact products."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

# whole range; around 1; the ends, where products underflow and overflow; a band of slices
_EXPONENTS = st.one_of(
    st.integers(-1074, 1023),
    st.integers(-3, 3),
    st.sampled_from([-1074, -1073, -1023, -1022, -1021, -537, -500, 500, 511, 512, 1022, 1023]),
    st.integers(-70, 0),
)
_MANTISSAS = st.one_of(
    st.just(1 << 52),
    # just below a power of two, and just above
    st.integers(0, 52).map(lambda bits: (1 << 53) - (1 << bits)),
    st.integers(0, 51).map(lambda bits: (1 << 52) + (1 << bits)),
    st.integers(1 << 52, (1 << 53) - 1),
    st.just((1 << 53) - 1),
)


def _element(sign: int, mantissa: int, exponent: int) -> float:
    return sign * math.ldexp(mantissa / 2.0**52, exponent)


ELEMENTS = st.one_of(
    st.builds(_element, st.sampled_from([1, -1]), _MANTISSAS, _EXPONENTS),
    st.builds(_element, st.sampled_from([1, -1]), _MANTISSAS, _EXPONENTS),
    st.builds(_element, st.sampled_from([1, -1]), _MANTISSAS, _EXPONENTS),
    st.just(0.0),
)
"""Finite float64 of the whole range, subnormals and zeros among them."""


@st.composite
def matrices(draw: st.DrawFn, longest: int = 5) -> tuple[Tensor, Tensor]:
    """[m, k] and [k, n]; sometimes of one range of exponents, sometimes cancelling."""
    m, k, n = draw(st.integers(1, 2)), draw(st.integers(1, longest)), draw(st.integers(1, 2))
    a, b = (
        torch.tensor(
            draw(st.lists(ELEMENTS, min_size=rows * columns, max_size=rows * columns)),
            dtype=torch.float64,
        ).reshape(rows, columns)
        for rows, columns in ((m, k), (k, n))
    )
    if draw(st.booleans()):
        # the same products twice with opposite signs, the last bit of one of them changed
        step = draw(st.sampled_from([0.0, 2.0**-52, -(2.0**-52)]))
        changed = -a * (1 + step)
        a = torch.cat([a, torch.where(torch.isfinite(changed), changed, -a)], 1)
        b = torch.cat([b, b])
    return a, b
