"""What runs natively where: on this machine, and on hardware that is not here."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mixprec import support
from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm import GemmSpec, native, resolve
from mixprec.quantization import QuantSpec, quantize
from mixprec.recipes import RECIPES, Recipe, get_recipe, with_accumulate
from mixprec.support import native_support

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
E4M3 = QuantSpec(format=FORMATS["e4m3"])
E5M2 = QuantSpec(format=FORMATS["e5m2"])


def recipe_of(a: QuantSpec | None, b: QuantSpec | None) -> Recipe:
    """A recipe with one quantised product."""
    return Recipe(output=GemmSpec(a=a, b=b))


@pytest.mark.parametrize(
    ("fmt", "capability", "native", "reason"),
    [
        ("e2m1", (9, 0), False, "no units in Hopper (9.0); Blackwell (10.0) has"),
        ("e2m1", (10, 0), True, "native on Blackwell (10.0)"),
        ("e3m2", (10, 0), False, "Blackwell (10.0) has units, but torch has no type"),
        ("e4m3", (8, 0), False, "no units in Ampere (8.0); Ada (8.9) has"),
        ("e4m3", (8, 9), True, "native on Ada (8.9)"),
        ("bf16", (7, 5), False, "no units in Turing (7.5); Ampere (8.0) has, older than CDNA 3"),
        (
            "e4m3fnuz",
            (9, 0),
            False,
            "no units in Hopper (9.0), which multiplies e4m3 in its place; ",
        ),
        ("e8m0", (10, 0), False, "no units in Blackwell (10.0); no GPU of the table has"),
        ("fp64", (7, 0), True, "native on Volta (7.0)"),
    ],
)
def test_native_support_of_a_format(
    fmt: str, capability: tuple[int, int], native: bool, reason: str
) -> None:
    found = native_support(FORMATS[fmt], capability)
    assert (found.name, found.native) == (fmt, native)
    assert found.reason.startswith(reason)


def test_native_support_knows_vendors_and_custom_formats() -> None:
    assert native_support(FORMATS["e4m3fnuz"], (9, 4), vendor="amd").native
    assert not native_support(FORMATS["e4m3"], (9, 4), vendor="amd").native
    assert native_support(FloatFormat(exponent=4, mantissa=3, specials="nan"), (9, 0)).native
    assert not native_support(FloatFormat(exponent=4, mantissa=3), (9, 0)).native


@pytest.mark.parametrize(
    ("version", "native"), [("2.0.1", False), ("2.1.0", True), ("2.13.0+cpu", True), ("10.0", True)]
)
def test_native_support_needs_torchs_type(version: str, native: bool) -> None:
    found = native_support(FORMATS["e4m3"], (9, 0), version)
    assert found.native == native
    if not native:
        assert found.reason == "needs torch 2.1, this is 2.0"


@pytest.mark.parametrize(
    ("name", "capability", "note"),
    [
        (
            "fp8_rowwise",
            (9, 0),
            "; FP8 sums in about 13 fraction bits, collected in FP32 every 128",
        ),
        ("fp8_tensorwise", (8, 9), "; FP8 sums in about 13 fraction bits (measured; no bound is"),
        ("fp8_rowwise", (10, 0), ""),
        ("fp32", (9, 0), ""),
    ],
)
def test_native_support_says_where_sums_take_fewer_bits(
    name: str, capability: tuple[int, int], note: str
) -> None:
    recipe = get_recipe(name)
    place = native_support(FORMATS["fp32"], capability).reason
    found = native_support(recipe, capability)
    assert found.native
    assert found.reason.startswith(f"{place}{note}")
    assert bool(note) == (found.reason != place)
    fp8 = native_support(FORMATS["e4m3"], capability).reason
    assert fp8.startswith(f"{place}; FP8 sums") == (capability < (10, 0))


def test_local_support_says_where_sums_take_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(support, "resolve_spec", lambda *_: ("scaled_mm", "native"))
    found = support.local_support(get_recipe("fp8_rowwise"))
    assert (found.native, set(found.impls.values())) == (True, {"scaled_mm"})
    assert found.reason.startswith("native; FP8 sums in about 13 fraction bits, collected in FP32")
    assert "132 * 2^-13 * scale * sum|a||b|" in found.reason
    assert support.local_support(get_recipe("fp32")).reason == "high precision: torch's own product"


def test_native_support_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="torch_version: got 'main'; must start with two numbers"):
        native_support(FORMATS["e4m3"], (9, 0), "main")
    with pytest.raises(ValueError, match="vendor: got 'intel'"):
        native_support(FORMATS["e4m3"], (9, 0), vendor="intel")


def test_torch_types_are_in_this_torch() -> None:
    aliases = {"e4m3": "float8_e4m3fn", "e2m1": "float4_e2m1fn_x2"}
    for name in support.TORCH_TYPES:
        assert hasattr(torch, aliases.get(name, f"float8_{name}"))


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({}, {"fp64", "fp32"}),
        ({"AVX-512 BF16": True}, {"fp64", "fp32", "bf16"}),
        ({"AMX BF16": True, "AVX-512 FP16": True}, {"fp64", "fp32", "bf16", "fp16"}),
    ],
)
def test_native_support_on_a_cpu(features: dict[str, bool], expected: set[str]) -> None:
    supports = [native_support(fmt, None, features=features) for fmt in FORMATS.values()]
    assert {support.name for support in supports if support.native} == expected
    assert all("this CPU" in support.reason for support in supports)
    assert native_support(get_recipe("fp32"), None).native
    assert not native_support(get_recipe("fp8_rowwise"), None).native


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_native_support_of_a_recipe_agrees_with_the_implementation(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES[name]
    monkeypatch.setattr(native, "device_facts", lambda x: ("cuda", capability))
    own = {"scaled_mm": ("e4m3", "e5m2", "e2m1"), "bf16_mm": ("bf16",), "fp16_mm": ("fp16",)}
    emulated = []
    for product in ("output", "grad_input", "grad_weight"):
        gemm = getattr(recipe, product)
        if gemm.is_plain:
            continue
        if gemm.is_exact:
            emulated.append(True)
            continue
        a, b = (
            quantize(
                torch.zeros(256, 256),
                dataclasses.replace(spec, amax_history_len=0, rounding="nearest_even"),
            )
            for spec in (gemm.a, gemm.b)
        )
        name, _ = resolve(a, b, torch.float32)
        emulated.append(not {str(gemm.a.format), str(gemm.b.format)} <= {*own.get(name, ())})
    assert native_support(recipe, capability).native == (not any(emulated))


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (E5M2, E5M2, "e5m2: the units multiply it with e4m3 only"),
        (E4M3, None, "e4m3: no units multiply it with an operand in high precision"),
        (
            QuantSpec(format=FORMATS["bf16"], scale_rule="none"),
            E4M3,
            "bf16: no implementation multiplies it natively",
        ),
        (
            QuantSpec(format=FORMATS["e4m3"], block=(1, 32)),
            E4M3,
            r"a: got blocks of \(1, 32\) of e4m3 scaled by real; torch has no product of them",
        ),
        (QuantSpec(format=FORMATS["e2m1"]), E4M3, r"e2m1: no units in Hopper \(9.0\)"),
    ],
)
def test_native_support_of_a_recipe_names_the_obstacle(
    a: QuantSpec, b: QuantSpec | None, reason: str
) -> None:
    found = native_support(recipe_of(a, b), (9, 0))
    assert not found.native
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found.reason)


def test_local_support_on_a_cpu_names_the_implementation() -> None:
    plain = support.local_support(get_recipe("fp32"))
    assert (plain.native, set(plain.impls.values())) == (True, {"torch"})
    found = support.local_support(get_recipe("fp8_rowwise_hp_grad_weight"))
    if not torch.cuda.is_available():
        assert not found.native
        assert found.impls == {
            "output": "emulated",
            "grad_input": "emulated",
            "grad_weight": "torch",
        }
        assert "device: " in found.reason


def test_local_support_takes_a_custom_recipe_with_noise() -> None:
    spec = QuantSpec(format=FloatFormat(exponent=3, mantissa=1), rounding="stochastic")
    found = support.local_support(recipe_of(spec, spec))
    assert (found.name, found.native) == ("custom", False)


def test_device_on_which_torch_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution")

    monkeypatch.setattr(support, "resolve_spec", fail)
    found = support.local_support(get_recipe("fp8_tensorwise"))
    assert (found.native, found.impls) == (False, {})
    assert found.reason.startswith("torch fails on ")
    assert found.reason.endswith("CUDA error: no kernel image is available for execution")


@pytest.mark.parametrize(
    ("name", "since"), [("bf16", (8, 0)), ("bf16_pure", (8, 0)), ("fp16", (7, 0)), ("O2", (7, 0))]
)
def test_recipes_of_16_bits_are_native_where_their_units_are(
    name: str, since: tuple[int, int]
) -> None:
    recipe = get_recipe(name)
    for capability in [(6, 1), (7, 0), *CAPABILITIES]:
        found = native_support(recipe, capability)
        assert found.native == (capability >= since)
        assert found.reason.startswith("native on" if found.native else f"{recipe.base}: no units")
    assert not native_support(recipe, (9, 4), vendor="amd").native


def test_decoded_values_on_units_of_16_bits_count_as_emulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "device_facts", lambda x: ("cuda", (8, 0)))
    found = support.local_support(get_recipe("fp8_rowwise"))
    assert (found.native, set(found.impls.values())) == (False, {"bf16_mm"})
    assert "Ampere) has no FP8 units" in found.reason
    for name, impl in (("bf16", "bf16_mm"), ("fp16", "fp16_mm")):
        found = support.local_support(get_recipe(name))
        assert (found.native, set(found.impls.values())) == (True, {impl})


@pytest.mark.parametrize(
    ("name", "places", "elsewhere"),
    [
        ("fp8_blockwise", [(9, 0)], {(8, 9): "no blocks of 128", (10, 0): "no blocks of 128; 9.0"}),
        ("mxfp8", [(10, 0), (12, 0)], {(9, 0): "(Hopper) has no blocks of 32; 10.0 has"}),
        ("nvfp4", [(10, 0), (12, 0)], {(9, 0): "e2m1: no units in Hopper (9.0); Blackwell (10.0)"}),
        (
            "mxfp4",
            [],
            {(9, 0): "e2m1: no units in Hopper", (10, 0): "torch has no product of them"},
        ),
        ("mxfp6_e3m2", [], {(10, 0): "e3m2: Blackwell (10.0) has units, but torch has no type"}),
    ],
)
def test_blocks_are_native_where_the_units_take_their_scales(
    name: str, places: list[tuple[int, int]], elsewhere: dict[tuple[int, int], str]
) -> None:
    recipe = RECIPES[name]
    found = [place for place in CAPABILITIES if native_support(recipe, place).native]
    assert found == places
    for place, reason in elsewhere.items():
        assert reason in native_support(recipe, place).reason


def test_sums_as_of_other_units_are_emulated_everywhere() -> None:
    recipe = with_accumulate(RECIPES["fp8_rowwise"], "hopper")
    found = native_support(recipe, (9, 0))
    assert (found.native, found.reason) == (
        False,
        "sums as of hopper: only the emulation adds like that",
    )
