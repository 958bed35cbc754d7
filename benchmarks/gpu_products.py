"""Single products on one device: are they right by every implementation, and how fast are they.

Right: a converted layer is run forward and backward by each implementation. Its six operands must
have the bits that the CPU gives them, and each of its three results must lie within

    (K + 3) * 2^-24 * scale * sum|a||b|, plus half an ulp of the result's type

of the float64 product of those operands (docs/numerics.md, section 4); an implementation whose
units are known to add in fewer bits has their part added (``CUTS``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import mixprec
from mixprec.gemm import GemmSpec, native, resolve_spec
from mixprec.gemm.api import EMULATED, multiply, resolve
from mixprec.hardware import generation
from mixprec.measure import interleaved
from mixprec.nn import QuantizedLinear
from mixprec.quantization import Operand, QuantizedTensor, quantize
from mixprec.recipes import PRODUCTS, RECIPES, Recipe
from mixprec.rounding import SOURCE_FORMATS
from mixprec.scaling import expand_blocks

NATIVE = ("scaled_mm", "bf16_mm", "fp16_mm")
IMPLS = (*NATIVE, EMULATED)
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = {
    "cpu": ((24, 40, 64), (33, 47, 90)),
    "cuda": ((256, 512, 1024), (130, 260, 384), (33, 47, 300)),
}
# 33 terms cut to 13 bits, four times between two additions in float32 (mixprec.hardware)
CUTS = {"scaled_mm": 4 * 33 * 2.0**-13}
TABLE = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "bf16", "mxfp8", "nvfp4")
SAMPLE_SECONDS, MOST_CALLS = 0.01, 200


def quantising() -> dict[str, Recipe]:
    """The recipes that quantise something; of those with the same products the first."""
    found: dict[tuple[GemmSpec, ...], Recipe] = {}
    for recipe in RECIPES.values():
        gemms = tuple(getattr(recipe, product) for product in PRODUCTS)
        if any(spec is not None for spec in recipe.specs):
            found.setdefault(gemms, recipe)
    return {recipe.name: recipe for recipe in found.values()}


def why_not(recipe: Recipe, impl: str, device: torch.device) -> dict[str, str | None]:
    """For each product of a recipe why an implementation cannot run it on a device, or None."""
    reasons: dict[str, str | None] = {}
    for product in PRODUCTS:
        gemm = getattr(recipe, product)
        if gemm.is_plain:
            reasons[product] = "high precision: torch's own product"
            continue
        try:
            resolve_spec(gemm, device, torch.float32, impl)
            reasons[product] = None
        except ValueError as error:
            start, end = f"impl: got {impl!r}; ", "; use impl='auto' or 'emulated'"
            reasons[product] = str(error).removeprefix(start).removesuffix(end)
    return reasons


def cut_of(impl: str, device: torch.device) -> float:
    """What an implementation's units may drop, as a share of scale * sum|a||b|."""
    _, capability = native.device_facts(torch.empty(0, device=device))
    if capability is None or not generation(capability).fp8_sums:
        return 0.0
    return CUTS.get(impl, 0.0)


def _exact(operand: Operand) -> Tensor:
    """What an operand stands for, float64."""
    if not isinstance(operand, QuantizedTensor):
        return operand.double()
    values = operand.values.double()
    if operand.scale is None:
        return values
    scale = expand_blocks(operand.block_scale, operand.spec.block, operand.matrix_shape)
    whole = operand.tensor_scale
    return values * scale.double() * (1.0 if whole is None else whole.double())


def errors(
    result: Tensor, a: Operand, b: Operand, gemm: GemmSpec, cut: float
) -> tuple[float, float]:
    """The largest error by the bound, and by the bound of float32 sums (cut 0)."""
    left, right = _exact(a), _exact(b)
    exact, magnitude = left @ right.t(), left.abs() @ right.t().abs()
    # a recipe that rounds results does so before their type does
    roundings = dict.fromkeys(
        [*([gemm.out.format] if gemm.out else []), SOURCE_FORMATS[result.dtype]]
    )
    error = (result.double() - exact).abs()
    ratios = []
    for dropped in (cut, 0.0):
        allowed = ((left.shape[1] + 3) * 2.0**-24 + dropped) * magnitude
        for fmt in roundings:
            allowed = allowed + fmt.eps / 2 * (exact.abs() + allowed) + fmt.smallest_subnormal / 2
        # max would pass a NaN by on some devices
        ratio = (error / allowed).nan_to_num(nan=torch.inf)
        ratios.append(float(ratio.max()) if ratio.numel() else 0.0)
    return ratios[0], ratios[1]


@dataclass(slots=True)
class Verdict:
    """The worst of all cases of one product by one implementation, by the type of the result."""

    worst: dict[str, float] = field(default_factory=dict)
    worst_without_cut: float = 0.0
    operands_equal: bool = True

    def add(self, dtype: str, ratios: tuple[float, float], equal: bool) -> None:
        """One more case."""
        self.worst[dtype] = max(self.worst.get(dtype, 0.0), ratios[0])
        self.worst_without_cut = max(self.worst_without_cut, ratios[1])
        self.operands_equal &= equal

    @property
    def passes(self) -> bool:
        """Whether every operand has the CPU's bits and every sum is within the bound."""
        return bool(self.worst) and self.operands_equal and max(self.worst.values()) <= 1.0


