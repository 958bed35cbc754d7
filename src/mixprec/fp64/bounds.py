"""Bounds on the error of each element of a finished product.

    float64         truncation + roundings of adding up + 2^-53 |hi|
    double_double   truncation + roundings of adding up
    nearest         2^-53 |hi|
    native          (k + 2) 2^-53 |A||B|

and a few units of 2^-1074 for results in the subnormal range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixprec.fp64.arithmetic import SMALLEST, UNIT
from mixprec.fp64.plan import Plan, Task
from mixprec.fp64.request import DOUBLE_DOUBLE, FLOAT64, NEAREST
from mixprec.fp64.sums import ADDED_UP


def element_bounds(error: Tensor, high: Tensor, task: Task, plan: Plan) -> Tensor:
    """What each element of the result may be off, [batch, m, n].

    Args:
        error: What the scheme leaves out and adding up loses.
        high: The result, or its first part.
        task, plan: What was asked, and how it was done.
    """
    rounding = high.abs() * (UNIT * (1 + 4 * UNIT)) + SMALLEST
    bound = error * (1 + 4 * UNIT) + 2 * SMALLEST
    if task.request.output == FLOAT64:
        bound = bound + rounding
    elif task.request.output == NEAREST:
        bound = rounding
    if plan.exact is not None:
        is_pair = task.request.output == DOUBLE_DOUBLE
        exact = high.abs() * ADDED_UP + 2 * SMALLEST if is_pair else rounding
        bound = torch.where(plan.exact, exact, bound)
    # a pair has no second part for what overflows
    bound = bound.masked_fill(torch.isinf(high), torch.inf)
    is_native = plan.is_native
    if bool(is_native.any()):
        share = (task.length + 2) * UNIT
        magnitudes = task.a.values.abs() @ task.b.values.abs().mT
        native = magnitudes * (share * (1 + 2 * share)) + task.length * SMALLEST
        bound = torch.where(is_native, native, bound)
    return bound
