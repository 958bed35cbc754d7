"""Contractions of any shape as products of matrices, each of them a linear layer's three products.

    einsum("bik,bjk->bij", a, b)[i] = linear(a[i], b[i])

Every index of two operands has one of five parts: batch (in both and in the result), free of a,
free of b, contraction (in both, not in the result), or alone (in one, not in the result). Alone
indices are summed first; the operands become [batch, M, K] and [batch, N, K], and each batch entry
is a product of its own, with a as x and b as w.

Legend: M free indices of a, N free indices of b, K contraction; B batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mixprec.autograd import linear
from mixprec.linear_products import LinearState
from mixprec.noise import Noise
from mixprec.policy import active_dtype
from mixprec.recipes import Recipe, get_recipe
from mixprec.rounding import check_floating

_STREAMS_PER_ENTRY = 8
_ELLIPSIS = "..."
_ARROW = "->"
_LABELS = re.compile(r"(?:\.\.\.|[A-Za-z]| )*")


@dataclass(frozen=True, slots=True)
class _Term:
    """An operand with a label for each of its axes, no label twice."""

    x: Tensor
    labels: list[str]

    def summed(self, kept: Collection[str]) -> _Term:
        """The sum over every axis whose label is not kept; 16-bit operands sum in FP32."""
        alone = [axis for axis, label in enumerate(self.labels) if label not in kept]
        if not alone:
            return self
        x = self.x.sum(alone, dtype=torch.promote_types(self.x.dtype, torch.float32))
        return _Term(x, [label for label in self.labels if label in kept])

    def sizes(self, labels: Iterable[str]) -> list[int]:
        return [self.x.shape[self.labels.index(label)] for label in labels]

    def matrices(self, *groups: list[str]) -> Tensor:
        """The operand with one axis for each group of labels."""
        order = [self.labels.index(label) for group in groups for label in group]
        return self.x.permute(order).reshape([math.prod(self.sizes(group)) for group in groups])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Products:
    """How every product of a call runs."""

    recipe: Recipe
    noise: Noise | None
    impl: str
    state: LinearState | None

    def __call__(self, a_BMK: Tensor, b_BNK: Tensor, first: int) -> Tensor:
        """[B, M, N]: one product a batch entry, the first one drawing from that entry's streams."""
        dtype = _result_dtype(a_BMK, b_BNK)
        if not a_BMK.shape[0]:
            return torch.bmm(a_BMK.to(dtype), b_BNK.to(dtype).mT)
        a_BMK = a_BMK.to(torch.promote_types(a_BMK.dtype, dtype))
        entries = [
            linear(
                a_MK,
                b_NK,
                recipe=self.recipe,
                noise=self._noise(first + i),
                impl=self.impl,
                state=self.state.later() if self.state and first + i else self.state,
            )
            for i, (a_MK, b_NK) in enumerate(zip(a_BMK, b_BNK, strict=True))
        ]
        return torch.stack(entries)

    def _noise(self, entry: int) -> Noise | None:
        if self.noise is None:
            return None
        return replace(self.noise, stream=self.noise.stream + _STREAMS_PER_ENTRY * entry)


def einsum(
    equation: str,
    *operands: Tensor,
    recipe: str | Recipe,
    noise: Noise | None = None,
    impl: str = "auto",
    state: LinearState | None = None,
) -> Tensor:
    """The contraction that an equation names, its products by a recipe, with gradients.

        out[batch, m, n] = sum_k a[batch, m, k] * b[batch, n, k]

    The left operand is the x of ``linear`` and the right one its weight: ``recipe.output.a`` and
    ``.b`` quantise them, ``recipe.grad_input`` and ``grad_weight`` make their gradients. More than
    two operands are contracted from left to right, each result being the left operand of the next.

    Args:
        equation: As ``torch.einsum`` takes it: a letter an axis, "..." for axes that broadcast,
            repeated letters in an operand for its diagonal, spaces, and with no "->" the letters
            that occur once, in alphabetical order.
        operands: float16, bfloat16, float32 or float64, of types that may differ.
        recipe: Name or value, of those without delayed scaling.
        noise: For stochastic rounding; batch entry i draws from noise.stream + 8 * i and on, with
            the entries of several products counted through.
        impl: As ``linear`` takes it.
        state: Of the first batch entry, whose backward then counts the noise step.

    Returns:
        The contraction in the widest type of the operands; inside a region of 16 bits, ours
        or ``torch.autocast``, in its type (float64 stays). Gradients have their operand's type.

    Raises:
        TypeError: An equation that is no string, as in ``torch.einsum``'s sublist form; an operand
            that is no floating-point tensor.
        ValueError: An equation or shapes that ``torch.einsum`` refuses; what ``linear`` refuses.

    Edge cases: one operand is ``torch.einsum`` itself, since nothing is multiplied, and keeps its
    type. An axis of size 1 that broadcasts is as if its operand lacked it: it is free in the other
    one. No contraction index is K = 1, no free index M = 1 or N = 1. Each batch entry costs a call.

    Exactness: every batch entry is that of ``linear``, bit for bit, in its own scales. Indices in
    one operand only are summed first, in float32 (float64 for float64).
    """
    if not isinstance(equation, str):
        raise TypeError(
            f"equation: got {type(equation).__name__}; must be a string; write indices as letters"
        )
    products = _Products(recipe=get_recipe(recipe), noise=noise, impl=impl, state=state)
    tensors = _tensors(operands)
    labels, output = _parse(equation, [x.ndim for x in tensors])
    terms = _broadcast(tensors, labels)
    if len(tensors) == 1:
        return torch.einsum(equation, tensors[0])
    left, entries = terms[0], 0
    for position, right in enumerate(terms[1:], start=2):
        later = {label for term in terms[position:] for label in term.labels}
        left, count = _contract(left, right, later | set(output), products, entries)
        entries += count
    return left.x.permute([left.labels.index(label) for label in output])


