"""What the numerics refuse, because it could only be right by luck."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mixprec.codes import decode, encode
from mixprec.formats import FORMATS, FloatFormat
from mixprec.noise import Noise
from mixprec.quantization import QuantSpec, quantize
from mixprec.recipes import RECIPES, Recipe
from mixprec.scaling import delayed_state

# each once: what quantises the activations of a recipe, and of which one
ACTIVATIONS = {each.output.a: name for name, each in RECIPES.items() if each.output.a is not None}
TINY = {"format": {"exponent": 2, "mantissa": 1}}


@pytest.mark.parametrize("name", ["bf16", "tf32", "fp32"])
def test_scales_to_a_range_whose_products_overflow_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"scale_rule: got 'real' with format {name}; .*overflow"):
        QuantSpec(format=FORMATS[name])
    spec = Recipe.from_dict({"output": {"a": {"format": name}}}).output.a
    assert spec == QuantSpec(format=FORMATS[name], scale_rule="none")


@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e2m3"])
@pytest.mark.parametrize("fields", [{"scale_rule": "none"}, {"amax_history_len": 4}])
def test_formats_without_nan_need_a_scale_that_can_be_nan(
    name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=rf"format: got {name} .*it has no NaN"):
        QuantSpec(format=FORMATS[name], **fields)


def test_state_for_a_scale_from_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state: got one for a spec with amax_history_len=0"):
        quantize(torch.ones(2, 2), "e4m3", state=delayed_state(4))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"name": "fp8_rowwise", "output": {"a": TINY}}, r"name: got 'fp8_rowwise'; .*definition"),
        (
            {"output": {"a": {"format": {"exponent": 4, "mantissa": 2, "name": "e4m3"}}}},
            r"output\.a\.format\.name: got 'e4m3'; .*another definition",
        ),
        ({"output": {"a": {"format": "e4m4"}}}, r"output\.a\.format: format: got 'e4m4'; unknown"),
        ({"output": {"a": {"format": {"exponent": 4}}}}, r"output\.a\.format: got no mantissa"),
        (
            {"output": {"a": {"format": {"exponent": 4.5, "mantissa": 2}}}},
            r"output\.a\.format\.exponent: got 4\.5; must lie in 1\.\.11",
        ),
    ],
)
def test_tables_that_name_what_is_not_so_are_refused(data: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Recipe.from_dict(data)


def test_a_recipe_under_its_own_name_is_taken() -> None:
    recipe = RECIPES["fp8_rowwise"]
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5])
def test_seeds_out_of_range_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed: got .*0 to 2\^64 - 1"):
        Noise(seed=seed)


def test_a_whole_narrower_than_its_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"columns: got 3; the tensor alone has 8"):
        Noise(seed=1, columns=3).draws((1, 8))


@pytest.mark.parametrize(("exponent", "mantissa"), [(5, 10), (3, 12), (8, 7), (8, 23), (10, 5)])
def test_nan_survives_in_fnuz_formats_that_fill_their_integer(exponent: int, mantissa: int) -> None:
    fmt = FloatFormat(exponent=exponent, mantissa=mantissa, specials="fnuz")
    values = decode(encode(torch.tensor([torch.nan, 1.0, -1.0]), fmt), fmt, torch.float64)
    assert values[0].isnan()
    assert values[1:].tolist() == [1.0, -1.0]


def test_values_wider_than_float32_decode_in_float64() -> None:
    spec = QuantSpec(format=FloatFormat(exponent=8, mantissa=3, specials="nan"), scale_rule="none")
    values = quantize(torch.tensor([1.0, 3e38, torch.nan]), spec).values
    assert values.dtype == torch.float64
    assert values[:2].tolist() == [1.0, 1.75 * 2.0**127]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("spec", ACTIVATIONS, ids=ACTIVATIONS.values())
def test_compiled_codes_of_a_tensor_made_in_the_graph(spec: QuantSpec) -> None:
    # Inductor keeps such a tensor in FP32 unless its bits are asked for
    state = delayed_state(16) if spec.is_delayed else None

    def codes(x: torch.Tensor) -> list[torch.Tensor]:
        halves = [x.to(dtype) for dtype in (torch.bfloat16, torch.float16)]
        return [quantize(half, spec, state=state).codes for half in halves]

    torch._dynamo.reset()
    x = torch.randn(64, 96)
    for found, wanted in zip(torch.compile(codes, fullgraph=True)(x), codes(x), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("block", [(1, 16), (16, 16), (4, 1)])
def test_compiled_codes_under_blocks_that_are_cut_short(block: tuple[int, int]) -> None:
    spec = QuantSpec(format=FORMATS["e4m3"], block=block)
    torch._dynamo.reset()
    x = torch.randn(33, 65)
    compiled = torch.compile(lambda x: quantize(x, spec).codes, fullgraph=True)
    assert torch.equal(compiled(x), quantize(x, spec).codes)
