"""Whether an emulated product is expected to be faster than a native one, by the hardware table.

    emulated = share * rate of the engine's type / products,   native = FP64's rate, the better one

with the integer products that a result takes. The share is what such products reach of a GPU's
peak: 2.6 of 5 * 10^15 operations a second in published measurements of cuBLAS's own emulation on
GB200 (55 to 71 bits at n = 16384), of which the estimate for Hopper, 39 * 10^12, is what was
measured there too. It is an estimate of large products, not a promise.
"""

from __future__ import annotations

import torch

from mixprec.fp64.engines import ENGINES
from mixprec.fp64.slices import parts_for
from mixprec.hardware import Accelerator, find_accelerator

_SHARE = 0.55
# 55 bits are what double precision takes of operands of one scale
_USUAL_BITS = 55
# below this launches decide: cuBLAS's emulation was measured to win nothing at 512
_LEAST_SIZE = 1024
_RATES = {"int8": "int8", "fp8": "fp8", "float32": "fp32"}
_AUTO_ENGINE = "int8"


def why_not_faster(
    device: torch.device, size: int, bits: int | None, engine: str = "auto"
) -> str | None:
    """Why a native product is expected to be at least as fast, or None.

    Args:
        device: Where the product runs.
        size: The smallest of m, n, k.
        bits: Mantissa bits; None for as many as the data need, taken as 55.
        engine: A name in ``ENGINES``, or ``auto``.
    """
    if device.type != "cuda":
        return f"native FP64 is faster on {device.type}"
    accelerator = find_accelerator(torch.cuda.get_device_name(device))
    return why_not_faster_on(accelerator, size, bits, engine)


def why_not_faster_on(
    accelerator: Accelerator | None, size: int, bits: int | None, engine: str = "auto"
) -> str | None:
    """``why_not_faster`` on a row of the hardware table; None is hardware that it has not."""
    if accelerator is None:
        return "the hardware table has no rates of this device"
    if size < _LEAST_SIZE:
        return f"smaller than {_LEAST_SIZE}, where native FP64 is faster"
    name = engine if engine in ENGINES else _AUTO_ENGINE
    rate = accelerator.rates.get(_RATES.get(name, ""), 0.0)
    parts = parts_for(bits or _USUAL_BITS, ENGINES[name].width)
    emulated = _SHARE * rate / (parts * (parts + 1) // 2)
    native = max(accelerator.rates.get(unit, 0.0) for unit in ("fp64", "fp64_tensor"))
    if emulated > native:
        return None
    return (
        f"{accelerator.name}: about {emulated:.3g} emulated against {native:.3g} * 10^12 "
        "operations a second"
    )
