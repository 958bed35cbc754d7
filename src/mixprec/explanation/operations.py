"""One operation as a row: its types, the operands of a product by a recipe, and what decided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from mixprec.quant_spec import QuantSpec
from mixprec.rounding import SOURCE_FORMATS

LOSS = "(loss)"
# torch's names of operations that give another view of a tensor, or the tensor itself
VIEWS = frozenset(
    """__get__ __getitem__ alias as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors
    broadcast_to chunk contiguous detach diagonal dsplit expand expand_as flatten hsplit movedim
    moveaxis narrow permute ravel requires_grad_ reshape reshape_as select split
    split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold
    unsqueeze unsafe_chunk unsafe_split view view_as vsplit""".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """One operation of a forward pass, or what the backward pass does for one.

    Attributes:
        module: Path of the module that ran it; "" is the model, ``(loss)`` the loss.
        operation: Torch's name, in backward that of the operation whose gradient it is; of a
            converted layer its kind (``linear``), in backward ``grad_input``, ``grad_weight`` and
            ``grad_bias``. What torch knows no operation for has the name of its node.
        inputs: Types of its floating-point inputs, in their order, as ``fp32`` or ``bf16``; in
            backward of the gradients that arrive, of a product by a recipe of its two operands.
        compute: The types that they are cast to before, or their own, which a gradient shares with
            its operation; of a product by a recipe the formats of its two operands.
        outputs: Types of its results; in backward of the gradients that it gives.
        rule: What decided: a rule of the policy, or the recipe.
        impl: The implementation of a product by a recipe; else "".
        is_view: Whether nothing is computed (``view``, ``transpose``, ``reshape``).
        phase: ``forward`` or ``backward``.
        operands: How the two operands of a product by a recipe are quantised, None for one in high
            precision; of other operations ().
    """

    module: str
    operation: str
    inputs: tuple[str, ...]
    compute: tuple[str, ...]
    outputs: tuple[str, ...]
    rule: str
    impl: str = ""
    is_view: bool = False
    phase: Literal["forward", "backward"] = "forward"
    operands: tuple[QuantSpec | None, ...] = ()


def plain(name: str) -> str:
    """``add`` for ``__add__``."""
    is_special = name.startswith("__") and name.endswith("__") and name not in VIEWS
    return name.strip("_") if is_special else name


def type_names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    """Each type as a format is called."""
    return tuple(
        str(SOURCE_FORMATS.get(dtype, str(dtype).removeprefix("torch."))) for dtype in dtypes
    )
