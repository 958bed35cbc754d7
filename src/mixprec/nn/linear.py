"""The converted linear layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mixprec.autograd import check_linear
from mixprec.gemm.api import Operand
from mixprec.hadamard import hadamard
from mixprec.linear_products import (
    G_GRAD_INPUT,
    G_GRAD_WEIGHT,
    W_GRAD_INPUT,
    W_OUTPUT,
    X_GRAD_WEIGHT,
    X_OUTPUT,
    quantize_operand,
    state_position,
)
from mixprec.nn.layer import QuantizedLayer
from mixprec.nn.tensor_parallel import multiply_parts
from mixprec.quant_spec import QuantSpec
from mixprec.recipes import OPERANDS
from mixprec.sharding import is_distributed


class QuantizedLinear(QuantizedLayer, nn.Linear):
    """``nn.Linear`` whose three products follow a recipe; made by ``mixprec.convert``.

    y = x @ weight.T + bias, x [..., in_features], in x's type (see ``mixprec.linear``).
    """

    @staticmethod
    def sizes(layer: Any) -> tuple[int, ...]:
        return layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """y = x @ weight.T + bias by the recipe; records amaxes in training mode."""
        # read once: a parametrised weight is computed at each look
        weight, bias = self.weight, self.bias
        if is_distributed(weight):
            return multiply_parts(self, x, weight, bias)
        check_linear(x, weight, bias)
        return self.multiply(x, weight, bias)

    def quantized_operands(
        self, x: Tensor, grad_output: Tensor
    ) -> dict[str, tuple[Tensor, Operand]]:
        """The six operands as the layer would quantise them now, recording nothing.

        Args:
            x: [..., in_features].
            grad_output: [..., out_features].

        Returns:
            ``output.a`` to ``grad_weight.b`` -> the tensor, transformed where its product asks for
            it, and what is multiplied for it.
        """
        x = x.detach().reshape(-1, x.shape[-1])
        g = grad_output.detach().reshape(-1, grad_output.shape[-1])
        w = self.weight.detach()
        tensors = {
            X_OUTPUT: x,
            W_OUTPUT: w,
            G_GRAD_INPUT: g,
            W_GRAD_INPUT: w.t(),
            G_GRAD_WEIGHT: g.t(),
            X_GRAD_WEIGHT: x.t(),
        }
        delayed, noise = self.delayed_states(), self.noise()
        found = {}
        for position, path in enumerate(OPERANDS):
            state = delayed[state_position(self.recipe, position)]
            quantized = quantize_operand(
                tensors[position], self.recipe.specs[position], position, noise, state
            )
            found[path] = (_transformed(tensors[position], self.recipe.specs[position]), quantized)
        return found


def _transformed(x: Tensor, spec: QuantSpec | None) -> Tensor:
    return hadamard(x) if spec is not None and spec.hadamard else x
