"""Sums as of units of fewer bits, against the definition in fractions, one number at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gemm.fake_cuda import FakeCuda
from mixprec import FORMATS, GemmSpec, Noise, QuantizedTensor, QuantSpec, quantize, quantized_matmul
from mixprec.gemm import resolve, resolve_spec
from mixprec.gemm.accumulation import MODELS
from mixprec.gemm.impl import emulated
from mixprec.recipes import PRODUCTS, RECIPES, with_accumulate

E4M3 = QuantSpec(format=FORMATS["e4m3"])
E5M2 = QuantSpec(format=FORMATS["e5m2"])
NARROW = [name for name, recipe in RECIPES.items() if recipe.output.is_narrow]


def exponent(number: Fraction) -> int:
    """floor(log2(number)) of a positive number."""
    guess = number.numerator.bit_length() - number.denominator.bit_length()
    return guess if Fraction(2) ** guess <= number else guess - 1


def instruction(acc: Fraction, products: list[Fraction]) -> Fraction:
    terms = [acc, *products]
    largest = max(map(abs, terms))
    if not largest:
        return Fraction(0)
    unit = Fraction(2) ** (exponent(largest) - 13)
    return sum((math.trunc(term / unit) * unit for term in terms), Fraction(0))


def one_sum(a: list[float], b: list[float], promotes: bool) -> float:
    """One element of the result; FP32 additions by numpy's rule, through torch."""
    products = [Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)]
    total, acc = torch.zeros(()), Fraction(0)
    for start in range(0, len(products), 32):
        if promotes and start and start % 128 == 0:
            total, acc = total + float(acc), Fraction(0)
        acc = instruction(acc, products[start : start + 32])
    return float(total + float(acc))


def expected(a: Tensor, b: Tensor, promotes: bool) -> Tensor:
    rows, columns = a.double().tolist(), b.double().tolist()
    return torch.tensor([[one_sum(x, y, promotes) for y in columns] for x in rows])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 127, 128, 129, 300])
@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_model_is_the_definition(model: str, k: int, spread: float) -> None:
    shape_a, shape_b = (3, k), (4, k)
    a = quantize(torch.randn(shape_a) * (torch.randn(shape_a) * spread).exp(), E4M3).values
    b = quantize(torch.randn(shape_b) * (torch.randn(shape_b) * spread).exp(), E5M2).values
    want = expected(a, b, promotes=model == "hopper_promoted")
    assert torch.equal(MODELS[model](a, b), want)


@pytest.mark.parametrize("model", MODELS)
def test_scaling_by_powers_of_two_changes_no_bit(model: str) -> None:
    """Down to where products leave float32, so that scales may come before the sums."""
    a, b = (quantize(torch.randn(3, 200), E4M3).values for _ in range(2))
    scaled = MODELS[model](a * 2.0**-100, b * 2.0**90)
    assert torch.equal(scaled, MODELS[model](a, b) * 2.0**-10)


@pytest.mark.parametrize("model", MODELS)
def test_sums_do_not_depend_on_the_tiling(model: str) -> None:
    a, b = torch.randn(70, 100), torch.randn(2100, 100)
    whole = MODELS[model](a, b)
    assert torch.equal(whole[13:20, 2040:2090], MODELS[model](a[13:20], b[2040:2090]))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 0, 4), (4, 4, 0)])
