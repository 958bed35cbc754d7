"""A linear layer forward and backward under recipes, by size: time beside error, and what pays."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from mixprec import nn as layers
from mixprec.amp.autocast import DTYPES
from mixprec.amp.setup import cast_parameters, region
from mixprec.bench.contender import synchronise
from mixprec.bench.plan import recipes_by_label, required_device
from mixprec.bench.steps import CANNOT_RUN, OUT_OF_MEMORY, reason_of
from mixprec.gemm.api import check_impl
from mixprec.measure import interleaved, sqnr_db
from mixprec.memory import process_peak
from mixprec.recipes import Recipe
from mixprec.train import checkpoint
from mixprec.train.compare import EMULATED_NOTE
from mixprec.train.log import ProgressLines, environment, finite

Shape = tuple[int, int, int]
CPU_SHAPES: tuple[Shape, ...] = tuple((n, n, n) for n in (32, 64, 128, 256, 512, 1024))
GPU_SHAPES: tuple[Shape, ...] = tuple((n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384))
RECIPES = ("fp32", "bf16", "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4")
PRODUCTS = ("output", "grad_input", "grad_weight")
NEVER, NEVER_EMULATED = "never in these shapes", "never here (emulated)"
_OPERATIONS = 6
# beyond it, products in float64 for the error would take longer than all that is measured
_LARGEST_WITH_ERROR = 2**33
_EMULATED = "emulated"


def run(
    shapes: Sequence[Shape] | None = None,
    *,
    recipes: Sequence[str | Recipe] = RECIPES,
    base: str | None = None,
    rounds: int = 5,
    device: str = "auto",
    impl: str = "auto",
    seed: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure x [M, K] times w [N, K] transposed, and its two gradients, in turns.

    Args:
        shapes: (M, K, N); by default squares, of 32 to 1024 on a CPU and to 16384 on a GPU.
        recipes: Names or recipes; ratios are to the first.
        base: fp32, bf16 or fp16 for all, in place of each recipe's own.
        rounds: In each of which every recipe runs once, and the first changes.
        device: auto, cpu, mps, cuda or cuda:N.
        impl: Of the products; a recipe that it cannot run is skipped.
        seed: Of the operands, normal with deviation 1, weights 1 / sqrt(K).
        console: Where progress goes; standard error by default.

    Returns: `{"rows": [...], "pays": {...}, "skipped": [...], ...}`; a row has

        - `shape` (MxKxN), `recipe`, `impl`, `ms`: median; `ratio`: median over the rounds of the
          time over the first recipe's; `tflops`: 6 M K N operations over the median, in 10^12;
        - `sqnr`: decibels of output, grad_input and grad_weight against float64; None for shapes
          whose float64 products would take too long.

        `pays`: of each recipe after the first, the size from which its ratio stays below 1.

    Raises:
        ValueError: A name or number that cannot be used. What cannot run is skipped, not raised.
    """
    target = required_device(device)
    check_impl(impl)
    chosen = recipes_by_label(recipes, base)
    if shapes is None:
        shapes = CPU_SHAPES if target.type == "cpu" else GPU_SHAPES
    _check(shapes, rounds)
    ordered = sorted(shapes, key=math.prod)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    with checkpoint.isolated_generators(target), ProgressLines(len(ordered), console) as lines:
        for place, shape in enumerate(ordered):
            lines.status(place, f"{_text(shape)}: {len(chosen)} recipes in turns")
            torch.manual_seed(seed)
            rows += _measured(shape, chosen, target, impl, rounds, skipped)
    emulated = any(_EMULATED in row["impl"] for row in rows)
    return finite(
        {
            "rounds": rounds,
            "base": base,
            "rows": rows,
            "pays": {label: pays(rows, label) for label in list(chosen)[1:]},
            "skipped": skipped,
            "notes": [EMULATED_NOTE] if emulated else [],
            "process_peak_bytes": process_peak(),
            "environment": environment(target),
        }
    )


