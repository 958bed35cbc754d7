"""Quantised operands equal torchao's, all six of its three recipes; where they may not, and why.

torchao's own faults force four exceptions, each with a test of its own:
- its power-of-two floor, exp2(floor(log2(s))) in FP32, rounds up one ulp below a power of two;
- it floors amax at 1e-12, so that smaller tensors lose range without a word;
- it takes the amax of a float64 tensor before rounding it to float32;
- an infinity gives scale 0, and the codes of the finite elements beside it become zeros.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.recipes import RECIPES, get_recipe, operands

with warnings.catch_warnings():
    # torchao warns of extensions that were built for another torch
    warnings.simplefilter("ignore")
    from torchao.float8.config import (
        CastConfig,
        Float8LinearConfig,
        ScalingGranularity,
        ScalingType,
    )
    from torchao.float8.float8_scaling_utils import (
        get_maybe_axiswise_dim,
        hp_tensor_to_float8_dynamic,
    )
    from torchao.float8.float8_training_tensor import LinearMMConfig

NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SHAPES = [(1, 1, 1), (16, 32, 48), (33, 65, 17), (5, 3, 130)]


def casts(config: Float8LinearConfig) -> dict[str, tuple[CastConfig, str, int]]:
    """For each operand: torchao's cast, its tensor, and the axis of amax in torchao's layout."""
    return {
        "output.a": (config.cast_config_input, "x", -1),
        "output.b": (config.cast_config_weight, "w_t", 0),
        "grad_input.a": (config.cast_config_grad_output, "g", -1),
        "grad_input.b": (config.cast_config_weight_for_grad_input, "w_t", -1),
        "grad_weight.a": (config.cast_config_grad_output_for_grad_weight, "g", 0),
        "grad_weight.b": (config.cast_config_input_for_grad_weight, "x", 0),
    }


# Where torchao's tensor lies with its contraction on the first axis.
TRANSPOSED = {"output.b", "grad_weight.a", "grad_weight.b"}


def theirs(name: str, path: str, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Codes and encode factor of one operand as torchao's linear layer makes it, or None."""
    config = Float8LinearConfig.from_recipe_name(name)
    cast, tensor, axis = casts(config)[path]
    if cast.scaling_type is ScalingType.DISABLED:
        return None
    quantized = hp_tensor_to_float8_dynamic(
        tensors[tensor],
        cast.target_dtype,
        LinearMMConfig(),
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(axis, cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    codes, encode = quantized._data.view(torch.uint8), quantized._scale
    if encode.ndim == 0:
        encode = encode.reshape(1, 1)
    return (codes.t(), encode.t()) if path in TRANSPOSED else (codes, encode)


def ours(name: str, path: str, tensors: dict[str, Tensor]) -> QuantizedTensor | None:
    """The same operand of the recipe that the name stands for."""
    spec = operands(get_recipe(name))[path]
    _, tensor, _ = casts(Float8LinearConfig())[path]
    x = tensors[tensor].t() if path in TRANSPOSED else tensors[tensor]
    return None if spec is None else quantize(x, spec)


def layer(m: int, n: int, k: int, dtype: torch.dtype, size: float = 1.0) -> dict[str, Tensor]:
    """Input, transposed weight and output gradient of a layer, in torchao's layout."""
    numbers = {"x": torch.randn(m, k), "w_t": torch.randn(n, k).t(), "g": torch.randn(m, n)}
    return {key: (x * size).to(dtype) for key, x in numbers.items()}


def assert_equal(q: QuantizedTensor | None, other: tuple[Tensor, Tensor] | None) -> None:
    """Equal codes, and a scale that is the reciprocal of torchao's, rounded once."""
    assert (q is None) == (other is None)
    if q is not None and other is not None:
        codes, encode = other
        assert torch.equal(q.codes, codes)
        assert torch.equal(q.scale, encode.double().reciprocal().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", casts(Float8LinearConfig()))
@pytest.mark.parametrize("name", NAMES)
def test_operands_equal(
    name: str, path: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    for size in (1e-3, 1.0, 1e3):
        tensors = layer(*shape, dtype, size)
        assert_equal(ours(name, path, tensors), theirs(name, path, tensors))


@pytest.mark.parametrize("path", casts(Float8LinearConfig()))
@pytest.mark.parametrize("name", NAMES)
def test_operands_equal_from_the_smallest_amax_to_the_largest(name: str, path: str) -> None:
    for power in range(-38, 124, 9):
        tensors = layer(9, 7, 11, torch.float32, 2.0**power)
        assert_equal(ours(name, path, tensors), theirs(name, path, tensors))


def test_each_name_of_torchao_stands_for_a_recipe() -> None:
    assert [get_recipe(name) for name in NAMES] == [
        RECIPES["fp8_tensorwise"],
        RECIPES["fp8_rowwise"],
        RECIPES["fp8_rowwise_hp_grad_weight"],
    ]


def pair(x: Tensor, spec: QuantSpec) -> tuple[QuantizedTensor, tuple[Tensor, Tensor]]:
    """One operand of a row scale by both."""
    pow2 = spec.scale_rule == "pow2"
    quantized = hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=pow2,
    )
    return quantize(x, spec), (quantized._data.view(torch.uint8), quantized._scale)


ROW = RECIPES["fp8_rowwise"].output.a
assert ROW is not None
ROW_REAL = replace(ROW, scale_rule="real")


def test_exception_power_of_two_floor_one_ulp_below_a_power() -> None:
    just_below = 2.0**5 * (1 - 2.0**-24)
    amaxes = [448 / just_below * (1 + step * 2.0**-23) for step in range(-4, 5)]
    wrong = 0
    for amax in torch.tensor(amaxes).tolist():
        q, (_, encode) = pair(torch.tensor([[amax, amax / 3]]), ROW)
        exact = torch.tensor(448 / amax, dtype=torch.float64).float()
        below = 2.0 ** math.floor(math.log2(exact.double().item()))
        assert q.scale is not None
        assert q.scale.item() == 1 / below
        wrong += encode.item() != below
        assert encode.item() in (below, 2 * below)
    assert wrong >= 1


def test_exception_amax_below_the_floor() -> None:
    x = torch.randn(4, 8) * 1e-14
    q, (codes, encode) = pair(x, ROW_REAL)
    assert (encode == torch.tensor(448 / 1e-12)).all()
    assert not torch.equal(q.codes, codes)
    floored = quantize(x, replace(ROW_REAL, min_amax=1e-12))
    assert_equal(floored, (codes, encode))


def test_zeros_are_zeros_with_both() -> None:
    x = torch.zeros(2, 8)
    q, (codes, encode) = pair(x, ROW_REAL)
    assert torch.equal(q.codes, codes)
    assert (q.scale == 1).all()
    assert_equal(quantize(x, replace(ROW_REAL, min_amax=1e-12)), (codes, encode))


def test_exception_amax_of_float64_before_it_is_rounded() -> None:
    x = torch.rand(100, 4, dtype=torch.float64)
    q, (_, encode) = pair(x, ROW_REAL)
    rounded = quantize(x.float(), ROW_REAL)
    assert torch.equal(q.scale, rounded.scale)
    assert torch.equal(q.codes, rounded.codes)
    assert (encode.double().reciprocal().float() != q.scale).any()


def test_exception_infinity() -> None:
    x = torch.tensor([[1.0, math.inf], [1.0, 2.0]])
    q, (codes, encode) = pair(x, ROW_REAL)
    assert encode[0].item() == 0
    assert codes[0, 0].item() == 0
    assert q.dequantize()[0].isnan().all()
    assert torch.equal(q.codes[1], codes[1])
