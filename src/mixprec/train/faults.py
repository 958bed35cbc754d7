"""What stops a training run: values that are not finite, and the first tensor that has one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteError(ArithmeticError):
    """Training met a NaN or an infinity: at `step`, first in the tensor that `tensor` names."""

    def __init__(self, step: int, what: str, tensor: str) -> None:
        super().__init__(
            f"step {step}: {what} is not finite; the first tensor at fault is {tensor}"
        )
        self.step = step
        self.tensor = tensor


def first_fault(
    model: nn.Module, inputs: Tensor, forward: Callable[[Tensor], object]
) -> str | None:
    """Name the first tensor of a forward pass that is not finite: input, parameter or output.

    Runs the model once more, as `forward` does; modules are taken in the order in which they
    finish.
    """
    if not inputs.isfinite().all():
        return "the input batch"
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if found or not isinstance(output, Tensor) or output.isfinite().all():
                return
            own = module.named_parameters(recurse=False)
            bad = [key for key, parameter in own if not parameter.isfinite().all()]
            path = f"{name}." if name else ""
            found.append(f"parameter {path}{bad[0]}" if bad else f"output of {name or 'the model'}")

        return hook

    handles = [module.register_forward_hook(look(n)) for n, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