def _layer(recipe: Recipe, impl: str, weight: Tensor) -> QuantizedLinear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    layer.weight = nn.Parameter(weight.clone())
    mixprec.convert(layer, recipe, impl=impl)
    assert isinstance(layer, QuantizedLinear)
    return layer


def _same(found: Operand, expected: Operand) -> bool:
    """Bit for bit, wherever they are."""
    if not isinstance(found, QuantizedTensor) or not isinstance(expected, QuantizedTensor):
        return isinstance(found, Tensor) and isinstance(expected, Tensor)
    moved = {
        name: None if (tensor := getattr(found, name)) is None else tensor.cpu()
        for name in ("codes", "scale", "tensor_amax")
    }
    return replace(found, **moved, amax=None, encode=None).equal(expected)


def run_layer(
    recipe: Recipe, impl: str, device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, tuple[tuple[float, float], bool]]:
    """For each quantised product: error by bound, and whether its operands have the CPU's bits."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m)
    x, w, g = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((m, k), (n, k), (m, n))
    )
    expected = _layer(recipe, EMULATED, w).quantized_operands(x, g)
    layer, inputs = _layer(recipe, impl, w.to(device)), x.to(device).requires_grad_()
    operands = layer.quantized_operands(inputs, g.to(device))
    output = layer(inputs)
    output.backward(g.to(device))
    results = {
        "output": output.detach(),
        "grad_input": inputs.grad,
        "grad_weight": layer.weight.grad,
    }
    found = {}
    for product, result in results.items():
        gemm, paths = getattr(recipe, product), (f"{product}.a", f"{product}.b")
        if gemm.is_plain:
            continue
        a, b = (operands[path][1] for path in paths)
        equal = all(_same(operands[path][1], expected[path][1]) for path in paths)
        found[product] = errors(result, a, b, gemm, cut_of(impl, device)), equal
    return found


def correctness(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each product of a recipe and each implementation."""
    recipe = RECIPES[name]
    for impl in IMPLS:
        reasons = why_not(recipe, impl, device)
        plain = {product: GemmSpec() for product, reason in reasons.items() if reason is not None}
        verdicts = {product: Verdict() for product in PRODUCTS if product not in plain}
        # what cannot run is left to torch, what can is run in one layer
        kept = replace(recipe, **plain, name="", description="") if plain else recipe
        for shape in SHAPES[device.type] if verdicts else ():
            for dtype in DTYPES:
                for product, case in run_layer(kept, impl, device, shape, dtype).items():
                    verdicts[product].add(str(dtype).removeprefix("torch."), *case)
        for product in PRODUCTS:
            row: dict[str, Any] = {"recipe": name, "product": product, "impl": impl}
            verdict = verdicts.get(product)
            if verdict is None:
                yield row | {"status": "not run", "why": reasons[product]}
                continue
            yield row | {
                "status": "pass" if verdict.passes else "fail",
                "worst": verdict.worst,
                "worst_without_cut": verdict.worst_without_cut,
                "operands_equal": verdict.operands_equal,
            }


def _calls(call: Callable[[], object]) -> int:
    """How often a call fits into a sample that outweighs the launch of a kernel."""
    call()
    seconds = interleaved({"once": call}, 1).seconds["once"]
    return max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / max(seconds, 1e-9))))


def _repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def timed(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of a call of each, in turns."""
    calls = {name: _calls(call) for name, call in contenders.items()}
    repeated = {name: _repeated(call, calls[name]) for name, call in contenders.items()}
    seconds = interleaved(repeated, rounds).seconds
    return {name: seconds[name] / calls[name] for name in contenders}


@torch.no_grad()
def gemm_table(n: int, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for torch's own 16-bit product [n, n] x [n, n], and one for each recipe's output.

    ``product``: of operands quantised before; ``whole``: with their quantisation, both each time.
    """
    x, w = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    contenders: dict[str, Callable[[], object]] = {"torch bf16": lambda: torch.mm(x, w.t())}
    impls = {"torch bf16": "torch"}
    for name in TABLE:
        gemm = RECIPES[name].output
        a, b = quantize(x, gemm.a, packed=False), quantize(w, gemm.b, packed=False)
        impls[name] = resolve(a, b, torch.float32 if gemm.out else x.dtype)[0]
        contenders[f"{name} product"] = _product(gemm, lambda a=a: a, lambda b=b: b)
        contenders[f"{name} whole"] = _product(
            gemm,
            lambda spec=gemm.a: quantize(x, spec, packed=False),
            lambda spec=gemm.b: quantize(w, spec, packed=False),
        )
    seconds = timed(contenders, rounds)
    base, operations = seconds["torch bf16"], 2 * n**3
    for name, impl in impls.items():
        product = seconds.get(f"{name} product", base)
        whole = seconds.get(f"{name} whole", base)
        yield {
            "n": n,
            "recipe": name,
            "impl": impl,
            "product_ms": 1e3 * product,
            "whole_ms": 1e3 * whole,
            "tflops": operations / product / 1e12,
            "product_speedup": base / product,
            "whole_speedup": base / whole,
        }


def _product(
    gemm: GemmSpec, left: Callable[[], Operand], right: Callable[[], Operand]
) -> Callable[[], Tensor]:
    return lambda: multiply(
        left(), right(), bias=None, out_dtype=torch.bfloat16, impl="auto", out=gemm.out
    )
