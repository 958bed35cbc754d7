"""The four ways to hold a 16-bit parameter between steps whose arithmetic is float32.

With p the parameter, v its float32 value, and v' what an optimizer makes of that:

    update         v = load(p)                   store(v')
    masters        the master, kept in float32   p = nearest(v')
    compensated    p + c, c kept in p's type     p = nearest(v'), c = nearest(v' - p)
    stochastic     p                             p = stochastic(v', noise of seed, step, parameter)
    plain          p                             p = nearest(v')

Sources: float32 masters, Micikevicius et al. 2018, "Mixed Precision Training"; compensated sums,
Kahan 1965; stochastic and compensated updates of bfloat16 weights, Zamirai et al. 2020, "Revisiting
BFloat16 Training".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixprec.gemm.widening import NARROW
from mixprec.noise import Noise
from mixprec.rounding import SOURCE_FORMATS, can_look_at, round_float


def float32_at_least(dtype: torch.dtype) -> torch.dtype:
    """The type that a narrow type's numbers are computed in; any other stays."""
    return torch.float32 if dtype in NARROW else dtype


class Update(NamedTuple):
    """What is kept for a narrow parameter p, how its float32 value v is made of it, and put back.

    start: Parameter and its value before it was narrowed; returns what is kept, or None.
    load: Parameter and what is kept; returns the float32 value.
    store: Parameter, float32 value, what is kept, noise; changes parameter and kept in place.
    """

    start: Callable[[Tensor, Tensor], Tensor | None]
    load: Callable[[Tensor, Any], Tensor]
    store: Callable[[Tensor, Tensor, Any, Noise], None]


def _start_master(parameter: Tensor, exact: Tensor) -> Tensor:
    return exact.detach().to(parameter.device, torch.float32)


def _load_master(parameter: Tensor, master: Tensor) -> Tensor:
    rounded = master.to(parameter.dtype)
    if can_look_at(parameter) and torch.equal(rounded, parameter):
        # One look spares most steps three passes.
        return master
    # Where the parameter is not the rounded master, somebody else has written to it.
    return master.copy_(torch.where(rounded == parameter, master, parameter.float()))


def _start_compensation(parameter: Tensor, exact: Tensor) -> Tensor:
    lost = exact.to(parameter.device, torch.float32) - parameter.float()
    return lost.to(parameter.dtype)


def _load_compensated(parameter: Tensor, compensation: Tensor) -> Tensor:
    value, lost = parameter.float(), compensation.float()
    # Half a step at most was lost, and three quarters of that cannot move the parameter: where
    # they do, somebody else has written to it. Infinities (inf - inf is NaN) end here too.
    is_own = (value + 0.75 * lost).to(parameter.dtype) == parameter
    return value + torch.where(is_own, lost, 0.0)


def _store_compensated(parameter: Tensor, value: Tensor, compensation: Tensor, _: Noise) -> None:
    parameter.copy_(value)
    compensation.copy_(value - parameter.float())


def _store_stochastic(parameter: Tensor, value: Tensor, _: None, noise: Noise) -> None:
    if hasattr(parameter, "device_mesh"):
        noise = _of_shard(parameter, noise)
        parameter, value = parameter.to_local(), value.to_local()  # type: ignore[attr-defined]
    parameter.copy_(round_float(value, SOURCE_FORMATS[parameter.dtype], "stochastic", noise))


def _of_shard(parameter: Any, noise: Noise) -> Noise:
    """The part of a whole parameter's noise that is its shard's, cut along first or last axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = parameter.shape
    _, start = compute_local_shape_and_global_offset(
        shape, parameter.device_mesh, parameter.placements
    )
    row = start[0] * math.prod(shape[1:-1]) if len(shape) > 1 else 0
    return replace(noise, row=row, column=start[-1], columns=shape[-1])


def _start_nothing(parameter: Tensor, exact: Tensor) -> None:
    return None


def _load_parameter(parameter: Tensor, _: None) -> Tensor:
    return parameter.float()


def _store_nearest(parameter: Tensor, value: Tensor, kept: Tensor | None, _: Noise) -> None:
    # One rounding: float32 to 16 bits is where torch's cast is exact, subnormals included.
    parameter.copy_(value)


UPDATES: Mapping[str, Update] = MappingProxyType(
    {
        "masters": Update(_start_master, _load_master, _store_nearest),
        "compensated": Update(_start_compensation, _load_compensated, _store_compensated),
        "stochastic": Update(_start_nothing, _load_parameter, _store_stochastic),
        "plain": Update(_start_nothing, _load_parameter, _store_nearest),
    }
)
"""How narrow parameters are held, by name."""
