"""Gradients of an optimizer as loss scaling and clipping need them: in place, each once, by name.

A gradient may be sparse, complex, expanded, conjugated or shared. Here each becomes tensors of
real numbers that own every element, so that one multiplication in place is right:

    sparse: the coalesced values;  complex: real and imaginary parts;  stride 0: a copy
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from mixprec.nn import attached_models


def parameters_with_gradient(optimizer: Optimizer) -> Iterator[tuple[int, Tensor]]:
    """Position in the optimizer, over all groups, and parameter, of those that have a gradient."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for position, parameter in enumerate(parameters):
        if parameter.grad is not None:
            yield position, parameter


def parameter_labels(optimizer: Optimizer) -> list[str]:
    """What to call each parameter, in the order of the optimizer's groups.

    The name in a model that was attached to the optimizer, else the one that the optimizer was
    given (``named_parameters``), else its place and shape.
    """
    known = {
        id(parameter): name
        for model in attached_models(optimizer)
        for name, parameter in model.named_parameters()
    }
    labels = []
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for place, parameter in enumerate(group["params"]):
            fallback = f"parameter {place} of group {number}, shape {tuple(parameter.shape)}"
            labels.append(known.get(id(parameter)) or (given[place] if given else fallback))
    return labels


def own_values(parameter: Tensor) -> Tensor:
    """The elements of a parameter's gradient, safe to change in place; ``grad`` may be replaced.

    Returns:
        A dense gradient itself; the values of a sparse one, duplicates summed, so that a sum that
        overflows is seen.
    """
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        if not grad.is_coalesced():
            parameter.grad = grad = grad.coalesce()
        return grad._values()
    if grad.layout is not torch.strided:
        return grad.values()
    strides = zip(grad.stride(), grad.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in strides):
        parameter.grad = grad = grad.clone(memory_format=torch.contiguous_format)
    if grad.is_conj() or grad.is_neg():
        parameter.grad = grad = grad.resolve_conj().resolve_neg()
    return grad


def region(values: Tensor) -> Hashable:
    """A key that is equal for tensors of the same elements in memory."""
    if type(values) is not Tensor:
        # tensor subclasses, such as sharded ones, need not say where their elements are
        return id(values)
    return values.device, values.data_ptr(), values.numel(), values.dtype


def as_real(values: Tensor) -> Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(values) if values.is_complex() else values


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists that one foreach operation can take: equal device, type and class."""
    kinds = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.device, tensor.dtype, type(tensor)].append(tensor)
    return list(kinds.values())


def total_norm(grads: Iterable[Tensor], norm_type: float) -> Tensor:
    """The norm of all elements of ``grads`` together, 0-d, in float32 or wider.

        norm = (sum |g|^p)^(1/p);   p = inf: max |g|

    Args:
        grads: Any shapes and types; 16-bit ones are widened first, so that their squares do not
            overflow. Complex elements count by magnitude.
        norm_type: p, above 0.

    Edge cases: 0 without elements; NaN or inf where an element is not finite.
    """
    magnitudes = [grad.abs() if grad.is_complex() else grad for grad in grads if grad.numel()]
    norms: list[Tensor] = []
    for kind in by_kind(magnitudes):
        wide = torch.promote_types(kind[0].dtype, torch.float32)
        norms += torch._foreach_norm(kind, norm_type, dtype=wide)
    if not norms:
        return torch.zeros(())
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    device = norms[0].device
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    stacked = torch.stack([norm.to(device, widest) for norm in norms])
    return torch.linalg.vector_norm(stacked, norm_type)


def distinct_values(optimizer: Optimizer) -> list[Tensor]:
    """What to multiply in place: each gradient of the optimizer once, as real numbers."""
    found = {}
    for _, parameter in parameters_with_gradient(optimizer):
        values = own_values(parameter)
        found[region(values)] = as_real(values)
    return list(found.values())


@torch.no_grad()
def clip_norm(optimizer: Optimizer, max_norm: float, norm_type: float) -> Tensor:
    """Multiply all gradients by min(1, max_norm / norm), in place; returns the norm before.

    Edge cases: with a norm that is not finite the gradients stay, so that no NaN spreads.
    """
    grads = [own_values(parameter) for _, parameter in parameters_with_gradient(optimizer)]
    norm = total_norm(grads, norm_type)
    # not where(norm > max_norm, ...): a quotient of inf / inf must not be chosen either
    clipped = (norm > max_norm) & norm.isfinite()
    factor = torch.where(clipped, max_norm / norm, 1.0)
    for kind in by_kind(distinct_values(optimizer)):
        torch._foreach_mul_(kind, factor.to(kind[0].device))
    return norm


@torch.no_grad()
def clip_value(optimizer: Optimizer, limit: float, nonfinite: Tensor) -> None:
    """Limit all elements to [-limit, limit], in place; none where ``nonfinite`` (0-d) is not 0."""
    bound = torch.where(nonfinite > 0, math.inf, limit)
    for values in distinct_values(optimizer):
        own = bound.to(values.device, values.dtype)
        values.clamp_(min=-own, max=own)


@torch.no_grad()
def nonfinite_flags(optimizer: Optimizer) -> tuple[list[int], Tensor | None]:
    """Positions of the parameters with a gradient, and on the device which are not finite."""
    places, flags = [], []
    for position, parameter in parameters_with_gradient(optimizer):
        flag = ~own_values(parameter).isfinite().all()
        flags.append(flag.full_tensor() if hasattr(flag, "full_tensor") else flag)
        places.append(position)
    device = flags[0].device if flags else None
    return places, torch.stack([flag.to(device) for flag in flags]) if flags else None


def sum_on(device: torch.device, flags: Iterable[Tensor]) -> Tensor:
    """The sum of 0-d flags from any devices, on one of them."""
    total = torch.zeros((), device=device)
    for flag in flags:
        total = total + flag.to(device, non_blocking=True)
    return total


def call_fused(
    scale: Tensor | None, optimizer: Any, state: dict[str, Any], call: Callable[[], Any]
) -> Any:
    """Step of an optimizer that unscales in its kernel: it reads two attributes, as torch sets."""
    assert scale is not None
    if state["stage"] is OptState.READY:
        optimizer.grad_scale = scale * getattr(optimizer, "grad_scale", 1)
    else:
        optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
    optimizer.found_inf = sum_on(scale.device, state["found_inf_per_device"].values())
    try:
        return call()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
