"""Products with exact sums: two operands in float64, by integer products, in layers and alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import mixprec
from mixprec import FORMATS, RECIPES, GemmSpec, QuantSpec, Recipe, convert, fp64, quantized_matmul
from mixprec.autograd import linear
from mixprec.gemm import resolve, resolve_spec
from mixprec.recipes import PRODUCTS, with_accumulate
from mixprec.support import local_support, native_support

DOUBLE = torch.float64
EXACT = GemmSpec(accumulate="exact")
RECIPE = RECIPES["fp64_emulated"]
E4M3 = QuantSpec(format=FORMATS["e4m3"])
# natively inf - inf; exactly 0
ROW = torch.tensor([[1e200, -1e200]], dtype=DOUBLE)


def fractions(x: Tensor) -> list[list[Fraction]]:
    return [[Fraction(value) for value in row] for row in x.tolist()]


def assert_exact(found: Tensor, a: Tensor, b: Tensor) -> None:
    """found is a @ b.T, off by at most 2^-53 |exact| + 2^-54 |a| @ |b.T|."""
    for i, row in enumerate(fractions(a)):
        for j, column in enumerate(fractions(b)):
            terms = [x * y for x, y in zip(row, column, strict=True)]
            bound = Fraction(2) ** -53 * abs(sum(terms)) + Fraction(2) ** -54 * sum(map(abs, terms))
            assert abs(Fraction(found[i, j].item()) - sum(terms)) <= bound


@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_product_is_within_the_bound_of_exact_fractions(spread: float) -> None:
    a, b = (
        torch.randn(rows, 40, dtype=DOUBLE) * torch.randn(rows, 40, dtype=DOUBLE).mul(spread).exp()
        for rows in (4, 3)
    )
    assert_exact(quantized_matmul(a, b, EXACT), a, b)


def test_bias_is_added_after_the_product_is_rounded() -> None:
    a, b, bias = (torch.randn(*shape, dtype=DOUBLE) for shape in ((4, 9), (3, 9), (3,)))
    product = quantized_matmul(a, b, EXACT)
    assert torch.equal(quantized_matmul(a, b, EXACT, bias=bias), product + bias)
    single = quantized_matmul(a, b, EXACT, bias=bias.float(), out_dtype=torch.float32)
    assert torch.equal(single, (product + bias.float().double()).float())


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_products(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    bias = torch.ones(n, dtype=DOUBLE)
    a, b = torch.ones(m, k, dtype=DOUBLE), torch.ones(n, k, dtype=DOUBLE)
    found = quantized_matmul(a, b, EXACT, bias=bias)
    assert torch.equal(found, torch.full((m, n), k + 1.0, dtype=DOUBLE))


def test_every_name_means_auto_for_operands_in_high_precision() -> None:
    assert resolve_spec(EXACT, "cpu", torch.float32)[0] == "exact"
    for impl in ("auto", "scaled_mm", "emulated", "exact"):
        assert resolve(ROW, ROW, DOUBLE, impl, "exact")[0] == "exact"
        assert quantized_matmul(ROW, ROW.abs(), EXACT, impl=impl).item() == 0
    # and without exact sums nothing asks for them
    assert resolve(ROW, ROW, DOUBLE)[0] == "emulated"


def test_exact_by_name_takes_no_quantised_operand() -> None:
    x = torch.randn(16, 16)
    with pytest.raises(ValueError, match=r"impl: got 'exact'; a: got e4m3; exact sums are of"):
        quantized_matmul(x, x, GemmSpec(a=E4M3, b=E4M3), impl="exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_are_widened_and_the_result_is_rounded_to_theirs(dtype: torch.dtype) -> None:
    # 2^12 + 2^-12 - 2^12: FP32 sums lose the middle term
    a = torch.tensor([[4096.0, 2.0**-12, -4096.0]], dtype=dtype)
    assert linear(a, torch.ones(1, 3, dtype=dtype), recipe=RECIPE).tolist() == [[2.0**-12]]
    x, w = torch.randn(4, 9, dtype=dtype), torch.randn(3, 9, dtype=dtype)
    for found in (quantized_matmul(x, w, EXACT), linear(x, w, recipe=RECIPE)):
        assert found.dtype == dtype
        assert torch.equal(found, quantized_matmul(x.double(), w.double(), EXACT).to(dtype))


@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_exact_sums_of_quantised_operands_are_refused(operand: str) -> None:
    spec = E4M3 if operand != "out" else QuantSpec(format=FORMATS["bf16"], scale_rule="none")
    with pytest.raises(ValueError, match=rf"accumulate: got 'exact' with a spec for {operand}; it"):
        GemmSpec(**{operand: spec}, accumulate="exact")  # type: ignore[arg-type]


def test_other_recipes_do_not_take_exact_sums() -> None:
    with pytest.raises(ValueError, match=r"accumulate: got 'exact' with a spec for a, b; it"):
        with_accumulate(RECIPES["fp8_rowwise"], "exact")
    assert with_accumulate(RECIPE, "hopper") is RECIPE
    with pytest.raises(ValueError, match=r"accumulate: got 'exakt'; must be one of .*, exact"):
        GemmSpec(accumulate="exakt")  # type: ignore[arg-type]


def test_recipe_makes_its_three_products_exactly() -> None:
    x, w = torch.randn(5, 30, dtype=DOUBLE), torch.randn(4, 30, dtype=DOUBLE)
    g = torch.randn(5, 4, dtype=DOUBLE)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    with fp64.record() as products:
        out = linear(*leaves, recipe=RECIPE)
        grad_x, grad_w = torch.autograd.grad(out, leaves, g)
    assert len(products) == 3
    assert_exact(out, x, w)
    assert_exact(grad_x, g, w.T)
    assert_exact(grad_w, g.T, x.T)


def test_recipe_of_one_exact_product_beside_quantised_ones() -> None:
    mixed = replace(RECIPES["fp8_rowwise"], name="mine", grad_weight=EXACT)
    x, w = torch.randn(16, 16, dtype=DOUBLE), torch.randn(16, 16, dtype=DOUBLE, requires_grad=True)
    with fp64.record() as products:
        linear(x, w, recipe=mixed, impl="emulated").sum().backward()
    assert len(products) == 1
    assert w.grad is not None
    assert_exact(w.grad, torch.ones(16, 16, dtype=DOUBLE), x.T)


def test_convert_takes_the_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    report = convert(model, "fp64_emulated")
    assert [row.impl for row in report.converted] == ["exact", "exact"]
    assert {row.bits for row in report.converted} == {"64"}
    assert model(torch.randn(3, 6)).dtype == torch.float32
    model.double()
    with fp64.record() as products:
        model(torch.randn(3, 6, dtype=DOUBLE)).sum().backward()
    assert len(products) == 5
    mixprec.revert(model)
    assert type(model[0]) is nn.Linear


def test_an_input_in_float64_widens_a_weight_in_float32() -> None:
    layer = nn.Linear(6, 4)
    convert(layer, "fp64_emulated")
    x = torch.randn(3, 6, dtype=DOUBLE)
    out = layer(x)
    out.sum().backward()
    assert out.dtype == DOUBLE
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(out, copy.deepcopy(layer).double()(x))


def test_einsum_takes_the_recipe() -> None:
    a, b = torch.randn(2, 3, 9, dtype=DOUBLE), torch.randn(2, 4, 9, dtype=DOUBLE)
    found = mixprec.einsum("bik,bjk->bij", a, b, recipe=RECIPE)
    for index in range(2):
        assert_exact(found[index], a[index], b[index])


def test_support_says_that_integer_products_stand_in() -> None:
    found = local_support(RECIPE)
    assert (found.native, set(found.impls.values())) == (False, {"exact"})
    for capability in (None, (7, 0), (9, 0), (10, 0)):
        support = native_support(RECIPE, capability)
        assert not support.native
        assert support.reason.startswith("exact sums")


def test_recipe_is_data() -> None:
    assert Recipe.from_dict(RECIPE.to_dict()) == RECIPE
    assert RECIPE.to_dict()["output"]["accumulate"] == "exact"
    made = Recipe.from_dict({"variant_of": "fp64", "grad_weight": {"accumulate": "exact"}})
    assert [getattr(made, product).is_exact for product in PRODUCTS] == [False, False, True]
    assert not made.is_high_precision


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_layer_compiles_whole_with_the_same_bits() -> None:
    layer = nn.Linear(6, 4).double()
    convert(layer, "fp64_emulated")
    x = torch.randn(3, 6, dtype=DOUBLE)
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), [leaf, layer.weight])))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
