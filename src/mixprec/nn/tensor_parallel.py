"""Linear layers whose weight is a ``DTensor``: each rank multiplies the parts that it holds.

    column parallel   y[M, N part] = x[M, K] w[N part, K].T + bias[N part]
    row parallel      y[M, N] = sum over ranks of x[M, K part] w[N, K part].T, then + bias[N]

Placements decide which, one mesh axis at a time, so that ``parallelize_module`` serves converted
layers as it does others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mixprec.autograd import check_linear
from mixprec.nn.layer import QuantizedLayer
from mixprec.sharding import Spread, spread_over

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def multiply_parts(layer: QuantizedLayer, x: Tensor, weight: Any, bias: Any) -> Tensor:
    """``layer.multiply`` of DTensors, by the parts that this rank holds.

    Args:
        layer: The layer.
        x: A DTensor [..., K]: replicated, or spread along K as the weight is.
        weight: A DTensor [N, K], spread along N or K or neither, one of them an axis of its mesh.
        bias: A DTensor [N], spread as N is, or None.

    Returns:
        A DTensor [..., N], spread along N as the weight is. Sums over parts of K (of N, for
        grad_input) are added in FP32 (FP64 for float64) and rounded once, the bias added once.

    Raises:
        TypeError: x or bias is no DTensor on the weight's mesh.
        ValueError: Other placements.

    Edge cases: parts of unequal sizes, and empty ones.
    """
    from torch.distributed.tensor import DTensor

    _check_distributed(x, weight, bias)
    assert isinstance(x, DTensor)
    mesh = weight.device_mesh
    spreads, places = _spreads(x, weight, bias)
    x_part, weight_part = x.to_local(), weight.to_local()
    bias_part = None if bias is None else bias.to_local()
    check_linear(x_part, weight_part, bias_part)
    out = layer.multiply(
        x_part,
        weight_part,
        bias_part,
        owner=weight,
        sharding=replace(layer.active_sharding(), **spreads),
    )
    # of parts of unequal sizes torch cannot tell the whole's
    whole = torch.empty((*x_part.shape[:-1], weight.shape[0]), device="meta")
    return DTensor.from_local(
        out, mesh, places, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _spreads(x: DTensor, weight: DTensor, bias: DTensor | None) -> tuple[dict[str, Spread], Any]:
    """Which of N and K is spread, and over whom; and the placements of the result."""
    from torch.distributed.tensor import Replicate, Shard

    # weight, x, bias: the axis that is spread, and the placement of the result
    known: Mapping[Any, tuple[str | None, Any]] = {
        (Shard(0), Replicate(), Shard(0)): ("outputs", Shard(x.dim() - 1)),
        (Shard(1), Shard(x.dim() - 1), Replicate()): ("inputs", Replicate()),
        (Replicate(), Replicate(), Replicate()): (None, Replicate()),
    }
    spreads: dict[str, Spread] = {}
    places = []
    for axis, (held, given) in enumerate(zip(weight.placements, x.placements, strict=True)):
        own = Shard(0) if held == Shard(0) else Replicate()
        kind = (held, given, own if bias is None else bias.placements[axis])
        name, place = known.get(kind, ("", None))
        if name == "" or name in spreads:
            raise ValueError(
                f"weight: got placements {weight.placements} with x {x.placements} and bias "
                f"{None if bias is None else bias.placements}; one mesh axis may spread the "
                "outputs (weight Shard(0), x Replicate, bias Shard(0)) and one the inputs (weight "
                "Shard(1), x Shard(-1), bias Replicate); use ColwiseParallel or RowwiseParallel"
            )
        spread = spread_over(weight.device_mesh.get_group(axis))
        if name is not None and spread is not None:
            spreads[name] = spread
        places.append(place)
    return spreads, places


def _check_distributed(x: Any, weight: Any, bias: Any) -> None:
    mesh = weight.device_mesh
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and getattr(tensor, "device_mesh", None) != mesh:
            raise TypeError(
                f"{name}: got {type(tensor).__name__} with a weight that is a DTensor on {mesh}; "
                "must be a DTensor on that mesh; use parallelize_module, whose styles make it one"
            )
