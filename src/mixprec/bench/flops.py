"""Operations of a model's products in a step, and the share of a device's peak that a step reaches.

    MFU = operations of the step / (seconds of the step * peak rate of the recipe)

A product of [M, K] with [K, N] is 2 M K N operations, and a layer has three of them. What is
counted is the plain model's work, whatever a recipe does for it: quantising and recomputing are no
progress.
"""

import torch
from torch import nn

from mixprec.bench.presets import Workload
from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm import GemmSpec
from mixprec.gemm.accumulation import EXACT
from mixprec.hardware import Accelerator, find_accelerator
from mixprec.recipes import PRODUCTS, Recipe

# up to it torchao's own measurements on H100 have FP8 layers slower than BF16 ones (docs/bench.md)
SMALL = 1024


def model_flops(workload: Workload, rows: int) -> int | None:
    """Operations of the products and convolutions of one step, forward and backward.

    Counted on torch's ``meta`` device: no memory, no arithmetic. Of attention, its products.

    Returns: None for a model that does not run there.
    """
    # it imports triton, which may be broken
    from torch.utils.flop_counter import FlopCounterMode

    inputs, targets = workload.batch(1, torch.Generator())
    try:
        with torch.device("meta"):
            model = workload.build()
        counter = FlopCounterMode(display=False)
        with counter:
            output = model(inputs.to("meta").expand(rows, *inputs.shape[1:]).contiguous())
            target = targets.to("meta").expand(rows, *targets.shape[1:]).contiguous()
            workload.loss(output, target).backward()
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return None
    return counter.get_total_flops()


def parameter_count(workload: Workload) -> int | None:
    """Parameters of the model, without making it; None where it cannot be made on ``meta``."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in workload.build().parameters())
    except (RuntimeError, NotImplementedError):
        return None


def small_layers(workload: Workload) -> tuple[int, int]:
    """Linear layers with at most 1024 inputs or outputs, and all of them; (0, 0) if unknown."""
    try:
        with torch.device("meta"):
            modules = list(workload.build().modules())
    except (RuntimeError, NotImplementedError):
        return 0, 0
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    small = [m for m in linears if min(m.in_features, m.out_features) <= SMALL]
    return len(small), len(linears)


def device_row(device: torch.device) -> Accelerator | None:
    """The device's row of the hardware table; None for a CPU and what the table does not have."""
    return find_accelerator(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_rate(recipe: Recipe, row: Accelerator | None) -> float | None:
    """Operations a second at which the device can run the recipe's three products.

    A product runs in the wider of its two formats, high precision in the base; of three rates
    r, the harmonic mean 3 / (1/r1 + 1/r2 + 1/r3), for each product is a third of the work.

    Returns: None, never a guess, where the table has no rate for a format, or no row.
    """
    if row is None:
        return None
    rates = [product_rate(getattr(recipe, product), recipe, row) for product in PRODUCTS]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    return len(known) / sum(1 / rate for rate in known)


def product_rate(spec: GemmSpec, recipe: Recipe, row: Accelerator) -> float | None:
    """Operations a second of one product of a recipe; None where the table has no rate for it."""
    if spec.accumulate == EXACT:
        return None
    formats = [_format(operand, recipe) for operand in (spec.a, spec.b)]
    return row.rate(max(formats, key=lambda fmt: fmt.bits))


def _format(operand: object, recipe: Recipe) -> FloatFormat:
    found = getattr(operand, "format", None)
    return found if isinstance(found, FloatFormat) else FORMATS[recipe.base]


def utilisation(flops: int | None, seconds: float, peak: float | None) -> float | None:
    """Model FLOP/s over the peak, 0 to 1; None where either is unknown."""
    return None if flops is None or peak is None else flops / seconds / peak