def test_empty_operands(model: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    assert torch.equal(MODELS[model](torch.ones(m, k), torch.ones(n, k)), torch.zeros(m, n))


@pytest.mark.parametrize("model", MODELS)
def test_nan_and_inf_stay_in_their_row_as_in_float32(model: str) -> None:
    a, b = torch.ones(4, 40), torch.ones(3, 40)
    a[0, 3], a[1, 35], a[2, 1], a[2, 39] = torch.nan, torch.inf, torch.inf, -torch.inf
    result = MODELS[model](a, b)
    torch.testing.assert_close(result, a @ b.t(), rtol=0, atol=0, equal_nan=True)


def test_an_instruction_cuts_toward_zero_below_the_largest() -> None:
    """Of 1 and 31 terms just under 2^-13 nothing but 1 is left; at 2^-13 all of them are."""
    one = torch.ones(1, 32)
    for sign in (1.0, -1.0):
        terms = torch.full((1, 32), sign * 2.0**-13)
        terms[0, 7] = sign
        assert MODELS["hopper"](terms, one) == sign * (1 + 31 * 2.0**-13)
        below = torch.where(terms.abs() == 1, terms, terms * 0.998)
        assert MODELS["hopper"](below, one) == sign


def relative_error(result: Tensor, a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double().t()
    return float((result.double() - exact).norm() / exact.norm())


def test_loss_of_accuracy_at_4096_and_its_repair() -> None:
    """Seen: numbers in [0, 1) lose 7.5 %, promoted 0.055 %; normal ones 0.13 % and 0.012 %."""
    shape = (16, 4096)
    for draw, lost, repaired in (
        (torch.rand, (0.05, 0.1), (2e-4, 1e-3)),
        (torch.randn, (7e-4, 3e-3), (5e-5, 2e-4)),
    ):
        a, b = (quantize(draw(shape), E4M3).values for _ in range(2))
        assert relative_error(a @ b.t(), a, b) < 1e-6
        assert lost[0] < relative_error(MODELS["hopper"](a, b), a, b) < lost[1]
        assert repaired[0] < relative_error(MODELS["hopper_promoted"](a, b), a, b) < repaired[1]


def block_values(q: QuantizedTensor) -> Tensor:
    """Values times the scales of their blocks, and no other."""
    plain = replace(q, tensor_amax=None) if q.tensor_amax is not None else q
    return plain.dequantize()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NARROW)
def test_every_recipe_of_8_bits_takes_every_model(name: str, model: str) -> None:
    """Scales as for fp32: those of blocks before the sums, all others after."""
    recipe = with_accumulate(RECIPES[name], model)
    for product in PRODUCTS:
        gemm = getattr(recipe, product)
        if not gemm.is_narrow:
            assert gemm.accumulate == "fp32"
            continue
        specs = [replace(spec, amax_history_len=0) for spec in (gemm.a, gemm.b)]
        noise = Noise(seed=1)
        a = quantize(torch.rand(5, 300), specs[0], noise=noise)
        b = quantize(torch.rand(6, 300), specs[1], noise=replace(noise, stream=1))
        bias = torch.randn(6)
        result = emulated.matmul(a, b, bias=bias, out_dtype=torch.float32, accumulate=model)
        plain = emulated.matmul(a, b, bias=bias, out_dtype=torch.float32)
        if a.block_scale.shape[1] > 1:
            want = MODELS[model](block_values(a), block_values(b))
            for q, transposed in ((a, False), (b, True)):
                if q.tensor_scale is not None:
                    want = want * (q.tensor_scale.t() if transposed else q.tensor_scale)
        else:
            want = MODELS[model](a.values, b.values) * a.block_scale * b.block_scale.t()
        assert torch.equal(result, want + bias)
        # products of so few digits lie on the units' grid already
        is_coarse = gemm.a.format.mantissa == gemm.b.format.mantissa == 1
        assert is_coarse or not torch.equal(result, plain)


@pytest.mark.parametrize("model", MODELS)
def test_slabs_under_other_scales_than_powers_of_two_are_added_in_float32(model: str) -> None:
    spec = QuantSpec(format=FORMATS["e4m3"], block=(1, 128), scale_rule="real")
    a, b = quantize(torch.rand(3, 300), spec), quantize(torch.rand(4, 300), spec)
    want = torch.zeros(3, 4)
    for index, start in enumerate(range(0, 300, 128)):
        part = slice(start, start + 128)
        slab = MODELS[model](a.values[:, part], b.values[:, part])
        want += slab * a.scale[:, index, None] * b.scale[:, index]
    result = emulated.matmul(a, b, bias=None, out_dtype=torch.float32, accumulate=model)
    assert torch.equal(result, want)


def test_only_the_emulation_takes_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = GemmSpec(a=E4M3, b=E4M3, accumulate="hopper")
    x = torch.rand(16, 96)
    result = quantized_matmul(x, x, spec)
    for fake in (FakeCuda(kind="cpu"), FakeCuda((9, 0))):
        fake.install(monkeypatch)
        name, reason = resolve_spec(spec, "cpu", torch.float32)
        assert name == "emulated"
        assert reason == "accumulate: got 'hopper'; only the emulation adds like that"
        assert torch.equal(quantized_matmul(x, x, spec, impl="emulated"), result)
        assert not fake.calls
        for impl in ("scaled_mm", "bf16_mm", "fp16_mm"):
            with pytest.raises(ValueError, match=rf"impl: got '{impl}'; accumulate: got 'hopper'"):
                quantized_matmul(x, x, spec, impl=impl)
    q = quantize(x, E4M3)
    assert resolve(q, q, torch.float32)[0] == "scaled_mm"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"a": E4M3, "b": E4M3, "accumulate": "fp8"}, "accumulate: got 'fp8'; must be one of fp32"),
        ({"accumulate": "hopper"}, "accumulate: got 'hopper' with operands None and None"),
        ({"a": E4M3, "accumulate": "hopper"}, "of units for operands of 8 bits or less; use"),
        (
            dict.fromkeys("ab", QuantSpec(format=FORMATS["bf16"], scale_rule="none"))
            | {"accumulate": "hopper_promoted"},
            "operands of 8 bits or less",
        ),
    ],
)
def test_refusals(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        GemmSpec(**options)


def test_compiled_code_gives_the_same_sums() -> None:
    a, b = torch.rand(4, 70), torch.rand(3, 70)
    spec = GemmSpec(a=E4M3, b=E4M3, accumulate="hopper")
    compiled = torch.compile(lambda x, y: quantized_matmul(x, y, spec), backend="eager")
    assert torch.equal(compiled(a, b), quantized_matmul(a, b, spec))
