"""The converted bilinear layer: the outer products of its inputs are the rows of a product.

    rows        = x1[N, I, 1] * x2[N, 1, J]                     in the inputs' type
    output      = gemm(rows[N, I J],  w[O, I J])                contraction: pairs of features
    grad_rows   = gemm(g[N, O],       w.T[I J, O])              contraction: outputs
    grad_weight = gemm(g.T[O, N],     rows.T[I J, N])           contraction: rows

    grad_x1[n, i] = sum_j grad_rows[n, i j] x2[n, j];   grad_x2[n, j] = sum_i grad_rows x1

Legend: N rows, I and J features of the two inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mixprec.nn.layer import QuantizedLayer
from mixprec.rounding import check_floating


class QuantizedBilinear(QuantizedLayer, nn.Bilinear):
    """``nn.Bilinear`` whose three products follow a recipe; made by ``mixprec.convert``.

    y[n, o] = sum_ij x1[n, i] weight[o, i, j] x2[n, j] + bias[o], as one product: the weight is one
    operand, and every sum is one sum.

    Memory: N I J elements of the inputs' type for the rows, and in backward for their gradient.

    Exactness: each outer product is rounded to the inputs' common type (float16 may overflow), then
    as ``mixprec.linear``.
    """

    @staticmethod
    def sizes(layer: Any) -> tuple[int, ...]:
        return layer.in1_features * layer.in2_features, layer.out_features

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """y [..., O] of input1 [..., I] and input2 [..., J] by the recipe."""
        features = (self.in1_features, self.in2_features)
        for name, x, size in zip(("input1", "input2"), (input1, input2), features, strict=True):
            check_floating(name, x)
            if x.dim() < 1 or x.shape[-1] != size or x.shape[:-1] != input1.shape[:-1]:
                raise ValueError(
                    f"{name}: got shape {tuple(x.shape)}; must be [..., {size}], with the leading "
                    f"axes of input1 {tuple(input1.shape)}; reshape it"
                )
        outer = input1.unsqueeze(-1) * input2.unsqueeze(-2)
        return self.multiply(
            outer.flatten(-2), self.weight.flatten(1), self.bias, owner=self.weight
        )