def pays(rows: Sequence[Mapping[str, Any]], recipe: str) -> str:
    """From which size on a recipe's ratio stays below 1, in words.

    Args:
        rows: Of `run`, by rising size.
        recipe: Its label.
    """
    own = [row for row in rows if row["recipe"] == recipe and row["ratio"] is not None]
    start = len(own)
    while start and own[start - 1]["ratio"] < 1:
        start -= 1
    if start < len(own):
        return f"from {own[start]['shape']}"
    return NEVER_EMULATED if any(_EMULATED in row["impl"] for row in own) else NEVER


class _Layer:
    """One linear layer under a recipe, with its operands."""

    def __init__(self, recipe: Recipe, operands: tuple[Tensor, Tensor, Tensor], impl: str) -> None:
        x, w, g = operands
        dtype = DTYPES[recipe.parameters]
        self._region = partial(region, recipe)
        self._layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device)
        self._layer.weight.data.copy_(w)
        report = layers.convert(self._layer, recipe, impl=impl)
        self.impl = ", ".join(sorted({row.impl for row in report.converted})) or "native"
        cast_parameters(self._layer, recipe)
        # a leaf of its own also where the type stays
        self._x, self._g = x.detach().to(dtype).requires_grad_(), g

    def __call__(self) -> tuple[Tensor, ...]:
        """The output and the two gradients."""
        self._x.grad = self._layer.weight.grad = None
        with self._region():
            output = self._layer(self._x)
        output.backward(self._g.to(output.dtype))
        grads = (self._x.grad, self._layer.weight.grad)
        return (output.detach(), *(grad for grad in grads if grad is not None))


def _measured(
    shape: Shape,
    recipes: Mapping[str, Recipe],
    device: torch.device,
    impl: str,
    rounds: int,
    skipped: list[dict[str, str]],
) -> list[dict[str, Any]]:
    m, k, n = shape
    operands = (
        torch.randn(m, k, device=device),
        torch.randn(n, k, device=device) / math.sqrt(k),
        torch.randn(m, n, device=device),
    )
    exact = _exact(*operands) if math.prod(shape) <= _LARGEST_WITH_ERROR else None
    calls: dict[str, _Layer] = {}
    errors: dict[str, dict[str, float | None]] = {}
    for label, recipe in recipes.items():
        try:
            layer = _Layer(recipe, operands, impl)
            results = layer()
        except (*CANNOT_RUN, *OUT_OF_MEMORY) as error:
            skip = {"shape": _text(shape), "recipe": label, "reason": reason_of(error)}
            skipped.append(skip)
            continue
        calls[label] = layer
        errors[label] = dict.fromkeys(PRODUCTS)
        if exact is not None:
            figures = (sqnr_db(a, b) for a, b in zip(exact, results, strict=True))
            errors[label] = dict(zip(PRODUCTS, figures, strict=True))
    if not calls:
        return []
    synchronise(device)
    timing = interleaved(calls, rounds)
    has_baseline = next(iter(recipes)) in calls
    return [
        {
            "shape": _text(shape),
            "recipe": label,
            "impl": layer.impl,
            "ms": 1e3 * timing.seconds[label],
            "ratio": timing.ratios[label] if has_baseline else None,
            "tflops": _OPERATIONS * math.prod(shape) / timing.seconds[label] / 1e12,
            "sqnr": errors[label],
        }
        for label, layer in calls.items()
    ]


def _exact(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (tensor.cpu().double() for tensor in (x, w, g))
    return a @ b.T, c @ b, c.T @ a


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _check(shapes: Sequence[Shape], rounds: int) -> None:
    if not shapes:
        raise ValueError("shapes: got none; a table needs one at least; give some")
    for shape in shapes:
        if len(shape) != 3 or any(not isinstance(size, int) or size < 1 for size in shape):
            raise ValueError(f"shapes: got {shape!r}; must be three sizes M, K, N of at least 1")
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}; must be at least 1; ask for an odd number")