def _tensors(operands: tuple[Tensor, ...]) -> list[Tensor]:
    """The operands, each checked; torch.einsum takes them as one list too."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    for position, x in enumerate(operands):
        check_floating(f"operands[{position}]", x)
    return list(operands)


def _result_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return dtype if dtype == torch.float64 else active_dtype(a) or dtype


def _contract(
    a: _Term, b: _Term, kept: set[str], products: _Products, entries: int
) -> tuple[_Term, int]:
    """The product of two operands over the labels that nothing later needs, and its batch size."""
    dtype = _result_dtype(a.x, b.x)
    a, b = a.summed(kept | set(b.labels)), b.summed(kept | set(a.labels))
    both = [label for label in a.labels if label in b.labels]
    batch = [label for label in both if label in kept]
    inner = [label for label in both if label not in kept]
    free_a = [label for label in a.labels if label not in both]
    free_b = [label for label in b.labels if label not in both]
    a_BMK, b_BNK = a.matrices(batch, free_a, inner), b.matrices(batch, free_b, inner)
    out = products(a_BMK, b_BNK, entries).to(dtype)
    sizes = a.sizes([*batch, *free_a]) + b.sizes(free_b)
    return _Term(out.reshape(sizes), [*batch, *free_a, *free_b]), a_BMK.shape[0]


def _parse(equation: str, ndims: list[int]) -> tuple[list[list[str]], list[str]]:
    """A label for each axis of each operand, and those of the result.

    Axes under "..." are labelled by their place from the right, "...1" the last.
    """
    left, arrow, right = equation.partition(_ARROW)
    inputs = [_labels(equation, part) for part in left.split(",")]
    if len(inputs) != len(ndims):
        raise ValueError(
            f"equation: got {equation!r} for {len(ndims)} operands; it names {len(inputs)}; "
            "separate operands by commas"
        )
    hidden = []  # how many axes each "..." stands for
    for position, (labels, ndim) in enumerate(zip(inputs, ndims, strict=True)):
        hidden.append(ndim - len(labels) + (_ELLIPSIS in labels))
        if hidden[-1] < 0 or (hidden[-1] and _ELLIPSIS not in labels):
            raise ValueError(
                f"equation: got {equation!r}; operands[{position}] has {ndim} axes; "
                "name each by a letter, or several by '...'"
            )
    seen = [label for labels in inputs for label in labels]
    implicit = [_ELLIPSIS, *sorted(label for label in seen if seen.count(label) == 1)]
    output = _labels(equation, right) if arrow else list(dict.fromkeys(implicit))
    unknown = set(output) - set(seen) - {_ELLIPSIS}
    if unknown or len(set(output)) != len(output):
        raise ValueError(
            f"equation: got {equation!r}; the result names each letter of the operands at most "
            f"once; change {right!r}"
        )
    expanded = [_expand(labels, extra) for labels, extra in zip(inputs, hidden, strict=True)]
    return expanded, _expand(output, max(hidden, default=0))


def _labels(equation: str, part: str) -> list[str]:
    """Letters and at most one "..." of one operand or of the result."""
    labels = re.findall(r"\.\.\.|[A-Za-z]", part)
    if not _LABELS.fullmatch(part) or labels.count(_ELLIPSIS) > 1:
        raise ValueError(
            f"equation: got {equation!r}; must be letters, spaces and one '...' an operand, with "
            f"commas and one '->' between; change {part!r}"
        )
    return labels


def _expand(labels: list[str], count: int) -> list[str]:
    """Labels with the axes that "..." stands for."""
    axes = [f"{_ELLIPSIS}{place}" for place in range(count, 0, -1)]
    return [name for label in labels for name in (axes if label == _ELLIPSIS else [label])]


def _broadcast(tensors: list[Tensor], labels: list[list[str]]) -> list[_Term]:
    """Operands without repeated labels and without axes that broadcast."""
    sizes: dict[str, int] = {}
    for position, (x, names) in enumerate(zip(tensors, labels, strict=True)):
        own: dict[str, int] = {}
        for label, size in zip(names, x.shape, strict=True):
            known = sizes.get(label, 1)
            if own.setdefault(label, size) != size or (size != known and 1 not in (size, known)):
                raise ValueError(
                    f"operands[{position}]: got shape {tuple(x.shape)}; index {label!r} has size "
                    f"{own[label] if own[label] != size else known} before and {size} here; make "
                    "them equal"
                )
            sizes[label] = size if known == 1 else known
    return [_plain(x, names, sizes) for x, names in zip(tensors, labels, strict=True)]


def _plain(x: Tensor, labels: list[str], sizes: dict[str, int]) -> _Term:
    """An operand's diagonal over repeated labels, without axes of size 1 that broadcast."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            x = x.diagonal(dim1=first, dim2=second)
            rest = [name for axis, name in enumerate(labels) if axis not in (first, second)]
            labels = [*rest, label]
    for label in list(labels):
        axis = labels.index(label)
        if x.shape[axis] != sizes[label]:
            x, labels = x.select(axis, 0), labels[:axis] + labels[axis + 1 :]
    return _Term(x, labels)
